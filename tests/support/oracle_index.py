"""The index of keys in numpy: keys in one or two bits a channel, and queries in bytes."""

import numpy as np
from oracle import hadamard

LEAST_BLOCK = 32  # channels that are transformed together
FEW, MANY = 3.0, 10.0  # levels of two bits; between them lies 6.5
BORDER = 0.9816  # of the deviation: where a normal distribution is cut (Max 1960)


def index_block(head_dim: int) -> int:
    """Return how many channels are transformed together: the largest power of two that divides the head, or none."""
    block = head_dim & -head_dim
    return block if block >= LEAST_BLOCK else 0


def level_scale(x: np.ndarray, level: np.ndarray) -> np.ndarray:
    """Return the scale of least error, x . level / level . level, ``[..., 1]``."""
    return (x * level).sum(-1, keepdims=True) / (level * level).sum(-1, keepdims=True)


def levels_beyond(x: np.ndarray, border: np.ndarray) -> np.ndarray:
    """Return -10, -3, 3 or 10: ten where the size is beyond the border."""
    return np.where(x < 0, -1, 1) * np.where(abs(x) > border, MANY, FEW)


def key_levels(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the levels of transformed keys and their scales; one bit: sign and mean magnitude."""
    if bits == 1:
        level = np.where(x < 0, -1.0, 1.0)
    else:
        level = levels_beyond(x, BORDER * np.sqrt((x * x).mean(-1, keepdims=True)))
        level = levels_beyond(x, (FEW + MANY) / 2 * level_scale(x, level))
    return level, level_scale(x, level)


def index_keys(keys: np.ndarray, bits: int) -> np.ndarray:
    """Return what the index keeps of stored keys ``[..., head_dim]``, transformed; scales are halves."""
    level, scale = key_levels(hadamard(keys, index_block(keys.shape[-1])), bits)
    return level * scale.astype(np.float16).astype(np.float64)


def in_bytes(q: np.ndarray) -> np.ndarray:
    """Return queries ``[..., head_dim]``, transformed, each rounded to multiples of a 127th of its largest channel."""
    x = hadamard(q, index_block(q.shape[-1]))
    step = abs(x).max(-1, keepdims=True) / 127
    return np.rint(x / np.where(step > 0, step, 1)) * step


def row_scores(q: np.ndarray, keys: np.ndarray, scale: float) -> np.ndarray:
    """Return scale q . k of rotated queries ``[n, n_head, dim]`` and rows ``[n_rows, n_head_kv, dim]``."""
    rows = keys.repeat(q.shape[1] // keys.shape[1], axis=1)
    return np.einsum("nhd,rhd->nhr", q, rows, optimize=True) * scale
