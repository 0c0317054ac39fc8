"""Products of quantized weights with columns (native/cpu/multiply.cpp) against numpy."""

import numpy as np
import op  # noqa: F401  # skips where the library runs no single ops
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from op_harness import call, ffi, lib

# values that share a scale of a column, and where the scales of a block are (f16, bytes from its start)
TYPES = {"Q4_0": (32, [0]), "Q4_1": (32, [0, 2]), "Q5_0": (32, [0]), "Q5_1": (32, [0, 2]), "Q8_0": (32, [0])}
TYPES |= {"Q4_K": (256, [0, 2]), "Q5_K": (256, [0, 2]), "Q6_K": (256, [208])}
# blocks of a row, rows, columns, threads
SHAPES = {
    "one column": (18, 17, 1, 1),
    "two": (5, 63, 2, 3),
    "few": (1, 65, 5, 2),
    "up to panels": (7, 63, 12, 3),
    "a tile": (3, 16, 16, 1),
}
SHAPES |= {"odd": (2, 257, 33, 3)}


def weights(name: str, n_rows: int, k_dim: int, rng: np.random.Generator) -> np.ndarray:
    """Rows of random blocks: every bit pattern, with scales that are numbers."""
    n, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    blocks = rng.integers(0, 256, (n_rows * k_dim // n, size), dtype=np.uint8)
    for at in TYPES[name][1]:
        scale = rng.uniform(-0.1, 0.1, (len(blocks), 1)).astype(np.float16)
        blocks[:, at : at + 2] = scale.view(np.uint8)
    return blocks.reshape(n_rows, -1)


def as_bytes(x: np.ndarray, n: int) -> np.ndarray:
    """Columns as the product has them: n values as integers of up to 127 times a scale."""
    blocks = x.reshape(-1, n)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    return (np.round(blocks / np.where(scale == 0, 1, scale)) * scale).reshape(x.shape)


def multiply(name: str, weight: np.ndarray, x: np.ndarray, n_rows: int, n_threads: int):
    """Return the product and whether ours computed it."""
    out = np.empty((len(x), n_rows), np.float32)
    args = ffi.new("lctx_multiply_args *")
    args.type, args.k_dim, args.n_rows, args.n_columns = GGMLQuantizationType[name], x.shape[1], n_rows, len(x)
    args.n_threads = n_threads
    args.weight, args.x = ffi.from_buffer(weight), ffi.from_buffer("float[]", x)
    args.out = ffi.from_buffer("float[]", out)
    call(lib.lctx_multiply_run, args)
    return out, bool(args.is_ours)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_product(name, shape):
    """Ours sums the same integers as numpy; ggml's own rounds the columns a little differently."""
    n_block, n_rows, n_columns, n_threads = SHAPES[shape]
    rng = np.random.default_rng(n_rows)
    k_dim = n_block * TYPES[name][0]
    weight = weights(name, n_rows, k_dim, rng)
    x = rng.standard_normal((n_columns, k_dim), dtype=np.float32)
    x[0, : TYPES[name][0]] = 0
    out, ours = multiply(name, weight, x, n_rows, n_threads)
    dense = dequantize(weight, GGMLQuantizationType[name]).astype(np.float64)
    expected = as_bytes(x, TYPES[name][0]).astype(np.float64) @ dense.T
    spread = np.abs(dense).sum(axis=1).max()
    assert np.abs(out - expected).max() < (3e-6 if ours else 3e-2) * spread


def test_a_column_of_q8_0_does_not_depend_on_the_others():
    """Tokens that are evaluated one by one, drafted or in a prompt have the same bits."""
    rng = np.random.default_rng(2)
    weight, x = weights("Q8_0", 63, 7 * 32, rng), rng.standard_normal((33, 7 * 32), dtype=np.float32)
    whole, ours = multiply("Q8_0", weight, x, 63, 2)
    if not ours:
        pytest.skip("this CPU multiplies as ggml does")
    for n in (1, 2, 3, 4, 5, 9, 17):
        out, also_ours = multiply("Q8_0", weight, x[:n], 63, 1)
        assert also_ours
        np.testing.assert_array_equal(out, whole[:n])


@pytest.mark.parametrize("n_columns", [5, 17])
def test_number_that_is_not_finite(n_columns):
    """A column with NaN or infinity has no finite result; the others do not notice."""
    weight = weights("Q4_1", 33, 64, np.random.default_rng(1))
    x = np.ones((n_columns, 64), np.float32)
    x[3, 5], x[4, 40] = np.nan, np.inf
    out, ours = multiply("Q4_1", weight, x, 33, 2)
    if not ours:
        pytest.skip("this CPU multiplies as ggml does")
    assert not np.isfinite(out[3:5]).any()
    assert np.isfinite(np.delete(out, [3, 4], axis=0)).all()


def test_refusals():
    """Sizes that no weight has."""
    with pytest.raises(ValueError, match="block"):
        multiply("Q4_K", np.zeros((1, 144), np.uint8), np.ones((1, 100), np.float32), 1, 1)
