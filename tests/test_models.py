"""Every architecture against unpatched llama.cpp, every refusal, every KV type and RoPE scaling under every method.

``python tests/test_models.py`` writes docs/models-table.md: run it after adding a recipe to ``tiny_models.py``.
"""

import re
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import oracle
import pytest
from cases import LOGIT_TOLERANCE, LONGHEADS, N_CTX_TRAIN
from model_oracle import Model
from test_methods import assert_same_logits, evaluate, open_llama
from test_parity import LINEAR, YARN, run_llama_cpp
from thinning import thin
from tiny_gguf import Shape, make_model
from tiny_models import PROVEN, REFUSED

N, N_SHORT = 150, 60  # beyond and within the trained context
SHAPE = Shape(n_embd=128, n_ctx_train=N_CTX_TRAIN)  # heads of 32 channels: whole blocks of every KV type
OTHER_BASE = {"rope_freq_base": 20000.0}
IDLE = {  # methods, set so that they change nothing in N_SHORT tokens
    "window": "window,n_sink=4,window=60",
    "selfextend": "selfextend,group_size=4,neighbor_window=60",
    "dca": "dca,chunk_size=37,local_window=23",
    "longheads": "longheads,chunk_size=16,window=64,representation=attention",
    "corm": "corm,window=4,recent=60,evict_every=16",
}
METHODS = {
    "full": oracle.Full(),
    "window": oracle.Window(4, 29),
    "selfextend": oracle.SelfExtend(8, 13),
    "dca": oracle.DualChunk(29, 11),
}
# ggml looks GELU up in a table of f16: an input that rounds the other way moves an activation by 5e-4
GELU = ("codeshell", "falcon", "gemma", "gptneox", "phi2", "starcoder2")
# When the oracle rounds rows too, two things remain: float rounding, and a tie in the rounding that falls the other way
# here and there, which is as large as one step of the type. So the median is tight whatever the type.
TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
MEDIAN, STEP = 5e-5, 2e-2
REASONS = {
    "baichuan-13b": "ALiBi",
    "bert": "encoder",
    "bloom": "ALiBi",
    "deepseek2": "latent attention",
    "dream": "causal attention",
    "gemma2": "sliding-window",
    "gemma3": "sliding-window",
    "gpt2": "no rotary positions",
    "grok": "scales attention scores",
    "hunyuan-dense": "after the rotation",
    "hunyuan-moe": "after the rotation",
    "jais": "ALiBi",
    "lfm2": "mixes recurrent and attention",
    "llada": "causal attention",
    "llada-moe": "causal attention",
    "maincoder": "after the rotation",
    "mamba": "recurrent",
    "minicpm3": "joins a rotated and an unrotated",
    "mistral3-temperature": r"not the result of RoPE \(but of MUL\)",
    "mpt": "ALiBi",
    "nanbeige": "not proven",
    "olmo2-window": "sliding-window",
    "plm": "joins a rotated and an unrotated",
    "qwen2vl": "multi-section",
    "refact": "ALiBi",
    "rnd1": "causal attention",
    "smollm3": "layers have no rotary",
    "starcoder": "not proven",
}
PAGE = Path(__file__).parents[1] / "docs" / "models-table.md"
BEGIN, END = "<!-- models begin -->\n", "\n<!-- models end -->"


def make(folder: Path, name: str) -> Path:
    """Return the file of a model, written on first use."""
    path = folder / f"{name}.gguf"
    return path if path.is_file() else make_model(path, SHAPE, arch=name, seed=1)


def stock(folder: Path, tokens: list[int]) -> dict[str, np.ndarray]:
    """Return the logits of unpatched llama.cpp of every model, and with another RoPE base under ``NAME/base``."""
    paths = {name: str(make(folder, name)) for name in PROVEN}
    jobs = {name: (path, {}) for name, path in paths.items()}
    other = {f"{name}/base": (path, OTHER_BASE) for name, path in paths.items()}
    return run_llama_cpp(jobs | other, tokens, folder / "logits.npz")


def full(path: Path, tokens: list[int], **settings) -> np.ndarray:
    return evaluate(path, "full", tokens, **{"n_batch": 256, "n_ubatch": 256} | settings)


