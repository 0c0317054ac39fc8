"""The CUDA kernel of *attend* for few tokens (``native/cuda/decode.cu``): heads alone, and heads that read the same.

Run by the CPU thread by thread: against the oracle, and where heads have evicted rows against the CPU's own.
"""

from dataclasses import replace

import numpy as np
import pytest
from cases import EIGHT_BITS, LONGHEADS, OP_CASES, PAPER, OpCase
from cases_chunks import CHUNK_CASES, POSITIONS, ChunkCase, chunk_case
from cases_evict import EvictCase, evict_case
from op import make_inputs, run_chunks, run_native, run_oracle, run_step, stored
from oracle import SelfExtend
from oracle_chunks import LongHeads
from session import assert_same
from thinning import thin

MAX_TOKENS = 16  # of a batch that the kernel is for where heads choose for themselves
TOLERANCE = 1e-3  # rows are halves; queries, scores and weights are floats
TENSOR_CORES = 2e-3  # queries and weights are halves too
OTHERS = 0.1  # share of queries that may choose another chunk than on the CPU, or drop another row

pytestmark = pytest.mark.usefixtures("emulated")


def check(case: ChunkCase) -> None:
    x = make_inputs(case)
    got = run_chunks(case, x)
    assert_same(got.out, stored(case, x).attend(got.chunks), max(case.tolerance, TOLERANCE))


# short: an emulated graph for a few tokens is slow
BY_NAME = {
    case.name: replace(case, n_rows=131, n_tokens=131, n_ubatch=MAX_TOKENS - len(case.name) % 7)
    for case in CHUNK_CASES
    if case.method.select == "head" and case.method.representation != "minmax"
}


@thin(table=BY_NAME)
@pytest.mark.parametrize("name", BY_NAME)
def test_chunks_equal_the_oracle(name):
    check(BY_NAME[name])


@thin
@pytest.mark.parametrize("n_tokens", [1, MAX_TOKENS, MAX_TOKENS + 1])
@pytest.mark.parametrize("types", [("f16", "f16"), ("f16", "q4_1"), ("bf16", "f32")])
@pytest.mark.parametrize("dims", [(8, 64), (64, 72), (128, 128), (192, 128), (256, 256), (264, 520), (576, 512)])
def test_heads_of_every_width(dims, types, n_tokens):
    """And as many tokens as the tensor cores take over; where a head has no row twice as long as a lane has room."""
    dim_k, dim_v = (-(-dim // 32) * 32 if "q" in kind else dim for dim, kind in zip(dims, types, strict=True))
    case = chunk_case("wide", n_rows=113, n_head=2, n_head_kv=1, head_dim_k=dim_k, head_dim_v=dim_v, n_ubatch=n_tokens,
                      type_k=types[0], type_v=types[1], method=LongHeads(16, 80))  # fmt: skip
    check(case)


@thin
@pytest.mark.parametrize("method", [LongHeads(48, 192), LongHeads(80, 320, n_recent=0), LongHeads(48, 192, **PAPER)])
@pytest.mark.parametrize("n_ubatch", [3, 16])
def test_chunks_of_several_pieces(method, n_ubatch):
    check(chunk_case("pieces", n_rows=389, n_head=2, n_head_kv=1, head_dim_k=32, head_dim_v=32, n_ubatch=n_ubatch,
                     method=method))  # fmt: skip


# ---- heads that read the same ----


def assert_equals_the_oracle(case: OpCase, tolerance: float) -> None:
    x = make_inputs(case)
    for got, want in zip(run_native(case, x), run_oracle(case, x), strict=True):
        assert_same(got, want, max(case.tolerance, tolerance))


@thin(strength=2)
@pytest.mark.parametrize("n_tokens", [1, 2, 3])
@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q4_0", "q5_1"])
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (8, 2), (14, 2), (8, 1), (9, 1)])
@pytest.mark.parametrize("dims", [(32, 64), (128, 128), (192, 128), (256, 256), (288, 64)])
def test_heads_of_a_group_equal_the_oracle(dims, heads, kv_type, n_tokens):
    """Two tiles of a KV head at most, others than whole ones too; the rest is up to the tensor cores."""
    case = replace(OP_CASES[0], n_rows=97, n_tokens=n_tokens, n_head=heads[0], n_head_kv=heads[1], head_dim_k=dims[0],
                   head_dim_v=dims[1], type_k=kv_type, type_v=kv_type, lse=True)  # fmt: skip
    assert_equals_the_oracle(case, TENSOR_CORES)


