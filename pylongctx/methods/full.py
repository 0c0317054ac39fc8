"""Full attention."""

from dataclasses import dataclass

from pylongctx.methods.base import Method


@dataclass(frozen=True)
class Full(Method):
    """Every query reads every earlier token at its true position: the model as it was trained.

    Examples
    --------
    >>> str(Full())
    'full'
    """

    name = "full"
    role = "base"
    reads_all = True
