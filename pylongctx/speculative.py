"""Draft models, which guess the next tokens of a text, see ``Llama(draft_model=...)``."""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray


class LlamaDraftModel(ABC):
    """The base class of draft models.

    Examples
    --------
    >>> class Repeat(LlamaDraftModel):
    ...     def __call__(self, input_ids, /, **kwargs):
    ...         return input_ids[-1:]
    >>> Repeat()(np.array([4, 5, 6], np.int32))
    array([6], dtype=int32)
    """

    @abstractmethod
    def __call__(self, input_ids: NDArray[np.int32], /, **kwargs: Any) -> NDArray[np.int32]:
        """Return the draft tokens after int32 [n], empty for no draft."""


class LlamaPromptLookupDecoding(LlamaDraftModel):
    """Drafts the tokens that followed the most recent earlier occurrence of the last tokens.

    Parameters
    ----------
    max_ngram_size : int
        Maximum number of last tokens to search for; fewer if they are not found.
    num_pred_tokens : int
        Maximum number of draft tokens.

    Examples
    --------
    >>> guess = LlamaPromptLookupDecoding(max_ngram_size=2, num_pred_tokens=3)
    >>> guess(np.array([7, 8, 9, 1, 2, 7, 8], np.int32))
    array([9, 1, 2], dtype=int32)
    """

    def __init__(self, max_ngram_size: int = 2, num_pred_tokens: int = 10) -> None:
        self.max_ngram_size = max_ngram_size
        self.num_pred_tokens = num_pred_tokens

    def __call__(self, input_ids: NDArray[np.int32], /, **kwargs: Any) -> NDArray[np.int32]:
        """Return the tokens that followed the last tokens before."""
        return self.find_candidate_pred_tokens(input_ids, self.max_ngram_size, self.num_pred_tokens)

    @staticmethod
    def find_candidate_pred_tokens(
        input_ids: NDArray[np.int32], max_ngram_size: int, num_pred_tokens: int
    ) -> NDArray[np.int32]:
        """Return the tokens that followed the last tokens before; takes the parameters of the class."""
        for size in range(min(max_ngram_size, len(input_ids) - 1), 0, -1):
            windows = np.lib.stride_tricks.sliding_window_view(input_ids[:-1], size)
            places = np.flatnonzero((windows == input_ids[-size:]).all(axis=1))
            if len(places):
                start = places[-1] + size
                return input_ids[start : start + num_pred_tokens]
        return input_ids[:0]
