"""TOVA: keep the keys that the last query attends to most."""

from dataclasses import dataclass

from pylongctx.methods.base import Method
from pylongctx.methods.checks import LIMIT, UNIFORM_OR_ADAPTIVE, check_int, check_word


@dataclass(frozen=True)
class Tova(Method):
    """Keep a budget of keys per layer and KV head: those that the last query before an eviction attends to most.

    TOVA, Token Omission Via Attention, Transformers are Multi-State RNNs, arXiv 2401.06104, section 3. The score of a
    key is the sum of that query's weights over the query heads that share it; the paper's is the mean over all heads of
    a layer, which drop the same tokens. No key is protected; of equal scores the newer one stays.

    Parameters
    ----------
    budget : int or None
        Keys that an eviction leaves; up to ``evict_every`` more are held until the next one. None: a quarter of the
        trained context.
    evict_every : int or None
        Tokens between two evictions, which follow the positions that complete a multiple of it. 1 is the paper's. None:
        a quarter of the budget, 256 at most.
    heads : str or None
        "adaptive": the KV heads of a layer share their budgets and keep their best keys together, and a fifth of its
        budget is each head's own (AdaKV, arXiv 2407.11550, with the safeguard of its section 4). None, "uniform": every
        head has its budget for itself.

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
