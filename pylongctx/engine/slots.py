"""The sequences of the engine, and which one a prompt goes to."""

from dataclasses import dataclass

from pylongctx.engine.documents import common, placed_up_to
from pylongctx.engine.job import Job
from pylongctx.engine.prefix import find_gap, longest_prefix
from pylongctx.engine.session import Session

SIMILAR = 0.1  # share of a prompt that a sequence must hold to be preferred to the least recently used one


@dataclass(eq=False)
class Slot:
    """One sequence of the native context, and the job that runs on it."""

    session: Session
    job: Job | None = None
    last: Job | None = None  # the job before, for those who ask
    used: int = 0  # when the last job ended, in jobs
    owner: str | None = None  # whose tokens it holds

    @property
    def id(self) -> int:
        """The number of the sequence."""
        return self.session.seq

    def shared(self, job: Job) -> int:
        """Return how many tokens of a prompt were evaluated on this sequence for the same owner."""
        return self.session.holds(job.tokens, job.placed, job.lossy) if self._serves(job) else 0

    def hand_over(self, job: Job) -> None:
        """Forget what was evaluated for somebody else, or must not be used again."""
        if self.owner != job.owner or not job.reuses:
            self.session.clear()
        self.owner = job.owner
        if self.session.stored is not None:
            self.session.stored.owner, self.session.stored.finds = job.owner, job.reuses

    def saved(self, job: Job) -> int:
        """Return how many tokens of a prompt need not be evaluated on this sequence."""
        if self.job is None and job.lossy and self._serves(job) and (gap := find_gap(self.session.tokens, job.tokens)):
            return gap[0] + longest_prefix(self.session.tokens[gap[1] :], job.tokens[gap[0] :])
        return self.session.reachable(self.shared(job))

    def _serves(self, job: Job) -> bool:
        return self.owner == job.owner and job.reuses


def assign(slots: list[Slot], job: Job) -> Slot | None:
    """Return the idle sequence for a job, its cache cut to what the prompt shares with it; None: all are busy.

    A prompt goes where most of it is already, else to the sequence that was not used for longest. What a busy sequence
    holds is copied, which shares the pages; so is the beginning of a long text when there is an empty sequence.
    """
    idle = [slot for slot in slots if slot.job is None and job.wants(slot.id)]
    if not idle:
        return None
    oldest = min(idle, key=lambda slot: (slot.session.n_tokens > 0, slot.used))
    if job.follows:  # the one sequence of a Solo
        job.pending = job.tokens
        return oldest
    if job.every_row:
        oldest.session.clear()
        oldest.hand_over(job)
        job.pending = job.tokens
        return oldest
    saved = {slot: slot.saved(job) for slot in slots}
    shared = max(slot.shared(job) for slot in slots)
    best = max(slots, key=lambda slot: (saved[slot], slot in idle))
    chosen = best
    if saved[best] < SIMILAR * len(job.tokens):
        chosen = oldest
    elif best not in idle or (_loses_much(best, job, saved[best]) and not oldest.session.n_tokens):
        nearest = max(idle, key=lambda slot: saved[slot])
        chosen = nearest if best not in idle and saved[nearest] >= SIMILAR * len(job.tokens) else oldest
        _copy(best, chosen, job, saved[best])
    chosen.hand_over(job)
    chosen.session.checkpoints.wish(shared)
    job.pending = chosen.session.reuse(job.tokens, job.placed, job.lossy)
    return chosen


def _loses_much(slot: Slot, job: Job, n: int) -> bool:
    """Return whether a cut to ``n`` tokens would lose more than it keeps, and a copy can be made instead."""
    begins = n <= slot.shared(job)  # else they are not all at the beginning
    return bool(slot.session.context.method) and begins and slot.session.n_tokens > 2 * n


def _copy(source: Slot, target: Slot, job: Job, n: int) -> None:
    """Let a sequence begin as another one, where the method can and that saves something."""
    context = target.session.context
    if not context.method or n <= target.saved(job):
        return  # llama.cpp's own cache copies whole sequences only
    target.session.clear()
    target.owner = source.owner
    if context.copy(source.id, target.id, n):
        target.session.placed = placed_up_to(source.session.placed, n)
        whole = source.session.n_tokens == n and source.session.has_logits
        target.session.advance(source.session.tokens[:n], source.session.last_logits if whole else None)


def forerunner(slots: list[Slot], job: Job, worth: int) -> Job | None:
    """Return a job whose prompt is being read and saves this one at least ``worth`` tokens when it is copied then."""
    if not slots[0].session.context.method or job.every_row:
        return None
    saved = max(slot.saved(job) for slot in slots)
    promised = {slot: _promised(slot, job) for slot in slots if slot.job is not None and slot.job.is_reading}
    best = max(promised, key=lambda slot: promised[slot], default=None)
    if best is None or promised[best] - saved < worth:
        return None
    best.session.checkpoints.wish(promised[best])
    return best.job


def _promised(slot: Slot, job: Job) -> int:
    """Return how many tokens of a prompt can be copied from a sequence when its prompt is read."""
    assert slot.job is not None
    if slot.owner != job.owner or not job.reuses:
        return 0
    n = common(slot.job.tokens, slot.job.placed, job.tokens, job.placed)
    if slot.session.seam is not None and not job.lossy:
        n = min(n, slot.session.seam)
    return n if n > slot.session.n_tokens else slot.session.reachable(n)
