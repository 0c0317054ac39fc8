"""Draft models: what guesses the next tokens of a text, see ``Llama(draft_model=...)``."""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray


class LlamaDraftModel(ABC):
    """What guesses how a text goes on.

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
        """Return the tokens that may follow int32 [n], none when it has no guess."""


class LlamaPromptLookupDecoding(LlamaDraftModel):
    """Guess that the text goes on as it did where its last tokens stood before: the last such place.

    Parameters
    ----------
    max_ngram_size : int
        Most last tokens to look for; fewer when they are nowhere.
    num_pred_tokens : int
        Most tokens to guess.

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
        """Return what followed the last tokens before."""
        return self.find_candidate_pred_tokens(input_ids, self.max_ngram_size, self.num_pred_tokens)

    @staticmethod
    def find_candidate_pred_tokens(
        input_ids: NDArray[np.int32], max_ngram_size: int, num_pred_tokens: int
    ) -> NDArray[np.int32]:
        """Return what followed the last tokens before; the parameters are those of the class."""
        for size in range(min(max_ngram_size, len(input_ids) - 1), 0, -1):
            windows = np.lib.stride_tricks.sliding_window_view(input_ids[:-1], size)
            places = np.flatnonzero((windows == input_ids[-size:]).all(axis=1))
            if len(places):
                start = places[-1] + size
                return input_ids[start : start + num_pred_tokens]
        return input_ids[:0]
