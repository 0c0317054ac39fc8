"""Drafts: tokens that are guessed, evaluated together, and kept as far as the model would have said them too."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pylongctx._lib import lib
from pylongctx.engine.context import Context
from pylongctx.engine.session import Session
from pylongctx.methods import Method

DraftModel = Callable[[NDArray[np.int32]], NDArray[np.int32]]


class Drafting:
    """Evaluate tokens together with what a draft model guesses behind them.

    Parameters
    ----------
    session : Session
        Where they are evaluated.
    model : callable
        The draft model.
    """

    def __init__(self, session: Session, model: DraftModel) -> None:
        self._session = session
        self._model = model
        self._tokens: list[int] = []  # guessed, evaluated, not said yet
        self._rows: list[NDArray[np.float32]] = []  # the logits after them

    def extend(self, tokens: NDArray[np.int32]) -> None:
        """Evaluate int32 [n] after the current tokens, unless they were guessed; the last logits are known then."""
        if self._tokens and tokens.tolist() == self._tokens[:1]:
            self._tokens.pop(0)
            self._session.settle(self._session.n_tokens + 1, self._rows.pop(0))
            return
        self._tokens, self._rows = [], []
        guess = self._guess(tokens) if len(tokens) == 1 and self._session.n_tokens else np.empty(0, np.int32)
        if not len(guess):
            self._session.extend(tokens, True)
            return
        together = np.concatenate([tokens, guess])
        rows = [row.copy() for part in self._session.eval_rows(together, quiet=True) for row in part]
        self._session.settle(self._session.n_tokens - len(guess), rows[0])
        self._tokens, self._rows = guess.tolist(), rows[1:]

    def forget(self) -> None:
        """Let go of what was guessed: the tokens before it have changed."""
        self._tokens, self._rows = [], []

    def _guess(self, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        session = self._session
        known = np.concatenate([session.tokens, tokens])
        guess = session.model.check_tokens(np.asarray(self._model(known)).astype(np.int32), allow_empty=True)
        return guess[: session.context.n_ctx - len(known)]


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
