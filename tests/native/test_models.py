"""Every architecture that methods serve against unpatched llama.cpp, in any batches, under every method; every refusal.

``python tests/native/test_models.py`` writes docs/models-table.md: run it after adding a recipe to ``tiny_models.py``.
"""

import re
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

sys.path.extend(str(Path(__file__).resolve().parents[2] / folder) for folder in ("tests/support", "bench"))

import numpy as np
import pytest
from cases import LOGIT_TOLERANCE, N_CTX_TRAIN
from session import Session
from test_methods import assert_same_logits, evaluate, open_llama
from test_parity import run_llama_cpp
from thinning import thin
from tiny_gguf import Shape, make_model
from tiny_indexed import INDEXED
from tiny_models import FIXED_KEYS, GROUP, GROUPS, NARROW_VALUES, ORDINARY, PROVEN, REFUSED, STILL

N, N_SHORT = 150, 60  # beyond and within the trained context
SHAPE = Shape(n_embd=128, n_ctx_train=N_CTX_TRAIN)  # heads of 32 channels: whole blocks of every KV type
OTHER_BASE = {"rope_freq_base": 20000.0}
ROOT = Path(__file__).parents[2]
PICTURES = np.s_[4:8196]  # tokens of chameleon that are parts of a picture, excluded in the first row of a batch
BY_ATTENTION = "longheads,chunk_size=16,window=64,representation=attention"  # needs V as wide as K
IDLE = {  # methods, set so that they change nothing in N_SHORT tokens
    "window": "window,n_sink=4,window=60",
    "selfextend": "selfextend,group_size=4,neighbor_window=60",
    "dca": "dca,chunk_size=37,local_window=23",
    "string": "string,shift_offset=37,local_window=37",
    "longheads": BY_ATTENTION,
    "corm": "corm,window=4,recent=60,evict_every=16",
}
POSITION = {"selfextend": "selfextend,group_size=8,neighbor_window=16", "dca": "dca"}
SELECTION = {"longheads": BY_ATTENTION, "corm": "corm,window=8,recent=24,evict_every=16"}
MOVING = (*POSITION, "string", "window", "longheads")  # methods that read keys from other positions than their own


@dataclass(frozen=True)
class Kind:
    """What a recipe has: the default suite runs a few that have everything; parity it runs for all."""

    group: str
    has_sinks: bool
    has_experts: bool
    has_norms: bool
    has_biases: bool
    has_factors: bool
    is_still: bool
    shares_keys: bool


def kind(name: str) -> Kind:
    recipe = PROVEN[name]
    layers = recipe.layer if isinstance(recipe.layer, str) else " ".join(recipe.layer)
    return Kind(
        GROUP[name],
        "attn_sinks" in layers,
        "exps" in layers,
        "attn_q_norm" in layers,
        "attn_q+b" in layers,
        "rope_f" in recipe.outer,
        name in STILL,
        name in ("gemma3n", "gemma4"),
    )


KINDS = {name: kind(name) for name in PROVEN}


def serves(name: str, method: str) -> bool:
    """Return whether a method, named as in ``IDLE``, goes with a model."""
    return not (method in MOVING and name in FIXED_KEYS) and not (method == "longheads" and name in NARROW_VALUES)


def pairs(names, methods) -> list[tuple[str, str]]:
    return [(name, method) for name in names for method in methods if serves(name, method)]


def make(folder: Path, name: str) -> Path:
    """Return the file of a model, written on first use."""
    path = folder / f"{name}.gguf"
    return path if path.is_file() else make_model(path, SHAPE, arch=name, seed=1)


def visible(name: str, logits: np.ndarray) -> np.ndarray:
    """Return logits without those that the architecture hides in some rows."""
    return np.delete(logits, PICTURES, axis=1) if name == "chameleon" else logits


def stock(folder: Path, tokens: list[int]) -> dict[str, np.ndarray]:
    """Return the logits of unpatched llama.cpp of every model; of some with another RoPE base under ``NAME/base``."""
    jobs = {name: (str(make(folder, name)), {}) for name in PROVEN}
    other = {f"{name}/base": (jobs[name][0], OTHER_BASE) for name in ORDINARY}
    logits = run_llama_cpp(jobs | other, tokens, folder / "logits.npz")
    return {name: visible(name, found) for name, found in logits.items()}


def run(path: Path, method: str, tokens: list[int], **settings) -> np.ndarray:
    return visible(path.stem, evaluate(path, method, tokens, **{"n_batch": 256, "n_ubatch": 256} | settings))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("architectures")


