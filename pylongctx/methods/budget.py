"""The base class of rules that keep a budget of keys."""

from dataclasses import dataclass, fields

from pylongctx.methods.base import Method
from pylongctx.methods.checks import LIMIT, UNIFORM_OR_ADAPTIVE, check_below, check_int, check_word

MINIMUM = {"budget": 1, "recent": 0, "window": 1, "evict_every": 1}


@dataclass(frozen=True)
class BudgetRule(Method):
    """The base of rules that keep a budget of keys per layer and KV head; a rule declares the options that it has.

    Attributes
    ----------
    budget : int or None
        Keys left by an eviction; up to ``evict_every`` more are held until the next one. None: a quarter of the
        trained context.
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
        When an option is not an integer, too small or larger than 2**30, or ``recent`` not below ``budget``.

    Examples
    --------
    >>> from pylongctx import H2O
    >>> isinstance(H2O(budget=1024), BudgetRule)
    True
    """

    role = "rule"
    words = {"heads": UNIFORM_OR_ADAPTIVE}

    def __post_init__(self) -> None:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in given.items():
            if name in self.words:
                check_word(name, value, self.words[name])
            else:
                check_int(name, value, MINIMUM[name], LIMIT)
        check_below("recent", given.get("recent"), "budget", given["budget"])
