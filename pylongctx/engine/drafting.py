"""Speculative decoding: draft tokens are evaluated in one batch and kept up to the first mismatch."""

from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pylongctx._lib import lib
from pylongctx.engine.context import Context
from pylongctx.engine.draft_length import DraftLength, StepTimes
from pylongctx.engine.model import Model
from pylongctx.engine.session import Session
from pylongctx.methods import Method

DraftModel = Callable[..., NDArray[np.int32]]
Row = NDArray[np.float32]


class Drafting:
    """The drafts of one job.

    Parameters
    ----------
    model : callable
        The draft model, see ``LlamaDraftModel``.

    Attributes
    ----------
    n_drafted, n_accepted : int
        Draft tokens that were evaluated, and how many of them were right.
    n_drafts : int
        Drafts.
    """

    def __init__(self, model: DraftModel) -> None:
        self._model = model
        self._length = DraftLength() if is_adaptive(model) else None
        self._tokens: list[int] = []  # drafted and evaluated, not accepted yet
        self._rows: list[Row] = []  # their logits
        self._n_right = 0  # accepted tokens of the current draft
        self.n_drafted = self.n_accepted = self.n_drafts = 0

    def guess(
        self, session: Session, tokens: NDArray[np.int32], most: int, times: StepTimes, n_others: int
    ) -> NDArray[np.int32]:
        """Return the draft after int32 [n], at most ``most`` tokens, in a step with ``n_others`` other answers.

        ``session`` holds all but the last of the tokens.
        """
        more: dict[str, Any] = {}
        if self._length is not None:
            most = self._length.choose(times, n_others, most)
            more = {"n_max": most, "session": session}
        if most <= 0:
            return tokens[:0]
        start = perf_counter()
        draft = np.asarray(self._model(tokens, **more)).astype(np.int32)[:most]
        if self._length is not None:
            self._length.took(len(draft), perf_counter() - start)
        return draft

    def keep(self, tokens: NDArray[np.int32], rows: Row) -> None:
        """Store evaluated draft tokens and the logits after them, float32 [n, n_vocab]."""
        self._tokens, self._rows = tokens.tolist(), [row.copy() for row in rows]
        self._n_right = 0
        self.n_drafts += 1
        self.n_drafted += len(tokens)

    def accept(self, tokens: NDArray[np.int32]) -> Row | None:
        """Return the logits after int32 [n] if it is the draft token; None: it must be evaluated."""
        if not self._tokens:
            return None
        if tokens.tolist() == self._tokens[:1]:
            self._tokens.pop(0)
            self._n_right += 1
            self.n_accepted += 1
            row = self._rows.pop(0)
            if not self._tokens:
                self._learn(self._n_right)
            return row
        self._learn(self._n_right + len(self._tokens))
        self.forget()
        return None

    def _learn(self, drafted: int) -> None:
        if self._length is not None:
            self._length.add(drafted, self._n_right)

    def forget(self) -> None:
        """Discard the draft, since the tokens before it have changed."""
        self._tokens, self._rows = [], []


def is_adaptive(model: DraftModel) -> bool:
    """Return True if the length of its drafts is adaptive; then it is called with more arguments."""
    return bool(getattr(model, "adaptive", False))


def check_model(draft_model: DraftModel | None, model: Model) -> None:
    """Raise ValueError if a draft model cannot draft for a model."""
    check = getattr(draft_model, "check", None)
    if check is not None:
        check(model)


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
