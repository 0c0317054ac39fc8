"""H2O: keep the newest keys and the heavy hitters."""

from dataclasses import dataclass

from pylongctx.methods.base import Method
from pylongctx.methods.checks import LIMIT, UNIFORM_OR_ADAPTIVE, check_below, check_int, check_word


@dataclass(frozen=True)
class H2O(Method):
    """Keep a budget of keys per layer and KV head: the newest ones, and those with the most accumulated attention.

    H2O: Heavy-Hitter Oracle, arXiv 2306.14048, section 4.1, algorithm 1. The score of a key is the sum of its weights
    over all queries since it was added, and over the query heads that share it; on ties the newer key stays.

    Parameters
    ----------
    budget : int or None
        Keys left by an eviction; up to ``evict_every`` more are held until the next one. None: a quarter of the
        trained context.
    recent : int or None
        Number of newest keys that are never evicted, less than ``budget``. None: a quarter of the budget.
    evict_every : int or None
        Tokens between two evictions, which happen at multiples of it. 1 is the paper's setting. None:
        a quarter of the budget, but at most 256.
    heads : str or None
        "adaptive": the KV heads of a layer pool their budgets for their best keys, and each head keeps at least a fifth
        of its budget (AdaKV, arXiv 2407.11550, with the safeguard of its section 4). None, "uniform": every head has
        its own budget.

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
    role = "rule"
    words = {"heads": UNIFORM_OR_ADAPTIVE}

    def __post_init__(self) -> None:
        check_int("budget", self.budget, 1, LIMIT)
        check_int("recent", self.recent, 0, LIMIT)
        check_int("evict_every", self.evict_every, 1, LIMIT)
        check_word("heads", self.heads, UNIFORM_OR_ADAPTIVE)
        check_below("recent", self.recent, "budget", self.budget)
