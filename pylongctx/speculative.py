"""Drafts: tokens that are guessed, evaluated together, and kept as far as the model would have said them too."""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pylongctx._session import Session
from pylongctx.methods import Method


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
        for size in range(min(self.max_ngram_size, len(input_ids) - 1), 0, -1):
            windows = np.lib.stride_tricks.sliding_window_view(input_ids[:-1], size)
            places = np.flatnonzero((windows == input_ids[-size:]).all(axis=1))
            if len(places):
                start = places[-1] + size
                return input_ids[start : start + self.num_pred_tokens]
        return input_ids[:0]


class Drafting:
    """Evaluate tokens together with what a draft model guesses behind them.

    Parameters
    ----------
    session : Session
        Where they are evaluated.
    model : callable
        The draft model.
    """

    def __init__(self, session: Session, model: Any) -> None:
        self._session = session
        self._model = model
        self._tokens: list[int] = []  # guessed, evaluated, not said yet
        self._rows: list[NDArray[np.float32]] = []  # the logits after them

    def eval(self, tokens: NDArray[np.int32]) -> None:
        """Evaluate int32 [n] after the current tokens, unless they were guessed; the last logits are known then."""
        if self._tokens and tokens.tolist() == self._tokens[:1]:
            self._tokens.pop(0)
            self._session.settle(self._session.n_tokens + 1, self._rows.pop(0))
            return
        self._tokens, self._rows = [], []
        guess = self._guess(tokens) if len(tokens) == 1 and self._session.n_tokens else np.empty(0, np.int32)
        if not len(guess):
            self._session.eval(tokens)
            return
        rows = [row.copy() for part in self._session.eval_rows(np.concatenate([tokens, guess])) for row in part]
        self._session.settle(self._session.n_tokens - len(guess), rows[0])
        self._tokens, self._rows = guess.tolist(), rows[1:]

    def _guess(self, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        session = self._session
        known = np.concatenate([session.tokens, tokens])
        guess = session.model.check_tokens(np.asarray(self._model(known)).astype(np.int32), allow_empty=True)
        return guess[: session.context.n_ctx - len(known)]


def check_draft(draft_model: Any, method: Method | None) -> None:
    """Raise NotImplementedError when drafted tokens cannot be taken back: methods that evict change what they hold."""
    rules = [part.name for part in method.parts if part.role == "rule"] if method else []
    if draft_model is not None and rules:
        raise NotImplementedError(
            f"draft_model: {rules[0]} evicts rows by the queries that it sees, and a guess that is wrong could not be "
            "taken back; use a method without an eviction rule"
        )