@pytest.fixture(scope="module")
def stock_logits(folder, tokens) -> dict[str, np.ndarray]:
    return stock(folder, tokens[:N])


@pytest.fixture(scope="module")
def full(folder, tokens):
    """Return a function: the logits of a model under full attention."""
    return cache(lambda name, n=N: run(make(folder, name), "full", tokens[:n], n_ctx=256 if n == N else n))


# ---- parity ----


@pytest.mark.parametrize("name", PROVEN)
def test_full_equals_unpatched_llama_cpp(stock_logits, full, name):
    assert_same_logits(full(name), stock_logits[name])


@pytest.mark.parametrize("name", ORDINARY)
def test_another_rope_base_gives_other_logits(stock_logits, name):
    """The comparison could not fail if positions had none. Of other recipes tests/native/test_tiny_*.py say so."""
    want = stock_logits[name]
    assert abs(stock_logits[f"{name}/base"] - want).max() > 0.05 * abs(want).max()


@thin(table=KINDS)
@pytest.mark.parametrize("name", PROVEN)
@pytest.mark.parametrize(("n_batch", "n_ubatch"), [(1, 1), (61, 37)])
def test_full_is_the_same_in_any_batches(folder, tokens, full, name, n_batch, n_ubatch):
    got = run(make(folder, name), "full", tokens[:N], n_batch=n_batch, n_ubatch=n_ubatch)
    assert_same_logits(got, full(name))


@thin(table=KINDS)
@pytest.mark.parametrize(("name", "method"), pairs(PROVEN, IDLE))
def test_methods_that_do_nothing_equal_full(folder, tokens, full, name, method):
    got = run(make(folder, name), IDLE[method], tokens[:N_SHORT], n_ctx=N_SHORT)
    assert_same_logits(got, full(name, N_SHORT))


@thin(table=KINDS)
@pytest.mark.parametrize(("name", "method"), pairs(STILL, POSITION))
def test_methods_that_move_keys_change_nothing_without_rotation(folder, tokens, full, name, method):
    assert_same_logits(run(make(folder, name), POSITION[method], tokens[:N]), full(name))


@thin(table=KINDS)
@pytest.mark.parametrize(("name", "method"), pairs([name for name in PROVEN if name not in STILL], POSITION))
def test_methods_go_beyond_the_trained_context_in_any_batches(folder, tokens, full, name, method):
    want = run(make(folder, name), POSITION[method], tokens[:N])
    assert np.isfinite(want).all()
    assert abs(full(name) - want).max() > 0.01 * abs(want).max()
    got = run(make(folder, name), POSITION[method], tokens[:N], n_batch=61, n_ubatch=37)
    assert_same_logits(got, want)


@thin(table=KINDS)
@pytest.mark.parametrize(("name", "method"), pairs(PROVEN, SELECTION))
def test_choices_are_the_same_in_any_batches(folder, tokens, full, name, method):
    """Except at a near tie, where other batches may round differently and change the choice."""
    want = run(make(folder, name), SELECTION[method], tokens[:N])
    assert np.isfinite(want).all()
    assert abs(full(name) - want).max() > 1e-3 * abs(want).max()
    got = run(make(folder, name), SELECTION[method], tokens[:N], n_batch=61, n_ubatch=37)
    assert np.median(abs(got - want)) < LOGIT_TOLERANCE * abs(want).max()


# ---- refusals ----

