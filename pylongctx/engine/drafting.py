"""Drafts: tokens that are guessed, evaluated together, and kept as far as the model chooses them too."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pylongctx._lib import lib
from pylongctx.engine.context import Context
from pylongctx.methods import Method

DraftModel = Callable[[NDArray[np.int32]], NDArray[np.int32]]
Row = NDArray[np.float32]


class Drafting:
    """The guesses of one job.

    Parameters
    ----------
    model : callable
        The draft model.
    """

    def __init__(self, model: DraftModel) -> None:
        self._model = model
        self._tokens: list[int] = []  # guessed and evaluated, not chosen yet
        self._rows: list[Row] = []  # the logits after them

    def guess(self, tokens: NDArray[np.int32], most: int) -> NDArray[np.int32]:
        """Return what the model guesses after int32 [n], at most ``most`` tokens."""
        return np.asarray(self._model(tokens)).astype(np.int32)[: max(most, 0)]

    def keep(self, tokens: NDArray[np.int32], rows: Row) -> None:
        """Remember tokens that were evaluated, and the logits after them, float32 [n, n_vocab]."""
        self._tokens, self._rows = tokens.tolist(), [row.copy() for row in rows]

    def accept(self, tokens: NDArray[np.int32]) -> Row | None:
        """Return the logits after int32 [n] if they are the token that was guessed; None: they must be evaluated."""
        if tokens.tolist() == self._tokens[:1]:
            self._tokens.pop(0)
            return self._rows.pop(0)
        self.forget()
        return None

    def forget(self) -> None:
        """Forget what was guessed: the tokens before it have changed."""
        self._tokens, self._rows = [], []


def check_draft(draft_model: DraftModel | None, method: Method | None, context: Context | None = None) -> None:
    """Raise NotImplementedError when drafted tokens cannot be taken back: evicted rows, recurrent states."""
    if draft_model is not None and context is not None and context.rollback == lib.LCTX_ROLLBACK_NONE:
        raise NotImplementedError(
            "draft_model: the recurrent layers of this model cannot take back a guess that is wrong; the text would be "
            "evaluated again from its last checkpoint, which costs more than guesses save"
        )
    rules = [part.name for part in method.parts if part.role == "rule"] if method else []
    if draft_model is not None and rules:
        raise NotImplementedError(
            f"draft_model: {rules[0]} evicts rows by the queries that it sees, and a guess that is wrong could not be "
            "taken back; use a method without an eviction rule"
        )
