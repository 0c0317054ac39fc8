"""Comparison of two token sequences."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

MIN_AFTER_GAP = 32  # minimum tokens after the gap of turns that were dropped here
Gap = tuple[int, int]  # first token and end of a run


def longest_prefix(a: Sequence[int] | NDArray[Any], b: Sequence[int] | NDArray[Any]) -> int:
    """Return the length of the common prefix."""
    n = min(len(a), len(b))
    different = np.flatnonzero(np.asarray(a[:n]) != np.asarray(b[:n]))
    return int(different[0]) if len(different) else n


def find_gap(held: NDArray[np.int32], tokens: NDArray[np.int32], least: int = MIN_AFTER_GAP) -> Gap | None:
    """Find the run of held tokens that is missing from a text with the same tokens before and after it.

    Returns the first token and the end of the run with the most matching tokens after it; None if those are fewer than
    ``least``.

    Examples
    --------
    >>> import numpy as np
    >>> text = np.arange(100, dtype=np.int32)
    >>> find_gap(text, np.delete(text, slice(10, 50)))
    (10, 50)
    """
    first = longest_prefix(held, tokens)
    wanted = tokens[first : first + least]
    behind = held[first + 1 :]
    if len(wanted) < least or len(behind) < least:
        return None
    windows = np.lib.stride_tricks.sliding_window_view(behind, least)
    starts = np.flatnonzero(windows[:, 0] == wanted[0])
    starts = starts[(windows[starts] == wanted).all(1)]
    longest, end = 0, 0
    for start in starts.tolist():
        if len(behind) - start <= longest:
            break
        n = longest_prefix(behind[start:], tokens[first:])
        longest, end = max((longest, end), (n, first + 1 + start))
    return (first, end) if end else None


def find_gaps(held: NDArray[np.int32], tokens: NDArray[np.int32], least: int, most: int) -> tuple[list[Gap], int]:
    """Find the runs of held tokens that are missing from a text, each followed by at least ``least`` equal tokens.

    Returns the first ``most`` of them, each as it is when those before it have left, and how many tokens of the text
    are then held.

    Examples
    --------
    >>> import numpy as np
    >>> text = np.arange(100, dtype=np.int32)
    >>> find_gaps(text, np.delete(text, [*range(10, 30), *range(60, 70)]), least=8, most=2)
    ([(10, 30), (40, 50)], 70)
    """
    gaps: list[Gap] = []
    while len(gaps) < most and (gap := find_gap(held, tokens, least)) is not None:
        gaps.append(gap)
        held = np.delete(held, slice(*gap))
    return gaps, longest_prefix(held, tokens)
