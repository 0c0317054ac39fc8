"""LongHeads (arXiv 2402.10685) in numpy: every head reads a few chunks that it picks itself.

``oracle_filter.py`` says what a query chooses from; here is how much it wants a chunk, and what it reads. Chunks that
are read are masks ``[.., n_chunk]``; the lists of the native code end with ``UNUSED``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from oracle import NORM, Rope, attend, attend_segments, cap, rotate, round_trip
from oracle_filter import LongHeads, kinds
from oracle_index import in_bytes, index_keys, row_scores

TILE_STEP = 4  # one of that many queries of a head is compared for a tile
UNUSED = -1  # fills the slots of a query that reads fewer chunks than the others


def as_mask(chunks: np.ndarray, n_chunk: int) -> np.ndarray:
    """Return lists of chunks ``[.., k]`` as a mask ``[.., n_chunk]``."""
    return (chunks[..., None] == np.arange(n_chunk)).any(-2)


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


def is_in_bytes(method: LongHeads, head_dim: int) -> bool:
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


# ---- one layer ----


@dataclass(frozen=True)
class Stored:
    """One layer as the native code holds it: rows rotated to their storage positions and rounded to their types.

    Parameters
    ----------
    q, k, v : arrays ``[n_rows, n_head or n_head_kv, head_dim]``, not rotated
    is_exact : bool
        Nothing is rounded, as in the definition; what is compared is.
    center : array ``[n_head_kv, head_dim]`` or None
        What is subtracted from keys as they are stored.
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
    is_exact: bool = False
    center: np.ndarray | None = None
    n_ubatch: int = 0  # a tile is whole where a ubatch has all of its rows; 0: one ubatch has all
    evict_every: int = 0  # a ubatch ends there

    @property
    def n_head_kv(self) -> int:
        return self.k.shape[1]

    @property
    def ratio(self) -> int:
        return self.q.shape[1] // self.n_head_kv

    # ---- rows as stored ----

    def keys_at(self, pos: np.ndarray) -> np.ndarray:
        keys = rotate(self.k, pos[:, None], self.rope) - (0 if self.center is None else self.center)
        return keys if self.is_exact else round_trip(keys, self.type_k, self.block_k)

    @cached_property
    def keys(self) -> np.ndarray:
        return self.keys_at(self.method.storage(np.arange(len(self.k))))

    @cached_property
    def near_keys(self) -> np.ndarray:
        return self.keys_at(np.arange(len(self.k)))

    @cached_property
    def values(self) -> np.ndarray:
        return self.v if self.is_exact else round_trip(self.v, self.type_v, self.block_v)

    # ---- what queries are compared with ----

    def summarize(self) -> np.ndarray | None:
        """Return the representation of every complete chunk, or None where keys are compared.

        ``[n_head, n_chunk, head_dim]`` for ``attention``, ``[n_head_kv, n_chunk, 2 * head_dim]`` for ``minmax``,
        3 * head_dim for ``outlier``.
        """
        method, size = self.method, self.method.chunk_size
        if method.key_bits:
            return None
        keys = split_chunks(self.keys, size)
        if method.representation == "minmax":
            return key_range(keys)
        if method.representation == "outlier":
            return (to_bytes if is_in_bytes(method, keys.shape[-1]) else to_half)(key_outlier(keys, self.scale))
        keys, values = (x.repeat(self.ratio, axis=0) for x in (keys, split_chunks(self.values, size)))
        queries = split_chunks(rotate_local(self.q, size, self.rope), size)
        mean = in_the_order_of_keys(chunk_query(queries, keys, values, self.scale, self.softcap), self.rope.mode)
        summaries = attended_keys(mean, keys, self.scale, self.softcap)
        return summaries if self.type_k == "f32" else to_half(summaries)

    # ---- queries ----

    def queries(self) -> list[np.ndarray]:
        """Return the queries ``[n_rows, n_head, head_dim]`` as they see far rows: from each angle of the base.

        By attention as they are (the authors' code).
        """
        q = self.q.astype(np.float64)
        if self.method.representation == "attention":
            return [q]
        angles = np.array([[s.a for s in self.method.base.segments(p)] for p in range(len(q))])
        return [rotate(q, of_kind[:, None], self.rope) for of_kind in angles.T]

    # ---- scores ----

    def seen(self, unit: int, of_kind: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Return ``of_kind(queries)`` at the angle from which each of ``unit`` rows is seen; -inf where it is not."""
        n = len(self.k)
        rows = slice(0, n // unit * unit, unit)
        kind = np.stack([kinds(self.method.base, p, n)[rows] for p in range(n)])[:, None]
        out = np.full((n, self.q.shape[1], n // unit), -np.inf)
        for i, q in enumerate(self.queries()):
            out = np.where(kind == i, of_kind(q), out)
        return out

    def wants(self, summaries: np.ndarray | None) -> np.ndarray:
        """Return how much every query wants every complete chunk, or by keys every row, ``[n_rows, n_head, ..]``.

        Each is seen from the angle of the base; what the query does not see is -inf.
        """
        if summaries is not None:
            return self.seen(self.method.chunk_size, lambda q: self.summary_scores(q, summaries))
        indexed = index_keys(self.keys, self.method.key_bits)
        return self.seen(1, lambda q: row_scores(in_bytes(q), indexed, self.scale))

    def products(self) -> np.ndarray:
        """Return what ``wants`` would be with the keys themselves."""
        return self.seen(1, lambda q: row_scores(q, self.keys, self.scale))

    def summary_scores(self, q: np.ndarray, summaries: np.ndarray) -> np.ndarray:
        """Return how much rotated queries want chunks, ``[n_rows, n_head, n_chunk]`` (eq. 3, left of the rank)."""
        name, dim = self.method.representation, q.shape[-1]
        of_heads = summaries.repeat(q.shape[1] // len(summaries), axis=0)
        product = lambda x, part: np.einsum("nhd,hcd->nhc", x, part, optimize=True)  # noqa: E731
        if name == "attention":
            return product(q, of_heads)
        if name == "minmax":  # no key between the bounds has a larger product
            return product(np.concatenate([np.maximum(q, 0), np.minimum(q, 0)], axis=-1), of_heads)
        # log of the mean exponential of a normal distribution, for all but one; and that one
        others = product(np.concatenate([q * self.scale, q**2], axis=-1), of_heads[..., : 2 * dim])
        outlier = product(q * self.scale, of_heads[..., 2 * dim :])
        return np.logaddexp(others + np.log(self.method.chunk_size - 1), outlier)

    def scores(self, wants: np.ndarray, held: np.ndarray) -> np.ndarray:
        """Return the scores of complete chunks ``[.., n_head, n_chunk]``, -inf for a chunk of which nothing is held.

        Parameters
        ----------
        wants : array ``[.., n_head, n_rows or n_chunk]``
        held : bool array ``[n_head_kv, n_rows]``
        """
        size, n = self.method.chunk_size, len(self.k) // self.method.chunk_size
        there = held[:, : n * size].reshape(self.n_head_kv, n, size).repeat(self.ratio, axis=0)
        if self.method.key_bits:  # log of the sum over the rows of exp(scale q . k)
            rows = np.where(there, wants[..., : n * size].reshape(*wants.shape[:-1], n, size), -np.inf)
            wants = np.logaddexp.reduce(rows, axis=-1)
        scores = np.where(there.any(-1), wants, -np.inf)
        return self.of_groups(scores) if self.method.select == "group" and not self.method.key_bits else scores

    def of_groups(self, of_heads: np.ndarray) -> np.ndarray:
        """Return what the query heads of a KV head add up to, ``[.., n_head, n_chunk]``."""
        shape = of_heads.shape
        by_group = of_heads.reshape(*shape[:-2], self.n_head_kv, self.ratio, shape[-1])
        return by_group.sum(-2).repeat(self.ratio, axis=-2)

    def group_scores(self, scores: np.ndarray, wants: np.ndarray, p: int, held: np.ndarray | None = None) -> np.ndarray:
        """Return the log of the added weights of chunks for heads that choose together, ``[n_head, n_chunk]``.

        The weight of a chunk is its share of the attention of a head to it, to the other far chunks, and to what the
        head reads anyway.
        """
        free = self.method.free(p)
        if self.method.select != "group" or not self.method.key_bits or not free.any():
            return scores
        n = scores.shape[-1]
        far = np.pad(free, (0, n))[:n]
        there = np.ones_like(wants, dtype=bool) if held is None else held.repeat(self.ratio, axis=0)
        anyway = np.array([self.reference(rows, p, ~free) for rows in np.where(there, wants, -np.inf)])
        among = np.where(far, scores, -np.inf)
        total = np.logaddexp(np.logaddexp.reduce(among, axis=-1), anyway)
        with np.errstate(divide="ignore"):
            return np.log(self.of_groups(np.exp(among - total[:, None])))

    # ---- tiles ----

    def tile_of(self, p: int) -> int | None:
        """Return the first row of the whole tile of a row, None where it is in none."""
        first = p // self.method.tile * self.method.tile
        begin, end = next((begin, end) for begin, end in self.ubatches if p < end)
        is_whole = self.method.tile > 1 and begin <= first and first + self.method.tile <= end
        return first if is_whole and self.method.is_tile(first) else None

    @cached_property
    def ubatches(self) -> list[tuple[int, int]]:
        """Return the first row and the end of every ubatch."""
        n, found, begin = len(self.k), list[tuple[int, int]](), 0
        while begin < n:
            border = (begin // self.evict_every + 1) * self.evict_every if self.evict_every else n
            found.append((begin, min(n, border, begin + (self.n_ubatch or n))))
            begin = found[-1][1]
        return found

    def is_compared(self, row: int, head: int) -> bool:
        """Return whether a query is compared for its tile: one of four of each head, others for each."""
        return (row % self.method.tile + head % self.ratio) % TILE_STEP == 0

    def reference(self, wants: np.ndarray, p: int, whole: np.ndarray) -> float:
        """Return r, the log of the sum over the rows that a query reads anyway of exp(scale q . k).

        Parameters
        ----------
        wants : array ``[n_rows]``
            Scores of rows by the index; rows of a near ring are not in it.
        whole : bool array ``[n_chunk]``
            Chunks that all queries of the tile read.
        """
        read = whole.repeat(self.method.chunk_size)[: p + 1]
        for s in self.method.base.segments(p):
            read[s.row0 : s.row1] &= not s.near
        return float(np.logaddexp.reduce(wants[: p + 1][read]))

    def tile_values(self, wants: np.ndarray, first: int, held: np.ndarray) -> np.ndarray:
        """Return the value of every chunk for a tile, ``[n_head_kv, n_chunk]``.

        v(i) is the largest of (largest score of a key of chunk i) - r over the queries that are compared.
        """
        size, free = self.method.chunk_size, self.method.tile_free(first)
        values = np.full((self.n_head_kv, len(free)), -np.inf)
        for p, head in np.ndindex(self.method.tile, self.q.shape[1]):
            if free.any() and self.is_compared(p, head):
                rows = np.where(held[head // self.ratio], wants[first + p, head], -np.inf)
                r = self.reference(rows, first + p, ~free)
                best = rows[: len(free) * size]
                best = np.pad(best, (0, len(free) * size - len(best)), constant_values=-np.inf).reshape(-1, size).max(1)
                group = head // self.ratio
                values[group] = np.maximum(values[group], best - r)
        return values

    def all_scores(self, summaries: np.ndarray | None) -> np.ndarray:
        """Return the scores of all queries, of heads that hold all rows."""
        return self.scores(self.wants(summaries), np.ones((self.n_head_kv, len(self.k)), dtype=bool))

    # ---- choice ----

    def choose(self, summaries: np.ndarray | None) -> np.ndarray:
        """Return the chunks that the queries read, ``[n_rows, n_head, n_chunk]``, the open one included."""
        scores, wants = self.all_scores(summaries), self.wants(summaries)
        out = np.zeros((*self.q.shape[:2], -(-len(self.k) // self.method.chunk_size)), dtype=bool)
        for p, head in np.ndindex(self.q.shape[:2]):
            free = self.method.free(p)
            out[p, head, : len(free)] = choose(
                self.group_scores(scores[p], wants[p], p)[head], free, self.method.n_free
            )
        return out

    def attend(self, read: np.ndarray) -> np.ndarray:
        """Return what the queries read of these chunks, ``[n_rows, n_head, head_dim]``."""
        out = np.empty((*self.q.shape[:2], self.values.shape[-1]))
        for p, h in np.ndindex(self.q.shape[:2]):
            segs, g = self.method.segments(p, np.flatnonzero(read[p, h]).tolist()), h // self.ratio
            kept = (self.keys[:, g], self.near_keys[:, g], self.values[:, g])
            out[p, h] = attend_segments(self.q[p, h], segs, *kept, self.rope, self.scale, self.softcap)[0]
        return out


# ---- choice ----


def choose(scores: np.ndarray, free: np.ndarray, n: int) -> np.ndarray:
    """Return which chunks ``[own + 1]`` a query reads (eq. 3): of those that are ``free`` the ``n`` best.

    The lower index first among equals.
    """
    read = ~free
    best = sorted(np.flatnonzero(free).tolist(), key=lambda i: (-scores[i], i))
    read[best[:n]] = True
    return read


def missed(scores: np.ndarray, read: np.ndarray, free: np.ndarray, n: int, least: float = -np.inf) -> float:
    """Return by how much chunks were taken or left wrongly; inf for what may not be.

    The ``n`` best that reach ``least`` are right. Chunks without rows, of score -inf, may be taken or left.
    """
    there = free & (np.pad(scores, (0, len(free)), constant_values=-np.inf)[: len(free)] > -np.inf)
    taken, left = scores[np.flatnonzero(there & read)], scores[np.flatnonzero(there & ~read)]
    if not read[~free].all() or (read & free).sum() > n:
        return np.inf
    bar = taken.min(initial=np.inf) if len(taken) == n else least
    return float(max([0.0, *(left - bar), *(least - taken)]))


# ---- by definition ----


def attend_longheads(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    method: LongHeads,
    rope: Rope,
    scale: float,
    center: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Attend with every query of a sequence, by the definition of the method; rows are not rounded.

    Parameters
    ----------
    q, k, v : arrays ``[n_rows, n_head or n_head_kv, head_dim]``, not rotated

    Returns
    -------
    array ``[n_rows, n_head, head_dim]``, and the chunks that were read ``[n_rows, n_head, n_chunk]``
    """
    heads = np.arange(q.shape[1]) // (q.shape[1] // k.shape[1])
    layer = Stored(q, k, v, method, rope, scale, is_exact=True, center=center)
    read = layer.choose(layer.summarize())
    at_zero, out = rotate(k, 0, rope), np.empty((*q.shape[:2], v.shape[-1]))
    for p, of_heads in enumerate(read):
        seen = [method.relative_positions(p, np.flatnonzero(chunks).tolist()) for chunks in of_heads]
        rows, distance = (np.stack(part) for part in zip(*seen, strict=True))
        scores = (rotate(q[p][:, None], distance, rope) * at_zero[rows, heads[:, None]]).sum(-1) * scale
        out[p] = [attend(s, values)[0] for s, values in zip(scores, v[rows, heads[:, None]], strict=True)]
    return out, read
