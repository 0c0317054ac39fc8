"""Eviction in numpy: after some positions a KV head drops the rows that its queries did not want.

A rule says which queries vote, what a vote is, and which rows stay; ``Layer`` runs it token by token over any base
method. Votes are counted three times: as they are, and with every score of attention moved by ``margin`` down and up.
Where that changes a decision, float32 may decide otherwise than float64 and both are right: ``certain`` rows stay
either way, those that are not ``possible`` leave either way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from oracle import Full, Method, Rope, Segment, attend, cap, rotate, round_trip
from oracle_chunks import LongHeads, Stored, choose, missed, softmax
from oracle_rules import Kvzip, Rule, border

Base = Method | LongHeads


# ---- algorithm 1 of the paper ----


def corm_eviction(
    keys: np.ndarray,
    values: np.ndarray,
    message: np.ndarray,
    attn_score: np.ndarray,
    w: int,
    r: int,
    t: int,
    every: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return keys, values, message and the indices kept: the listing of CORM (arXiv 2404.15949), one head, one step.

    Two repairs: ``concatenate`` along the first axis, and the message is indexed with the kept keys too. ``[-r:]``
    is written so that r = 0 protects nothing. With ``every`` > 1 the decision is made at multiples of it only.
    """
    m = message.shape[0]
    message = np.concatenate([message, np.zeros((m, 1), dtype=bool)], axis=1)
    cur_message = attn_score >= 1 / t
    message = np.concatenate([message, cur_message], axis=0)[-w:, :]
    decision = message.any(axis=0)
    decision[max(0, len(decision) - r) :] = True
    indices = np.flatnonzero(decision | (message.shape[0] < w) | (t % every > 0))
    return keys[indices], values[indices], message[:, indices], indices


