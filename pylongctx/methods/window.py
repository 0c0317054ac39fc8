"""Attention sinks and a sliding window."""

from dataclasses import dataclass

from pylongctx.methods.base import Method
from pylongctx.methods.checks import check_given, check_int


@dataclass(frozen=True)
class Window(Method):
    """Read the first tokens (sinks) and the last ones, evict the middle.

    StreamingLLM, arXiv 2309.17453, and LM-Infinite, arXiv 2308.16137. Fluent at any length, but blind to tokens
    outside the window: the baseline for long-context methods.

    Parameters
    ----------
    n_sink : int
        Number of first tokens that are kept.
    window : int or None
        Number of last tokens that are kept, including the query's own key. None: chosen from the trained context.

    Raises
    ------
    TypeError, ValueError
        When an option is not an integer or is too small.

    Examples
    --------
    >>> str(Window(n_sink=4, window=400))
    'window,n_sink=4,window=400'
    """

    n_sink: int = 4
    window: int | None = None

    name = "window"

    def __post_init__(self) -> None:
        check_given("n_sink", self.n_sink)
        check_int("n_sink", self.n_sink, 0)
        check_int("window", self.window, 1)
