"""The numpy reference: formula first, one function per equation, float64, no speed.

Two descriptions of a method live here and must agree: ``relative_positions`` says, straight from the papers, at which
distance query ``p`` sees key ``j``; ``segments`` says how the native code reaches that distance by rotating queries.
The model oracle uses the first, the op oracle the second, and ``test_ops.py`` holds them against each other.

Arrays are token-major: queries ``[n_tokens, n_head, head_dim]``, keys and values ``[n_rows, n_head_kv, head_dim]``.
"""

from dataclasses import dataclass, field

import gguf
import numpy as np

NORM, NEOX = 0, 2  # ggml's rope modes: adjacent pairs, or pairs n_dims/2 apart


# ---- RoPE ----


@dataclass(frozen=True)
class Rope:
    """RoPE as ggml parametrizes it; the names are those of ``ggml_rope_ext``."""

    n_dims: int
    mode: int = NORM
    freq_base: float = 10000.0
    freq_scale: float = 1.0
    ext_factor: float = 0.0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    n_ctx_orig: int = 4096
    freq_factors: np.ndarray | None = field(default=None, compare=False)


def yarn_dim(rope: Rope, n_rot: float) -> float:
    """Return the (fractional) pair that turns ``n_rot`` times within the original context."""
    return rope.n_dims * np.log(rope.n_ctx_orig / (n_rot * 2 * np.pi)) / (2 * np.log(rope.freq_base))


