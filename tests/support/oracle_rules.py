"""The eviction rules in numpy: which queries vote, what a vote is, which rows stay; and what each is tested with.

``oracle_evict`` runs them, ``cases_evict`` combines them with bases.
"""

from dataclasses import dataclass, fields

import numpy as np

Kept = tuple[np.ndarray, np.ndarray]  # certain, possible


def border(p: int, every: int) -> int:
    """Return the first position at ``p`` or later after which an eviction follows."""
    return (p // every + 1) * every - 1


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


def best_with_own(low: np.ndarray, high: np.ndarray, held: np.ndarray, safe: np.ndarray, n: int, n_own: int) -> tuple:
    """Return which rows of all heads are among the ``n`` best, where ``n_own`` of each head and the safe ones stay."""
    low, high = (np.where(safe, np.inf, score) for score in (low, high))
    own = np.zeros((2, *held.shape), dtype=bool)  # certain, possible
    for g, here in enumerate(held):
        rows = np.flatnonzero(here)
        own[:, g, rows] = best(low[g, rows], high[g, rows], max(n_own, int(safe[g].sum())))
    low, high = (np.where(mine, np.inf, score) for mine, score in zip(own, (low, high), strict=True))
    return best_of_all(low, high, held, max(n, int((own[0] | safe).sum())))


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
        return best_with_own(low, high, held, safe, len(held) * self.budget, self.budget // 5)

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

    Rows from ``n_text`` on are the replay. It is taken back, and ``share`` of the rows of all heads stay, of each head
    at least a fifth of an equal part.
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
        equal = self.share * self.n_text
        return best_with_own(low, high, held, safe, int(equal * len(held)), int(equal) // 5)


RULES = {  # on random rows each of them drops many and keeps many
    "corm": Corm(16, 16, 1),
    "corm-every16": Corm(12, 24, 16),
    "corm-unprotected": Corm(24, 0, 7),
    "h2o": H2O(96, 32, 8),
    "h2o-every": H2O(100, 7, 1),
    "scissorhands": Scissorhands(80, 9, 16, 12),
    "tova": Tova(64, 5),
    "h2o-adaptive": H2O(96, 32, 8, "adaptive"),
    "kvzip": Kvzip(190, 0.4),
}
EDGES = {
    "window-beyond-the-end": Corm(300, 8, 1),
    "recent-beyond-the-end": Corm(2, 257, 1),
    "window-one": Corm(1, 40, 1),
    "window-one-unprotected": Corm(1, 0, 1),
    "every-beyond-the-end": Corm(8, 8, 258),
    "every-at-the-end": Corm(8, 8, 257),
    "every-wider-than-window": Corm(5, 3, 50),
    "every-does-not-divide": Corm(20, 10, 13),
    "pages": Corm(16, 64, 64),
    "budget-beyond-the-end": H2O(300, 8, 4),
    "budget-is-nearly-recent": H2O(40, 39, 4),
    "budget-one": H2O(1, 0, 1),
    "tova-one": Tova(1, 1),
    "scissorhands-window-one": Scissorhands(50, 1, 10, 10),
    "scissorhands-every-one": Scissorhands(50, 1, 10, 1),
    "adaptive-scissorhands": Scissorhands(80, 9, 16, 12, "adaptive"),
    "adaptive-tova": Tova(64, 5, "adaptive"),
    "adaptive-budget-beyond-the-end": H2O(300, 8, 4, "adaptive"),
    "adaptive-budget-is-nearly-recent": H2O(40, 39, 4, "adaptive"),
    "adaptive-budget-one": H2O(1, 0, 1, "adaptive"),
    "kvzip-all": Kvzip(128, 1.0),
    "kvzip-nothing": Kvzip(129, 1e-9),
    "kvzip-one-row": Kvzip(1, 0.9),
    "kvzip-one-query": Kvzip(256, 0.3),
}
MODEL_RULES = (  # of whole models, on a GPU
    "corm,window=64,recent=64,evict_every=64",
    "h2o,budget=192,recent=32,evict_every=32",
    "tova,budget=192,evict_every=32",
    "h2o,budget=192,recent=32,evict_every=32,heads=adaptive",
    "kvzip",
    "scissorhands,budget=192",
)
