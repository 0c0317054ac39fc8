"""The native store and attend ops against the oracle, over the table of cases; and the oracle against itself."""

from dataclasses import replace

import numpy as np
import oracle
import pytest
from cases import METHODS, OP_CASES, ROPES, TOLERANCE, OpCase
from hypothesis import given, settings
from hypothesis import strategies as st
from op import POISON, make_inputs, run_native, run_oracle
from thinning import few, thin

BY_NAME = {case.name: case for case in OP_CASES}


def assert_close(got: np.ndarray, want: np.ndarray, tolerance: float) -> None:
    """Compare with ``tolerance`` times the largest finite value wanted (at least times one)."""
    assert not (got == POISON).any(), "an element was not written"
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite])
    if finite.any():
        np.testing.assert_allclose(got[finite], want[finite], rtol=0, atol=tolerance * max(1, abs(want[finite]).max()))


def check(case: OpCase) -> None:
    x = make_inputs(case)
    out, lse = run_native(case, x)
    want_out, want_lse = run_oracle(case, x)
    assert_close(out, want_out, case.tolerance)
    if lse is not None:
        assert_close(lse, want_lse, case.tolerance)


# ---- the oracle itself ----


@given(
    st.sampled_from(
        [
            *METHODS.values(),
            oracle.SelfExtend(1, 5),
            oracle.SelfExtend(3, 1),
            oracle.Window(9, 2),
            oracle.DualChunk(19, 19),
            oracle.DualChunk(63, 1),
        ]
    ),
    st.integers(0, 400),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_segments_reach_the_distances_of_the_definition(method, p):
    want = dict(zip(*(a.tolist() for a in method.relative_positions(p)), strict=True))
    got = {}
    for seg in method.segments(p):
        rows = np.arange(seg.row0, seg.row1)
        stored = rows if seg.near else method.storage(rows)
        for j, distance in zip(rows.tolist(), (seg.a - stored).tolist(), strict=True):
            assert j not in got, "a key is read twice"
            got[j] = distance
    assert got == want


@pytest.mark.parametrize("name", ROPES)
def test_a_rotated_score_depends_on_the_distance_only(name):
    case = BY_NAME[f"rope-{name}"]
    q, k = np.random.default_rng(0).standard_normal((2, case.head_dim_k))
    rope = case.make_rope()
    scores = [oracle.rotate(q, j + 5, rope) @ oracle.rotate(k, j, rope) for j in (0, 3, 1000)]
    np.testing.assert_allclose(scores, scores[0], atol=1e-9)
    assert abs(scores[0] - oracle.rotate(q, 6, rope) @ oracle.rotate(k, 0, rope)) > 1e-3


def test_selfextend_keeps_distances_within_training():
    method = oracle.SelfExtend(4, 16)
    far = method.max_ctx(64) - 1
    assert method.relative_positions(far)[1].max() < 64
    assert (method.relative_positions(far)[1] >= 0).all()


@pytest.mark.parametrize("method", [oracle.DualChunk(48, 16), oracle.DualChunk(29, 11), oracle.DualChunk(1, 1)])
def test_dual_chunks_keep_distances_within_training_and_the_local_window_exact(method):
    for p in range(300):
        keys, distance = method.relative_positions(p)
        assert distance.min() == 0
        assert distance.max() < method.n_ctx_train
        near = p - keys <= method.local_window
        np.testing.assert_array_equal(distance[near], (p - keys)[near])


def test_dual_chunks_are_those_of_the_papers_example():
    """Trained on 10 tokens, chunks of 6, a local window of 4; the third row has all three kinds."""
    method = oracle.DualChunk(6, 4, 10)
    rows = [method.relative_positions(p)[1].tolist() for p in (9, 10, 14)]
    assert rows[0] == [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]
    assert rows[1] == [9, 8, 7, 6, 5, 4, 4, 3, 2, 1, 0]
    assert rows[2] == [9, 8, 7, 6, 5, 4, 8, 7, 6, 5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize(("n_ctx", "want"), [(64, (1, 16)), (65, (4, 16)), (128, (8, 16)), (256, (16, 16))])
def test_automatic_selfextend_is_the_smallest_group_of_equation_5(n_ctx, want):
    auto = oracle.self_extend_auto(64, n_ctx)
    assert (auto.group_size, auto.neighbor_window) == want


# ---- native against the oracle ----


@thin(table=BY_NAME, strength=2)
@pytest.mark.parametrize("name", BY_NAME)
def test_op_equals_the_oracle(name):
    check(BY_NAME[name])


@given(st.data())
@settings(max_examples=few(60), deadline=None, derandomize=True)
def test_op_equals_the_oracle_on_random_shapes(data):
    n_head_kv = data.draw(st.integers(1, 3))
    types = st.sampled_from(list(TOLERANCE))
    type_k, type_v = data.draw(types), data.draw(types)
    step_k, step_v = (32 if "q" in name else 8 for name in (type_k, type_v))
    case = OpCase(
        "random",
        n_rows=data.draw(st.integers(1, 300)),
        n_tokens=data.draw(st.integers(1, 40)),
        head_dim_k=step_k * data.draw(st.integers(1, 128 // step_k)),
        head_dim_v=step_v * data.draw(st.integers(1, 128 // step_v)),
        n_head=n_head_kv * data.draw(st.integers(1, 5)),
        n_head_kv=n_head_kv,
        type_k=type_k,
        type_v=type_v,
        n_threads=data.draw(st.integers(1, 3)),
        random_segments=data.draw(st.integers(1, 6)),
        seed=data.draw(st.integers(0, 99)),
        rope={"mode": data.draw(st.sampled_from([oracle.NORM, oracle.NEOX]))},
    )
    check(case)


def test_a_query_without_keys_gives_zero_and_minus_infinity():
    case = OpCase("empty", n_rows=65, n_tokens=3, random_segments=2)
    x = make_inputs(case)
    x.seg_rows[:] = [[[0, 0], [64, 64]], [[10, 20], [65, 65]], [[5, 5], [5, 5]]]
    out, lse = run_native(case, x)
    assert (out[[0, 2]] == 0).all()
    assert np.isneginf(lse[[0, 2]]).all()
    assert np.isfinite(lse[1]).all()
    assert (out[1] != 0).any()


def test_a_ring_keeps_the_last_rows():
    """300 rows through a ring of 64: the near segment reads rows 236..299 at their own positions."""
    case = OpCase("ring", n_rows=300, n_tokens=1, near_rows=64, method=oracle.SelfExtend(4, 64))
    check(case)


@pytest.mark.parametrize("name", ["rows257-tokens7", "selfextend-rows257-tokens7", "k-q8_0-v-q8_0-dim64-tokens7"])
def test_the_order_of_pages_does_not_matter(name):
    case = BY_NAME[name]
    x = make_inputs(case)
    first, second = (run_native(case, x, page_seed=seed)[0] for seed in (1, 2))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("name", ["rows257-tokens1", "rows257-tokens64", "selfextend-rows321-tokens65"])
def test_the_number_of_threads_does_not_matter(name):
    case = BY_NAME[name]
    x = make_inputs(case)
    want = run_native(replace(case, n_threads=1), x)[0]
    for n_threads in (2, 3, 8):
        assert_close(run_native(replace(case, n_threads=n_threads), x)[0], want, 1e-5)


def test_repeating_the_attention_does_not_change_it():
    case = BY_NAME["rows65-tokens7"]
    x = make_inputs(case)
    np.testing.assert_array_equal(*(run_native(case, x, n_repeat=n)[0] for n in (1, 3)))


# ---- bad arguments ----

BAD = {
    "head_dim_k": {"head_dim_k": 0},
    "head_dim_v": {"head_dim_v": -8},
    "n_head": {"n_head": 0},
    "n_head_kv": {"n_head_kv": 3},
    "n_rows": {"n_rows": -1},
    "n_tokens": {"n_tokens": 0},
    "n_seg": {"n_seg": 0},
    "n_threads": {"n_threads": 0},
    "near_rows": {"near_rows": 63},
    "type_k": {"type_k": 9999},
    "type_v": {"type_v": -1},
    "rope_dims": {"rope_dims": 65},
    "rope_dims too many": {"rope_dims": 128},
    "rope_mode": {"rope_mode": 77},
}


@pytest.mark.parametrize("field", BAD)
def test_bad_arguments_are_refused_with_a_reason(field):
    case = BY_NAME["rows65-tokens7"]
    with pytest.raises(ValueError, match=r"\w"):
        run_native(case, make_inputs(case), **BAD[field])


@pytest.mark.parametrize("array", ["k", "v", "k_pos", "q", "seg_rows", "seg_pos", "out"])
def test_missing_arrays_are_refused_with_a_reason(array):
    case = BY_NAME["rows65-tokens7"]
    with pytest.raises(ValueError, match=r"\w"):
        run_native(case, make_inputs(case), **{array: None})


@pytest.mark.parametrize("rows", [(-1, 3), (0, 66), (5, 4)])
def test_segments_outside_the_rows_are_refused_with_a_reason(rows):
    case = BY_NAME["rows65-tokens7"]
    x = make_inputs(case)
    x.seg_rows[2, 0] = rows
    with pytest.raises(ValueError, match=r"\w"):
        run_native(case, x)


@pytest.mark.parametrize(("head_dim", "blocks"), [(32, (32, 32)), (96, (32, 32)), (256, (256, 64)), (160, (32, 32))])
def test_rows_are_transformed_as_a_context_stores_them(head_dim, blocks):
    case = OpCase("stored", head_dim_k=head_dim, head_dim_v=head_dim, type_k="q4_0", type_v="q5_1")
    x = make_inputs(case)
    got = run_native(case, x, hadamard_k=-1, hadamard_v=-1)[0]
    assert blocks == oracle.hadamard_blocks("q4_0", head_dim, "q5_1", head_dim)
    want, other = (run_native(replace(case, hadamard_k=k, hadamard_v=v), x)[0] for k, v in (blocks, (0, 0)))
    np.testing.assert_array_equal(got, want)
    assert abs(got - other).max() > 0
    floats = replace(case, type_k="f16", type_v="bf16")
    np.testing.assert_array_equal(*(run_native(floats, x, hadamard_k=n, hadamard_v=n)[0] for n in (-1, 0)))


@pytest.mark.parametrize("block", [{"hadamard_k": 16}, {"hadamard_v": 96}, {"hadamard_k": 128}, {"hadamard_v": 65}])
def test_blocks_that_do_not_fit_the_head_are_refused(block):
    case = OpCase("blocks", head_dim_k=192, head_dim_v=96, type_k="q8_0", type_v="q8_0")
    with pytest.raises(ValueError, match=f"{next(iter(block))} must be 32, 64, ... and divide head_dim"):
        run_native(case, make_inputs(case), **block)


def test_q8_0_needs_whole_blocks():
    case = replace(BY_NAME["dim40x8"], type_k="q8_0")
    with pytest.raises(ValueError, match=r"\w"):
        run_native(case, make_inputs(case))
