"""The shares of jobs in a step: the first of their pending tokens, limited for the sake of answers, and drafts."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pylongctx.engine.drafting import Drafting, DraftRequest, StepTimes, guess, moving_average
from pylongctx.engine.job import Job, Row
from pylongctx.engine.slots import Slot

MIN_PROMPT_TOKENS = 16  # minimum prompt tokens in a step
WEIGHT = 0.5  # weight of the last step in the moving average
ROW_BYTES = 1 << 26  # maximum bytes of logits in a step of a scored prompt
Jobs = list[tuple[Slot, Job]]
End = Callable[[Slot, BaseException], None]


class Pace:
    """Bounds the time of steps with both answers and prompts.

    The bound is ``seconds``, or twice the time of a step without prompts if that is more; None: no limit.

    Examples
    --------
    >>> pace = Pace(0.15)
    >>> pace.add(n_prompt=0, seconds=0.05)
    >>> pace.add(n_prompt=100, seconds=0.25)
    >>> pace.most(512)
    48
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._alone = 0.0  # seconds of a step without prompts
        self._each = 0.0  # additional seconds per prompt token

    def most(self, n_step: int) -> int:
        """Return how many prompt tokens the next step may evaluate, at most ``n_step``."""
        if self._seconds is None:
            return n_step
        room = max(self._seconds - self._alone, self._alone)
        n = int(room / self._each) if self._each else 4 * MIN_PROMPT_TOKENS
        return min(n_step, max(MIN_PROMPT_TOKENS, n - n % MIN_PROMPT_TOKENS))

    def add(self, n_prompt: int, seconds: float) -> None:
        """Record a step with ``n_prompt`` prompt tokens."""
        if n_prompt == 0:
            self._alone = moving_average(self._alone or None, seconds, WEIGHT)
        elif n_prompt >= MIN_PROMPT_TOKENS:
            each = max(seconds - self._alone, 0.1 * seconds) / n_prompt
            self._each = moving_average(self._each or None, each, WEIGHT)


@dataclass(eq=False)
class Share:
    """The tokens of a job in a step: the first of its pending tokens, then draft tokens."""

    slot: Slot
    job: Job
    part: NDArray[np.int32]
    n_guess: int = 0

    @property
    def n_own(self) -> int:
        """The number of tokens that are not drafted."""
        return len(self.part) - self.n_guess

    @property
    def n_rows(self) -> int:
        """The number of last tokens whose logits are requested."""
        if self.job.every_row:
            return len(self.part)
        return self.n_guess + int(self.n_own == len(self.job.pending))


def divide(jobs: Jobs, pace: Pace, times: StepTimes, end: End) -> list[Share]:
    """Return the tokens that each slot evaluates next: those of answers first, then those of prompts.

    Short prompts are evaluated fully, the others have equal shares. Answers are drafted together; ``end`` ends jobs
    whose draft model fails.
    """
    if not jobs:
        return []
    jobs = sorted(jobs, key=lambda pair: (job := pair[1]).is_reading * len(job.pending))
    left = jobs[0][0].session.context.n_step
    room = left // len(jobs)
    shares = [_share(slot, job, room) for slot, job in jobs if not job.is_reading]
    n_answers = len(shares)
    shares = _drafted(shares, room, times, end)
    left -= sum(len(share.part) for share in shares)
    if shares and n_answers < len(jobs):
        left = min(left, pace.most(left))
    for i, (slot, job) in enumerate(jobs[n_answers:]):
        shares.append(_share(slot, job, left // (len(jobs) - n_answers - i)))
        left -= len(shares[-1].part)
    return shares


def _share(slot: Slot, job: Job, most: int) -> Share:
    """Return at most ``most`` of the pending tokens, up to the next piece of a source."""
    n = min(len(job.pending), most)
    if job.pieces and job.is_reading:
        n = min(n, job.pieces[0].first - slot.session.n_tokens)
    if job.every_row:
        n = min(n, max(1, ROW_BYTES // (4 * slot.session.context.n_vocab)))
    n = slot.session.next_step(n)
    return Share(slot, job, job.pending[: n if n == len(job.pending) else slot.session.whole_tiles(n)])


def _drafted(shares: list[Share], room: int, times: StepTimes, end: End) -> list[Share]:
    """Return the shares of answers with draft tokens, at most ``room`` tokens each."""
    wanted = {share: request for share in shares if (request := _request(share, room, times, len(shares) - 1))}
    for (share, (drafting, _)), draft in zip(wanted.items(), guess(list(wanted.values())), strict=True):
        session = share.slot.session
        try:
            if isinstance(draft, Exception):
                raise draft
            draft = session.model.check_tokens(draft, allow_empty=True)
        except Exception as reason:  # the draft model failed; other jobs have nothing to do with it
            end(share.slot, reason)
            shares.remove(share)
            continue
        n = session.next_step(1 + len(draft)) - 1
        if n and drafting.can_undo(session):
            share.n_guess, share.part = n, np.concatenate([share.part, draft[:n]])
    return shares


def _request(share: Share, room: int, times: StepTimes, n_others: int) -> tuple[Drafting, DraftRequest] | None:
    """Return the draft that is wanted after a token of an answer, or None."""
    session, job = share.slot.session, share.job
    if job.draft is None or len(share.part) != 1 or len(job.pending) != 1:
        return None
    if session.n_tokens < max(1, job.draft.least):
        return None
    most = min(session.n_ctx - session.n_tokens - 1, room - 1, (job.limit or session.n_ctx) - job.n_generated - 1)
    most = job.draft.length(most, times, n_others)
    if most <= 0:
        return None
    return job.draft, job.draft.request(np.concatenate([session.tokens, share.part]), most, session, job.sampler)


def keep_guess(share: Share, rows: Row) -> Row:
    """Move the logits of draft tokens to the draft and cut the sequence before them; returns the other logits."""
    if not share.n_guess:
        return rows
    session, guess = share.slot.session, share.part[share.n_own :]
    assert share.job.draft is not None
    share.job.draft.keep(guess, rows[-share.n_guess :])
    share.job.unsettled = True
    session.settle(session.n_tokens - share.n_guess, rows[-share.n_guess - 1])
    return rows[: -share.n_guess]