def yarn_ramp(rope: Rope) -> np.ndarray:
    """Return per pair how much of the unscaled angle YaRN keeps: 1 for fast pairs, 0 for slow ones."""
    low = max(0.0, np.floor(yarn_dim(rope, rope.beta_fast)))
    high = min(rope.n_dims - 1.0, np.ceil(yarn_dim(rope, rope.beta_slow)))
    ramp = (np.arange(rope.n_dims // 2) - low) / max(0.001, high - low)
    return 1 - np.clip(ramp, 0, 1)


def rope_angles(rope: Rope) -> np.ndarray:
    """Return the angle of one position step for each pair."""
    angles = rope.freq_base ** (-2.0 * np.arange(rope.n_dims // 2) / rope.n_dims)
    if rope.freq_factors is not None:
        angles = angles / rope.freq_factors
    mix = yarn_ramp(rope) * rope.ext_factor if rope.ext_factor else 0.0
    return rope.freq_scale * angles * (1 - mix) + angles * mix


def rope_magnitude(rope: Rope) -> float:
    """Return the factor on rotated channels; only YaRN has one besides ``attn_factor``."""
    return rope.attn_factor * (1 + 0.1 * np.log(1 / rope.freq_scale) if rope.ext_factor else 1.0)


def rope_pairs(rope: Rope) -> tuple[np.ndarray, np.ndarray]:
    """Return the channel indices of the first and second member of every pair."""
    first = np.arange(rope.n_dims // 2)
    if rope.mode == NEOX:
        return first, first + rope.n_dims // 2
    return 2 * first, 2 * first + 1


def rotate(x: np.ndarray, pos: np.ndarray | int, rope: Rope) -> np.ndarray:
    """Rotate ``x [..., head_dim]`` to positions ``pos`` (broadcast over the leading axes)."""
    angle = np.asarray(pos, dtype=np.float64)[..., None] * rope_angles(rope)
    cos, sin = rope_magnitude(rope) * np.cos(angle), rope_magnitude(rope) * np.sin(angle)
    a, b = rope_pairs(rope)
    out = np.broadcast_to(x, np.broadcast_shapes(x.shape, (*np.shape(pos), x.shape[-1]))).astype(np.float64)
    x_a, x_b = out[..., a], out[..., b]
    out[..., a], out[..., b] = x_a * cos - x_b * sin, x_a * sin + x_b * cos
    return out


# ---- storage types ----


def hadamard(x: np.ndarray, block: int) -> np.ndarray:
    """Multiply each ``block`` channels of ``x [..., head_dim]`` with Sylvester's matrix over its root; 0: nothing."""
    if not block:
        return x
    matrix = np.ones((1, 1))
    while len(matrix) < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (x.reshape(-1, block) @ matrix / np.sqrt(block)).reshape(x.shape)


def hadamard_blocks(type_k: str, head_dim_k: int, type_v: str, head_dim_v: int) -> tuple[int, int]:
    """Return the blocks of K and of V: the largest power of two that divides a head, for V at most 64."""
    types = ((type_k, head_dim_k), (type_v, head_dim_v))
    block_k, block_v = (n & -n if "q" in name else 0 for name, n in types)
    return block_k, min(64, block_v)


def round_trip(x: np.ndarray, type_name: str, block: int = 0) -> np.ndarray:
    """Return what is left of ``x`` after storing it, transformed, as a ggml type such as "f16" or "q8_0"."""
    qtype = gguf.GGMLQuantizationType[type_name.upper()]
    prepared = hadamard(x, block).astype(np.float32)
    stored = _quantize_iq4_nl(prepared) if type_name == "iq4_nl" else gguf.quantize(prepared, qtype)
    return hadamard(gguf.dequantize(stored, qtype).astype(np.float64), block)


def _quantize_iq4_nl(x: np.ndarray) -> np.ndarray:
    """Return rows of IQ4_NL, which gguf only reads: as ggml writes them, by comparison with every value."""
    values = np.array(gguf.quants.IQ4_NL.kvalues, np.float32)
    blocks = x.reshape(-1, 32)
    largest = np.take_along_axis(blocks, abs(blocks).argmax(1)[:, None], 1)
    inverse = np.divide(values[0], largest, out=np.zeros_like(largest), where=largest != 0)
    levels = abs((blocks * inverse)[..., None] - values).argmin(-1)
    chosen, weights = values[levels], blocks**2
    scales = (weights * chosen * blocks).sum(1) / np.maximum((weights * chosen**2).sum(1), np.finfo(np.float32).tiny)
    nibbles = (levels[:, :16] | levels[:, 16:] << 4).astype(np.uint8)
    packed = np.concatenate([scales.astype(np.float16)[:, None].view(np.uint8), nibbles], 1)
    return packed.reshape(*x.shape[:-1], -1)


# ---- attention ----


def attend(scores: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, float]:
    """Return softmax(scores) v and the log-sum-exp of the scores; no key at all gives 0 and -inf."""
    if len(scores) == 0:
        return np.zeros(v.shape[-1]), -np.inf
    top = scores.max()
    weights = np.exp(scores - top)
    return weights @ v / weights.sum(), top + np.log(weights.sum())


def cap(scores: np.ndarray, softcap: float) -> np.ndarray:
    """Squash scores into (-softcap, softcap); 0 leaves them as they are."""
    return softcap * np.tanh(scores / softcap) if softcap else scores


@dataclass(frozen=True)
class Segment:
    """Rows ``[row0, row1)`` seen from position ``a``; ``near`` reads the keys of the near ring."""

    row0: int
    row1: int
    a: int
    near: bool = False


def attend_segments(
    q: np.ndarray,
    segs: list[Segment],
    k: np.ndarray,
    k_near: np.ndarray | None,
    v: np.ndarray,
    rope: Rope,
    scale: float,
    softcap: float = 0.0,
) -> tuple[np.ndarray, float]:
    """Attend with one unrotated query head over stored (rotated, rounded) keys of its KV head.

    Parameters
    ----------
    q : array ``[head_dim_k]``
    k, k_near : arrays ``[n_rows, head_dim_k]``
        Keys as stored; ``k_near`` is indexed by row, the ring is the native code's business.
    v : array ``[n_rows, head_dim_v]``
    """
    segs = [s for s in segs if s.row1 > s.row0]
    scores = [(k_near if s.near else k)[s.row0 : s.row1] @ rotate(q, s.a, rope) for s in segs]
    values = [v[s.row0 : s.row1] for s in segs]
    return attend(cap(np.concatenate([[], *scores]) * scale, softcap), np.concatenate([v[:0], *values]))


# ---- methods ----


@dataclass(frozen=True)
class Full:
    """Every key at its true distance."""

    def text(self) -> str:
        return "full"

    def relative_positions(self, p: int) -> tuple[np.ndarray, np.ndarray]:
        keys = np.arange(p + 1)
        return keys, p - keys

    def segments(self, p: int) -> list[Segment]:
        return [Segment(0, p + 1, p)]

    def storage(self, j: np.ndarray) -> np.ndarray:
        return j


@dataclass(frozen=True)
class Window:
    """StreamingLLM: the sinks and the last keys, at their places in the cache and not in the text."""

    n_sink: int
    window: int

    def text(self) -> str:
        return f"window,n_sink={self.n_sink},window={self.window}"

    def relative_positions(self, p: int) -> tuple[np.ndarray, np.ndarray]:
        keys = np.arange(p + 1)
        keys = keys[(keys < self.n_sink) | (keys > p - self.window)]
        return keys, len(keys) - 1 - np.arange(len(keys))

    def segments(self, p: int) -> list[Segment]:
        n_sink = min(self.n_sink, p + 1)
        recent = max(self.n_sink, p - self.window + 1)
        a = min(p, self.n_sink + self.window - 1)
        return [Segment(0, n_sink, a), Segment(min(recent, p + 1), p + 1, p)]

    def storage(self, j: np.ndarray) -> np.ndarray:
        return j


@dataclass(frozen=True)
class SelfExtend:
    """SelfExtend (arXiv 2401.01325, algorithm 1): exact nearby, floor-divided positions far away."""

    group_size: int
    neighbor_window: int

    def text(self) -> str:
        return f"selfextend,group_size={self.group_size},neighbor_window={self.neighbor_window}"

    def relative_positions(self, p: int) -> tuple[np.ndarray, np.ndarray]:
        size, window = self.group_size, self.neighbor_window
        keys = np.arange(p + 1)
        grouped = p // size + window - window // size - keys // size
        return keys, np.where(p - keys < window, p - keys, grouped)

    def segments(self, p: int) -> list[Segment]:
        size, window = self.group_size, self.neighbor_window
        border = max(0, p - window + 1)
        return [Segment(0, border, p // size + window - window // size), Segment(border, p + 1, p, near=True)]

    def storage(self, j: np.ndarray) -> np.ndarray:
        return j // self.group_size

    def max_ctx(self, n_ctx_train: int) -> int:
        """Return the longest context these settings allow (eq. 4)."""
        return (n_ctx_train - self.neighbor_window) * self.group_size + self.neighbor_window


def self_extend_auto(n_ctx_train: int, n_ctx: int) -> SelfExtend:
    """Return the automatic choice: a quarter of the trained context, the smallest group that obeys eq. 5."""
    window, size = n_ctx_train // 4, 1
    while n_ctx > n_ctx_train and not n_ctx_train / 2 > window + (n_ctx - window) / size:
        size += 1
    return SelfExtend(size, window)


@dataclass(frozen=True)
class DualChunk:
    """ChunkLlama (arXiv 2402.17463): chunks of s keys at positions 0 .. s - 1, and three kinds of query positions.

    Its own chunk is seen from t = p mod s, the one before from s + t by the first w queries of a chunk, all else from
    c - 1, with the trained context c >= s + w.
    """

    chunk_size: int
    local_window: int
    n_ctx_train: int = 64

    def text(self) -> str:
        return f"dca,chunk_size={self.chunk_size},local_window={self.local_window}"

    def relative_positions(self, p: int) -> tuple[np.ndarray, np.ndarray]:
        s, w, last = self.chunk_size, self.local_window, self.n_ctx_train - 1
        successive = [*range(s, s + w), *[last] * (s - w)]
        keys = np.arange(p + 1)
        chunks_between = p // s - keys // s
        seen_from = np.select([chunks_between == 0, chunks_between == 1], [p % s, successive[p % s]], last)
        return keys, seen_from - keys % s

    def segments(self, p: int) -> list[Segment]:
        own = p - p % self.chunk_size
        before = max(0, own - self.chunk_size)
        near = self.chunk_size + p % self.chunk_size
        a = near if p - own < self.local_window else self.n_ctx_train - 1
        return [Segment(own, p + 1, p - own), Segment(before, own, a), Segment(0, before, self.n_ctx_train - 1)]

    def storage(self, j: np.ndarray) -> np.ndarray:
        return j % self.chunk_size


def dual_chunk_auto(n_ctx_train: int, align: int = 1) -> DualChunk:
    """Return the automatic choice: chunks of three quarters of the trained context, the rest is the local window.

    Below a selection a chunk of ours holds whole chunks of ``align`` rows.
    """
    size = max(align, (n_ctx_train - n_ctx_train // 4) // align * align)
    return DualChunk(size, min(size, n_ctx_train - size), n_ctx_train)


@dataclass(frozen=True)
class ShiftedRotary:
    """STRING (arXiv 2410.18745, equation 4): distances D >= S become D - S + W."""

    shift_offset: int
    local_window: int

    def text(self) -> str:
        return f"string,shift_offset={self.shift_offset},local_window={self.local_window}"

    def relative_positions(self, p: int) -> tuple[np.ndarray, np.ndarray]:
        keys = np.arange(p + 1)
        exact = p - keys
        return keys, np.where(exact >= self.shift_offset, exact - self.shift_offset + self.local_window, exact)

    def segments(self, p: int) -> list[Segment]:
        border = max(0, p - self.shift_offset + 1)
        return [Segment(border, p + 1, p), Segment(0, border, p - self.shift_offset + self.local_window)]

    def storage(self, j: np.ndarray) -> np.ndarray:
        return j

    def max_ctx(self, n_ctx_train: int) -> int:
        """Return the longest context whose largest distance is one that the model was trained on."""
        return n_ctx_train + self.shift_offset - self.local_window


def shifted_auto(n_ctx_train: int, n_ctx: int) -> ShiftedRotary:
    """Return the automatic choice: a third of the trained context, or the least whose ``max_ctx`` is ``n_ctx``."""
    window = min(128, n_ctx_train // 16)
    shift = n_ctx_train // 3
    while ShiftedRotary(shift, window).max_ctx(n_ctx_train) < n_ctx:
        shift += 1
    return ShiftedRotary(shift, window)


Method = Full | Window | SelfExtend | DualChunk | ShiftedRotary


def attend_method(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, p: int, method: Method, rope: Rope, scale: float
) -> np.ndarray:
    """Attend with the query at ``p``, each pair at its own distance, by the definition of the method.

    Parameters
    ----------
    q : array ``[n_head, head_dim_k]``, not rotated
    k, v : arrays ``[n_rows, n_head_kv, head_dim]``, not rotated

    Returns
    -------
    array ``[n_head, head_dim_v]``
    """
    keys, distance = method.relative_positions(p)
    heads_kv = np.arange(len(q)) // (len(q) // k.shape[1])
    seen = rotate(q[:, None, :], distance, rope)
    scores = np.einsum("hnd,nhd->hn", seen, rotate(k[keys], 0, rope)[:, heads_kv]) * scale
    return np.stack([attend(s, v[keys, h])[0] for s, h in zip(scores, heads_kv, strict=True)])
