"""Scissorhands: keep the newest keys and those that were important most often."""

from dataclasses import dataclass

from pylongctx.methods.base import Method
from pylongctx.methods.checks import LIMIT, UNIFORM_OR_ADAPTIVE, check_below, check_int, check_word


@dataclass(frozen=True)
class Scissorhands(Method):
    """Keep a budget of keys per layer and KV head: the newest ones, and those that were recently important most often.

    Scissorhands, arXiv 2305.17118, section 4.1, algorithms 1 and 2. The score of a key counts how often its weight was
    at least the mean one, among the last ``window`` queries before an eviction and the query heads that share it; the
    mean is 1/t for a query whose segments span t tokens, including evicted ones. Each eviction resets the scores to 0;
    on ties the newer key stays.

    Parameters
    ----------
    budget : int or None
        Keys left by an eviction; up to ``evict_every`` more are held until the next one. None: a quarter of the
        trained context.
    window : int or None
        Number of queries before an eviction that count, at most ``evict_every``. None: ``evict_every``, which is all
        since the last eviction.
    recent : int or None
        Number of newest keys that are never evicted, less than ``budget``. None: a quarter of the budget.
    evict_every : int or None
        Tokens between two evictions, which happen at multiples of it. None: a quarter of the budget, but at most 256.
    heads : str or None
        "adaptive": the KV heads of a layer pool their budgets for their best keys, and each head keeps at least a fifth
        of its budget (AdaKV, arXiv 2407.11550, with the safeguard of its section 4). None, "uniform": every head has
        its own budget.

    Raises
    ------
    TypeError, ValueError
        When an option is not an integer, too small or larger than 2**30, ``recent`` not below ``budget``, or ``window``
        above ``evict_every``.

    Examples
    --------
    >>> str(Scissorhands(budget=1024))
    'scissorhands,budget=1024'
    """

    budget: int | None = None
    window: int | None = None
    recent: int | None = None
    evict_every: int | None = None
    heads: str | None = None

    name = "scissorhands"
    role = "rule"
    words = {"heads": UNIFORM_OR_ADAPTIVE}

    def __post_init__(self) -> None:
        check_int("budget", self.budget, 1, LIMIT)
        check_int("window", self.window, 1, LIMIT)
        check_int("recent", self.recent, 0, LIMIT)
        check_int("evict_every", self.evict_every, 1, LIMIT)
        check_word("heads", self.heads, UNIFORM_OR_ADAPTIVE)
        check_below("recent", self.recent, "budget", self.budget)
        if self.window is not None and self.evict_every is not None and self.window > self.evict_every:
            raise ValueError(f"window must be at most evict_every ({self.evict_every}), not {self.window}")
