"""Drafts from the tokens of a text."""

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pylongctx.speculative import LlamaDraftModel

Tokens = NDArray[np.int32]


class NgramDraft(LlamaDraftModel):
    """Drafts the tokens that followed an earlier occurrence of the last ``size_n`` tokens, as llama.cpp's ngram kinds.

    The length of drafts is adaptive, up to ``size_m`` tokens.

    Parameters
    ----------
    size_n : int
        Tokens that must be equal.
    size_m : int
        Maximum number of draft tokens.
    min_hits : int
        Minimum number of earlier occurrences.
    most_common : bool
        Draft the continuation that followed most often, and the latest of several; else the latest one.

    Raises
    ------
    ValueError
        When a size is less than 1.

    Examples
    --------
    >>> guess = NgramDraft(size_n=2, size_m=3)
    >>> guess(np.array([7, 8, 9, 1, 2, 7, 8], np.int32))
    array([9, 1, 2], dtype=int32)
    >>> guess(np.array([7, 8, 9, 1, 2, 7, 8], np.int32), n_max=1)
    array([9], dtype=int32)
    """

    adaptive = True

    def __init__(self, size_n: int = 12, size_m: int = 48, min_hits: int = 1, most_common: bool = False) -> None:
        for name, value in (("size_n", size_n), ("size_m", size_m), ("min_hits", min_hits)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        self.size_n, self.size_m, self.min_hits, self.most_common = size_n, size_m, min_hits, most_common

    def __call__(self, input_ids: Tokens, /, n_max: int | None = None, **kwargs: Any) -> Tokens:
        """Return at most ``n_max`` tokens that followed the last ones before."""
        n, most = len(input_ids), min(self.size_m, n_max if n_max is not None else self.size_m)
        if n <= self.size_n:
            return input_ids[:0]
        ends = np.flatnonzero(input_ids[self.size_n - 1 : -1] == input_ids[-1]) + self.size_n  # of earlier occurrences
        for back in range(1, self.size_n):
            ends = ends[input_ids[ends - 1 - back] == input_ids[-1 - back]]
        if len(ends) < self.min_hits:
            return input_ids[:0]
        parts = [input_ids[end : end + most] for end in ends]
        if not self.most_common:
            return parts[-1]
        counts = Counter(part.tobytes() for part in parts)
        return max(reversed(parts), key=lambda part: counts[part.tobytes()])
