"""The share of a job in a step: the first of its pending tokens, and draft tokens."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pylongctx.engine.draft_length import StepTimes
from pylongctx.engine.job import Job, Row
from pylongctx.engine.slots import Slot


@dataclass
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


def n_ahead(slot: Slot, job: Job) -> int:
    """Return how many pending tokens come before the next piece of a source."""
    n = len(job.pending)
    return min(n, job.pieces[0].first - slot.session.n_tokens) if job.pieces and job.is_reading else n


def guessed(slot: Slot, job: Job, part: NDArray[np.int32], most: int, times: StepTimes, n_others: int) -> Share:
    """Return the share of a job, with draft tokens after a token of the answer, at most ``most`` tokens in all."""
    session = slot.session
    if job.draft is None or len(part) != 1 or len(job.pending) != 1 or not session.n_tokens:
        return Share(slot, job, part)
    known = np.concatenate([session.tokens, part])
    room = min(session.n_ctx - len(known), most - 1, (job.limit or session.n_ctx) - job.n_generated - 1)
    guess = session.model.check_tokens(job.draft.guess(session, known, room, times, n_others), allow_empty=True)
    n = session.next_step(1 + len(guess)) - 1
    return Share(slot, job, np.concatenate([part, guess[:n]]), n)


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
