"""Single ops whose sums have one order (native/ops/fixed.h): a column's bits do not depend on the others."""

from dataclasses import replace

import numpy as np
import op  # noqa: F401  # skips where the library runs no single ops
import pytest
from cases import OP_CASES, OpCase
from cases_chunks import CHUNK_CASES
from gguf import GGMLQuantizationType, dequantize, quantize
from op import Inputs, make_inputs, run_chunks, run_native, run_oracle
from oracle import DualChunk, SelfExtend
from test_multiply import TYPES, bound, multiply, weights
from test_ops import assert_close
from thinning import thin

PLAIN = ("F32", "F16", "BF16")
COLUMNS = (1, 2, 3, 4, 5, 8, 9, 12, 13, 16, 17, 33)
BY_NAME = {case.name: replace(case, lse=True) for case in OP_CASES}
LONG = [
    OpCase("pieces", n_rows=1100, n_tokens=33, n_head=6, type_k="f16", type_v="f16"),
    OpCase("pieces-q8_0", n_rows=1100, n_tokens=17, n_head=14, type_k="q8_0", type_v="q8_0"),
    OpCase("pieces-one-head", n_rows=1500, n_tokens=70, n_head=8, n_head_kv=1, type_k="f16", type_v="q4_0"),
    OpCase("pieces-dca", n_rows=1300, n_tokens=9, type_k="f16", type_v="f16", method=DualChunk(600, 200)),
    OpCase("pieces-selfextend", n_rows=1200, n_tokens=19, near_rows=704, method=SelfExtend(4, 640)),
    OpCase("pieces-segments", n_rows=1700, n_tokens=40, n_head=2, random_segments=3, seed=3, type_k="q8_0"),
]
CHUNKS = {case.name: case for case in CHUNK_CASES if case.method.tile == 1}  # a ubatch decides which tiles are whole
CASES = BY_NAME | {case.name: case for case in LONG}


def rows_of(name: str, n_rows: int, k_dim: int) -> np.ndarray:
    rng = np.random.default_rng(n_rows)
    if name in TYPES:
        return weights(name, n_rows, k_dim, rng)
    return quantize(rng.standard_normal((n_rows, k_dim), dtype=np.float32), GGMLQuantizationType[name]).view(np.uint8)


@pytest.mark.parametrize("name", [*TYPES, *PLAIN])
def test_a_product_has_the_same_bits_among_any_number_of_columns(name):
    n_rows, k_dim = 65, 256 * 5
    weight = rows_of(name, n_rows, k_dim)
    x = np.random.default_rng(1).standard_normal((max(COLUMNS), k_dim), dtype=np.float32)
    whole, ours = multiply(name, weight, x, n_rows, 2, fixed=1)
    assert ours
    for n in COLUMNS:
        for n_threads in (1, 3, 8):
            np.testing.assert_array_equal(multiply(name, weight, x[-n:], n_rows, n_threads, fixed=1)[0], whole[-n:])
    dense = dequantize(weight, GGMLQuantizationType[name]).astype(np.float64)
    assert np.abs(whole - x @ dense.T).max() < bound(dense, ours=False)


@pytest.mark.parametrize("name", [*TYPES, "F16"])
@pytest.mark.parametrize("n_own", [1, 3])
def test_a_product_with_experts_has_the_same_bits_among_any_number_of_columns(name, n_own):
    n_rows, k_dim, n_expert, n_used, n_token = 33, 512, 5, 3, 40
    rng = np.random.default_rng(2)
    weight = rows_of(name, n_expert * n_rows, k_dim)
    x = rng.standard_normal((n_token, n_own, k_dim), dtype=np.float32)
    ids = np.array([rng.permutation(n_expert)[:n_used] for _ in range(n_token)], np.int32)
    whole, _ = multiply(name, weight, x, n_rows, 2, (n_expert, ids), fixed=1)
    for n in (1, 2, 3, 7, 16):
        some, _ = multiply(name, weight, x[:n].copy(), n_rows, 3, (n_expert, ids[:n].copy()), fixed=1)
        np.testing.assert_array_equal(some, whole[:n])


def part(case: OpCase, x: Inputs, first: int, end: int) -> tuple[OpCase, Inputs]:
    """Return what some of the tokens of a case read."""
    some = [np.ascontiguousarray(array[first:end]) for array in (x.q, x.seg_rows, x.seg_pos)]
    return replace(case, n_tokens=end - first), replace(x, q=some[0], seg_rows=some[1], seg_pos=some[2])


@thin(table=CHUNKS)
@pytest.mark.parametrize("name", CHUNKS)
def test_chosen_chunks_and_what_is_read_of_them_do_not_depend_on_batches(name):
    case = CHUNKS[name]
    x = make_inputs(case)
    want = run_chunks(replace(case, n_ubatch=64), x, fixed=1)
    for n_ubatch, n_threads in ((1, 1), (3, 2), (17, 3)):
        got = run_chunks(replace(case, n_ubatch=n_ubatch), x, fixed=1, n_threads=n_threads)
        np.testing.assert_array_equal(got.chunks, want.chunks)
        np.testing.assert_array_equal(got.out, want.out)


@thin(table=CASES)
@pytest.mark.parametrize("name", CASES)
def test_attention_has_the_same_bits_among_any_tokens(name):
    case = CASES[name]
    x = make_inputs(case)
    whole, whole_lse = run_native(case, x, fixed=1)
    n = case.n_tokens
    for first, end in {(0, n), (0, 1), (n - 1, n), (n // 3, n // 3 + 1), (n // 2, n), (n // 4, n // 4 + n // 2)}:
        for n_threads in (1, 2, 8):
            if first < end:
                out, lse = run_native(*part(case, x, first, end), fixed=1, n_threads=n_threads)
                np.testing.assert_array_equal(out, whole[first:end])
                np.testing.assert_array_equal(lse, whole_lse[first:end])
    want, want_lse = run_oracle(case, x)
    assert_close(whole, want, case.rounding)
    assert_close(whole_lse, want_lse, case.rounding)