def corm_listing(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, w: int, r: int, rope: Rope, scale: float, every: int = 1
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Run one head by the listing.

    Parameters
    ----------
    q, k, v : arrays ``[n_rows, head_dim]``, not rotated

    Returns
    -------
    outputs ``[n_rows, head_dim_v]``, and the rows held after every step
    """
    q, k = (rotate(x, np.arange(len(x)), rope) for x in (q, k))
    keys, values, rows = k[:0], v[:0], np.arange(0)
    message, out, held = np.zeros((0, 0), dtype=bool), [], []
    for p in range(len(q)):
        keys, values, rows = np.vstack([keys, k[p]]), np.vstack([values, v[p]]), np.append(rows, p)
        scores = keys @ q[p] * scale
        out.append(attend(scores, values)[0])
        weights = softmax(scores)[None]
        keys, values, message, kept = corm_eviction(keys, values, message, weights, w, r, p + 1, every)
        rows = rows[kept]
        held.append(rows)
    return np.array(out), held


@dataclass(frozen=True)
class Evicting:
    """A base method whose KV heads drop rows."""

    base: Base
    rule: Rule

    def text(self) -> str:
        return self.rule.text() if isinstance(self.base, Full) else f"{self.base.text()}+{self.rule.text()}"

    def open_row(self, p: int) -> int:
        """Return the first row of the chunk that is open after ``p``."""
        size = self.base.chunk_size if isinstance(self.base, LongHeads) else 1
        return (p + 1) // size * size


# ---- one layer ----


@dataclass
class Run:
    """What a layer did: ``held`` is after the eviction that is due at the end, ``before`` without it.

    Attributes
    ----------
    out : array ``[n_rows, n_head, head_dim_v]``
    held, before : bool arrays ``[n_head_kv, n_rows]``
    scores : array ``[3, n_head_kv, n_rows]``
        Low, as they are, high.
    chunks : bool array ``[n_rows, n_head, n_chunk]`` or None
    missed : array ``[n_rows, n_head]`` or None
        By how much better the best chunk was that was left; of chunks that were given.
    doubts : list of positions after which a decision was not certain
    """

    out: np.ndarray
    held: np.ndarray
    before: np.ndarray
    scores: np.ndarray
    chunks: np.ndarray | None
    missed: np.ndarray | None
    doubts: list[int]


Decide = Callable[[int, np.ndarray, np.ndarray], np.ndarray]


def moved(weights: np.ndarray, by: float) -> np.ndarray:
    """Return every weight as if its score alone were larger by ``by``, but not in the sum that it is divided by."""
    return weights * np.exp(by)


@dataclass(frozen=True)
class Layer:
    """One layer with all its rows, stored as in ``oracle_chunks.Stored``.

    Parameters
    ----------
    q, k, v : arrays ``[n_rows, n_head or n_head_kv, head_dim]``, not rotated
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    method: Evicting
    rope: Rope
    scale: float
    softcap: float = 0.0
    type_k: str = "f32"
    type_v: str = "f32"
    block_k: int = 0
    block_v: int = 0
    n_ubatch: int = 0

    # ---- rows as stored ----

    def keys_at(self, pos: np.ndarray) -> np.ndarray:
        return round_trip(rotate(self.k, pos[:, None], self.rope), self.type_k, self.block_k)

    @cached_property
    def far(self) -> np.ndarray:
        return self.keys_at(self.method.base.storage(np.arange(len(self.k))))

    @cached_property
    def near(self) -> np.ndarray:
        return self.keys_at(np.arange(len(self.k)))

    @cached_property
    def values(self) -> np.ndarray:
        return round_trip(self.v, self.type_v, self.block_v)

    # ---- chunks ----

    @cached_property
    def chunked(self) -> Stored | None:
        """Return what chooses chunks; no eviction changes what queries are compared with."""
        if not isinstance(self.method.base, LongHeads):
            return None
        types = (self.type_k, self.type_v, self.block_k, self.block_v)
        where = {"n_ubatch": self.n_ubatch, "evict_every": self.method.rule.evict_every}
        return Stored(self.q, self.k, self.v, self.method.base, self.rope, self.scale, self.softcap, *types, **where)

    def wanted(self, p: int, wants: np.ndarray, held: np.ndarray) -> np.ndarray:
        """Return how much each head wants chunks at ``p``: by itself, or for the tile that begins there."""
        assert self.chunked
        if self.chunked.tile_of(p) is None:
            scores = self.chunked.scores(wants, held)
            return self.chunked.group_scores(scores, wants, p, held)
        with_tile = held.copy()
        with_tile[:, p : p + self.method.base.tile] = True
        return self.chunked.tile_values(wants, p, with_tile).repeat(self.chunked.ratio, axis=0)

    def free(self, p: int) -> tuple[np.ndarray, int]:
        """Return which chunks the query at ``p`` or its tile chooses from, and how many of them."""
        assert self.chunked
        base, first = self.method.base, self.chunked.tile_of(p)
        return (base.free(p), base.n_free) if first is None else (base.tile_free(first), base.n_shared)

    def choose(self, p: int, scores: np.ndarray) -> np.ndarray:
        """Return the chunks ``[n_head, n_chunk]`` that the heads read at ``p``, given their scores."""
        own, (free, n) = p // self.method.base.chunk_size, self.free(p)
        out = np.zeros((len(scores), -(-len(self.k) // self.method.base.chunk_size)), dtype=bool)
        for h in range(len(scores)):
            out[h, : own + 1] = choose(scores[h], free, n)[: own + 1]
        return out

    def missed(self, p: int, scores: np.ndarray, chunks: np.ndarray) -> list[float]:
        """Return for each head by how much better the best chunk is that it has left."""
        free, n = self.free(p)
        free = free[: p // self.method.base.chunk_size + 1]
        return [missed(of_head, read[: len(free)], free, n) for of_head, read in zip(scores, chunks, strict=True)]

    # ---- attention and votes ----

    def read(self, p: int, h: int, segs: list[Segment], held: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """Return the output of a query head, the weight of every row, and how many rows the segments span."""
        g = h * self.k.shape[1] // self.q.shape[1]
        rows = np.concatenate([np.arange(s.row0, s.row1) for s in segs])
        keys = [(self.near if s.near else self.far)[s.row0 : s.row1, g] for s in segs]
        scores = [part @ rotate(self.q[p, h], s.a, self.rope) for part, s in zip(keys, segs, strict=True)]
        here, weights = held[g, rows], np.zeros(len(self.k))
        weights[rows[here]] = softmax(cap(np.concatenate(scores)[here] * self.scale, self.softcap))
        return weights @ self.values[:, g], weights, len(rows)

    def segments(self, p: int, chunks: np.ndarray | None) -> list[list[Segment]]:
        """Return the segments of every query head."""
        if chunks is None:
            return [self.method.base.segments(p)] * self.q.shape[1]
        return [self.method.base.segments(p, np.flatnonzero(of_head).tolist()) for of_head in chunks]

    def vote(self, p: int, scores: np.ndarray, weights: np.ndarray, t: np.ndarray, margin: float) -> None:
        """Count the votes of query ``p`` into ``scores [3, n_head_kv, n_rows]``: low, as they are, high."""
        n_head_kv = self.k.shape[1]
        weights, t = weights.reshape(n_head_kv, -1, len(self.k)), t.reshape(n_head_kv, -1)
        for counted, by in zip(scores, (-margin, 0, margin), strict=True):
            for g in range(n_head_kv):
                counted[g] = self.method.rule.vote(counted[g], p, moved(weights[g], by), t[g])

    def evict(self, p: int, scores: np.ndarray, held: np.ndarray, decide: Decide | None) -> tuple[np.ndarray, bool]:
        """Return what is held after border ``p``, and whether it was in doubt."""
        (low, middle, high), settings = scores, (held, p, self.method.open_row(p))
        certain, possible = self.method.rule.kept_by_heads(low, high, *settings)
        exact = self.method.rule.kept_by_heads(middle, middle, *settings)[0]
        doubt = (certain != possible).any()
        return (decide(p, certain, possible) if doubt and decide else exact), bool(doubt)

    def run(
        self,
        summaries: np.ndarray | None = None,
        margin: float = 0.0,
        decide: Decide | None = None,
        chunks: np.ndarray | None = None,
    ) -> Run:
        """Run all tokens, one by one.

        Parameters
        ----------
        summaries : array or None
            Summaries to choose from; None: those of ``Stored.summarize``.
        margin : float
            How far a score of attention may be off.
        decide : callable or None
            Called as ``decide(p, certain, possible)`` where the margin leaves it open; returns what is held.
        chunks : bool array ``[n_rows, n_head, n_chunk]`` or None
            What is read; None: the best.
        """
        rule, (n, n_head, _), n_head_kv, chunked = self.method.rule, self.q.shape, self.k.shape[1], self.chunked
        wants = chunked.wants(chunked.summarize() if summaries is None else summaries) if chunked else None
        held, scores = np.zeros((n_head_kv, n), dtype=bool), np.full((3, n_head_kv, n), rule.first_score)
        out, read, by, doubts = np.empty((n, n_head, self.v.shape[-1])), [], [], []
        before = held.copy()
        for p in range(n):
            held[:, p] = True
            if chunked:
                first = chunked.tile_of(p)
                if first is None or first == p:
                    wanted = self.wanted(p, wants if first == p else wants[p], held)
                read.append(self.choose(p, wanted) if chunks is None else chunks[p])
                by.append(self.missed(p, wanted, read[-1]))
            segs = self.segments(p, read[-1] if chunked else None)
            reads = [self.read(p, h, segs[h], held) for h in range(n_head)]
            out[p], weights, t = (np.stack(x) for x in zip(*reads, strict=True))
            if rule.votes(p):
                self.vote(p, scores, weights, t, margin)
            before = held.copy()
            if p == border(p, rule.evict_every):
                held, doubt = self.evict(p, scores, held, decide)
                doubts += [p] * doubt
                if rule.resets:
                    scores[:] = rule.first_score
        if isinstance(rule, Kvzip):
            held, doubt = self.evict(rule.n_text - 1, scores, held, decide)
            doubts += [rule.n_text - 1] * doubt
        return Run(out, held, before, scores, *(np.stack(x) if chunked else None for x in (read, by)), doubts)
