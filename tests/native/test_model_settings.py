"""KV types against an oracle that rounds, and RoPE scaling against one that scales, under every method."""

import re
from dataclasses import dataclass, replace

import numpy as np
import oracle
import pytest
from cases import FEW_TOKENS, LOGIT_TOLERANCE, LONGHEADS, N_CTX_TRAIN
from model_oracle import Model
from oracle_chunks import LongHeads
from test_methods import assert_same_logits, evaluate
from test_parity import LINEAR, YARN
from thinning import thin
from tiny_gguf import Shape, make_model

from pylongctx import Llama

METHODS = {
    "full": oracle.Full(),
    "window": oracle.Window(4, 29),
    "selfextend": oracle.SelfExtend(8, 13),
    "dca": oracle.DualChunk(29, 11),
    "string": oracle.ShiftedRotary(57, 11),
}
# When the oracle rounds rows too, two things remain: float rounding, and a tie in the rounding that falls the other way
# here and there, which is as large as one step of the type. So the median is tight whatever the type.
TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
MEDIAN, STEP = 5e-5, 2e-2


# ---- KV types ----


@dataclass(frozen=True)
class RoundingModel(Model):
    """The oracle with a cache: keys are stored rotated, transformed and rounded, as segments see them."""

    type_k: str = "f32"
    type_v: str = "f32"
    blocks: tuple[int, int] = (0, 0)

    def attention(self, x: np.ndarray, i: int, method: oracle.Method) -> np.ndarray:
        n_head, n_head_kv = self.meta["attention.head_count"], self.meta["attention.head_count_kv"]
        q, k, v = (self.linear(x, f"blk.{i}.attn_{part}").reshape(len(x), heads, -1)
                   for part, heads in (("q", n_head), ("k", n_head_kv), ("v", n_head_kv)))  # fmt: skip
        rows = np.arange(len(x))
        far, near = (oracle.round_trip(oracle.rotate(k, at[:, None], self.rope), self.type_k, self.blocks[0])
                     for at in (method.storage(rows), rows))  # fmt: skip
        v, scale = oracle.round_trip(v, self.type_v, self.blocks[1]), q.shape[-1] ** -0.5
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


def rounding_logits(path, tokens, method, type_k: str, type_v: str, blocks: tuple[int, int]) -> np.ndarray:
    base = Model.load(path)
    return RoundingModel(base.meta, base.tensors, base.rope, type_k, type_v, blocks).logits(tokens, method)


@thin
@pytest.mark.parametrize(("type_k", "type_v"), dict.fromkeys(PAIRS))
@pytest.mark.parametrize("method", METHODS)
def test_every_kv_type_equals_the_rounding_oracle(model_path, tokens, method, type_k, type_v):
    path, tokens, method = model_path("llama-wide"), tokens[:100], METHODS[method]
    blocks = tuple(64 if "q" in name else 0 for name in (type_k, type_v))
    assert blocks == oracle.hadamard_blocks(type_k, 64, type_v, 64)
    want = rounding_logits(path, tokens, method, type_k, type_v, blocks)
    got = evaluate(path, method.text(), tokens, n_ctx=100, n_ubatch=FEW_TOKENS, type_k=type_k, type_v=type_v)
    assert_same_logits(got, want, LOGIT_TOLERANCE if type_k == type_v == "f32" else STEP)
    assert np.median(abs(got - want)) < MEDIAN * abs(want).max()


@pytest.mark.parametrize(("head_dim", "blocks"), [(32, (32, 32)), (96, (32, 32)), (128, (128, 64)), (160, (32, 32))])
def test_heads_are_transformed_in_blocks_that_divide_them(tmp_path, tokens, head_dim, blocks):
    path = make_model(tmp_path / "wide.gguf", Shape(n_embd=4 * head_dim, n_ctx_train=N_CTX_TRAIN), seed=1)
    want = rounding_logits(path, tokens[:60], oracle.Full(), "q8_0", "q5_1", blocks)
    got = evaluate(path, "full", tokens[:60], n_ctx=60, n_ubatch=FEW_TOKENS, type_k="q8_0", type_v="q5_1")
    assert blocks == oracle.hadamard_blocks("q8_0", head_dim, "q5_1", head_dim)
    assert_same_logits(got, want, STEP)
    assert np.median(abs(got - want)) < MEDIAN * abs(want).max()


