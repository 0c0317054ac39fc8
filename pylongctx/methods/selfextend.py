"""SelfExtend: exact distances nearby, grouped distances far away."""

from dataclasses import dataclass

from pylongctx.methods.base import Method
from pylongctx.methods.checks import check_int


@dataclass(frozen=True)
class SelfExtend(Method):
    """Read every token; beyond the neighbor window, distances are divided by the group size.

    LLM Maybe LongLM: SelfExtend, arXiv 2401.01325, algorithm 1. With automatic options, nothing is remapped up to
    the trained context, and the result is that of full attention.

    Parameters
    ----------
    group_size : int or None
        Far positions are floor-divided by it. None: the smallest that fits n_ctx by the paper's rule (eq. 5).
    neighbor_window : int or None
        Distances below it stay exact. None: chosen from the trained context.

    Raises
    ------
    TypeError, ValueError
        When an option is not an integer or is too small.

    Examples
    --------
    >>> from pylongctx import Llama
    >>> with Llama("model.gguf", method=SelfExtend(), n_ctx=4096, verbose=False) as chosen:
    ...     chosen.method
    SelfExtend(group_size=32, neighbor_window=128)
    """

    group_size: int | None = None
    neighbor_window: int | None = None

    name = "selfextend"
    role = "base"
    reads_all = True

    def __post_init__(self) -> None:
        check_int("group_size", self.group_size, 1)
        check_int("neighbor_window", self.neighbor_window, 1)
