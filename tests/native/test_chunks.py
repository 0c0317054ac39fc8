"""Methods that choose chunks, one layer at a time: the oracle against itself, ``lctx_layer_run`` against the oracle.

The native stages are held up one by one, so that a near tie cannot hide an error in the next stage: summaries against
the oracle, choices against those that the native summaries or the keys ask for, outputs against the native choices.
"""

from dataclasses import replace

import numpy as np
import oracle
import pytest
from cases import EIGHT_BITS, PAPER, ROPES, OpCase
from cases_chunks import CHUNK_CASES, HALF, POSITIONS, REPRESENTATIONS, ChunkCase, chunk_case, with_method
from hypothesis import given, settings
from hypothesis import strategies as st
from op import (
    assert_right_choices,
    assert_same_summaries,
    make_inputs,
    run_chunks,
    run_layer,
    run_native,
    stored,
)
from oracle_chunks import LongHeads, softmax
from session import assert_same
from thinning import few, thin

BY_NAME = {case.name: case for case in CHUNK_CASES}
COMPARED = REPRESENTATIONS[1:]  # with a base


# ---- native against the oracle ----


def check(case: ChunkCase) -> None:
    x = make_inputs(case)
    layer, got = stored(case, x), run_chunks(case, x)
    assert_same_summaries(case, got.summaries, layer.summarize(), case.rounding)
    assert_right_choices(layer, got)
    assert_same(got.out, layer.attend(got.chunks), case.tolerance)


@thin(table=BY_NAME)
@pytest.mark.parametrize("name", BY_NAME)
def test_chunks_equal_the_oracle(name):
    check(BY_NAME[name])


@st.composite
def random_cases(draw, **fixed) -> ChunkCase:
    n_recent, size = draw(st.integers(0, 2)), 16 * draw(st.integers(1, 4))
    n_head_kv, dim = draw(st.integers(1, 2)), 8 * draw(st.integers(1, 16))
    method = LongHeads(
        size,
        size * (n_recent + 2 + draw(st.integers(0, 4))),
        n_recent=n_recent,
        select=draw(st.sampled_from(["head", "group"])),
        representation=draw(st.sampled_from(COMPARED)),
        position=draw(st.sampled_from(POSITIONS)),
    )
    settings = {
        "n_rows": draw(st.integers(1, 330)),
        "head_dim_k": dim,
        "head_dim_v": dim,
        "n_head": n_head_kv * draw(st.integers(1, 3)),
        "n_head_kv": n_head_kv,
        "n_threads": draw(st.integers(1, 3)),
        "n_ubatch": draw(st.integers(1, 130)),
        "seed": draw(st.integers(0, 99)),
    }
    return chunk_case("random", method=method, **settings | fixed)


@given(random_cases())
@settings(max_examples=few(60), deadline=None, derandomize=True)
def test_chunks_equal_the_oracle_on_random_settings(case):
    check(case)


