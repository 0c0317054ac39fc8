"""CORM: forget the keys that no recent query found important."""

from dataclasses import dataclass

from pylongctx.methods.base import Method
from pylongctx.methods.checks import LIMIT, check_given, check_int


@dataclass(frozen=True)
class Corm(Method):
    """Forget the keys that no recent query found important, in every layer and KV head by itself: no budget to set.

    CORM, Sequence can Secretly Tell You What to Discard, arXiv 2404.15949, section 4.2, algorithm 1. A key is important
    (definition 3.1) to a query whose segments span t tokens, forgotten ones counted, when its weight is at least 1/t;
    with grouped heads, when it is for any of the query heads that share it. By itself it reads as full attention does;
    ``SelfExtend() + Corm()`` and ``LongHeads() + Corm()`` read as their base does.

    Parameters
    ----------
    window : int
        Queries that are looked back at: a key leaves when none of the last ``window`` ones found it important, and
        nothing leaves before that many were seen.
    recent : int
        Newest keys that always stay; 0 protects none.
    evict_every : int or None
        Tokens between two evictions, which follow the positions that complete a multiple of it, however a prompt is cut
        into batches. 1 is algorithm 1 token by token. None: ``window``, 64 at least, by measurement.

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
