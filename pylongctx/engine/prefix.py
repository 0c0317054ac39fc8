"""Comparison of two token sequences."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

MIN_AFTER_GAP = 32  # minimum tokens after a gap


def longest_prefix(a: Sequence[int] | NDArray[Any], b: Sequence[int] | NDArray[Any]) -> int:
    """Return the length of the common prefix."""
    n = min(len(a), len(b))
    different = np.flatnonzero(np.asarray(a[:n]) != np.asarray(b[:n]))
    return int(different[0]) if len(different) else n


def find_gap(held: NDArray[np.int32], tokens: NDArray[np.int32]) -> tuple[int, int] | None:
    """Find the run of held tokens that is missing from a text with the same tokens before and after it.

    Returns the first token and the end of the run with the most matching tokens after it; None if those are too few.

    Examples
    --------
    >>> import numpy as np
    >>> text = np.arange(100, dtype=np.int32)
    >>> find_gap(text, np.delete(text, slice(10, 50)))
    (10, 50)
    """
    first = longest_prefix(held, tokens)
    wanted = tokens[first : first + MIN_AFTER_GAP]
    behind = held[first + 1 :]
    if len(wanted) < MIN_AFTER_GAP or len(behind) < MIN_AFTER_GAP:
        return None
    windows = np.lib.stride_tricks.sliding_window_view(behind, MIN_AFTER_GAP)
    starts = np.flatnonzero(windows[:, 0] == wanted[0])
    starts = starts[(windows[starts] == wanted).all(1)]
    longest, end = 0, 0
    for start in starts.tolist():
        if len(behind) - start <= longest:
            break
        n = longest_prefix(behind[start:], tokens[first:])
        longest, end = max((longest, end), (n, first + 1 + start))
    return (first, end) if end else None
