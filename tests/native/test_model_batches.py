"""What other programs hand to models: pictures, and hidden states for a block that drafts tokens (MTP)."""

import numpy as np
import pytest
from test_dropin import checked, on_ours, run
from test_models import make

PROGRAM = """
import ctypes, sys
import llama_cpp.llama_cpp as C, numpy as np

path, out, kind = sys.argv[1:4]
C.llama_backend_init()
model_params = C.llama_model_default_params()
model_params.load_mtp = kind == "mtp"
model = C.llama_model_load_from_file(path.encode(), model_params)
n_vocab = C.llama_vocab_n_tokens(C.llama_model_get_vocab(model))
n_embd, N = C.llama_model_n_embd(model), 10
params = C.llama_context_default_params()
params.n_ctx, params.n_batch, params.n_ubatch, params.n_threads, params.n_threads_batch = 256, 64, 64, 1, 1
params.type_k = params.type_v = params.flash_attn_type = 0
params.ctx_type = int(kind == "mtp")
ctx = C.llama_init_from_model(model, params)
rng = np.random.default_rng(0)
tokens = rng.integers(3, 288, 5 * N)
states = rng.standard_normal((5 * N, n_embd)).astype(np.float32)

def decode(first, n=N, text=True, hidden=False):
    pos = np.tile(np.arange(first, first + n, dtype=np.int32), 4)  # a part of a picture has four, each in its place
    rows, ones, zeros = states[first:first + n].copy(), np.ones(n, np.int32), np.zeros(n, np.int32)
    some, wanted = tokens[first:first + n].astype(np.int32), np.ones(n, np.int8)
    at = lambda array, kind: array.ctypes.data_as(ctypes.POINTER(kind))
    seqs = (ctypes.POINTER(ctypes.c_int32) * n)(*[at(zeros, ctypes.c_int32)] * n)
    status = C.llama_decode(ctx, C.llama_batch(
        n_tokens=n, token=at(some, ctypes.c_int32) if text else None,
        embd=None if text and not hidden else at(rows, ctypes.c_float), pos=at(pos, ctypes.c_int32),
        n_seq_id=at(ones, ctypes.c_int32), seq_id=seqs, logits=at(wanted, ctypes.c_int8)))
    if status:
        return status, np.zeros((0, n_vocab), np.float32)
    rows = [np.ctypeslib.as_array(C.llama_get_logits_ith(ctx, i), (n_vocab,)).copy() for i in range(n)]
    return status, np.stack(rows)

if kind == "mtp":
    steps = [decode(i * N, hidden=True) for i in range(4)] + [decode(4 * N + i, 1, hidden=True) for i in range(5)]
else:
    steps = [decode(0), decode(N, text=False)]
    steps += [decode(2 * N if steps[1][0] == 0 else N)]
np.savez(out, status=[status for status, _ in steps], logits=np.concatenate([logits for _, logits in steps]))
"""
# mimo2 needs another file: llama.cpp ends the process where the block has no fused projection
DRAFTERS = ("glm4moe-nextn", "hy_v3-nextn", "cohere2moe-nextn", "step35-nextn", "qwen35-nextn",
            "deepseek2-nextn")  # fmt: skip


@pytest.fixture
def program(tmp_path):
    """Return a function: what a program gets, on the unpatched library, or on ours with a method, and what it logs."""

    def start(name: str, kind: str, method: str = "") -> tuple[dict[str, np.ndarray], str]:
        out = tmp_path / "out.npz"
        environment = on_ours(LCTX_METHOD=method) if method else {}
        done = run(PROGRAM, make(tmp_path, name), out, kind, environment=environment)
        checked(done)
        return dict(np.load(out)), done.stderr

    return start


def assert_near(got: np.ndarray, want: np.ndarray) -> None:
    assert len(got) == len(want) > 0
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * abs(want).max())


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3next"])
def test_embeddings_take_the_place_of_tokens(program, name):
    got, _ = program(name, "pictures", "full")
    want, _ = program(name, "pictures")
    assert not want["status"].any()
    assert not got["status"].any()
    assert_near(got["logits"], want["logits"])


@pytest.mark.parametrize("name", ["qwen2vl", "qwen3vl", "qwen35"])
def test_pictures_of_models_with_sections_are_refused(program, name):
    """And text continues at their positions."""
    got, log = program(name, "pictures", "full")
    assert got["status"][1] != 0
    assert not got["status"][[0, 2]].any()
    assert "pictures (embeddings) of a model with sections of RoPE" in log
    want, _ = program(name, "pictures")
    assert not want["status"].any()
    assert_near(got["logits"][:10], want["logits"][:10])
    assert len(got["logits"]) == 20


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("method", ["full", "window,n_sink=4,window=40"])
def test_a_drafting_context_equals_llama_cpp(program, name, method):
    """Its only layers come after those of the model; a window of 40 hides nothing but the end of 45 tokens."""
    got, _ = program(name, "mtp", method)
    want, _ = program(name, "mtp")
    assert not want["status"].any()
    assert not got["status"].any()
    n = len(want["logits"]) if method == "full" else 40
    assert_near(got["logits"][:n], want["logits"][:n])
