"""Eviction in numpy: after some positions a KV head drops the rows that its queries did not want.

A rule says which queries vote, what a vote is, and which rows stay; ``Layer`` runs it token by token over any base
method. Votes are counted three times: as they are, and with every score of attention moved by ``margin`` down and up.
Where that changes a decision, float32 may decide otherwise than float64 and both are right: ``certain`` rows stay
either way, those that are not ``possible`` leave either way.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
from oracle import Full, Method, Rope, Segment, attend, cap, rotate, round_trip
from oracle_chunks import (
    UNUSED,
    LongHeads,
    by_score,
    chunk_scores,
    neighbours,
    rotated_queries,
    softmax,
    summarize_chunks,
)

Base = Method | LongHeads
Kept = tuple[np.ndarray, np.ndarray]  # certain, possible


def border(p: int, every: int) -> int:
    """Return the first position at ``p`` or later after which an eviction follows."""
    return (p // every + 1) * every - 1


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


# ---- rules ----


class Rule:
    """What the rules share. ``window`` is how many queries before a border vote."""

    name: str
    evict_every: int
    window: float
    recent: int
    first_score = 0.0
    score_type: type = np.int32
    resets = False

    def text(self) -> str:
        options = (f"{f.name}={getattr(self, f.name)}" for f in fields(self))  # type: ignore[arg-type]
        return ",".join([self.name, *options])

    def votes(self, p: int) -> bool:
        return border(p, self.evict_every) - p < self.window

    def vote(self, score: np.ndarray, p: int, weights: np.ndarray, t: np.ndarray) -> np.ndarray:
        """Return the scores after query ``p``.

        Parameters
        ----------
        score : array ``[n_rows]``
        weights : array ``[n_head, n_rows]`` of the query heads of one KV head
        t : array ``[n_head]``
            How many rows the segments of the query span.
        """
        raise NotImplementedError

    def kept(self, low: np.ndarray, high: np.ndarray, rows: np.ndarray, p: int, open_row: int) -> Kept:
        """Return which of ``rows`` (ascending) stay after border ``p`` for scores somewhere in ``low`` to ``high``.

        Rows from ``open_row`` on always stay.
        """
        raise NotImplementedError

    def kept_by_heads(
        self, low: np.ndarray, high: np.ndarray, held: np.ndarray, p: int, open_row: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the same of all KV heads, bool arrays ``[n_head_kv, n_rows]`` as ``held``, of which it is a part."""
        certain, possible = np.zeros((2, *held.shape), dtype=bool)
        for g, here in enumerate(held):
            rows = np.flatnonzero(here)
            certain[g, rows], possible[g, rows] = self.kept(low[g, rows], high[g, rows], rows, p, open_row)
        return certain, possible

    def least(self, score: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return what an implementation may show for ``score`` at least, without deciding otherwise."""
        return score


@dataclass(frozen=True)
class Corm(Rule):
    """A row stays when a query of the last ``window`` found it important, or when it is among the last ``recent``."""

    window: int = 256
    recent: int = 256
    evict_every: int = 1
    name = "corm"
    first_score = -1.0

    def vote(self, score, p, weights, t):
        return np.where((weights >= 1 / t[:, None]).any(0), p, score)

    def least(self, score, rows):
        if self.evict_every < self.window:
            return score
        # every vote counts at one border: the first of its window is enough, and a recent row needs none
        last = border(score, self.evict_every)
        return np.where((score < 0) | (rows > last - self.recent), -1, np.minimum(score, last - self.window + 1))

    def kept(self, low, high, rows, p, open_row):
        safe = (rows > p - self.recent) | (rows >= open_row)
        return safe | (p - low < self.window), safe | (p - high < self.window)


def best(low: np.ndarray, high: np.ndarray, n: int) -> Kept:
    """Return which scores are among the ``n`` best; of equal ones the last is best."""
    later = np.triu(np.ones((len(low), len(low)), dtype=bool), 1)
    beaten_perhaps = (low[:, None] < high) | ((low[:, None] == high) & later)
    beaten_surely = (high[:, None] < low) | ((high[:, None] == low) & later)
    np.fill_diagonal(beaten_perhaps, False)
    return beaten_perhaps.sum(1) < n, beaten_surely.sum(1) < n


def best_of_all(low: np.ndarray, high: np.ndarray, held: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return which rows of all heads are among the ``n`` best; of equal ones the newer, then that of the first head."""
    certain, possible = np.zeros((2, *held.shape), dtype=bool)
    rows, heads = np.nonzero(held[::-1].T)
    at = (len(held) - 1 - heads, rows)
    certain[at], possible[at] = best(low[at], high[at], n)
    return certain, possible


class BudgetRule(Rule):
    """A head with more than ``budget`` rows keeps the newest ``recent`` and the best of the others.

    With adaptive ``heads`` those of a layer keep as many together, and each at least its best fifth of a budget.
    """

    budget: int
    heads: str

    def text(self) -> str:
        return super().text().removesuffix(",heads=uniform")

    def kept_by_heads(self, low, high, held, p, open_row):
        if self.heads == "uniform":
            return super().kept_by_heads(low, high, held, p, open_row)
        n_row = held.shape[1]
        safe = held & ((np.arange(n_row) > p - self.recent) | (np.arange(n_row) >= open_row))
        low, high = (np.where(safe, np.inf, score) for score in (low, high))
        own = np.zeros((2, *held.shape), dtype=bool)  # certain, possible
        for g, here in enumerate(held):
            rows = np.flatnonzero(here)
            own[:, g, rows] = best(low[g, rows], high[g, rows], max(self.budget // 5, int(safe[g].sum())))
        low, high = (np.where(mine, np.inf, score) for mine, score in zip(own, (low, high), strict=True))
        n_sure = int((own[0] | safe).sum())
        return best_of_all(low, high, held, max(len(held) * self.budget, n_sure))

    def kept(self, low, high, rows, p, open_row):
        certain, possible = np.ones((2, len(rows)), dtype=bool)
        if len(rows) > self.budget:
            n_safe = max(self.recent, int((rows >= open_row).sum()))
            old = slice(0, len(rows) - n_safe)
            certain[old], possible[old] = best(low[old], high[old], max(0, self.budget - n_safe))
        return certain, possible


@dataclass(frozen=True)
class H2O(BudgetRule):
    """H2O (arXiv 2306.14048): heavy hitters by the sum of the weights of all queries."""

    budget: int
    recent: int
    evict_every: int = 1
    heads: str = "uniform"
    name = "h2o"
    score_type = np.float32
    window = np.inf

    def vote(self, score, p, weights, t):
        return score + weights.sum(0)


@dataclass(frozen=True)
class Scissorhands(BudgetRule):
    """Scissorhands (arXiv 2305.17118): how many of the last queries found a row important."""

    budget: int
    window: int
    recent: int
    evict_every: int = 1
    heads: str = "uniform"
    name = "scissorhands"
    resets = True

    def vote(self, score, p, weights, t):
        return score + (weights >= 1 / t[:, None]).sum(0)


@dataclass(frozen=True)
class Tova(BudgetRule):
    """TOVA (arXiv 2401.06104): the weights of the last query."""

    budget: int
    evict_every: int = 1
    heads: str = "uniform"
    name = "tova"
    score_type = np.float32
    window, recent, resets = 1, 0, True

    def vote(self, score, p, weights, t):
        return score + weights.sum(0)


@dataclass(frozen=True)
class Kvzip(Rule):
    """KVzip (arXiv 2505.23416): the largest weight that a query of a replay gave.

    Rows from ``n_text`` on are the replay. It is taken back, and ``share`` of the rows of all heads stay.
    """

    n_text: int
    share: float
    name = "kvzip"
    score_type = np.float32
    evict_every, recent = 2**30, 0

    def text(self) -> str:
        return self.name

    def votes(self, p):
        return p >= self.n_text

    def vote(self, score, p, weights, t):
        return np.maximum(score, weights.max(0))

    def kept_by_heads(self, low, high, held, p, open_row):
        held = held & (np.arange(held.shape[1]) < self.n_text)
        safe = held & (np.arange(held.shape[1]) >= open_row)
        low, high = (np.where(safe, np.inf, score) for score in (low, high))
        n = int(self.share * self.n_text * len(held))
        return best_of_all(low, high, held, max(n, int(safe.sum())))


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


# ---- choice of chunks that may be empty ----


def choose_held(scores: np.ndarray, own: int, method: LongHeads, empty: np.ndarray) -> list[int]:
    """Return the chunks that a query in chunk ``own`` reads; those without rows are taken when nothing else is left."""
    if own < method.n_chunk:
        return list(range(own + 1))
    recent = range(own - method.n_recent, own + 1)
    order = by_score(np.where(empty[: len(scores)], -np.inf, scores), range(1, recent[0]))
    n_free = method.n_chunk - 1 - len(recent)
    chosen = order[: n_free - method.n_neighbor]
    chosen = chosen + neighbours(chosen, [i for i in order if not empty[i]], method.n_neighbor)
    rest = [i for i in order if i not in chosen]
    return sorted([0, *chosen, *rest[: n_free - len(chosen)], *recent])


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
    chunks : array ``[n_rows, n_head, k]`` or None
    doubts : list of positions after which a decision was not certain
    """

    out: np.ndarray
    held: np.ndarray
    before: np.ndarray
    scores: np.ndarray
    chunks: np.ndarray | None
    doubts: list[int]


Decide = Callable[[int, np.ndarray, np.ndarray], np.ndarray]


def moved(weights: np.ndarray, by: float) -> np.ndarray:
    """Return every weight as if the score of that row alone were larger by ``by``."""
    return weights * np.exp(by) / (1 + weights * np.expm1(by))


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

    def summarize(self) -> np.ndarray:
        """Return the representation of every complete chunk; no eviction changes it."""
        local = self.keys_at(np.arange(len(self.k)) % self.method.base.chunk_size)
        return summarize_chunks(self.q, local, self.values, self.method.base, self.rope, self.scale, self.softcap)

    def score_chunks(self, summaries: np.ndarray) -> np.ndarray:
        """Return how much every query wants every chunk, ``[n_rows, n_head, n_chunk]``."""
        base = self.method.base
        queries = rotated_queries(self.q.astype(np.float64), base, self.rope)
        return chunk_scores(queries, summaries, base, self.k.shape[1], self.scale)

    def choose(self, p: int, scores: np.ndarray, held: np.ndarray) -> np.ndarray:
        """Return the chunks ``[n_head, k]`` that the heads read at ``p``, given the scores ``[n_head, n_chunk]``."""
        base, ratio = self.method.base, self.q.shape[1] // self.k.shape[1]
        starts = np.arange(0, held.shape[1], base.chunk_size)
        empty = ~np.logical_or.reduceat(held, starts, axis=1)
        out = np.full((len(scores), base.n_chunk), UNUSED)
        for h in range(len(scores)):
            chunks = choose_held(scores[h], p // base.chunk_size, base, empty[h // ratio])
            out[h, : len(chunks)] = chunks
        return out

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
        return [self.method.base.segments(p, of_head[of_head != UNUSED]) for of_head in chunks]

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

    def run(self, summaries: np.ndarray | None = None, margin: float = 0.0, decide: Decide | None = None) -> Run:
        """Run all tokens, one by one.

        Parameters
        ----------
        summaries : array or None
            Summaries to choose from; None: those of ``summarize``.
        margin : float
            How far a score of attention may be off.
        decide : callable or None
            Called as ``decide(p, certain, possible)`` where the margin leaves it open; returns what is held.
        """
        rule, (n, n_head, _), n_head_kv = self.method.rule, self.q.shape, self.k.shape[1]
        chunked = isinstance(self.method.base, LongHeads)
        wanted = self.score_chunks(self.summarize() if summaries is None else summaries) if chunked else None
        held, scores = np.zeros((n_head_kv, n), dtype=bool), np.full((3, n_head_kv, n), rule.first_score)
        out, chunks, doubts = np.empty((n, n_head, self.v.shape[-1])), [], []
        before = held.copy()
        for p in range(n):
            held[:, p] = True
            if wanted is not None:
                chunks.append(self.choose(p, wanted[p], held))
            segs = self.segments(p, chunks[-1] if chunked else None)
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
        return Run(out, held, before, scores, np.stack(chunks) if chunked else None, doubts)
