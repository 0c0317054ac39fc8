"""Random weights of all supported types, as the bytes of a GGUF file.

Each function takes a generator, the sizes of a tensor and the standard deviation of its values (for floats also per
row). Quantized blocks are drawn directly, all with the same scale.
"""

from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

try:
    import gguf as gguf  # re-exported for random_model
except ImportError as reason:
    raise ImportError("models with random weights need the gguf package: pip install gguf") from reason

Q4_0, Q4_1, Q4_K, Q5_K, Q6_K, Q8_0, MXFP4, F16, F32 = (
    gguf.GGMLQuantizationType[name] for name in ("Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "MXFP4", "F16", "F32")
)
Array = NDArray[Any]


def normal(rng: Generator, sizes: list[int]) -> Array:
    """Return numbers with deviation 1, f32 of the sizes."""
    return rng.standard_normal(sizes, dtype=np.float32)


def _f32(rng: Generator, sizes: list[int], std: Array | float) -> Array:
    return std * normal(rng, sizes)


def _f16(rng: Generator, sizes: list[int], std: Array | float) -> Array:
    return _f32(rng, sizes, std).astype(np.float16)


def _q8_0(rng: Generator, sizes: list[int], std: float) -> Array:
    """Return blocks of 32: scale, 32 signed bytes; uniform ones have a deviation of 73.9."""
    blocks = _blocks(rng, sizes, 32, 34)
    blocks[..., :2] = _f16_bytes(std / 73.9)
    return blocks.reshape(*sizes[:-1], -1)


def _q4_0(rng: Generator, sizes: list[int], std: float) -> Array:
    """Return blocks of 32: d, 4-bit q; d * (q - 8), whose deviation is 4.61 * d."""
    blocks = _blocks(rng, sizes, 32, 18)
    blocks[..., :2] = _f16_bytes(std / 4.61)
    return blocks.reshape(*sizes[:-1], -1)


def _q4_1(rng: Generator, sizes: list[int], std: float) -> Array:
    """Return blocks of 32: d, m, 4-bit q; d * q + m."""
    blocks = _blocks(rng, sizes, 32, 20)
    blocks[..., :4] = np.concatenate([_f16_bytes(std / 4.61), _f16_bytes(-7.5 * std / 4.61)])
    return blocks.reshape(*sizes[:-1], -1)


def _mxfp4(rng: Generator, sizes: list[int], std: float) -> Array:
    """Return blocks of 32: e, 4-bit q; 2^(e - 128) times a number of e2m1, doubled, whose deviation is 5.852.

    Scales are powers of two: two of them, mixed to give the deviation.
    """
    blocks = _blocks(rng, sizes, 32, 17)
    step = np.log2(std / 5.852)
    low = int(np.floor(step))
    share = (4 ** (step - low) - 1) / 3  # fraction of the larger scale, by variance
    blocks[..., 0] = 128 + low + (rng.random(blocks.shape[:-1]) < share)
    return blocks.reshape(*sizes[:-1], -1)


def _q4_k(rng: Generator, sizes: list[int], std: float) -> Array:
    """Return blocks of 256: d, dmin, eight 6-bit scales and minima (32 each), 4-bit q; d * 32 * q - dmin * 32."""
    return _with_minima(rng, sizes, 144, std / 4.61, 7.5)


def _q5_k(rng: Generator, sizes: list[int], std: float) -> Array:
    """Return blocks of 256: as those of Q4_K, with 5-bit q."""
    return _with_minima(rng, sizes, 176, std / 9.23, 15.5)


def _with_minima(rng: Generator, sizes: list[int], n_bytes: int, step: float, mean: float) -> Array:
    """Return blocks of 256 that begin with d, dmin and eight 6-bit scales and minima."""
    blocks = _blocks(rng, sizes, 256, n_bytes)
    blocks[..., :4] = np.concatenate([_f16_bytes(step / 32), _f16_bytes(mean * step / 32)])
    blocks[..., 4:16] = [0xA0] * 8 + [0] * 4  # 32: upper bits in the first 8 bytes, lower ones all 0
    return blocks.reshape(*sizes[:-1], -1)


def _q6_k(rng: Generator, sizes: list[int], std: float) -> Array:
    """Return blocks of 256: 6-bit q in 192 bytes, sixteen 8-bit scales (8 each), d; d * 8 * (q - 32)."""
    blocks = _blocks(rng, sizes, 256, 210)
    blocks[..., 192:208] = 8
    blocks[..., 208:] = _f16_bytes(std / (8 * 18.5))
    return blocks.reshape(*sizes[:-1], -1)


def _blocks(rng: Generator, sizes: list[int], n: int, n_bytes: int) -> Array:
    """Return random bytes for blocks of ``n`` values, uint8 [..., n_block, n_bytes]."""
    if sizes[-1] % n:
        raise ValueError(f"rows of {sizes[-1]} are not a multiple of a block, {n}: use weights f16")
    return rng.integers(0, 256, (*sizes[:-1], sizes[-1] // n, n_bytes), dtype=np.uint8)


def _f16_bytes(value: float) -> Array:
    return np.array([value], np.float16).view(np.uint8)


BLOCKS = {
    F32: _f32,
    F16: _f16,
    Q8_0: _q8_0,
    Q4_0: _q4_0,
    Q4_1: _q4_1,
    MXFP4: _mxfp4,
    Q4_K: _q4_k,
    Q5_K: _q5_k,
    Q6_K: _q6_k,
}
