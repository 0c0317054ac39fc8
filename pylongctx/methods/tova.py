"""TOVA: keep the keys that the last query attends to most."""

from dataclasses import dataclass

from pylongctx.methods.budget import BudgetRule


@dataclass(frozen=True)
class Tova(BudgetRule):
    """Keep a budget of keys per layer and KV head: those that the last query before an eviction attends to most.

    TOVA, Token Omission Via Attention, Transformers are Multi-State RNNs, arXiv 2401.06104, section 3. The score of a
    key is the sum of that query's weights over the query heads that share it; in the paper it is the mean over all
    heads of a layer, which evict the same tokens. No key is protected; on ties the newer key stays.

    Parameters
    ----------
    budget, evict_every, heads
        See ``BudgetRule``. ``evict_every=1`` is the paper's setting.

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
