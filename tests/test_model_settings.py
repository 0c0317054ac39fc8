"""KV types against an oracle that rounds, and RoPE scaling against one that scales, under every method."""

from dataclasses import dataclass, replace

import gguf
import numpy as np
import oracle
import pytest
from cases import LOGIT_TOLERANCE, LONGHEADS, N_CTX_TRAIN
from model_oracle import Model
from test_methods import assert_same_logits, evaluate
from test_parity import LINEAR, YARN
from thinning import thin

METHODS = {
    "full": oracle.Full(),
    "window": oracle.Window(4, 29),
    "selfextend": oracle.SelfExtend(8, 13),
    "dca": oracle.DualChunk(29, 11),
    "string": oracle.ShiftedRotary(57, 11),
}
# When the oracle rounds rows too, two things remain: float rounding, and a tie in the rounding that falls the other way
# here and there, which is as large as one step of the type. So the median is tight whatever the type.
TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
MEDIAN, STEP = 5e-5, 2e-2


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
