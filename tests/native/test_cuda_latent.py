"""The CUDA kernels of wide heads and of values that are channels of keys, run by the CPU: against its own kernels."""

from dataclasses import replace

import numpy as np
import pytest
from cases import N_CTX_TRAIN, SPECS
from random_model import GATED, write_model
from thinning import thin
from tiny_gguf import Shape, make_model
from tiny_latent import DEEPSEEK_META, LATENT, RANK

TOLERANCE = 5e-3  # queries, weights and rows are f16 on the tensor cores
F32, F16, Q8_0 = 0, 1, 8
N = 150
METHODS = {"full": SPECS["full"], "selfextend": SPECS["selfextend"], "longheads": SPECS["longheads-minmax"],
           "h2o": "full+h2o,budget=60,recent=20,evict_every=16"}  # fmt: skip

# keys of 512 latent and 64 rotated channels, as DeepSeek has them
SHAPE = Shape(n_embd=128, n_ctx_train=N_CTX_TRAIN, n_layer=2, n_head_kv=1, n_rot=64)
WIDE = replace(
    LATENT["deepseek2"],
    arch="deepseek2",
    layer="attn_norm attn_q_a=48,embd attn_q_a_norm=48 attn_q_b=320,48 attn_kv_a_mqa=576,embd attn_kv_a_norm=512 "
    f"attn_k_b=n_head,512,16 attn_v_b=n_head,32,512 attn_output {GATED}",
    meta=DEEPSEEK_META | RANK | {
        "attention.kv_lora_rank": 512, "attention.key_length": 576, "attention.value_length": 512,
        "attention.key_length_mla": 80, "attention.value_length_mla": 32, "leading_dense_block_count": 2},
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("emulated")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("latent")
    small = make_model(folder / "small.gguf", SHAPE, arch="deepseek2", seed=1)
    return {"small": small, "wide": write_model(folder / "wide.gguf", WIDE, SHAPE, seed=1)}


# (model, type of K and V): "small" is about bytes of values that begin between two words; rules would drop
# others rows than the CPU, which multiplies its keys in 8 bits
CASES = [(model, kv_type, name) for model, kv_type in (("small", Q8_0), ("wide", F32), ("wide", F16), ("wide", Q8_0))
         for name in METHODS if (model, name) != ("small", "h2o")]  # fmt: skip


@thin
@pytest.mark.parametrize(("model", "kv_type", "name"), CASES)
def test_latent_models_equal_the_cpu(emulated, open_file, files, tokens, model, kv_type, name):
    """A prompt in parts, then single tokens."""
    sizes = {"n_ctx": 192, "n_batch": 64, "n_ubatch": 32, "n_threads": 1, "n_threads_batch": 1,
             "type_k": kv_type, "type_v": kv_type}  # fmt: skip

    def logits() -> np.ndarray:
        session = open_file(files[model], METHODS[name], **sizes)
        return np.concatenate([session.decode(tokens[: N - 6], 64), session.decode(tokens[N - 6 : N], 1)])

    got = logits()
    emulated()
    want = logits()
    # a near tie may choose another chunk, or keep another row
    assert np.median(abs(got - want)) < TOLERANCE * abs(want).max()
    assert (abs(got - want).max(axis=1) > 5 * TOLERANCE * abs(want).max()).mean() < 0.1
