"""Scissorhands: keep the newest keys and those that were important most often."""

from dataclasses import dataclass

from pylongctx.methods.budget import BudgetRule


@dataclass(frozen=True)
class Scissorhands(BudgetRule):
    """Keep a budget of keys per layer and KV head: the newest ones, and those that were recently important most often.

    Scissorhands, arXiv 2305.17118, section 4.1, algorithms 1 and 2. The score of a key counts how often its weight was
    at least the mean one, among the last ``window`` queries before an eviction and the query heads that share it; the
    mean is 1/t for a query whose segments span t tokens, including evicted ones. Each eviction resets the scores to 0;
    on ties the newer key stays.

    Parameters
    ----------
    budget, recent, evict_every, heads
        See ``BudgetRule``.
    window : int or None
        Number of queries before an eviction that count, at most ``evict_every``. None: ``evict_every``, which is all
        since the last eviction.

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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is not None and self.evict_every is not None and self.window > self.evict_every:
            raise ValueError(f"window must be at most evict_every ({self.evict_every}), not {self.window}")
