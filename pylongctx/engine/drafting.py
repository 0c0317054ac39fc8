"""Speculative decoding: draft tokens are evaluated in one batch and kept up to the first mismatch."""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pylongctx._lib import lib
from pylongctx.engine.draft_length import DraftLength, StepTimes
from pylongctx.engine.model import Model
from pylongctx.engine.session import Session
from pylongctx.methods import Method

DraftModel = Callable[..., NDArray[np.int32]]
Row = NDArray[np.float32]
Tokens = NDArray[np.int32]


class DraftRequest(NamedTuple):
    """A text for which a draft is wanted.

    Attributes
    ----------
    tokens : numpy.ndarray
        int32 [n], the text.
    n_max : int
        Maximum number of draft tokens.
    session : Session or None
        The sequence that holds all but the last of the tokens.
    """

    tokens: Tokens
    n_max: int
    session: Session | None = None


class Drafting:
    """The drafts of one job.

    Parameters
    ----------
    model : callable
        The draft model, see ``LlamaDraftModel``.

    Attributes
    ----------
    model : callable
        The draft model.
    least : int
        Texts with fewer tokens are not drafted.
    n_drafted, n_accepted : int
        Draft tokens that were evaluated, and how many of them were right.
    n_drafts : int
        Drafts.
    """

    def __init__(self, model: DraftModel) -> None:
        self.model = model
        self.least = int(getattr(model, "least", 0))
        self._length = DraftLength() if is_adaptive(model) else None
        self._tokens: list[int] = []  # drafted and evaluated, not accepted yet
        self._rows: list[Row] = []  # their logits
        self._n_right = 0  # accepted tokens of the current draft
        self._paused = False
        self.n_drafted = self.n_accepted = self.n_drafts = 0

    def length(self, most: int, times: StepTimes, n_others: int) -> int:
        """Return the number of tokens to draft, at most ``most``, in a step with ``n_others`` other answers."""
        if self._paused:
            self._paused = False
            return 0
        return most if self._length is None else self._length.choose(times, n_others, most)

    def pause(self) -> None:
        """Leave out the next draft, since there was no room for one."""
        self._paused = True

    def took(self, drafted: int, seconds: float) -> None:
        """Record the time that a draft took."""
        if self._length is not None:
            self._length.took(drafted, seconds)

    def can_undo(self, session: Session) -> bool:
        """Return True if a draft after the current tokens can be undone; a recurrent state is copied for that."""
        start = perf_counter()
        if not save_state(session):
            return False
        if self._length is not None and session.context.rollback == lib.LCTX_ROLLBACK_NONE:
            self._length.copied(perf_counter() - start)
        return True

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


def guess(wanted: Sequence[tuple[Drafting, DraftRequest]]) -> list[Tokens | Exception]:
    """Return for each request its draft, or the exception of its draft model.

    The texts of one draft model are drafted together, and each draft token has an equal share of the time.
    """
    groups: dict[int, list[int]] = {}
    for i, (drafting, _) in enumerate(wanted):
        groups.setdefault(id(drafting.model), []).append(i)
    found: dict[int, Tokens | Exception] = {}
    for group in groups.values():
        start = perf_counter()
        drafts = draft_all(wanted[group[0]][0].model, [wanted[i][1] for i in group])
        seconds = perf_counter() - start
        lengths = [0 if isinstance(draft, Exception) else len(draft) for draft in drafts]
        for i, draft, n in zip(group, drafts, lengths, strict=True):
            found[i] = draft
            wanted[i][0].took(n, seconds * n / max(1, sum(lengths)))
    return [found[i] for i in range(len(wanted))]


def draft_all(model: DraftModel, requests: Sequence[DraftRequest]) -> list[Tokens | Exception]:
    """Return for each text the draft of one draft model, or its exception."""
    together = getattr(model, "draft_all", None)
    if together is not None and len(requests) > 1:
        try:
            return list(together(requests))
        except Exception:  # each alone, so that only those that fail have no draft
            return [_draft(model, request) for request in requests]
    return [_draft(model, request) for request in requests]


def _draft(model: DraftModel, request: DraftRequest) -> Tokens | Exception:
    more: dict[str, Any] = {"n_max": request.n_max, "session": request.session} if is_adaptive(model) else {}
    try:
        return np.asarray(model(request.tokens, **more)).astype(np.int32)[: request.n_max]
    except Exception as reason:
        return reason


def is_adaptive(model: DraftModel) -> bool:
    """Return True if the length of its drafts is adaptive; then it is called with more arguments."""
    return bool(getattr(model, "adaptive", False))


def check_model(draft_model: DraftModel | None, model: Model) -> None:
    """Raise ValueError if a draft model cannot draft for a model."""
    check = getattr(draft_model, "check", None)
    if check is not None:
        check(model)


def save_state(session: Session) -> bool:
    """Copy the recurrent state of a sequence, so that ``rewind`` can return to it; False: it cannot be copied."""
    if session.context.rollback != lib.LCTX_ROLLBACK_NONE:
        return True
    return not session.context.checkpoint(session.seq)


def check_draft(draft_model: DraftModel | None, method: Method | None) -> None:
    """Raise NotImplementedError if draft tokens cannot be undone, because a rule evicts."""
    rules = [part.name for part in method.parts if part.role == "rule"] if method else []
    if draft_model is not None and rules:
        raise NotImplementedError(
            f"draft_model: {rules[0]} evicts KV entries by the queries that it sees, so a wrong draft cannot be "
            "undone; use a method without an eviction rule"
        )
