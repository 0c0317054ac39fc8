"""CORM: evict the keys that no recent query found important."""

from dataclasses import dataclass

from pylongctx.methods.base import Method
from pylongctx.methods.checks import LIMIT, check_given, check_int


@dataclass(frozen=True)
class Corm(Method):
    """Evict the keys that no recent query found important, separately in every layer and KV head, without a budget.

    CORM, Sequence can Secretly Tell You What to Discard, arXiv 2404.15949, section 4.2, algorithm 1. A key is important
    (definition 3.1) to a query whose segments span t tokens, including evicted ones, when its weight is at least 1/t;
    with grouped heads, when it is for any of the query heads that share it. Alone it reads like full attention;
    ``SelfExtend() + Corm()`` and ``LongHeads() + Corm()`` read like their base.

    Parameters
    ----------
    window : int
        Number of last queries to consider: a key is evicted when none of them found it important; nothing
        is evicted before that many were seen.
    recent : int
        Number of newest keys that are never evicted; 0 protects none.
    evict_every : int or None
        Tokens between two evictions, which happen at multiples of it, no matter how a prompt is split
        into batches. 1 is algorithm 1, token by token. None: ``window``, but at least 64, by measurement.

    Raises
    ------
    TypeError, ValueError
        When an option is not an integer, too small, or larger than 2**30.

    Examples
    --------
    >>> str(Corm(window=128, recent=128))
    'corm,window=128,recent=128'
    """

    window: int = 256
    recent: int = 256
    evict_every: int | None = None

    name = "corm"
    role = "rule"

    def __post_init__(self) -> None:
        check_given("window", self.window)
        check_given("recent", self.recent)
        check_int("window", self.window, 1, LIMIT)
        check_int("recent", self.recent, 0, LIMIT)
        check_int("evict_every", self.evict_every, 1, LIMIT)
