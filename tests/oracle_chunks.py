"""LongHeads (arXiv 2402.10685) in numpy: every head reads a few chunks that it picks itself.

Chunk ``i`` is rows ``[i*l, (i+1)*l)``; ``own`` is the chunk of the query. As in ``oracle.py`` two descriptions of the
positions stand side by side, ``relative_positions`` and ``segments``, and ``test_chunks.py`` holds them together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from oracle import (
    NORM,
    Rope,
    Segment,
    attend,
    attend_segments,
    cap,
    rope_angles,
    rope_magnitude,
    rope_pairs,
    rotate,
    round_trip,
)

UNUSED = -1  # fills the slots of a query that reads fewer chunks than the others


@dataclass(frozen=True)
class LongHeads:
    """The settings; ``ablation`` is what ``LCTX_TEST_ABLATION`` holds ("no_first" and "last" are known here)."""

    chunk_size: int = 16
    window: int = 64
    n_recent: int = 1
    select: str = "head"
    representation: str = "attention"
    position: str = "packed"
    group_size: int = 8
    n_neighbor: int = 0
    mass: float = 0.0
    trained: int = 2**30  # context of the model: ``exact`` positions end there, and scores of longer texts know none
    ablation: str = ""

    def text(self) -> str:
        names = ["chunk_size", "window", "n_recent", "select", "representation", "position"]
        names += ["group_size"] * (self.position == "grouped") + ["n_neighbor", "mass"][: 1 + (self.mass > 0)]
        return ",".join(["longheads", *(f"{name}={getattr(self, name)}" for name in names)])

    @property
    def n_chunk(self) -> int:
        """Return k, the number of chunks that a query reads at most."""
        return self.window // self.chunk_size

    @property
    def n_near(self) -> int:
        """Return how many chunks back ``grouped`` shows at their own distance."""
        return self.n_recent + 1

    def is_packed(self, p: int) -> bool:
        in_reach = p // self.chunk_size < self.trained // self.chunk_size
        return self.position == "packed" or (self.position == "exact" and not in_reach)

    def rows(self, p: int, chunk: int) -> tuple[int, int]:
        """Return the rows [row0, row1) of ``chunk`` that are not later than ``p``."""
        return chunk * self.chunk_size, min((chunk + 1) * self.chunk_size, p + 1)

    def relative_positions(self, p: int, chunks: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows that ``p`` reads of ``chunks`` (ascending) and its distance to each (figure 3)."""
        keys = np.concatenate([np.arange(*self.rows(p, chunk)) for chunk in chunks])
        if self.is_packed(p):
            return keys, len(keys) - 1 - np.arange(len(keys))
        distance = p - keys
        if self.position == "exact":
            return keys, distance
        # whole chunks move: those beyond the near ones closer, all their rows alike
        chunks_back = p // self.chunk_size - keys // self.chunk_size
        skipped = np.maximum(0, chunks_back - self.n_near)
        return keys, distance - (skipped - skipped // self.group_size) * self.chunk_size

    def places(self, p: int, chunks: Sequence[int]) -> list[int]:
        """Return from how many chunks further on the query sees each of ``chunks``."""
        back = [p // self.chunk_size - chunk for chunk in chunks]
        if self.is_packed(p):
            return list(range(len(chunks)))[::-1]
        if self.position == "exact":
            return back
        return [b if b < self.n_near else self.n_near + (b - self.n_near) // self.group_size for b in back]

    def segments(self, p: int, chunks: Sequence[int]) -> list[Segment]:
        """Return how the native code reaches these distances from the storage positions."""
        places = self.places(p, chunks)
        return [
            Segment(*self.rows(p, chunk), place * self.chunk_size + p % self.chunk_size)
            for chunk, place in zip(chunks, places, strict=True)
        ]

    def storage(self, j: np.ndarray) -> np.ndarray:
        return j % self.chunk_size


# ---- chunk summaries ----


def split_chunks(x: np.ndarray, size: int) -> np.ndarray:
    """Return the complete chunks of ``x [n_rows, n_head, dim]`` as ``[n_head, n_chunk, size, dim]``."""
    n = len(x) // size
    return x[: n * size].reshape(n, size, *x.shape[1:]).transpose(2, 0, 1, 3)


def rotate_local(x: np.ndarray, size: int, rope: Rope) -> np.ndarray:
    """Rotate every row to its position in its chunk."""
    return rotate(x, np.arange(len(x))[:, None] % size, rope)


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def chunk_query(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, softcap: float = 0.0) -> np.ndarray:
    """Return q_i, the mean of O_i = softmax(Q_i K_i^T) V_i, every query seeing every key of the chunk (eq. 2)."""
    weights = softmax(cap(q @ k.swapaxes(-1, -2) * scale, softcap))
    return (weights @ v).mean(-2)


def in_the_order_of_keys(q: np.ndarray, mode: int) -> np.ndarray:
    """Permute a vector of V's space as the GGUF converter permutes the rows of Wk: for NORM RoPE, halves interleave."""
    if mode != NORM:
        return q
    return q.reshape(*q.shape[:-1], 2, q.shape[-1] // 2).swapaxes(-1, -2).reshape(q.shape)


def attended_keys(q: np.ndarray, k: np.ndarray, scale: float, softcap: float = 0.0) -> np.ndarray:
    """Return c_i = softmax(q_i K_i^T) K_i (eq. 1)."""
    return (softmax(cap(q[..., None, :] @ k.swapaxes(-1, -2) * scale, softcap)) @ k)[..., 0, :]


def key_range(k: np.ndarray) -> np.ndarray:
    """Return the largest and then the smallest value of every channel in a chunk; halves that bound them."""
    return np.concatenate([to_half(k.max(-2), up=1), to_half(k.min(-2), up=-1)], axis=-1)


def key_moments(k: np.ndarray, scale: float) -> np.ndarray:
    """Return mean and scale^2/2 times variance of every channel."""
    return np.concatenate([k.mean(-2), k.var(-2) * scale**2 / 2], axis=-1)


def key_outlier(k: np.ndarray, scale: float) -> np.ndarray:
    """Return the key of a chunk that is farthest from the mean of all, after the moments of the others."""
    farthest = ((k - k.mean(-2, keepdims=True)) ** 2).sum(-1).argmax(-1)[..., None]
    outlier = np.take_along_axis(k, farthest[..., None], -2)[..., 0, :]
    is_other = np.arange(k.shape[-2]) != farthest
    others = k[is_other].reshape(*k.shape[:-2], k.shape[-2] - 1, k.shape[-1])
    return np.concatenate([key_moments(others, scale), outlier], axis=-1)


def in_bytes(method: LongHeads, head_dim: int) -> bool:
    """Return whether summaries are kept in eight bits, not in halves."""
    return method.representation == "outlier" and head_dim % 32 == 0


def byte_steps(x: np.ndarray) -> np.ndarray:
    """Return the half whose multiples, up to 127 times, stand for a number: one for every block of 32."""
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // 32, 32)
    return to_half(abs(blocks).max(-1) / 127, up=1).repeat(32, axis=-1)


def to_bytes(x: np.ndarray) -> np.ndarray:
    """Round to multiples of the steps."""
    step = byte_steps(x)
    return np.rint(x / np.where(step > 0, step, 1)) * step


def to_half(x: np.ndarray, up: int = 0) -> np.ndarray:
    """Round to float16: to the nearest, or to what is not below (``up`` 1) or not above (-1)."""
    half = x.astype(np.float16)
    wrong = (half.astype(np.float64) - x) * up < 0
    return np.where(wrong, np.nextafter(half, np.float16(up * np.inf)), half).astype(np.float64)


def summarize_chunks(
    q: np.ndarray,
    k_local: np.ndarray,
    v: np.ndarray,
    method: LongHeads,
    rope: Rope,
    scale: float,
    softcap: float = 0.0,
) -> np.ndarray:
    """Represent every complete chunk.

    Parameters
    ----------
    q : array ``[n_rows, n_head, head_dim]``, not rotated
    k_local, v : arrays ``[n_rows, n_head_kv, head_dim]``
        As stored: keys rotated in their chunks, both rounded.

    Returns
    -------
    array ``[n_head, n_chunk, head_dim]`` for ``attention``, ``[n_head_kv, n_chunk, 2 * head_dim]`` for the others,
    3 * head_dim for ``outlier``
    """
    size, ratio = method.chunk_size, q.shape[1] // v.shape[1]
    keys = split_chunks(k_local, size)
    if method.representation != "attention":
        start = np.arange(keys.shape[1])[:, None] * size * (len(q) <= method.trained)
        keys = rotate(keys, start, replace(rope, attn_factor=rope.attn_factor / rope_magnitude(rope)))
        if method.representation == "minmax":
            return key_range(keys)
        if method.representation == "moments":
            return to_half(key_moments(keys, scale))
        return (to_bytes if in_bytes(method, keys.shape[-1]) else to_half)(key_outlier(keys, scale))
    keys, values = (x.repeat(ratio, axis=0) for x in (keys, split_chunks(v, size)))
    queries = split_chunks(rotate_local(q, size, rope), size)
    mean = chunk_query(queries, keys, values, scale, softcap)
    return to_half(attended_keys(in_the_order_of_keys(mean, rope.mode), keys, scale, softcap))


# ---- choice ----


def rotated_queries(q: np.ndarray, method: LongHeads, rope: Rope) -> np.ndarray:
    """Return queries as they meet summaries: at their own positions, or without distance; by attention as they are."""
    if method.representation == "attention":
        return q
    if len(q) <= method.trained:
        return rotate(q, np.arange(len(q))[:, None], rope)
    slow = np.ones(q.shape[-1])  # the channels that turn at most once in the trained context
    for channels in rope_pairs(rope):
        slow[channels] = np.abs(rope_angles(rope)) * method.trained <= 2 * np.pi
    return rotate(q, np.arange(len(q))[:, None] % method.chunk_size, rope) * slow


def chunk_scores(q: np.ndarray, summaries: np.ndarray, method: LongHeads, n_head_kv: int, scale: float) -> np.ndarray:
    """Return how much every query wants every chunk, ``[n_tokens, n_head, n_chunk]`` (eq. 3, left of the rank)."""
    n_head, ratio = q.shape[1], q.shape[1] // n_head_kv
    if method.representation == "minmax":
        q = np.concatenate([np.maximum(q, 0), np.minimum(q, 0)], axis=-1)
    elif method.representation != "attention":
        q = np.concatenate([q * scale, q**2], axis=-1)  # log of the mean exponential of a normal distribution
    summaries = summaries.repeat(n_head // len(summaries), axis=0)
    scores = np.einsum("nhd,hcd->nhc", q, summaries[..., : q.shape[-1]])
    if method.representation == "outlier":
        outliers = np.einsum("nhd,hcd->nhc", q[..., : q.shape[-1] // 2], summaries[..., q.shape[-1] :])
        scores = np.logaddexp(scores + np.log(method.chunk_size - 1), outliers)
    if method.mass:
        scores = chunk_shares(scores, method.chunk_size)
    if method.select == "group":
        groups = scores.reshape(len(q), n_head_kv, ratio, scores.shape[-1])
        groups = groups.mean(2) if method.mass else groups.sum(2)
        return groups.repeat(ratio, axis=1)
    return scores


def chunk_shares(scores: np.ndarray, size: int) -> np.ndarray:
    """Return the share of each chunk in what query ``p`` gives to the chunks before its own; 0 for later ones."""
    before = np.arange(scores.shape[-1]) < (np.arange(len(scores)) // size)[:, None, None]
    there = before & ~np.isnan(scores)
    masked = np.where(there, scores, -np.inf)
    top = masked.max(-1, keepdims=True, initial=-1e30)
    weights = np.exp(masked - top)
    shares = weights / np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    return np.where(np.isnan(scores), np.nan, shares)


def by_score(scores: np.ndarray, candidates: Sequence[int]) -> list[int]:
    """Order candidates, the best first, the lower index first among equals."""
    return sorted(candidates, key=lambda i: (-scores[i], i))


def neighbours(chosen: list[int], order: list[int], n: int) -> list[int]:
    """Return up to ``n`` of ``order`` (best first) that lie next to ``chosen``, one per chosen chunk and pass."""
    added: list[int] = []
    while True:
        before = len(added)
        for i in chosen:
            beside = [j for j in order if abs(i - j) == 1 and j not in chosen and j not in added]
            added += beside[: min(1, n - len(added))]
        if len(added) == before:
            return added


def pick(scores: np.ndarray, candidates: Sequence[int], n: int, n_neighbor: int) -> list[int]:
    """Return ``n`` candidates: the best, then neighbours of these, then the best of the rest."""
    order = by_score(scores, candidates)
    chosen = order[: n - n_neighbor]
    chosen = chosen + neighbours(chosen, order, n_neighbor)
    rest = [i for i in order if i not in chosen]
    return chosen + rest[: n - len(chosen)]


def n_wanted(shares: np.ndarray, candidates: Sequence[int], most: int, own: int, mass: float) -> int:
    """Return how many of the best candidates it takes, beside what is read anyway, to read ``mass``."""
    read = np.nansum([shares[i] for i in range(own) if i not in candidates])
    best = np.nan_to_num(shares[by_score(shares, candidates)])
    so_far = read + np.concatenate([[0.0], np.cumsum(best)])
    return min(most, int((so_far < mass).sum()))


def choose(scores: np.ndarray, own: int, method: LongHeads) -> list[int]:
    """Return the chunks, ascending, that a query in chunk ``own`` reads (eq. 3)."""
    if own < (method.n_recent + 2 if method.mass else method.n_chunk):
        return list(range(own + 1))
    first = [] if method.ablation == "no_first" else [0]
    recent = range(own - method.n_recent, own + 1)
    wanted = -scores if method.ablation == "last" else scores
    n_free = min(method.n_chunk - len(first) - len(recent), recent[0] - len(first))
    if method.mass:
        n_free = n_wanted(scores, range(len(first), recent[0]), n_free, own, method.mass)
    return sorted([*first, *pick(wanted, range(len(first), recent[0]), n_free, method.n_neighbor), *recent])


def choices(
    q: np.ndarray,
    summaries: np.ndarray,
    method: LongHeads,
    n_head_kv: int,
    rope: Rope,
    scale: float,
) -> np.ndarray:
    """Return the chunks of every query (not rotated), ``[n_tokens, n_head, k]``, unused slots last."""
    scores = chunk_scores(rotated_queries(q.astype(np.float64), method, rope), summaries, method, n_head_kv, scale)
    out = np.full((*q.shape[:2], method.n_chunk), UNUSED)
    for p, head in np.ndindex(q.shape[:2]):
        chunks = choose(scores[p, head], p // method.chunk_size, method)
        out[p, head, : len(chunks)] = chunks
    return out


# ---- attention ----


def attend_longheads(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, method: LongHeads, rope: Rope, scale: float
) -> np.ndarray:
    """Attend with every query of a sequence, by the definition of the method; nothing is rounded.

    Parameters
    ----------
    q, k, v : arrays ``[n_rows, n_head or n_head_kv, head_dim]``, not rotated

    Returns
    -------
    array ``[n_rows, n_head, head_dim]``
    """
    heads = np.arange(q.shape[1]) // (q.shape[1] // k.shape[1])
    summaries = summarize_chunks(q, rotate_local(k, method.chunk_size, rope), v, method, rope, scale)
    at_zero, out = rotate(k, 0, rope), np.empty((*q.shape[:2], v.shape[-1]))
    for p, of_heads in enumerate(choices(q, summaries, method, k.shape[1], rope, scale)):
        seen = [method.relative_positions(p, chunks[chunks != UNUSED]) for chunks in of_heads]
        rows, distance = (np.stack(part) for part in zip(*seen, strict=True))
        keys, values = at_zero[rows, heads[:, None]], v[rows, heads[:, None]]
        scores = np.einsum("hnd,hnd->hn", rotate(q[p][:, None], distance, rope), keys) * scale
        out[p] = [attend(s, head_values)[0] for s, head_values in zip(scores, values, strict=True)]
    return out


@dataclass(frozen=True)
class Stored:
    """One layer as the native code holds it: rows rotated to their storage positions and rounded to their types.

    Parameters
    ----------
    q, k, v : arrays ``[n_rows, n_head or n_head_kv, head_dim]``, not rotated
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    method: LongHeads
    rope: Rope
    scale: float
    softcap: float = 0.0
    type_k: str = "f32"
    type_v: str = "f32"
    block_k: int = 0
    block_v: int = 0

    def keys_at(self, pos: np.ndarray) -> np.ndarray:
        return round_trip(rotate(self.k, pos[:, None], self.rope), self.type_k, self.block_k)

    def summarize(self) -> np.ndarray:
        """Return the representation of every complete chunk."""
        local = self.keys_at(np.arange(len(self.k)) % self.method.chunk_size)
        v = round_trip(self.v, self.type_v, self.block_v)
        return summarize_chunks(self.q, local, v, self.method, self.rope, self.scale, self.softcap)

    def choose(self, summaries: np.ndarray) -> np.ndarray:
        """Return the chunks of every query, given summaries."""
        return choices(self.q, summaries, self.method, self.k.shape[1], self.rope, self.scale)

    def attend(self, chunks: np.ndarray) -> np.ndarray:
        """Return what the queries read from these chunks, ``[n_rows, n_head, head_dim]``."""
        rows, ratio = np.arange(len(self.k)), self.q.shape[1] // self.k.shape[1]
        stored, near = self.keys_at(self.method.storage(rows)), self.keys_at(rows)
        v = round_trip(self.v, self.type_v, self.block_v)
        out = np.empty((*self.q.shape[:2], v.shape[-1]))
        for p, h in np.ndindex(self.q.shape[:2]):
            segs = self.method.segments(p, chunks[p, h][chunks[p, h] != UNUSED])
            kept = (stored[:, h // ratio], near[:, h // ratio], v[:, h // ratio])
            out[p, h] = attend_segments(self.q[p, h], segs, *kept, self.rope, self.scale, self.softcap)[0]
        return out