@pytest.mark.parametrize(("kv_type", "settings"), [
    ("f16", {"softcap": 5.0}), ("q8_0", {"softcap": 5.0}), ("q8_0", {"hadamard_k": 32, "hadamard_v": 64}),
    ("q4_0", {"hadamard_k": 64}), ("f16", {"random_segments": 9}), ("q8_0", {"random_segments": 40}),
    ("q4_0", {"near_rows": 64, "method": SelfExtend(4, 21)}),
])  # fmt: skip
def test_heads_of_a_group_read_segments_from_any_angle(kv_type, settings):
    """One token of 4 heads; more segments than a warp has lanes are up to the tensor cores."""
    case = replace(OP_CASES[0], n_rows=150, n_tokens=1, n_head=8, type_k=kv_type, type_v=kv_type, lse=True, **settings)
    assert_equals_the_oracle(case, TENSOR_CORES)


@pytest.mark.parametrize("kv_type", ["f16", "q4_0"])
def test_more_pieces_of_a_group_than_a_warp_looks_up_at_once(kv_type):
    case = replace(OP_CASES[0], n_rows=9001, n_tokens=1, n_head=16, n_head_kv=4, head_dim_k=32, head_dim_v=32,
                   type_k=kv_type, type_v=kv_type, lse=True)  # fmt: skip
    assert_equals_the_oracle(case, TOLERANCE)


def assert_nearly_equal(
    got: np.ndarray, want: np.ndarray, tolerance: float = TOLERANCE, others: float = OTHERS
) -> None:
    error = abs(got - want).max(-1) / abs(want).max()
    assert (error < tolerance).mean() > 1 - others, error


def both(case: ChunkCase | EvictCase, back_to_the_cpu, spec: str, n_tokens: int, **settings):
    x = make_inputs(case)
    run = lambda: run_step(case, x, spec, n_tokens, n_ctx_train=case.n_rows, **settings)  # noqa: E731
    got = run()
    back_to_the_cpu()
    return got, run()


@pytest.mark.parametrize("n_tokens", [1, 8])
def test_more_pieces_than_a_warp_looks_up_at_once(emulated, n_tokens):
    """One warp has 40 of them, or five; runs and chunks are cut anywhere."""
    n_head = 16 if n_tokens == 8 else 2
    case = chunk_case("long", n_rows=3000, n_head=n_head, n_head_kv=2, head_dim_k=32, head_dim_v=32, type_k="f16")
    got, want = both(case, emulated, "longheads,window=2560,position=full", n_tokens)
    assert_nearly_equal(got.out, want.out)


@thin
@pytest.mark.parametrize("n_tokens", [1, 7])
@pytest.mark.parametrize("held", [0.03, 0.4, 1.0])
@pytest.mark.parametrize("position", ["full", "dca", "selfextend"])
@pytest.mark.parametrize("rule", ["corm,window=8", "h2o,budget=300"])
def test_heads_that_have_evicted_rows(emulated, rule, position, held, n_tokens):
    """Chunks begin in the middle of a page, end in the next, and few of their rows are left; near keys are apart."""
    case = evict_case("held", n_rows=700, n_head=4, n_head_kv=2, sharpness=1.0, head_dim_k=40, head_dim_v=40)
    spec = f"longheads,window=256,select_from=256,position={position}+{rule}"
    got, want = both(case, emulated, spec, n_tokens, held=held)
    assert got.n_held == want.n_held
    assert_nearly_equal(got.out, want.out)


@thin
@pytest.mark.parametrize("n_tokens", [1, 2])
@pytest.mark.parametrize("held", [0.03, 0.4, 1.0])
@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("method", ["full", "selfextend,group_size=7,neighbor_window=90",
                                    "longheads,window=256,select_from=256,select=group"])  # fmt: skip
def test_heads_of_a_group_that_have_evicted_rows(emulated, method, kv_type, held, n_tokens):
    case = evict_case("held", n_rows=500, n_head=8, n_head_kv=2, sharpness=1.0, head_dim_k=32, head_dim_v=32,
                      type_k=kv_type, type_v=kv_type)  # fmt: skip
    got, want = both(case, emulated, f"{method}+h2o,budget=300", n_tokens, held=held)
    assert got.n_held == want.n_held
    # the CPU may round queries for quantized rows to 8 bits; one of the groups of heads may choose in another way
    tolerance, group = (TOLERANCE if kv_type == "f16" else EIGHT_BITS), 1 / (2 * n_tokens)
    assert_nearly_equal(got.out, want.out, tolerance, OTHERS if method == "full" else group + OTHERS)


