"""Speculative decoding: draft tokens, as many as pay, are evaluated in one batch and kept up to the first mismatch.

A draft token is kept if it is the token that the answer has. Without a seed, that token may be chosen for it, by
rejection sampling (``Proposals``).
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pylongctx._lib import lib
from pylongctx.engine.model import Model
from pylongctx.engine.sampling.proposals import Proposals
from pylongctx.engine.sampling.sampler import Decide, Sampler
from pylongctx.engine.session import Session
from pylongctx.methods import Method

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # lengths that are compared
SLOPE = 0.1  # additional time of a token in a step, in steps of one token, until it is measured
WEIGHT = 0.25  # weight of the last step in the moving average
MIN_GAIN = 1.05  # drafts must be expected to be faster by this factor; times are known to a few percent
FIRST_PAUSE, MAX_PAUSE = 16, 256  # tokens without drafts before another trial, doubled after each failed one
LENGTH_TOKENS = 16  # tokens for which a length is kept while no draft was verified
REFRESH = 64  # drafts after which a step without one is measured, as the text has grown
TRIAL_TOKENS = 4  # maximum tokens of a trial
RECENT_FIRST, RECENT_NEXT = 8.0, 64.0  # draft tokens that the two acceptance rates remember
DraftModel = Callable[..., NDArray[np.int32]]
Row = NDArray[np.float32]
Tokens = NDArray[np.int32]


def moving_average(before: float | None, now: float, weight: float = WEIGHT) -> float:
    """Return the moving average of times; ``before`` is None for the first one."""
    return now if before is None else (1 - weight) * before + weight * now


class StepTimes:
    """Seconds of a step by its number of tokens, for steps without prompt tokens."""

    def __init__(self) -> None:
        self._known: dict[int, float] = {}
        self._sizes: list[int] = []  # the same, ascending

    def add(self, n: int, seconds: float) -> None:
        """Record a step of ``n`` tokens."""
        if n not in self._known:
            insort(self._sizes, n)
        self._known[n] = moving_average(self._known.get(n), seconds)

    def knows(self, n: int) -> bool:
        """Return True if a step of ``n`` tokens was measured."""
        return n in self._known

    def seconds(self, n: float) -> float:
        """Return the expected time of a step of ``n`` tokens, in steps of one token when nothing is known."""
        sizes, known = self._sizes, self._known
        if not sizes:
            return 1 + SLOPE * (n - 1)
        if len(sizes) == 1 or n <= sizes[0]:
            return known[sizes[0]] * (1 + SLOPE * (n - 1)) / (1 + SLOPE * (sizes[0] - 1))
        i = bisect_left(sizes, n)
        a, b = (sizes[i - 1], sizes[i]) if i < len(sizes) else (sizes[0], sizes[-1])
        low, high = known[a], known[b]
        return max(low, low + (high - low) * (n - a) / (b - a))


@dataclass
class Rate:
    """A share of accepted tokens, which remembers the last ``memory`` of them."""

    memory: float
    accepted: float
    tried: float

    def add(self, accepted: float, tried: float) -> None:
        """Record ``tried`` tokens, of which ``accepted`` were right."""
        kept = min(1.0, max(0.0, self.memory - tried) / self.tried) if self.tried else 1.0
        self.accepted, self.tried = kept * self.accepted + accepted, kept * self.tried + tried

    @property
    def value(self) -> float:
        """The share; it is never quite 0 or 1."""
        return (self.accepted + 0.1) / (self.tried + 0.2)


@dataclass
class DraftLength:
    """Chooses the length of the next draft of one answer; none until a step without drafts was measured.

    The first token of a draft is accepted with one probability, and each following one, after an accepted token, with
    another: drafts from the text are right for long, or not at all.
    """

    draft_seconds: float = 0.0  # time of a draft token
    copy_seconds: float | None = None  # time to copy a recurrent state; then a wrong draft is evaluated again
    _first: Rate = field(default_factory=lambda: Rate(RECENT_FIRST, 1.0, 2.0))
    _next: Rate = field(default_factory=lambda: Rate(RECENT_NEXT, 3.0, 4.0))
    _drafts: int = 0  # since a step without a draft
    _length: int = 0  # the last choice, which is kept for ``_left`` tokens with ``_n_others`` other answers
    _left: int = 0
    _n_others: int = 0
    _is_off: bool = False
    _wait: int = FIRST_PAUSE

    def add(self, drafted: int, accepted: int) -> None:
        """Record a draft of ``drafted`` tokens, of which the first ``accepted`` were right."""
        self._drafts += 1
        self._left = 0
        self._first.add(float(accepted > 0), 1)
        if accepted and drafted > 1:
            self._next.add(accepted - 1, min(accepted, drafted - 1))

    def took(self, drafted: int, seconds: float) -> None:
        """Record the time that a draft took."""
        if drafted:
            self._left = 0
            self.draft_seconds = moving_average(self.draft_seconds or None, seconds / drafted)

    def copied(self, seconds: float) -> None:
        """Record the time that a copy of the recurrent state took, which a draft can be undone with."""
        self.copy_seconds = moving_average(self.copy_seconds, seconds)

    def choose(self, times: StepTimes, n_others: int, most: int) -> int:
        """Return the number of tokens to draft, at most ``most``, in a step with ``n_others`` other answers."""
        if not times.knows(1 + n_others) or self._drafts >= REFRESH:
            self._drafts = 0
            return 0
        if not self._left or n_others != self._n_others:
            self._choose(times, n_others, most)
        self._left -= 1
        return min(self._length, most)

    def _choose(self, times: StepTimes, n_others: int, most: int) -> None:
        """Set the length of the next drafts, and for how many tokens it is kept."""
        plain = (1 + n_others) / times.seconds(1 + n_others)
        lengths = [n for n in LENGTHS if n < most] + [most] * (most > 0)
        rate, best = max(((self._rate(times, n_others, n), n) for n in lengths), default=(0.0, 0))
        self._n_others = n_others
        if rate > MIN_GAIN * plain:
            self._length, self._left, self._is_off, self._wait = best, LENGTH_TOKENS, False, FIRST_PAUSE
        elif not self._is_off:
            self._length, self._left, self._is_off = 0, self._wait, True
        else:  # a trial
            self._length, self._left, self._is_off = min(best, TRIAL_TOKENS), 1, False
            self._wait = min(2 * self._wait, MAX_PAUSE)

    def _rate(self, times: StepTimes, n_others: int, n: int) -> float:
        """Return the expected tokens per second of a step with a draft of ``n`` tokens."""
        p, q = self._first.value, self._next.value
        accepted = p * (1 - q**n) / (1 - q)
        seconds = times.seconds(1 + n_others + n) + n * self.draft_seconds
        if self.copy_seconds is not None:
            wrong = 1 - p * q ** (n - 1)
            right = (accepted - n * (1 - wrong)) / wrong  # accepted tokens of a wrong draft
            again = times.seconds(2 + n_others + right) - times.seconds(1 + n_others)  # with the token before them
            seconds += (1 + wrong) * self.copy_seconds + wrong * again
        return (1 + n_others + accepted) / seconds


class DraftRequest(NamedTuple):
    """A text for which a draft is wanted."""

    tokens: Tokens  # int32 [n], the text
    n_max: int  # draft tokens
    session: Session | None = None  # the sequence that holds all but the last of the tokens
    proposals: Proposals | None = None  # draws the tokens; None: they are the most probable ones

    def next_token(self, row: Row) -> int:
        """Return the next token of the draft by logits, float32 [n_vocab]."""
        return int(row.argmax()) if self.proposals is None else self.proposals.draw(row)


class Drafting:
    """The drafts of one job, by a draft model; see ``LlamaDraftModel``."""

    def __init__(self, model: DraftModel) -> None:
        self.model = model
        self.calling: Callable[[], AbstractContextManager[None]] = nullcontext  # entered around calls of the model
        self.least = int(getattr(model, "least", 0))  # texts with fewer tokens are not drafted
        self._length = DraftLength() if is_adaptive(model) else None
        self._tokens: list[int] = []  # drafted and evaluated, not accepted yet
        self._rows: list[Row] = []  # their logits
        self._proposals: Proposals | None = None
        self._are_drawn = False  # the tokens are proposals
        self._n_right = 0  # accepted tokens of the current draft
        self._paused = False
        self.n_drafts = 0
        self.n_drafted = self.n_accepted = 0  # draft tokens that were evaluated, and those of them that were right

    def length(self, most: int, times: StepTimes, n_others: int) -> int:
        """Return the number of tokens to draft, at most ``most``, in a step with ``n_others`` other answers."""
        if self._paused:
            self._paused = False
            return 0
        return most if self._length is None else self._length.choose(times, n_others, most)

    def request(self, tokens: Tokens, n_max: int, session: Session, sampler: Sampler) -> DraftRequest:
        """Return the request for a draft of at most ``n_max`` tokens; ``sampler`` is that of the answer."""
        if self._proposals is None and sampler.takes_proposals:
            self._proposals = Proposals(sampler)
        return DraftRequest(tokens, n_max, session, self._proposals)

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
        drawn = self._proposals.tokens if self._proposals is not None else []
        self._are_drawn = drawn[: len(tokens)] == self._tokens
        self._n_right = 0
        self.n_drafts += 1
        self.n_drafted += len(tokens)

    def decide(self) -> Decide | None:
        """Return what chooses the next token for the sake of a proposed one; None: nothing is proposed."""
        if not (self._tokens and self._are_drawn):
            return None
        assert self._proposals is not None
        return partial(self._proposals.decide, self._n_right)

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
        drafting = wanted[group[0]][0]
        with drafting.calling():
            drafts = draft_all(drafting.model, [wanted[i][1] for i in group])
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
        _begin(requests)
        try:
            return list(together(requests))
        except Exception:  # each alone, so that only those that fail have no draft
            return [_draft(model, request) for request in requests]
    return [_draft(model, request) for request in requests]


def _begin(requests: Sequence[DraftRequest]) -> None:
    for request in requests:
        if request.proposals is not None:
            request.proposals.begin()


def _draft(model: DraftModel, request: DraftRequest) -> Tokens | Exception:
    _begin([request])
    together = getattr(model, "draft_all", None)
    more: dict[str, Any] = {"n_max": request.n_max, "session": request.session} if is_adaptive(model) else {}
    try:
        draft = model(request.tokens, **more) if together is None else together([request])[0]
        return np.asarray(draft).astype(np.int32)[: request.n_max]
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
    rule = method.eviction if method else None
    if draft_model is not None and rule is not None:
        raise NotImplementedError(
            f"draft_model: {rule.name} evicts KV entries by the queries that it sees, so a wrong draft cannot be "
            "undone; use a method without an eviction rule"
        )