REASONS = {
    "baichuan-13b": "ALiBi",
    "bert": "encoder",
    "bloom": "ALiBi",
    "dream": "diffusion",
    "gpt2": "no rotary positions",
    "graniteswitch": "a router that must read every token",
    "jais": "ALiBi",
    "llada": "diffusion",
    "llada-moe": "diffusion",
    "mamba": "recurrent",
    "mpt": "ALiBi",
    "refact": "ALiBi",
    "rnd1": "diffusion",
    "starcoder": "learned positions",
    **dict.fromkeys(INDEXED, "selects keys itself, with an indexer"),
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    """Return a function from a name in ``REFUSED`` to its file, written on first use."""
    folder = tmp_path_factory.mktemp("refused")
    return cache(lambda name: make_model(folder / f"{name}.gguf", arch=name))


@pytest.mark.parametrize("name", REFUSED)
def test_other_architectures_are_refused_with_the_reason(refused, name):
    for method in ("full", "window,n_sink=4,window=29", "selfextend"):
        with pytest.raises(ValueError, match=REASONS[name]):
            open_llama(refused(name), method, n_ctx=N_CTX_TRAIN)


@thin
@pytest.mark.parametrize("name", FIXED_KEYS)
@pytest.mark.parametrize("method", MOVING)
def test_methods_that_move_keys_refuse_norms_after_the_rotation(folder, name, method):
    with pytest.raises(ValueError, match=r"rotated last, .*method=full and the eviction rules alone run"):
        open_llama(make(folder, name), IDLE[method], n_ctx=N_CTX_TRAIN)


@thin
@pytest.mark.parametrize("name", NARROW_VALUES)
def test_values_are_not_compared_with_keys_of_another_width(folder, name):
    with pytest.raises(ValueError, match="use another representation and position"):
        open_llama(make(folder, name), BY_ATTENTION, n_ctx=N_CTX_TRAIN)


@pytest.mark.parametrize("name", ["kimi-linear", "minimax-01"])
@pytest.mark.parametrize("method", ["", "full"])
def test_ubatches_that_would_end_the_process_are_refused(ffi, lib, folder, name, method):
    sizes = {"n_ctx": 256, "n_batch": 48, "n_threads": 1, "n_threads_batch": 1}
    with pytest.raises(ValueError, match="needs an n_ubatch that is a multiple of n_seq_max, not 16 for 3"):
        Session(ffi, lib, make(folder, name), method, n_seq_max=3, n_ubatch=16, **sizes)
    Session(ffi, lib, make(folder, name), method, n_seq_max=3, n_ubatch=18, **sizes).close()


# ---- the table of the documents ----

PAGE = ROOT / "docs" / "models-table.md"
BEGIN, END = "<!-- models begin -->\n", "\n<!-- models end -->"
ROUNDED = ("f16", "q8_0", "q4_0")
NO_FLASH = ("grok",)  # llama.cpp has no flash attention for it, and refuses a quantized V without


def served_rows() -> list[str]:
    """Return the rows of the native table that say of no reason."""
    rows = re.findall(r"\{(LLM_ARCH_\w+)([^{}]*)\}", (ROOT / "native" / "base" / "architectures.cpp").read_text())
    return [name for name, rest in rows if '"' not in rest and "INDEXER" not in rest]


def test_the_library_serves_the_proven_architectures():
    """All of these run, so the table, which has as many, has no other."""
    assert (
        len(served_rows()) == len(set(served_rows())) == len({recipe.arch or name for name, recipe in PROVEN.items()})
    )


def compare(path: Path, want: np.ndarray, tokens: list[int], type_name: str) -> list[float]:
    """Return the largest difference from ``want``, as a fraction of its largest, for full and each idle method."""
    if path.stem in NO_FLASH and type_name not in ("f32", "f16"):
        return [np.nan] * (1 + len(IDLE))
    types = {"type_k": type_name, "type_v": type_name}
    runs = [run(path, "full", tokens, **types)]
    for method, spec in IDLE.items():
        served = serves(path.stem, method)
        runs.append(run(path, spec, tokens[:N_SHORT], n_ctx=N_SHORT, **types) if served else np.empty((0, 0)))
    return [abs(got - want[: len(got)]).max() / abs(want).max() if got.size else np.nan for got in runs]


def cell(x: float) -> str:
    return "" if np.isnan(x) else f"{x:.0e}".replace("e-0", "e-").replace("e+00", "")


def table() -> str:
    """Return a Markdown table of each group: recipes, with methods apart where they ought to be equal, and KV types."""
    tokens = np.random.default_rng(0).integers(3, SHAPE.n_vocab, N).tolist()
    head = ["model", "architecture", *(f"{m}, f32" for m in ("full", *IDLE)), *ROUNDED]
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        logits = stock(Path(folder), tokens)
        for group, recipes in GROUPS.items():
            lines += [f"## {group.capitalize()}", "", row(head), row(["---"] * len(head))]
            for name, recipe in recipes.items():
                path = Path(folder) / f"{name}.gguf"
                errors = [compare(path, logits[name], tokens, t) for t in ("f32", *ROUNDED)]
                numbers = errors[0] + [np.nan if np.isnan(e).all() else np.nanmax(e) for e in errors[1:]]
                lines.append(row([name, recipe.arch or name, *map(cell, numbers)]))
            lines.append("")
    return "\n".join(lines).rstrip()


def row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def test_the_page_has_the_proven_architectures():
    rows = re.findall(r"^\| ([\w.-]+) \| ([\w.-]+) \| \d", PAGE.read_text(), re.MULTILINE)
    assert rows == [(name, recipe.arch or name) for name, recipe in PROVEN.items()]


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2])