@pytest.mark.parametrize("n_ubatch", [1, 6])
def test_a_key_that_is_nan_is_not_hidden(n_ubatch):
    """It is of the first chunk, which all read; the other KV head is as it was."""
    case = chunk_case("nan", n_rows=150, n_head=4, n_head_kv=2, n_ubatch=n_ubatch)
    x = make_inputs(case)
    x.k[3, 0] = np.nan
    out = run_chunks(case, x).out
    assert np.isnan(out[100:, :2]).all()
    assert np.isfinite(out[:, 2:]).all()


@pytest.mark.parametrize("largest", [1e5, 1e9])
def test_values_beyond_a_half_are_read_as_they_are(largest):
    case = chunk_case("large", n_rows=120, n_ubatch=3, type_k="q8_0", type_v="bf16")
    x = make_inputs(case)
    x.v[2, :, :32], x.v[100, :, 3] = largest, -largest
    got = run_chunks(case, x)
    want = stored(case, x).attend(got.chunks)
    for channels in (slice(0, 32), slice(32, 64)):
        assert_same(got.out[..., channels], want[..., channels], 1e-2)


# ---- whole models ----


@pytest.mark.parametrize("name", ["longheads-keys", "longheads-selfextend", "longheads-attention"])
def test_sequences_of_a_batch_are_as_alone(open_session, tokens, name):
    """Eight sequences of other lengths, of which some choose chunks and some read everything."""
    sizes = {"n_ctx": 128, "n_batch": 128, "n_ubatch": 64, "n_seq_max": 8, "n_threads": 1, "n_threads_batch": 1}
    lengths = (1, 15, 64, 65, 100, 120, 7, 90)
    together = open_session("llama", LONGHEADS[name].text(), **sizes)
    for seq, n in enumerate(lengths):
        together.decode_mixed([(seq, token) for token in tokens[seq : seq + n]])
    got = together.decode_mixed([(seq, tokens[200]) for seq in range(8)])
    for seq in (2, 5):
        alone = open_session("llama", LONGHEADS[name].text(), **sizes)
        alone.decode_mixed([(seq, token) for token in tokens[seq : seq + lengths[seq]]])
        assert_same(got[seq], alone.decode_mixed([(seq, tokens[200])])[0], 2 * TOLERANCE)


def test_two_sequences_that_read_all_are_as_alone(open_session, tokens):
    """One is short, one long: tokens of other sequences are tiles of their own."""
    sizes = {"n_ctx": 256, "n_batch": 256, "n_ubatch": 64, "n_seq_max": 2, "n_threads": 1, "n_threads_batch": 1,
             "type_k": 1, "type_v": 1}  # fmt: skip
    together = open_session("llama", "full", **sizes)
    for seq, n in enumerate((9, 200)):
        together.decode_mixed([(seq, token) for token in tokens[seq : seq + n]])
    got = together.decode_mixed([(seq, tokens[220]) for seq in range(2)])
    for seq, n in enumerate((9, 200)):
        alone = open_session("llama", "full", **sizes)
        alone.decode_mixed([(seq, token) for token in tokens[seq : seq + n]])
        assert_same(got[seq], alone.decode_mixed([(seq, tokens[220])])[0], 2 * TOLERANCE)


def test_pages_in_memory_of_the_host(open_session, tokens):
    """Some pages are staged, others far. Without them the tensor cores read what is there until heads choose."""
    sizes = {"n_ctx": 320, "n_batch": 64, "n_ubatch": 8, "n_threads": 1, "n_threads_batch": 1}
    answers = [
        open_session("llama", LONGHEADS["longheads-keys"].text(), kv_offload=offload, **sizes).decode(tokens[:150], 50)
        for offload in (0, 2**64 - 1)
    ]
    error = abs(answers[0] - answers[1]).max(-1) / abs(answers[0]).max()
    assert (error < 2 * TOLERANCE).mean() > 1 - OTHERS, error


def test_every_base_is_read():
    assert {case.method.position for case in BY_NAME.values()} == {*POSITIONS, "packed"}