@pytest.mark.parametrize("method", METHODS)
def test_rows_are_stored_as_they_come_where_the_environment_says_so(model_path, tokens, method, monkeypatch):
    path, method = model_path("llama-wide"), METHODS[method]
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")
    want = rounding_logits(path, tokens[:60], method, "q8_0", "q5_1", (0, 0))
    got = evaluate(path, method.text(), tokens[:60], n_ctx=60, n_ubatch=FEW_TOKENS, type_k="q8_0", type_v="q5_1")
    assert_same_logits(got, want, STEP)
    assert np.median(abs(got - want)) < MEDIAN * abs(want).max()


@pytest.mark.parametrize("method", ["full", "selfextend"])
def test_values_that_are_channels_of_keys_are_transformed_with_them(tmp_path, tokens, method, monkeypatch):
    """Rounding to 8 bits is small whether rows are transformed or not, and not the same.

    By the median: a few tokens get other experts.
    """
    path = make_model(tmp_path / "latent.gguf", Shape(n_ctx_train=N_CTX_TRAIN), arch="deepseek2", seed=1)
    tokens, spec, types = tokens[:60], METHODS[method].text(), {"type_k": "q8_0", "type_v": "q8_0"}
    want, got = evaluate(path, spec, tokens), evaluate(path, spec, tokens, **types)
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")
    plain = evaluate(path, spec, tokens, **types)
    for logits in (got, plain):
        assert 0 < np.median(abs(logits - want)) < 1e-2 * abs(want).max()
    assert abs(got - plain).max() > 0


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
    if isinstance(method, LongHeads):
        method = replace(method, n_ctx_train=STRETCHED.get(scaling, N_CTX_TRAIN), n_ctx=110)
    want = Model.load(path, **rope).logits(tokens[:110], method)
    got = evaluate(path, method.text(), tokens[:110], n_ctx=110, **settings)
    assert_same_logits(got, want)
    assert abs(Model.load(path).logits(tokens[:110], method) - want).max() > 0.1


# ---- numbers that are none ----

NONE, HUGE = float("nan"), float("inf")
NUMBERS = {
    "rope_freq_base": [NONE, HUGE, -HUGE, -1.0, 1e-30, 1.0, 1e30],
    "rope_freq_scale": [NONE, HUGE, -HUGE, -1.0, 1e-30, 1e30],
    "yarn_ext_factor": [NONE, HUGE, -HUGE, 1.5, 1e30],
    "yarn_attn_factor": [NONE, HUGE, -HUGE, 0.0, 1e-30, 1e30],
    "yarn_beta_fast": [NONE, HUGE, -HUGE, 1e30],
    "yarn_beta_slow": [NONE, HUGE, -HUGE, 1e30],
    "yarn_orig_ctx": [-1, 2**31, 2**32],
    "rope_scaling_type": [-2, 4, 99, 2**31],
}


@pytest.mark.parametrize("method", ["auto", None, "selfextend"])
@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in NUMBERS.items() for value in values])
def test_rope_numbers_that_are_none_are_refused_by_name(tmp_path, name, value, method):
    path = make_model(tmp_path / "model.gguf")
    with pytest.raises(ValueError, match=f"{name}[= ].*(must be|is out of range)"):
        Llama(str(path), n_ctx=64, method=method, verbose=False, **{name: value})


@pytest.mark.parametrize("name", ["rope_freq_base", "yarn_beta_slow", "rope_scaling_type"])
def test_what_is_not_a_number_is_refused_by_name(tmp_path, name):
    with pytest.raises(TypeError, match=f"{name}='x'"):
        Llama(str(make_model(tmp_path / "model.gguf")), n_ctx=64, verbose=False, **{name: "x"})


@pytest.mark.parametrize(("scale", "context"), [(1e-7, "1.28e+09"), (1e3, "0.128")])
def test_a_scale_stretches_to_a_context_that_can_be(tmp_path, scale, context):
    path = make_model(tmp_path / "model.gguf", Shape(n_ctx_train=128))
    with pytest.raises(
        ValueError, match=re.escape(f"makes {context} of 128 trained tokens; it must be one that makes 1 ..")
    ):
        Llama(str(path), n_ctx=64, verbose=False, method="selfextend", rope_freq_scale=scale)