@given(random_cases(n_head=2, n_head_kv=1, n_rows=241, head_dim_v=241))
@settings(max_examples=few(40), deadline=None, derandomize=True)
def test_every_row_is_read_once_and_at_the_distance_of_the_base(case):
    """Values that name their rows: an output is the weights of all rows."""
    x = make_inputs(case)
    x.v[:] = np.eye(case.n_rows, dtype=np.float32)[:, None]
    got, rope = run_chunks(case, x), case.make_rope()
    keys = oracle.rotate(x.k[:, 0], 0, rope)
    for p in (case.n_rows - 1, case.n_rows - 2, 3 * case.n_rows // 4):
        for head in range(2):
            rows, distance = case.in_context.relative_positions(p, np.flatnonzero(got.chunks[p, head]).tolist())
            scores = (oracle.rotate(x.q[p, head], distance, rope) * keys[rows]).sum(-1) * case.scale
            weights = np.zeros(case.n_rows)
            weights[rows] = softmax(scores)
            assert_same(got.out[p, head], weights, 1e-4)


# ---- native: what must not matter ----

ORDER_CASES = {
    name: BY_NAME[name]
    for name in (
        "chunk16-rows257-attention",
        "chunk48-rows257-minmax",
        "base-recent0-string-keys2",
        "base-recent1-selfextend-keys2",
        "heads8x2-group-outlier",
        "k-q8_0-v-q8_0-dca-outlier",
        "heads6x2-keys1",
    )
}


@pytest.fixture(params=ORDER_CASES)
def case(request) -> ChunkCase:
    return ORDER_CASES[request.param]


def assert_same_run(case, got, want) -> None:
    np.testing.assert_array_equal(got.chunks, want.chunks)
    if want.summaries is not None:
        assert_same(got.summaries, want.summaries, HALF)
    assert_same(got.out, want.out, EIGHT_BITS if case.in_eight_bits else 1e-5)


@thin
@pytest.mark.parametrize("n_ubatch", [1, 7, 64, 65])
def test_the_size_of_a_ubatch_does_not_matter(case, n_ubatch):
    x = make_inputs(case)
    want = run_chunks(replace(case, n_ubatch=case.n_rows), x)
    assert_same_run(case, run_chunks(replace(case, n_ubatch=n_ubatch), x), want)


@thin
@pytest.mark.parametrize("n_threads", [2, 3])
@pytest.mark.parametrize("n_ubatch", [1, 3, 64, 257])
def test_the_number_of_threads_does_not_matter_to_a_choice(case, n_threads, n_ubatch):
    """In a decoded token all threads share a head, in a prompt each has its own."""
    case = replace(case, n_ubatch=n_ubatch)
    x = make_inputs(case)
    want = run_chunks(replace(case, n_threads=1), x)
    assert_same_run(case, run_chunks(replace(case, n_threads=n_threads), x), want)


def test_the_order_of_the_pages_does_not_matter(case):
    x = make_inputs(case)
    a, b = (run_chunks(case, x, page_seed=seed) for seed in (1, 2))
    for field in ("chunks", "out"):
        np.testing.assert_array_equal(getattr(a, field), getattr(b, field))
    if a.summaries is not None:
        np.testing.assert_array_equal(a.summaries, b.summaries)


# ---- native: what is read where there is no choice ----


@thin
@pytest.mark.parametrize("representation", COMPARED)
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("n_ubatch", [1, 64])
def test_what_reads_every_chunk_equals_the_base_bit_for_bit(representation, position, n_ubatch):
    """As long as no query has a chunk to leave; then the outputs differ."""
    method = LongHeads(16, 112, n_recent=0, representation=representation, position=position)
    case = chunk_case("all", n_rows=257, n_ubatch=n_ubatch, method=method)
    x, n_ctx_train = make_inputs(case), case.n_ctx_train
    if position == "selfextend":  # its automatic settings are those of longheads
        assert case.in_context.base.group_size > 1
    run = lambda spec: run_layer(case, x, n_ubatch, spec, n_ctx_train, shows_chunks=False).out  # noqa: E731
    got, want = run(method.text()), run(case.in_context.base.text())
    chooses, same = np.array([case.in_context.free(p).any() for p in range(case.n_rows)]), (got == want).all((1, 2))
    n_same = chooses.argmax() // n_ubatch * n_ubatch
    assert n_same >= 64
    assert same[:n_same].all()
    assert not same[chooses].any()


@pytest.mark.parametrize("rope", ["norm", "neox", "yarn"])
def test_a_packed_window_that_holds_everything_equals_full(rope):
    case = chunk_case("all", rope=ROPES[rope], method=LongHeads(16, 272, **PAPER))
    full = OpCase("full", n_rows=case.n_rows, n_tokens=case.n_rows, sharpness=case.sharpness, rope=case.rope)
    x = make_inputs(full)
    assert_same(run_chunks(case, x).out, run_native(full, x)[0], 1e-5)


# ---- native: special choices ----


@pytest.mark.parametrize("representation", REPRESENTATIONS)
@pytest.mark.parametrize("size", [16, 48])
def test_equal_chunks_are_chosen_by_their_index(representation, size):
    where = PAPER if representation == "attention" else {"representation": representation}
    case = chunk_case("ties", n_rows=12 * size, method=LongHeads(size, 6 * size, **where))
    x = make_inputs(case)
    for part in (x.k, x.v, x.q):
        part[:] = part[np.arange(case.n_rows) % size]
    if representation != "attention":  # what stands elsewhere has another score
        x.q[:] = 0
    got = run_chunks(case, x)
    for own in range(6, 12):
        chosen = np.isin(np.arange(12), [0, 1, 2, 3, own - 1, own])
        assert (got.chunks[own * size : (own + 1) * size] == chosen).all()


def test_heads_choose_for_themselves_or_with_their_group():
    case = chunk_case("heads", n_head=4, n_head_kv=2)
    x = make_inputs(case)
    for select, same in (("head", False), ("group", True)):
        chunks = run_chunks(with_method(case, select=select), x).chunks
        assert (chunks[:, [0, 2]] == chunks[:, [1, 3]]).all() == same
        assert (chunks[:, 0] != chunks[:, 2]).any()


@pytest.mark.parametrize("name", ["k-q8_0-v-q8_0-full-keys2", "k-q4_0-v-q4_0-full-keys1", "k-q8_0-v-q8_0-attention"])
def test_a_rounded_cache_chooses_almost_the_same(name):
    case = BY_NAME[name]
    x = make_inputs(case)
    exact = replace(stored(case, x), type_k="f32", type_v="f32")
    assert (run_chunks(case, x).chunks == exact.choose(exact.summarize())).mean() > 0.9


# ---- refusals ----


@pytest.mark.parametrize(("method", "reason"), [
    ("chunk_size=24,window=96", "chunk_size"),
    ("chunk_size=0,window=96", "chunk_size"),
    ("chunk_size=16,window=100", "window"),
    ("chunk_size=16,window=32", "window"),
    ("chunk_size=16,window=48,n_recent=2", "window"),
    ("chunk_size=16,window=272", "trained context 256"),
    ("chunk_size=16,window=96,n_recent=-1", "n_recent"),
    ("chunk_size=16,window=96,select=tail", "tail"),
    ("chunk_size=16,window=96,position=packed,representation=keys2", "are the paper's and go together"),
    ("chunk_size=16,window=96,position=full,representation=attention", "are the paper's and go together"),
    ("chunk_size=16,window=96,representation=attention,select=group", "cannot choose as a group"),
    ("chunk_size=16,window=96,position=string", "position=string is for contexts up to the trained 256, not 300"),
    ("chunk_size=16,window=96,representation=mean", "mean"),
    ("chunk_size=16,window=96,position=true", "true"),
    ("chunk_size=16,window=96,chunks=4", "chunks"),
    ("chunk_size=many,window=96", "chunk_size"),
    ("chunk_size=16,window=96,tile=32", "tile must be 64, or 1: every token of a prompt"),
    ("chunk_size=16,window=96,tile_window=100", "tile_window must be a multiple of chunk_size 16 from 64 on, not 100"),
    ("chunk_size=16,window=96,tile_window=48", "tile_window must be a multiple of chunk_size 16 from 64 on, not 48"),
    ("chunk_size=16,window=96,tile=1,tile_window=96", "tile_window is for tiles of tokens that choose together"),
    ("chunk_size=16,window=96,tile=1,tile_cutoff=3", "tile_cutoff is for tiles of tokens that choose together"),
    ("chunk_size=16,window=96,tile_cutoff=1001", "tile_cutoff must be from 0 to 1000, which leaves out nothing"),
    ("chunk_size=16,window=96,tile=64,representation=minmax", "tile=64 compares keys, not minmax"),
])  # fmt: skip
def test_bad_settings_are_refused_with_the_reason(method, reason):
    case = chunk_case("refused", n_rows=300)
    with pytest.raises(ValueError, match=reason):
        run_layer(case, make_inputs(case), 64, f"longheads,{method}", n_ctx_train=256)


def test_heads_of_two_sizes_have_no_attention_representation():
    case = chunk_case("sizes", n_rows=100, head_dim_v=32)
    with pytest.raises(ValueError, match="head_dim_v"):
        run_chunks(with_method(case, **PAPER), make_inputs(case))
    check(case)
