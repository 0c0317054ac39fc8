"""Methods that choose chunks, one layer at a time: the oracle against itself, ``lctx_chunk_run`` against the oracle.

The native stages are held up one by one, so that a near tie cannot hide an error in the next stage: summaries
against the oracle, choices against those that the native summaries ask for, outputs against the native choices.
"""

from dataclasses import replace

import numpy as np
import oracle
import pytest
from cases import (
    CHUNK_CASES,
    EIGHT_BITS,
    HALF,
    POSITIONS,
    REPRESENTATIONS,
    ROPES,
    ChunkCase,
    OpCase,
    chunk_case,
    with_method,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from op import assert_same_summaries, make_inputs, run_chunks, run_native, stored
from oracle_chunks import (
    LongHeads,
    attend_longheads,
    choices,
    choose,
    chunk_scores,
    in_the_order_of_keys,
    pick,
    rotated_queries,
)
from session import assert_same
from thinning import few, thin

BY_NAME = {case.name: case for case in CHUNK_CASES}
EXACT = 1e-9  # float64


# ---- the oracle itself: positions ----


def all_methods() -> st.SearchStrategy[LongHeads]:
    return st.builds(
        lambda size, free, r, g, pos: LongHeads(size, (free + r + 2) * size, n_recent=r, group_size=g, position=pos),
        st.sampled_from([16, 48]), st.integers(0, 3), st.integers(0, 3), st.integers(1, 9),
        st.sampled_from(POSITIONS),
    )  # fmt: skip


@given(all_methods(), st.integers(0, 700), st.integers(0, 9))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_segments_reach_the_distances_of_the_definition(method, p, seed):
    scores = np.random.default_rng(seed).standard_normal(p // method.chunk_size + 1)
    chunks = choose(scores, p // method.chunk_size, method)
    keys, distances = method.relative_positions(p, chunks)
    got = {}
    for seg in method.segments(p, chunks):
        rows = np.arange(seg.row0, seg.row1)
        distance = seg.a - method.storage(rows)
        got |= dict(zip(rows.tolist(), distance.tolist(), strict=True))
    assert got == dict(zip(keys.tolist(), distances.tolist(), strict=True))
    assert got[p] == 0
    assert min(got.values()) >= 0
    if method.position == "packed":
        assert max(got.values()) < method.window


@given(all_methods(), st.integers(0, 700))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_chunks_that_fit_the_window_are_read_like_full(method, p):
    method = replace(method, window=48 * 700, group_size=1)
    chunks = choose(np.zeros(0), p // method.chunk_size, method)
    for got, want in zip(method.relative_positions(p, chunks), oracle.Full().relative_positions(p), strict=True):
        np.testing.assert_array_equal(got, want)


# ---- the oracle itself: choice ----


@given(all_methods(), st.integers(0, 40), st.integers(0, 3), st.integers(0, 9))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_choice_holds_what_must_be_read_and_fills_the_window(method, own, n_neighbor, seed):
    n_free = method.n_chunk - 2 - method.n_recent
    method = replace(method, n_neighbor=min(n_neighbor, n_free))
    chunks = choose(np.random.default_rng(seed).standard_normal(own), own, method)
    assert chunks == sorted(set(chunks))
    assert len(chunks) == min(own + 1, method.n_chunk)
    assert {0, own, *range(max(0, own - method.n_recent), own)} <= set(chunks)


@pytest.mark.parametrize(("n", "n_neighbor", "want"), [
    (3, 0, [6, 2, 9]),
    (3, 1, [6, 2, 7]),  # of 5 and 7 the better one
    (3, 2, [6, 7, 5]),  # two passes over the only chunk chosen
    (4, 2, [6, 2, 7, 3]),  # one for each of 6 and 2
    (5, 4, [6, 7, 5, 2, 9]),  # 6 has no more neighbours: the best of the rest
    (2, 2, [6, 2]),  # nothing was chosen by score: filled by score
])  # fmt: skip
def test_neighbours_of_chosen_chunks_are_pulled_in(n, n_neighbor, want):
    scores = np.array([0, 1, 8, 2, 0.1, 0.5, 9, 0.7, 0.2, 3])
    assert pick(scores, range(1, 10), n, n_neighbor) == want


def test_equal_scores_choose_the_lowest_indices():
    assert choose(np.zeros(20), 20, LongHeads(16, 6 * 16)) == [0, 1, 2, 3, 19, 20]
    assert pick(np.zeros(9), range(1, 9), 3, 2) == [1, 2, 3]


@pytest.mark.parametrize(("ablation", "want"), [("", [0, 7, 8, 9]), ("last", [0, 2, 8, 9]), ("no_first", [3, 7, 8, 9])])
def test_ablations_of_the_choice(ablation, want):
    scores = np.array([0.0, 5, -9, 6, 1, 1, 1, 7, 0, 0])
    assert choose(scores, 9, LongHeads(16, 64, ablation=ablation)) == want


# ---- the oracle itself: summaries ----


def test_halves_interleave_for_norm_rope_only():
    assert in_the_order_of_keys(np.arange(6), oracle.NORM).tolist() == [0, 3, 1, 4, 2, 5]
    assert in_the_order_of_keys(np.arange(6), oracle.NEOX).tolist() == [0, 1, 2, 3, 4, 5]


def test_a_converted_norm_model_equals_the_neox_model_it_came_from():
    """The converter permutes the rows of Wq and Wk; nothing else may change."""
    case = with_method(chunk_case("convert", n_rows=200), window=80, n_recent=0)
    x = make_inputs(case)
    q, k = (in_the_order_of_keys(part, oracle.NORM) for part in (x.q, x.k))
    neox = attend_longheads(x.q, x.k, x.v, case.method, oracle.Rope(64, oracle.NEOX), case.scale)
    norm = attend_longheads(q, k, x.v, case.method, oracle.Rope(64, oracle.NORM), case.scale)
    np.testing.assert_allclose(norm, neox, atol=EXACT)


def test_a_minmax_score_bounds_every_dot_product():
    """Keys and query at their own positions, summaries in half precision."""
    case = with_method(chunk_case("bound", n_rows=64, n_head=2, n_head_kv=2), representation="minmax")
    layer = stored(case, make_inputs(case))
    q = rotated_queries(layer.q, case.method, layer.rope)
    scores = chunk_scores(q, run_chunks(case, make_inputs(case)).summaries, case.method, 2, case.scale)
    keys = layer.keys_at(np.arange(64)).reshape(4, 16, 2, 64)
    products = np.einsum("nhd,clhd->nhcl", q, keys).max(-1)
    assert (scores >= products - 1e-5 * abs(products).max()).all()


@pytest.mark.parametrize("name", ["options-recent0-packed-attention", "rope-yarn-grouped-minmax"])
def test_stored_segments_attend_like_the_definition(name):
    """Two ways to the same numbers: relative positions without storage, and segments over stored rows."""
    case = BY_NAME[name]
    layer = stored(case, make_inputs(case))
    want = attend_longheads(layer.q, layer.k, layer.v, case.method, layer.rope, case.scale)
    assert_same(layer.attend(layer.choose(layer.summarize())), want, 1e-5)


# ---- native against the oracle ----


def check(case: ChunkCase) -> None:
    x = make_inputs(case)
    layer, got = stored(case, x), run_chunks(case, x)
    assert_same_summaries(case, got.summaries, layer.summarize(), case.rounding)
    np.testing.assert_array_equal(got.chunks, layer.choose(got.summaries))
    assert_same(got.out, layer.attend(got.chunks), case.tolerance)


@thin(table=BY_NAME)
@pytest.mark.parametrize("name", BY_NAME)
def test_chunks_equal_the_oracle(name):
    check(BY_NAME[name])


@given(st.data())
@settings(max_examples=few(60), deadline=None, derandomize=True)
def test_chunks_equal_the_oracle_on_random_settings(data):
    draw = data.draw
    size, n_recent, n_free = 16 * draw(st.integers(1, 4)), draw(st.integers(0, 2)), draw(st.integers(0, 4))
    n_head_kv, dim = draw(st.integers(1, 2)), 8 * draw(st.integers(1, 16))
    method = LongHeads(
        size,
        size * (n_recent + 2 + n_free),
        n_recent=n_recent,
        select=draw(st.sampled_from(["head", "group"])),
        representation=draw(st.sampled_from(REPRESENTATIONS)),
        position=draw(st.sampled_from(POSITIONS)),
        group_size=draw(st.integers(1, 9)),
        n_neighbor=draw(st.integers(0, max(0, n_free - 1))),
    )
    check(chunk_case(
        "random",
        n_rows=draw(st.integers(1, 330)),
        head_dim_k=dim,
        head_dim_v=dim,
        n_head=n_head_kv * draw(st.integers(1, 3)),
        n_head_kv=n_head_kv,
        n_threads=draw(st.integers(1, 3)),
        n_ubatch=draw(st.integers(1, 130)),
        method=method,
        seed=draw(st.integers(0, 99)),
    ))  # fmt: skip


# ---- native: what must not matter ----

ORDER_CASES = {
    name: BY_NAME[name]
    for name in (
        "chunk16-rows257-attention",
        "chunk48-rows257-minmax",
        "options-recent0-packed-minmax",
        "options-recent0-grouped-attention",
        "heads8x2-group-attention",
        "k-q8_0-v-q8_0-packed-attention",
    )
}


@pytest.fixture(params=ORDER_CASES)
def case(request) -> ChunkCase:
    return ORDER_CASES[request.param]


def assert_same_run(case, got, want) -> None:
    np.testing.assert_array_equal(got.chunks, want.chunks)
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
def test_the_number_of_threads_does_not_matter(case, n_threads):
    x = make_inputs(case)
    want = run_chunks(replace(case, n_threads=1), x)
    assert_same_run(case, run_chunks(replace(case, n_threads=n_threads), x), want)


def test_the_order_of_the_pages_does_not_matter(case):
    x = make_inputs(case)
    a, b = (run_chunks(case, x, page_seed=seed) for seed in (1, 2))
    for field in ("chunks", "summaries", "out"):
        np.testing.assert_array_equal(getattr(a, field), getattr(b, field))


# ---- native: special choices ----


@thin
@pytest.mark.parametrize("representation", REPRESENTATIONS)
@pytest.mark.parametrize(
    "position",
    [{}, {"position": "grouped", "group_size": 1}, {"position": "exact"}],
    ids=["packed", "grouped-by-1", "exact"],
)
@pytest.mark.parametrize("rope", ["norm", "neox", "yarn"])
def test_a_window_that_holds_everything_equals_full(representation, position, rope):
    method = LongHeads(16, 272, representation=representation, **position)
    case = chunk_case("all", rope=ROPES[rope], method=method)
    full = OpCase("full", n_rows=case.n_rows, n_tokens=case.n_rows, sharpness=case.sharpness, rope=case.rope)
    x = make_inputs(full)
    assert_same(run_chunks(case, x).out, run_native(full, x)[0], 1e-5)


@pytest.mark.parametrize("representation", REPRESENTATIONS)
@pytest.mark.parametrize("size", [16, 48])
def test_equal_chunks_are_chosen_by_their_index(representation, size):
    case = chunk_case("ties", n_rows=12 * size, method=LongHeads(size, 6 * size, representation=representation))
    x = make_inputs(case)
    for part in (x.k, x.v, x.q):
        part[:] = part[np.arange(case.n_rows) % size]
    if representation != "attention":  # what stands elsewhere has another score
        x.q[:] = 0
    got = run_chunks(case, x)
    for own in range(6, 12):
        assert (got.chunks[own * size : (own + 1) * size] == [0, 1, 2, 3, own - 1, own]).all()


def test_heads_choose_for_themselves_or_with_their_group():
    case = chunk_case("heads", n_head=4, n_head_kv=2)
    x = make_inputs(case)
    for select, same in (("head", False), ("group", True)):
        chunks = run_chunks(with_method(case, select=select), x).chunks
        assert (chunks[:, [0, 2]] == chunks[:, [1, 3]]).all() == same
        assert (chunks[:, 0] != chunks[:, 2]).any()


@thin
@pytest.mark.parametrize("mass", [0.3, 0.7, 1.0])
@pytest.mark.parametrize("select", ["head", "group"])
@pytest.mark.parametrize(
    ("representation", "n_ubatch", "n_threads"), [("moments", 130, 1), ("outlier", 130, 2), ("outlier", 2, 3)]
)
def test_heads_read_until_they_have_their_mass(representation, n_ubatch, n_threads, select, mass):
    method = LongHeads(16, 160, select=select, representation=representation, mass=mass)
    settings = {"n_ubatch": n_ubatch, "n_threads": n_threads, "sharpness": 3.0, "method": method}
    case = chunk_case("mass", n_rows=515, n_head=6, n_head_kv=2, **settings)
    check(case)
    n_read = (run_chunks(case, make_inputs(case)).chunks[200:] >= 0).sum(-1)
    assert (n_read == 10).all() if mass == 1.0 else 2 < n_read.min() < n_read.max()


@pytest.mark.parametrize("name", ["k-q8_0-v-q8_0-packed-attention", "k-q4_0-v-q4_0-packed-minmax"])
def test_a_rounded_cache_chooses_almost_the_same(name):
    case = BY_NAME[name]
    x = make_inputs(case)
    summaries = replace(stored(case, x), type_k="f32", type_v="f32").summarize()
    exact = choices(x.q, summaries, case.method, case.n_head_kv, case.make_rope(), case.scale)
    assert (run_chunks(case, x).chunks == exact).mean() > 0.9


# ---- refusals ----


@pytest.mark.parametrize(("method", "reason"), [
    ("chunk_size=24,window=96", "chunk_size"),
    ("chunk_size=0,window=96", "chunk_size"),
    ("chunk_size=16,window=100", "window"),
    ("chunk_size=16,window=32", "window"),
    ("chunk_size=16,window=48,n_recent=2", "window"),
    ("chunk_size=16,window=96,n_recent=-1", "n_recent"),
    ("chunk_size=16,window=96,select=tail", "tail"),
    ("chunk_size=16,window=96,select_block=1", "select_block"),
    ("chunk_size=16,window=96,representation=mean", "mean"),
    ("chunk_size=16,window=96,position=true", "true"),
    ("chunk_size=16,window=96,n_neighbor=3", "n_neighbor"),
    ("chunk_size=16,window=96,group_size=4", "group_size"),
    ("chunk_size=16,window=96,position=grouped,group_size=0", "group_size"),
    ("chunk_size=16,window=96,chunks=4", "chunks"),
    ("chunk_size=many,window=96", "chunk_size"),
])  # fmt: skip
def test_bad_settings_are_refused_with_the_reason(method, reason):
    case = chunk_case("refused", n_rows=20)
    recent = "" if "n_recent" in method else ",n_recent=1"
    with pytest.raises(ValueError, match=reason):
        run_chunks(case, make_inputs(case), method=f"longheads,{method}{recent}")


def test_heads_of_two_sizes_have_no_attention_representation():
    case = chunk_case("sizes", n_rows=100, head_dim_v=32)
    x = make_inputs(case)
    with pytest.raises(ValueError, match="head_dim_v"):
        run_chunks(case, x)
    check(with_method(case, representation="minmax"))
