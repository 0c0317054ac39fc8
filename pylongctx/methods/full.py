"""Full attention."""

from dataclasses import dataclass

from pylongctx.methods.base import Method
from pylongctx.methods.checks import check_int


@dataclass(frozen=True)
class Full(Method):
    """Every query reads all earlier tokens at their true positions, as the model was trained.

    Parameters
    ----------
    spans : int or None
        Maximum number of pieces of a text that were prefilled separately (``Llama.read``) or remained after an eviction
        (``overflow="evict_middle"``). Each is seen at its true distance. None: one.

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
