"""Speculative decoding: draft tokens are evaluated in one batch and kept up to the first mismatch."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pylongctx._lib import lib
from pylongctx.engine.context import Context
from pylongctx.methods import Method

DraftModel = Callable[[NDArray[np.int32]], NDArray[np.int32]]
Row = NDArray[np.float32]


class Drafting:
    """The drafts of one job.

    Parameters
    ----------
    model : callable
        The draft model.
    """

    def __init__(self, model: DraftModel) -> None:
        self._model = model
        self._tokens: list[int] = []  # drafted and evaluated, not accepted yet
        self._rows: list[Row] = []  # their logits

    def guess(self, tokens: NDArray[np.int32], most: int) -> NDArray[np.int32]:
        """Return the draft after int32 [n], at most ``most`` tokens."""
        return np.asarray(self._model(tokens)).astype(np.int32)[: max(most, 0)]

    def keep(self, tokens: NDArray[np.int32], rows: Row) -> None:
        """Store evaluated draft tokens and the logits after them, float32 [n, n_vocab]."""
        self._tokens, self._rows = tokens.tolist(), [row.copy() for row in rows]

    def accept(self, tokens: NDArray[np.int32]) -> Row | None:
        """Return the logits after int32 [n] if it is the draft token; None: it must be evaluated."""
        if tokens.tolist() == self._tokens[:1]:
            self._tokens.pop(0)
            return self._rows.pop(0)
        self.forget()
        return None

    def forget(self) -> None:
        """Discard the draft, since the tokens before it have changed."""
        self._tokens, self._rows = [], []


def check_draft(draft_model: DraftModel | None, method: Method | None, context: Context | None = None) -> None:
    """Raise NotImplementedError if draft tokens cannot be undone: with eviction or recurrent states."""
    if draft_model is not None and context is not None and context.rollback == lib.LCTX_ROLLBACK_NONE:
        raise NotImplementedError(
            "draft_model: the recurrent layers of this model cannot undo a wrong draft; the text would be "
            "evaluated again from its last checkpoint, which costs more than drafts save"
        )
    rules = [part.name for part in method.parts if part.role == "rule"] if method else []
    if draft_model is not None and rules:
        raise NotImplementedError(
            f"draft_model: {rules[0]} evicts KV entries by the queries that it sees, so a wrong draft cannot be "
            "undone; use a method without an eviction rule"
        )
