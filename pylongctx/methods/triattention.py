"""TriAttention: keep the keys that the mean query will find important."""

from dataclasses import dataclass

from pylongctx.methods.base import Method
from pylongctx.methods.checks import LIMIT, UNIFORM_OR_ADAPTIVE, check_below, check_int, check_word


@dataclass(frozen=True)
class TriAttention(Method):
    """Keep a budget of keys per layer and KV head: those that the mean of all queries so far expects to need.

    TriAttention, arXiv 2604.04921: before they are rotated, the queries of a head gather around a center. The score of
    a key is what a query like that center gives it, as a mean over the distances 1, 2, 4 to 65536 from which later
    queries look, and a term for how far queries stray from the center. It is taken in standard deviations over the keys
    of a head, and of the query heads that share a key the largest counts; of equal scores the newer key stays. The
    paper measures centers beforehand, on other texts. Here they are means over the sequence itself, so no calibration
    is needed. A model whose queries are not rotated last is refused, and so is a base other than ``full``.

    Parameters
    ----------
    budget : int or None
        Keys that an eviction leaves; up to ``evict_every`` more are held until the next one. None: a quarter of the
        trained context.
    recent : int or None
        Newest keys that stay whatever their score: less than ``budget``. None: 128, as in the paper, a quarter of the
        budget at most.
    evict_every : int or None
        Tokens between two evictions, which follow the positions that complete a multiple of it. None: 128, as in the
        paper, a quarter of the budget at most.
    heads : str or None
        "adaptive": the KV heads of a layer share their budgets and keep their best keys together, and a fifth of its
        budget is each head's own (AdaKV, arXiv 2407.11550, with the safeguard of its section 4). None, "uniform": every
        head has its budget for itself.

    Raises
    ------
    TypeError, ValueError
        When an option is not an integer, too small or larger than 2**30, or ``recent`` not below ``budget``.

    Examples
    --------
    >>> str(TriAttention(budget=1024))
    'triattention,budget=1024'
    """

    budget: int | None = None
    recent: int | None = None
    evict_every: int | None = None
    heads: str | None = None

    name = "triattention"
    role = "rule"
    words = {"heads": UNIFORM_OR_ADAPTIVE}

    def __post_init__(self) -> None:
        check_int("budget", self.budget, 1, LIMIT)
        check_int("recent", self.recent, 0, LIMIT)
        check_int("evict_every", self.evict_every, 1, LIMIT)
        check_word("heads", self.heads, UNIFORM_OR_ADAPTIVE)
        check_below("recent", self.recent, "budget", self.budget)
