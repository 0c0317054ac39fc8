"""The oracle of methods that choose chunks, against the definitions and itself."""

from dataclasses import replace

import numpy as np
import oracle
import pytest
from cases import PAPER
from cases_chunks import CHUNK_CASES, POSITIONS, chunk_case, with_method
from hypothesis import given, settings
from hypothesis import strategies as st
from op import (
    make_inputs,
    run_chunks,
    stored,
)
from oracle_chunks import LongHeads, attend_longheads, choose, in_the_order_of_keys, missed
from oracle_filter import must_read
from oracle_index import in_bytes, index_block, index_keys, key_levels
from session import assert_same

BY_NAME = {case.name: case for case in CHUNK_CASES}
EXACT = 1e-9  # float64


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
                                  "rope-factors-selfextend-keys2"])  # fmt: skip
def test_stored_segments_attend_like_the_definition(name):
    """Two ways to the same numbers: relative positions without storage, and segments over stored rows."""
    case = BY_NAME[name]
    layer = stored(case, make_inputs(case))
    want, _ = attend_longheads(layer.q, layer.k, layer.v, case.in_context, layer.rope, case.scale)
    assert_same(layer.attend(layer.choose(layer.summarize())), want, 1e-5)
