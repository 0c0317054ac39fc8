"""H2O: keep the newest keys and the heavy hitters."""

from dataclasses import dataclass

from pylongctx.methods.budget import BudgetRule


@dataclass(frozen=True)
class H2O(BudgetRule):
    """Keep a budget of keys per layer and KV head: the newest ones, and those with the most accumulated attention.

    H2O: Heavy-Hitter Oracle, arXiv 2306.14048, section 4.1, algorithm 1. The score of a key is the sum of its weights
    over all queries since it was added, and over the query heads that share it; on ties the newer key stays.

    Parameters
    ----------
    budget, recent, evict_every, heads
        See ``BudgetRule``. ``evict_every=1`` is the paper's setting.

    Raises
    ------
    TypeError, ValueError
        When an option is not an integer, too small or larger than 2**30, or ``recent`` not below ``budget``.

    Examples
    --------
    >>> str(H2O(budget=1024, recent=256))
    'h2o,budget=1024,recent=256'
    """

    budget: int | None = None
    recent: int | None = None
    evict_every: int | None = None
    heads: str | None = None

    name = "h2o"
