"""Ops on rows of floats that replace ggml's (native/weights/rowwise.cpp) against numpy."""

import numpy as np
import op  # noqa: F401  # skips where the library runs no single ops
import pytest
from op_harness import call, ffi, lib


def run(a: np.ndarray, b: np.ndarray, alpha: float = 0.0, limit: float = 0.0) -> np.ndarray:
    """Return each row of a times its number in b, or with a limit the gate of gpt-oss."""
    out = np.empty_like(a)
    args = ffi.new("lctx_rowwise_args *")
    args.n_rows, args.n = a.shape
    args.n_threads, args.is_gate, args.alpha, args.limit = 3, limit > 0, alpha, limit
    args.a, args.b, args.out = (ffi.from_buffer("float[]", x) for x in (a, b, out))
    call(lib.lctx_rowwise_run, args)
    assert args.is_ours
    return out


@pytest.mark.parametrize(("n_rows", "n"), [(1, 2), (5, 63), (2, 65), (257, 16)])
def test_rows_times_numbers(n_rows, n):
    rng = np.random.default_rng(n)
    a, b = rng.standard_normal((n_rows, n), dtype=np.float32), rng.standard_normal((n_rows, 1), dtype=np.float32)
    a[0, -1] = np.inf
    np.testing.assert_array_equal(run(a, b), a * b)


@pytest.mark.parametrize(("n_rows", "n"), [(1, 1), (5, 63), (2, 65), (257, 16)])
def test_gate(n_rows, n):
    """The model card of gpt-oss: x is cut above, y on both sides. Values reach far beyond what exp can."""
    rng = np.random.default_rng(n)
    a = (10 ** rng.uniform(-2, 3, (n_rows, n)) * rng.choice([-1, 1], (n_rows, n))).astype(np.float32)
    b = (5 * rng.standard_normal((n_rows, n))).astype(np.float32)
    x, y = np.minimum(a, 7).astype(np.float64), np.clip(b, -7, 7)
    with np.errstate(over="ignore"):
        want = x / (1 + np.exp(-1.702 * x)) * (y + 1)
    # exponents are floats of up to 88: half of a last place is 4e-6
    np.testing.assert_allclose(run(a, b, 1.702, 7.0), want, rtol=6e-6, atol=1e-30)


def test_number_that_is_not_finite():
    a, b = np.ones((3, 33), np.float32), np.ones((3, 33), np.float32)
    a[1, 5] = b[2, 32] = np.nan
    out = run(a, b, 1.702, 7.0)
    assert np.isnan(out[1, 5])
    assert np.isnan(out[2, 32])
    assert np.isfinite(out).sum() == out.size - 2
