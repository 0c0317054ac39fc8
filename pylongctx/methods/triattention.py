"""TriAttention: keep the keys that an average query will find important."""

from dataclasses import dataclass

from pylongctx.methods.base import Method
from pylongctx.methods.checks import LIMIT, UNIFORM_OR_ADAPTIVE, check_below, check_int, check_word


@dataclass(frozen=True)
class TriAttention(Method):
    """Keep a budget of keys per layer and KV head: those that matter most to the mean of all queries so far.

    TriAttention, arXiv 2604.04921: before rotation, the queries of a head cluster around a center. The score of a key
    is the attention logit of that center, averaged over the distances 1, 2, 4 to 65536 of later queries, plus a term
    for the spread of queries around the center. Scores are normalized to standard deviations over the keys of a head,
    and the maximum over the query heads that share a key counts; on ties the newer key stays. The paper measures
    centers in advance on other texts. Here they are means over the sequence itself, so no calibration is needed. Models
    whose queries are not rotated last are refused, and so are bases other than ``full``.

    Parameters
    ----------
    budget : int or None
        Keys left by an eviction; up to ``evict_every`` more are held until the next one. None: a quarter of the
        trained context.
    recent : int or None
        Number of newest keys that are never evicted, less than ``budget``. None: 128, as in the paper, but at most a
        quarter of the budget.
    evict_every : int or None
        Tokens between two evictions, which happen at multiples of it. None: 128, as in the paper, but at most a quarter
        of the budget.
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
