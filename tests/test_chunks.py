"""Methods that choose chunks, one layer at a time: the oracle against itself, ``lctx_layer_run`` against the oracle.

The native stages are held up one by one, so that a near tie cannot hide an error in the next stage: summaries against
the oracle, choices against those that the native summaries or the keys ask for, outputs against the native choices.
"""

from dataclasses import replace

import numpy as np
import oracle
import pytest
from cases import (
    CHUNK_CASES,
    EIGHT_BITS,
    HALF,
    PAPER,
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
from op import (
    assert_right_choices,
    assert_same_summaries,
    make_inputs,
    run_chunks,
    run_layer,
    run_native,
    stored,
)
from oracle_chunks import LongHeads, attend_longheads, choose, in_the_order_of_keys, missed, softmax
from oracle_filter import must_read
from oracle_index import in_bytes, index_block, index_keys, key_levels
from session import assert_same
from thinning import few, thin

BY_NAME = {case.name: case for case in CHUNK_CASES}
EXACT = 1e-9  # float64
COMPARED = REPRESENTATIONS[1:]  # with a base


# ---- the oracle itself: runs and far chunks ----


def all_methods(positions=(*POSITIONS, "packed")) -> st.SearchStrategy[LongHeads]:
    return st.builds(
        lambda size, free, r, pos, n_ctx: LongHeads(
            size, (free + r + 2) * size, n_recent=r, position=pos,
            n_ctx_train=n_ctx if pos == "string" else max(64, (free + r + 2) * size), n_ctx=n_ctx,
        ),
        st.sampled_from([16, 48]), st.integers(0, 3), st.integers(0, 3), st.sampled_from(positions),
        st.sampled_from([301, 700]),
    )  # fmt: skip


def some_choice(method: LongHeads, p: int, seed: int) -> list[int]:
    """Return the chunks that a query at ``p`` reads when scores are random."""
    free = method.free(p)
    scores = np.random.default_rng(seed).standard_normal(len(free))
    return np.flatnonzero(choose(scores, free, method.n_free)).tolist()


@given(all_methods(), st.integers(0, 300), st.integers(0, 9))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_segments_reach_the_distances_of_the_definition(method, p, seed):
    chunks = some_choice(method, p, seed)
    keys, distances = method.relative_positions(p, chunks)
    got, n_read = {}, 0
    for seg in method.segments(p, chunks):
        rows = np.arange(seg.row0, seg.row1)
        distance = seg.a - (rows if seg.near else method.storage(rows))
        got |= dict(zip(rows.tolist(), distance.tolist(), strict=True))
        n_read += len(rows)
    assert got == dict(zip(keys.tolist(), distances.tolist(), strict=True))
    assert (got[p], n_read) == (0, len(got))
    assert min(got.values()) >= 0
    if method.is_packed:
        assert max(got.values()) < method.window


@given(all_methods(), st.integers(0, 300), st.integers(0, 9))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_choice_holds_what_must_be_read_and_fills_the_window(method, p, seed):
    chunks, own = some_choice(method, p, seed), p // method.chunk_size
    whole = np.flatnonzero(must_read(method, p)).tolist()
    assert {0, own, *range(max(0, own - method.n_recent), own)} <= set(whole) <= set(chunks)
    assert len(chunks) == min(own + 1, len(whole) + method.n_free)
    assert len(chunks) <= method.n_read_max
    if method.position in ("full", "dca", "packed"):  # their angles end between chunks
        assert len(whole) == min(own + 1, method.n_recent + 2)


@given(all_methods(POSITIONS), st.integers(0, 300))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_chunks_that_fit_the_window_are_read_like_the_base(method, p):
    method = replace(method, window=48 * 700)
    got, want = method.relative_positions(p, some_choice(method, p, 0)), method.base.relative_positions(p)
    for part, wanted in zip(got, want, strict=True):
        np.testing.assert_array_equal(part, wanted)


def test_chunks_in_which_an_angle_ends_are_read_whole():
    """STRING with S = 100: the query at 259 sees rows up to 159 from the second angle, which end with chunk 9."""
    method = LongHeads(16, 96, n_recent=0, position="string", n_ctx_train=301, n_ctx=301)
    assert method.base.shift_offset == 100
    whole = lambda p: np.flatnonzero(must_read(method, p))  # noqa: E731
    assert whole(259).tolist() == [0, 16]
    assert whole(258).tolist() == [0, 9, 16]


def test_equal_scores_choose_the_lowest_indices():
    method = LongHeads(16, 6 * 16)
    assert np.flatnonzero(choose(np.zeros(21), method.free(320), method.n_free)).tolist() == [0, 1, 2, 3, 19, 20]


def test_a_choice_is_held_against_the_best():
    scores, free = np.array([0.0, 5, 1, 3, 2, 9, -np.inf, 0]), np.array([False] + 6 * [True] + [False])
    read = lambda *chunks: np.isin(np.arange(8), [0, *chunks, 7])  # noqa: E731
    assert choose(scores, free, 2).tolist() == read(1, 5).tolist()
    assert missed(scores, read(1, 5), free, 2) == 0
    assert missed(scores, read(3, 5), free, 2) == 2  # 5 was left for 3
    assert missed(scores, read(2, 3), free, 2) == 8
    for wrong in (read(5), read(1, 3, 5), read(1, 6), ~read(1, 5)):
        assert missed(scores, wrong, free, 2) == np.inf
    assert missed(scores, read(1, 2, 3, 4, 5, 6), free, 6) == 0  # nothing is left but a chunk without rows


# ---- the oracle itself: what is compared ----


def test_halves_interleave_for_norm_rope_only():
    assert in_the_order_of_keys(np.arange(6), oracle.NORM).tolist() == [0, 3, 1, 4, 2, 5]
    assert in_the_order_of_keys(np.arange(6), oracle.NEOX).tolist() == [0, 1, 2, 3, 4, 5]


def test_a_converted_norm_model_equals_the_neox_model_it_came_from():
    """The converter permutes the rows of Wq and Wk; nothing else may change."""
    case = with_method(chunk_case("convert", n_rows=200), window=80, n_recent=0, **PAPER)
    x = make_inputs(case)
    q, k = (in_the_order_of_keys(part, oracle.NORM) for part in (x.q, x.k))
    neox, _ = attend_longheads(x.q, x.k, x.v, case.method, oracle.Rope(64, oracle.NEOX), case.scale)
    norm, _ = attend_longheads(q, k, x.v, case.method, oracle.Rope(64, oracle.NORM), case.scale)
    np.testing.assert_allclose(norm, neox, atol=EXACT)


@pytest.mark.parametrize("position", ["full", "dca"])
def test_a_minmax_score_bounds_every_dot_product(position):
    """Keys and query as the base sees them, summaries in half precision."""
    case = with_method(chunk_case("bound", n_rows=128), representation="minmax", position=position)
    layer = stored(case, make_inputs(case))
    scores = layer.wants(run_chunks(case, make_inputs(case)).summaries)
    most = layer.products().reshape(128, 4, 8, 16).max(-1)
    seen = most > -np.inf
    assert (scores * case.scale >= most - 1e-5 * abs(most[seen]).max())[seen].all()


@pytest.mark.parametrize(("bits", "error"), [(1, 0.364), (2, 0.1175)])
def test_levels_are_those_of_least_error_for_a_normal_distribution(bits, error):
    """The errors of Max 1960, table I; a larger key has larger scales and the same levels."""
    x = np.random.default_rng(0).standard_normal((400, 128))
    level, scale = key_levels(x, bits)
    assert ((x - level * scale) ** 2).mean() == pytest.approx(error, rel=0.02)
    assert np.unique(level).tolist() == ([-1, 1] if bits == 1 else [-10, -3, 3, 10])
    for part, wanted in zip(key_levels(8 * x, bits), (level, 8 * scale), strict=True):
        np.testing.assert_allclose(part, wanted)


def test_products_with_the_index_are_those_with_keys():
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((50, 96)), rng.standard_normal((60, 96))
    exact, least = q @ k.T, {1: 0.75, 2: 0.92}
    for bits, share in least.items():
        assert np.corrcoef((in_bytes(q) @ index_keys(k, bits).T).ravel(), exact.ravel())[0, 1] > share
    assert [index_block(n) for n in (8, 24, 32, 40, 80, 96, 192, 512)] == [0, 0, 32, 0, 0, 32, 64, 512]


@pytest.mark.parametrize("name", ["chunk16-rows257-attention", "k-f32-v-f32-string-outlier", "base-recent0-dca-keys2",
                                  "rope-yarn-selfextend-keys2"])  # fmt: skip
def test_stored_segments_attend_like_the_definition(name):
    """Two ways to the same numbers: relative positions without storage, and segments over stored rows."""
    case = BY_NAME[name]
    layer = stored(case, make_inputs(case))
    want, _ = attend_longheads(layer.q, layer.k, layer.v, case.in_context, layer.rope, case.scale)
    assert_same(layer.attend(layer.choose(layer.summarize())), want, 1e-5)


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
    ("select_block=8", "select_block left in version 0.2.0; every query chooses for itself"),
    ("n_neighbor=3", "n_neighbor left in version 0.2.0; chunks of 16 tokens do without"),
    ("mass=0.9", "mass left in version 0.2.0; every query reads window tokens"),
    ("group_size=4", "group_size left in version 0.2.0; use position=selfextend"),
    ("position=exact", "position=exact left in version 0.2.0; use position=full"),
    ("position=grouped", "position=grouped left in version 0.2.0; use position=selfextend"),
    ("representation=moments", "representation=moments left in version 0.2.0; use representation=outlier"),
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
