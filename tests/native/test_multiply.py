"""Products of quantized weights with columns (native/weights/multiply.cpp) against numpy."""

import numpy as np
import op  # noqa: F401  # skips where the library runs no single ops
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from op_harness import call, ffi, lib

# values that share a scale of a column, and where the scales of a block are (bytes from its start; f16, but of MXFP4)
TYPES = {"Q4_0": (32, [0]), "Q4_1": (32, [0, 2]), "Q5_0": (32, [0]), "Q5_1": (32, [0, 2]), "Q8_0": (32, [0])}
TYPES |= {"Q4_K": (256, [0, 2]), "Q5_K": (256, [0, 2]), "Q6_K": (256, [208]), "MXFP4": (32, [])}
POWERS = 117, 125  # of two, 127 more than they are: the scales of MXFP4
# blocks of a row, rows, columns, threads
SHAPES = {
    "one column": (18, 17, 1, 1),
    "two": (5, 63, 2, 3),
    "few": (1, 65, 5, 2),
    "up to panels": (7, 63, 12, 3),
    "a tile": (3, 16, 16, 1),
}
SHAPES |= {"odd": (2, 257, 33, 3)}
# blocks of a row, rows, tokens, experts, those of a token, columns of a token, threads
EXPERTS = {
    "one token": (9, 65, 1, 5, 2, 1, 2),
    "few tokens, own columns": (5, 63, 3, 4, 3, 3, 3),
    "tiles": (3, 257, 33, 4, 2, 2, 3),
    "tiles, one column for all": (5, 17, 65, 7, 3, 1, 2),
    "one expert for all": (2, 16, 9, 1, 1, 1, 1),
}


def weights(name: str, n_rows: int, k_dim: int, rng: np.random.Generator) -> np.ndarray:
    """Rows of random blocks: every bit pattern, with scales that are numbers."""
    n, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    blocks = rng.integers(0, 256, (n_rows * k_dim // n, size), dtype=np.uint8)
    for at in TYPES[name][1]:
        scale = rng.uniform(-0.1, 0.1, (len(blocks), 1)).astype(np.float16)
        blocks[:, at : at + 2] = scale.view(np.uint8)
    if name == "MXFP4":
        blocks[:, 0] = rng.integers(*POWERS, len(blocks))
    return blocks.reshape(n_rows, -1)


def as_bytes(x: np.ndarray, n: int) -> np.ndarray:
    """Columns as the product has them: n values as integers of up to 127 times a scale."""
    blocks = x.reshape(-1, n)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    return (np.round(blocks / np.where(scale == 0, 1, scale)) * scale).reshape(x.shape)


def multiply(name: str, weight: np.ndarray, x: np.ndarray, n_rows: int, n_threads: int, experts=(0, None), fixed=0):
    """Return the product and whether ours computed it; experts are how many there are and those of each column."""
    n_expert, ids = experts
    out = np.empty((len(x), n_rows) if ids is None else (*ids.shape, n_rows), np.float32)
    args = ffi.new("lctx_multiply_args *")
    args.type, args.k_dim, args.n_rows, args.n_columns = GGMLQuantizationType[name], x.shape[-1], n_rows, len(x)
    args.n_threads, args.fixed = n_threads, fixed
    args.weight, args.x = ffi.from_buffer(weight), ffi.from_buffer("float[]", x)
    args.out = ffi.from_buffer("float[]", out)
    if ids is not None:
        args.n_expert, args.n_used, args.n_own = n_expert, ids.shape[1], x.shape[1]
        args.ids = ffi.from_buffer("int32_t[]", ids)
    call(lib.lctx_multiply_run, args)
    return out, bool(args.is_ours)


def bound(dense: np.ndarray, ours: bool) -> float:
    """Ours sums the same integers as numpy; ggml's own rounds the columns a little differently."""
    return (3e-6 if ours else 3e-2) * np.abs(dense).sum(axis=-1).max()


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_product(name, shape):
    n_block, n_rows, n_columns, n_threads = SHAPES[shape]
    rng = np.random.default_rng(n_rows)
    k_dim = n_block * TYPES[name][0]
    weight = weights(name, n_rows, k_dim, rng)
    x = rng.standard_normal((n_columns, k_dim), dtype=np.float32)
    x[0, : TYPES[name][0]] = 0
    out, ours = multiply(name, weight, x, n_rows, n_threads)
    dense = dequantize(weight, GGMLQuantizationType[name]).astype(np.float64)
    expected = as_bytes(x, TYPES[name][0]).astype(np.float64) @ dense.T
    assert np.abs(out - expected).max() < bound(dense, ours)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("shape", EXPERTS)
def test_experts(name, shape):
    """Tokens choose differently, and some experts are not chosen at all."""
    n_block, n_rows, n_token, n_expert, n_used, n_own, n_threads = EXPERTS[shape]
    rng = np.random.default_rng(n_rows)
    k_dim = n_block * TYPES[name][0]
    weight = weights(name, n_expert * n_rows, k_dim, rng)
    x = rng.standard_normal((n_token, n_own, k_dim), dtype=np.float32)
    ids = np.array([rng.permutation(max(n_used, n_expert - 1))[:n_used] for _ in range(n_token)], np.int32)
    out, ours = multiply(name, weight, x, n_rows, n_threads, (n_expert, ids))
    dense = dequantize(weight, GGMLQuantizationType[name]).astype(np.float64).reshape(n_expert, n_rows, k_dim)
    columns = np.broadcast_to(as_bytes(x, TYPES[name][0]).astype(np.float64), (n_token, n_used, k_dim))
    expected = np.einsum("turk,tuk->tur", dense[ids], columns)
    assert np.abs(out - expected).max() < bound(dense, ours)


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


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0"])
@pytest.mark.parametrize("n_columns", [5, 17])
def test_number_that_is_not_finite(n_columns, name):
    """A column with NaN or infinity has no finite result; the others do not notice."""
    weight = weights(name, 33, 64, np.random.default_rng(1))
    x = np.ones((n_columns, 64), np.float32)
    x[3, 5], x[4, 40] = np.nan, np.inf
    out, ours = multiply(name, weight, x, 33, 2)
    if not ours:
        pytest.skip("this CPU multiplies as ggml does")
    assert not np.isfinite(out[3:5]).any()
    assert np.isfinite(np.delete(out, [3, 4], axis=0)).all()


def test_refusals():
    """Sizes that no weight has."""
    with pytest.raises(ValueError, match="block"):
        multiply("Q4_K", np.zeros((1, 144), np.uint8), np.ones((1, 100), np.float32), 1, 1)
