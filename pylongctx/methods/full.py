"""Full attention."""

from dataclasses import dataclass

from pylongctx.methods.base import Method
from pylongctx.methods.checks import check_int


@dataclass(frozen=True)
class Full(Method):
    """Every query reads every earlier token at its true position: the model as it was trained.

    Parameters
    ----------
    spans : int or None
        Of how many pieces a text may consist that were read apart (``Llama.read``), or that stayed when others left
        (``overflow="evict_middle"``). Each is seen from its true distance. None: of one.

    Raises
    ------
    TypeError, ValueError
        When an option is not an integer or is too small.

    Examples
    --------
    >>> str(Full()), str(Full(spans=5))
    ('full', 'full,spans=5')
    """

    spans: int | None = None

    name = "full"
    role = "base"
    reads_all = True

    def __post_init__(self) -> None:
        check_int("spans", self.spans, 1)