def assert_equal(name: str, got: np.ndarray, want: np.ndarray) -> None:
    assert_same_logits(got, want, (5 if name in GELU else 1) * LOGIT_TOLERANCE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("architectures")


@pytest.fixture(scope="module")
def stock_logits(folder, tokens) -> dict[str, np.ndarray]:
    return stock(folder, tokens[:N])


# ---- architectures ----


@pytest.mark.parametrize("name", PROVEN)
def test_full_equals_unpatched_llama_cpp(stock_logits, folder, tokens, name):
    want = stock_logits[name]
    assert_equal(name, full(folder / f"{name}.gguf", tokens[:N]), want)
    # positions matter: the comparison could not fail if they had no weight
    assert abs(stock_logits[f"{name}/base"] - want).max() > 0.05 * abs(want).max()


@pytest.mark.parametrize("name", PROVEN)
def test_methods_that_do_nothing_equal_full(folder, tokens, name):
    path, tokens = make(folder, name), tokens[:N_SHORT]
    want = full(path, tokens, n_ctx=N_SHORT)
    for method in IDLE.values():
        assert_equal(name, evaluate(path, method, tokens, n_ctx=N_SHORT), want)


@thin
@pytest.mark.parametrize("name", PROVEN)
@pytest.mark.parametrize("method", ["selfextend,group_size=8,neighbor_window=16", "dca"])
def test_methods_go_beyond_the_trained_context_in_any_batches(folder, tokens, name, method):
    got, want = in_two_cuts(make(folder, name), tokens[:N], method)
    assert_equal(name, got, want)


@pytest.mark.parametrize("name", PROVEN)
def test_longheads_goes_beyond_the_trained_context_in_any_batches(folder, tokens, name):
    """A choice at a near tie may fall the other way when other batches round otherwise."""
    got, want = in_two_cuts(
        make(folder, name), tokens[:N], "longheads,chunk_size=16,window=64,representation=attention"
    )
    assert np.median(abs(got - want)) < LOGIT_TOLERANCE * abs(want).max()


def in_two_cuts(path: Path, tokens: list[int], method: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits from odd batches and from a single one, after a look whether the method did anything."""
    want = evaluate(path, method, tokens, n_batch=256, n_ubatch=256)
    assert np.isfinite(want).all()
    assert abs(full(path, tokens) - want).max() > 0.05 * abs(want).max()
    return evaluate(path, method, tokens, n_batch=61, n_ubatch=37), want


# ---- refusals ----


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    """Return a function from a name in ``REFUSED`` to its file, written on first use."""
    folder = tmp_path_factory.mktemp("refused")
    return cache(lambda name: make_model(folder / f"{name}.gguf", arch=name))


@thin
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("method", METHODS)
def test_other_architectures_are_refused_with_the_reason(refused, name, method):
    with pytest.raises(ValueError, match=REASONS[name]):
        open_llama(refused(name), method, n_ctx=N_CTX_TRAIN)


# ---- KV types ----


def rounded(x: np.ndarray, type_name: str) -> np.ndarray:
    """Return what is left of ``x`` after storing it in a ggml type."""
    qtype = gguf.GGMLQuantizationType[type_name.upper()]
    return gguf.dequantize(gguf.quantize(x.astype(np.float32), qtype), qtype).astype(np.float64)


@dataclass(frozen=True)
class RoundingModel(Model):
    """The oracle with a cache: keys are stored rotated and rounded, as segments see them."""

    type_k: str = "f32"
    type_v: str = "f32"

    def attention(self, x: np.ndarray, i: int, method: oracle.Method) -> np.ndarray:
        n_head, n_head_kv = self.meta["attention.head_count"], self.meta["attention.head_count_kv"]
        q, k, v = (self.linear(x, f"blk.{i}.attn_{part}").reshape(len(x), heads, -1)
                   for part, heads in (("q", n_head), ("k", n_head_kv), ("v", n_head_kv)))  # fmt: skip
        rows = np.arange(len(x))
        far, near = (rounded(oracle.rotate(k, at[:, None], self.rope), self.type_k)
                     for at in (method.storage(rows), rows))  # fmt: skip
        v, scale = rounded(v, self.type_v), q.shape[-1] ** -0.5
        out = np.empty_like(q)
        for p in rows:
            for h in range(n_head):
                kv = h * n_head_kv // n_head
                out[p, h], _ = oracle.attend_segments(
                    q[p, h], method.segments(p), far[:, kv], near[:, kv], v[:, kv], self.rope, scale
                )
        return self.linear(out.reshape(len(x), -1), f"blk.{i}.attn_output")


MIXED = [("f16", "q8_0"), ("q8_0", "q4_0"), ("bf16", "q5_1"), ("q5_0", "f16"), ("q4_1", "bf16")]
PAIRS = [pair for t in TYPES for pair in dict.fromkeys([(t, "f32"), ("f32", t), (t, t)])] + MIXED


@thin
@pytest.mark.parametrize(("type_k", "type_v"), dict.fromkeys(PAIRS))
@pytest.mark.parametrize("method", METHODS)
def test_every_kv_type_equals_the_rounding_oracle(model_path, tokens, method, type_k, type_v):
    path, tokens, method = model_path("llama-wide"), tokens[:100], METHODS[method]
    base = Model.load(path)
    want = RoundingModel(base.meta, base.tensors, base.rope, type_k, type_v).logits(tokens, method)
    got = evaluate(path, method.text(), tokens, n_ctx=100, type_k=type_k, type_v=type_v)
    assert_same_logits(got, want, LOGIT_TOLERANCE if type_k == type_v == "f32" else STEP)
    assert np.median(abs(got - want)) < MEDIAN * abs(want).max()


# ---- RoPE scaling ----

SCALINGS = {
    "linear": ({"rope_scaling_type": LINEAR, "rope_freq_scale": 0.25}, {"freq_scale": 0.25}),
    "ntk": ({"rope_freq_base": 40000.0}, {"freq_base": 40000.0}),
    "yarn": (
        {"rope_scaling_type": YARN, "rope_freq_scale": 0.25, "yarn_orig_ctx": N_CTX_TRAIN},
        {"freq_scale": 0.25, "ext_factor": 1.0, "n_ctx_orig": N_CTX_TRAIN},
    ),
}


STRETCHED = {"linear": 4 * N_CTX_TRAIN, "yarn": 4 * N_CTX_TRAIN}  # positions that a scaled model can tell apart


@thin
@pytest.mark.parametrize("model", ["llama", "qwen2"])
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("method", [*METHODS, *LONGHEADS])
def test_rope_scaling_composes_with_every_method(model_path, tokens, model, scaling, method):
    path, method, (settings, rope) = model_path(model), (METHODS | LONGHEADS)[method], SCALINGS[scaling]
    if isinstance(method, oracle.DualChunk):
        method = replace(method, n_ctx_train=STRETCHED.get(scaling, N_CTX_TRAIN))
    want = Model.load(path, **rope).logits(tokens[:110], method)
    got = evaluate(path, method.text(), tokens[:110], n_ctx=110, **settings)
    assert_same_logits(got, want)
    assert abs(Model.load(path).logits(tokens[:110], method) - want).max() > 0.1


# ---- the table of the documents ----


def compare(path: Path, want: np.ndarray, tokens: list[int], type_name: str) -> list[float]:
    """Return the largest difference from ``want``, as a fraction of its largest, for full and each idle method."""
    short, types = tokens[:N_SHORT], {"type_k": type_name, "type_v": type_name}
    runs = [full(path, tokens, **types)] + [evaluate(path, m, short, n_ctx=N_SHORT, **types) for m in IDLE.values()]
    return [abs(got - want[: len(got)]).max() / abs(want).max() for got in runs]


def table() -> str:
    """Return the Markdown table: architectures and KV types, with the methods apart where they ought to be equal."""
    tokens = np.random.default_rng(0).integers(3, SHAPE.n_vocab, N).tolist()
    head = ["model", "architecture", *(f"{m}, f32" for m in ("full", *IDLE)), *TYPES[1:]]
    lines = [head, ["---"] * len(head)]
    with tempfile.TemporaryDirectory() as folder:
        logits = stock(Path(folder), tokens)
        for name, recipe in PROVEN.items():
            errors = {t: compare(Path(folder) / f"{name}.gguf", logits[name], tokens, t) for t in TYPES}
            numbers = errors["f32"] + [max(errors[t]) for t in TYPES[1:]]
            lines.append(
                [name, recipe.arch or name, *(f"{x:.0e}".replace("e-0", "e-").replace("e+00", "") for x in numbers)]
            )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def test_the_page_has_the_proven_architectures():
    rows = re.findall(r"^\| ([\w.-]+) \| ([\w.-]+) \| \d", PAGE.read_text(), re.MULTILINE)
    assert rows == [(name, recipe.arch or name) for name, recipe in PROVEN.items()]


def test_the_library_serves_the_proven_architectures(folder):
    """The refusal of an architecture that nobody has tried lists those that are served."""
    path = make_model(folder / "nanbeige.gguf", arch="nanbeige")
    with pytest.raises(ValueError, match="not proven") as info:
        open_llama(path, "full", n_ctx=N_CTX_TRAIN)
    served = re.search(r"proven: ([^)]*)\)", str(info.value)).group(1).split(", ")
    assert sorted(served) == sorted({recipe.arch or name for name, recipe in PROVEN.items()})


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2])
