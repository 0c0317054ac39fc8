"""The sequences of the engine, and the choice of one for a prompt."""

from dataclasses import dataclass

from pylongctx.engine.documents import common
from pylongctx.engine.job import Job
from pylongctx.engine.reuse import Held, Piece
from pylongctx.engine.session import Session

SIMILAR = 0.1  # fraction of a prompt that a sequence must hold to be preferred to the least recently used one


@dataclass(eq=False)
class Slot:
    """One sequence of the native context, and the job that runs on it."""

    session: Session
    job: Job | None = None
    last: Job | None = None  # the previous job, for reports
    used: int = 0  # when the last job ended, counted in jobs

    @property
    def id(self) -> int:
        """The number of the sequence."""
        return self.session.seq

    def cached_piece(self, job: Job) -> Piece | None:
        """Return the piece of a prompt that this sequence already holds, or None."""
        if not self._serves(job):
            return None
        return Held(self.session, job.placed, job.lossy and self.job is None).covers(job.tokens)

    def saved(self, job: Job) -> int:
        """Return how many tokens of a prompt need no evaluation on this sequence."""
        piece = self.cached_piece(job)
        return 0 if piece is None else piece.end

    def shared(self, job: Job) -> int:
        """Return the length of the common prefix with a prompt, even if the sequence cannot be cut to it."""
        return Held(self.session, job.placed, job.lossy).shared(job.tokens) if self._serves(job) else 0

    def _serves(self, job: Job) -> bool:
        partial = self.job is not None and self.job.is_partial
        return self.session.owner == job.owner and job.reuses and not partial


def choose(slots: list[Slot], job: Job) -> tuple[Slot, Slot]:
    """Return the idle sequence for a job, and the one whose prefix it reuses: itself or one to copy from.

    A prompt goes to the sequence with the longest common prefix, else to the least recently used one. The prefix of a
    busy sequence is copied, which shares its pages; so is a prefix of a long text if another sequence is empty.
    """
    idle = [slot for slot in slots if slot.job is None and job.may_run_on(slot.id)]
    oldest = min(idle, key=lambda slot: (slot.session.n_tokens > 0, slot.used))
    if job.follows or job.every_row:
        return oldest, oldest
    saved = {slot: slot.saved(job) for slot in slots}
    best = max(slots, key=lambda slot: (saved[slot], slot in idle))
    if saved[best] < SIMILAR * len(job.tokens):
        return oldest, oldest
    if best in idle and not (_loses_much(best, job, saved[best]) and not oldest.session.n_tokens):
        return best, best
    nearest = max(idle, key=lambda slot: saved[slot])
    target = nearest if best not in idle and saved[nearest] >= SIMILAR * len(job.tokens) else oldest
    copies = best.session.context.method and saved[best] > saved[target]  # llama.cpp's own cache copies only whole
    return target, best if copies else target


def _loses_much(slot: Slot, job: Job, n: int) -> bool:
    """Return True if a cut to ``n`` tokens loses more than it keeps, and a copy is possible instead."""
    begins = n <= slot.shared(job)  # else not all of them are a prefix
    return bool(slot.session.context.method) and begins and slot.session.n_tokens > 2 * n


def forerunner(slots: list[Slot], job: Job, worth: int) -> Job | None:
    """Return a job in prefill whose prompt shares a prefix of at least ``worth`` tokens with this one."""
    if not slots[0].session.context.method or job.every_row:
        return None
    saved = max(slot.saved(job) for slot in slots)
    promised = {slot: _promised(slot, job) for slot in slots if slot.job is not None and slot.job.is_reading}
    best = max(promised, key=lambda slot: promised[slot], default=None)
    if best is None or promised[best] - saved < worth:
        return None
    best.session.checkpoints.request(promised[best])
    return best.job


def _promised(slot: Slot, job: Job) -> int:
    """Return how many tokens of a prompt can be copied from a sequence after its prefill."""
    assert slot.job is not None
    if slot.session.owner != job.owner or not job.reuses:
        return 0
    n = common(slot.job.tokens, slot.job.placed, job.tokens, job.placed)
    if slot.session.seam is not None and not job.lossy:
        n = min(n, slot.session.seam)
    return n if n > slot.session.n_tokens else slot.session.reachable(n)
