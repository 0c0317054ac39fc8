"""TOVA: keep the keys that the last query attends to most."""

from dataclasses import dataclass

from pylongctx.methods.base import Method
from pylongctx.methods.checks import LIMIT, UNIFORM_OR_ADAPTIVE, check_int, check_word


@dataclass(frozen=True)
class Tova(Method):
    """Keep a budget of keys per layer and KV head: those that the last query before an eviction attends to most.

    TOVA, Token Omission Via Attention, Transformers are Multi-State RNNs, arXiv 2401.06104, section 3. The score of a
    key is the sum of that query's weights over the query heads that share it; in the paper it is the mean over all
    heads of a layer, which evict the same tokens. No key is protected; on ties the newer key stays.

    Parameters
    ----------
    budget : int or None
        Keys left by an eviction; up to ``evict_every`` more are held until the next one. None: a quarter of the
        trained context.
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
        When an option is not an integer, too small or larger than 2**30.

    Examples
    --------
    >>> str(Tova(budget=1024))
    'tova,budget=1024'
    """

    budget: int | None = None
    evict_every: int | None = None
    heads: str | None = None

    name = "tova"
    role = "rule"
    words = {"heads": UNIFORM_OR_ADAPTIVE}

    def __post_init__(self) -> None:
        check_int("budget", self.budget, 1, LIMIT)
        check_int("evict_every", self.evict_every, 1, LIMIT)
        check_word("heads", self.heads, UNIFORM_OR_ADAPTIVE)
