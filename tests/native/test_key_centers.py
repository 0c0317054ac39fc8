"""What is subtracted from stored keys: attention stays the same, and few bits keep keys whose bias is large."""

from dataclasses import replace

import gguf
import numpy as np
import pytest
from cases import LOGIT_TOLERANCE, OP_CASES
from cases_chunks import CHUNK_CASES
from cases_evict import EVICT_CASES
from llamas import new
from op import _pointer, make_inputs, run_chunks, run_evict, run_native
from oracle import Full, rotate
from tiny_gguf import TINY, make_model

# queries that see all keys under one angle, whose scores nothing bends
SAME_ANGLE = [c for c in OP_CASES if isinstance(c.method, Full) and not (c.random_segments or c.softcap or c.near_rows)]
TOKENS = (np.arange(1, 200) * 7 % 250 + 3).tolist()
SHAPE = replace(TINY, n_embd=256, n_ctx_train=256, freq_base=1e7)
LARGE = 60.0  # of keys that are about 1 without it


@pytest.mark.parametrize("case", [c for c in SAME_ANGLE if c.type_k in ("f32", "f16")], ids=lambda c: c.name)
def test_a_vector_less_is_the_same_attention(case):
    x = make_inputs(case)
    rng = np.random.default_rng(case.seed + 3)
    center = rng.standard_normal((case.n_head_kv, case.head_dim_k)).astype(np.float32)
    plain, lse = run_native(case, x)
    found, moved = run_native(case, x, center=_pointer(center))
    np.testing.assert_allclose(found, plain, rtol=0, atol=4 * case.tolerance * np.abs(plain).max())
    if lse is not None:
        angles = np.repeat(x.seg_pos[:, :1], case.n_head, 1)
        q = np.array(
            [[rotate(x.q[t, h], angles[t, h], case.make_rope()) for h in range(case.n_head)] for t in range(len(x.q))]
        )
        less = case.scale * np.einsum("thd,hd->th", q, np.repeat(center, case.n_head // case.n_head_kv, 0))
        np.testing.assert_allclose(moved + less, lse, rtol=0, atol=4 * case.tolerance * np.abs(lse).max())


def vector(case):
    rng = np.random.default_rng(case.seed + 3)
    return _pointer(rng.standard_normal((case.n_head_kv, case.head_dim_k)).astype(np.float32))


ONE_ANGLE = [  # and bounds, which no level rounds
    c for c in CHUNK_CASES
    if c.type_k == "f32" and not c.softcap and (c.method.position, c.method.representation) == ("full", "minmax")
]  # fmt: skip
EVICTING = [
    c for c in EVICT_CASES
    if c.type_k == "f32" and not c.softcap and isinstance(c.method, Full)
]  # fmt: skip


@pytest.mark.parametrize("case", ONE_ANGLE, ids=lambda case: case.name)
def test_heads_choose_the_same_chunks(case):
    x = make_inputs(case)
    plain, found = run_chunks(case, x), run_chunks(case, x, center=vector(case))
    same = (found.chunks == plain.chunks).all(-1)
    assert same.mean() > 0.98  # near ties
    atol = 4 * case.tolerance * np.abs(plain.out).max()
    np.testing.assert_allclose(found.out[same], plain.out[same], rtol=0, atol=atol)


@pytest.mark.parametrize("case", EVICTING[::4], ids=lambda case: case.name)
def test_heads_keep_the_same_rows(case):
    x = make_inputs(case)
    plain, found = run_evict(case, x), run_evict(case, x, center=vector(case))
    assert (found.held == plain.held).mean() > 0.99


@pytest.fixture(scope="module")
def biased(tmp_path_factory):
    """Return a model whose keys have a large bias in the channels that turn slowest, as those of Qwen2.5 have."""
    path = make_model(tmp_path_factory.mktemp("centers") / "biased.gguf", SHAPE, arch="qwen2")
    half = SHAPE.head_dim // 2
    for tensor in gguf.GGUFReader(path, "r+").tensors:
        if tensor.name.endswith("attn_k.bias"):
            heads = tensor.data.view(np.float32).reshape(-1, SHAPE.head_dim)
            for slowest in (half - 1, half - 2):
                heads[:, slowest] += LARGE
                heads[:, slowest + half] -= LARGE
            tensor.data.flush()
    return path


def logits(path, method, kv, tokens=TOKENS, **options):
    with new(path, method=method, type_k=kv, n_ctx=256, **options) as llm:
        return np.concatenate([rows.copy() for rows in llm.session.eval_rows(np.array(tokens, np.int32))])


def error(found, right):
    return np.abs(found - right).max() / np.abs(right).max()


def test_logits_are_those_of_llama_cpp(biased):
    right = logits(biased, "full", "f32")
    assert error(logits(biased, None, "f32"), right) < 1e-2  # its scores are large, and rounded more
    for method in ("window", "longheads,window=64", "dca"):
        assert error(logits(biased, method, "f32")[:64], right[:64]) < LOGIT_TOLERANCE


@pytest.mark.parametrize("kv", ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"])
def test_few_bits_keep_the_keys(biased, kv):
    """Less is lost than where nothing is subtracted: with dca, whose queries see keys under several angles."""
    right = logits(biased, "full", "f32")
    assert error(logits(biased, "full", kv), right) < 0.6 * error(logits(biased, "dca", kv)[:100], right[:100])


def test_states_keep_what_was_subtracted(biased):
    whole = logits(biased, "full", "q4_0")
    with new(biased, method="full", type_k="q4_0", n_ctx=256) as llm:
        llm.eval(TOKENS[:100])
        state = llm.save_state()
        llm.eval(TOKENS[100:])
        np.testing.assert_allclose(llm.scores[-1], whole[-1], rtol=0, atol=1e-2 * np.abs(whole).max())
        last = llm.scores[-1].copy()
        llm.load_state(state)
        llm.eval(TOKENS[100:])
        np.testing.assert_array_equal(llm.scores[-1], last)


def test_the_index_finds_keys_with_a_bias(biased):
    """The chunks that heads select are those of the attention, not of the bias."""
    right, chosen = (logits(biased, method, "f32") for method in ("full", "longheads,window=96"))
    assert error(chosen, right) < 0.5


@pytest.mark.parametrize(
    ("method", "kv", "warned"),
    [
        *((method, "q4_0", True) for method in (None, "dca", "longheads,position=dca", "full,spans=2")),
        *((method, "q4_0", False) for method in ("full", "window", "longheads", "h2o,budget=64", "longheads+corm")),
        ("dca", "q8_0", False),
    ],
)
def test_a_warning_where_the_bias_is_stored(biased, caplog, method, kv, warned):
    with new(biased, method=method, type_k=kv, type_v=kv, n_ctx=128):
        assert ("too coarse for the bias" in caplog.text) == warned
