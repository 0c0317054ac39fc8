"""The engine: jobs on slots, one step after the other. It is the only maker of tokens."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pylongctx._log import LOG
from pylongctx.engine.compress import compress
from pylongctx.engine.documents import Document, Documents, without
from pylongctx.engine.job import Cancelled, Job, Row
from pylongctx.engine.session import Session
from pylongctx.engine.slots import Slot, assign, forerunner
from pylongctx.engine.tracer import Tracer
from pylongctx.errors import Aborted, ContextFull, LctxError

ROW_BYTES = 1 << 26  # most bytes of logits that a step of a scored prompt makes

Snapshot = tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.uint8]]  # see Session.save
Share = tuple[Slot, Job, NDArray[np.int32]]  # a slot, its job, and the tokens that a step evaluates of it
# Evaluates the shares of a step and returns for each the logits that are wanted, float32 [n_wanted, n_vocab].
Evaluate = Callable[[list[Share]], list[Row]]


@dataclass
class Counters:
    """What an engine has done since it was started."""

    prompt_tokens: int = 0  # evaluated
    cached_tokens: int = 0
    generated_tokens: int = 0
    dropped_tokens: int = 0  # of texts that did not fit
    steps: int = 0
    busy_seconds: float = 0.0
    completed: int = 0
    cancelled: int = 0
    failed: int = 0


class Engine:
    """Continuous batching: a step evaluates one token of each slot that writes, and shares the rest among prompts.

    It has no thread: whoever drives it calls ``assign_waiting`` and ``step``. Only ``interrupt`` may come from others.

    Parameters
    ----------
    sessions : list of Session
        The sequences of one context, a slot each.
    evaluate : callable
        Evaluates the shares of a step, and lets the sessions take note.
    """

    def __init__(self, sessions: list[Session], evaluate: Evaluate) -> None:
        self.model, self.context = sessions[0].model, sessions[0].context
        self.slots = [Slot(session) for session in sessions]
        self.waiting: deque[Job] = deque()
        self.counters = Counters()
        self.documents = Documents(self.model, self.context)
        self.tracer = Tracer(sessions[0])
        self.closing = False
        self._evaluate_shares = evaluate
        self._step_size = min(self.context.n_batch, self.context.n_ubatch)
        if self._step_size < len(sessions):
            raise ValueError(
                f"{len(sessions)} sequences need batches of as many tokens, not {self._step_size}: raise -ub"
            )
        self._n_ended = 0
        self._guard = threading.Lock()  # of the next two, and of the context's flag
        self._running: list[Job] = []  # jobs of the step that is being evaluated
        self._interrupted = False

    @property
    def n_busy(self) -> int:
        """The number of slots with a job."""
        return sum(slot.job is not None for slot in self.slots)

    @property
    def jobs(self) -> list[Job]:
        """The jobs on slots, and those that wait for one."""
        return [*(slot.job for slot in self.slots if slot.job is not None), *self.waiting]

    # ---- jobs come and go ----

    def can_assign(self) -> bool:
        """Return whether a job that waits can be given a slot, or be ended."""
        return any(job.cancelled for job in self.waiting) or any(self._fits(job) for job in self.waiting)

    def assign_waiting(self) -> None:
        """Give slots to the jobs that wait, in their order."""
        for job in list(self.waiting):
            self._read_first(job)
            if job.reads is not None and self._find_document(job.reads):
                self.waiting.remove(job)
                job.ended = time.monotonic()
                job.results.put(None)
        for job in list(self.waiting):
            if self._fits(job) and not job.considered:
                job.forerunner, job.considered = forerunner(self.slots, job, self._step_size), True
            if not (job.cancelled or self._fits(job)):
                continue
            if job.cancelled:
                self.counters.cancelled += 1
                self.waiting.remove(job)
                job.results.put(Cancelled("cancelled"))
                continue
            self._begin(job)

    def end_cancelled(self) -> None:
        """End the jobs whose readers went away."""
        for slot in self.slots:
            if slot.job is not None and slot.job.cancelled:
                self.end(slot, None if slot.job.satisfied else Cancelled("cancelled"))

    def end(self, slot: Slot, reason: BaseException | None = None) -> None:
        """End the job of a slot; ``reason``: what its reader gets, None for a job that is complete."""
        job = slot.job
        assert job is not None
        job.ended = time.monotonic()
        job.read = job.read or job.ended
        if job.traced is not None:
            self.tracer.end(job, slot.session)
        self._n_ended += 1
        name = "completed" if reason is None else "cancelled" if isinstance(reason, Cancelled) else "failed"
        setattr(self.counters, name, getattr(self.counters, name) + 1)  # first: who sees an idle slot reads them
        slot.job, slot.last, slot.used = None, job, self._n_ended
        job.results.put(reason)

    def end_all(self, reason: BaseException) -> None:
        """End all jobs, those that wait too."""
        for slot in self.slots:
            if slot.job is not None:
                self.end(slot, reason)
        while self.waiting:
            self.waiting.popleft().results.put(reason)

    def erase(self, seq: int) -> int:
        """Forget an idle slot; returns how many tokens it held."""
        slot = self._idle(seq)
        n = slot.session.n_tokens
        slot.session.clear()
        slot.used, slot.owner = 0, None
        return n

    def save(self, seq: int, owner: str | None) -> Snapshot:
        """Return tokens, last logits and KV rows of an idle slot; ValueError when it holds nothing of this owner."""
        slot = self._idle(seq)
        if slot.session.n_tokens and slot.owner == owner:
            slot.session.rewind(slot.session.n_tokens)  # an interrupted step may have left more in the cache
        if not slot.session.n_tokens or slot.owner != owner:
            raise ValueError(f"sequence {seq} holds nothing of yours")
        return slot.session.snapshot()

    def load(self, seq: int, owner: str | None, saved: Snapshot) -> int:
        """Replace what an idle slot holds; returns the number of tokens."""
        slot = self._idle(seq)
        slot.owner = owner
        slot.session.load(*saved)
        return slot.session.n_tokens

    def _idle(self, seq: int) -> Slot:
        slot = self.slots[seq]
        if slot.job is not None:
            raise ValueError(f"sequence {seq} is busy")
        return slot

    def interrupt(self) -> None:
        """Stop the step that is being evaluated when nobody waits for it; from any thread."""
        with self._guard:
            if self._running and self._is_in_vain():
                self._interrupted = self.context.abort = True

    def _is_in_vain(self) -> bool:
        return self.closing or all(job.cancelled for job in self._running)

    def _read_first(self, job: Job) -> None:
        """Let the documents of a prompt be read before it, each by a job of its own."""
        if job.every_row:
            job.placed = ()  # the rows of all tokens are wanted
        for place in job.placed:
            document = place.document
            if document is None or document.rows is not None:
                continue
            if document.job is not None and document.job.ended:
                LOG.warning("document %r could not be read: a prompt with it is read as others", document.name)
                document.job, job.placed = None, without(job.placed, document)
            elif document.job not in self.jobs and not job.cancelled:
                document.job = Job(document.prompt, job.sampler, owner=job.owner, reads=document, submitted=True)
                self.waiting.appendleft(document.job)

    def _fits(self, job: Job) -> bool:
        if any(place.document is not None and place.document.rows is None for place in job.placed):
            return False
        if job.forerunner is not None and job.forerunner.is_reading:
            return False
        if job.traced is not None and self.tracer.busy:
            return False  # one record at a time
        return any(slot.job is None and job.wants(slot.id) for slot in self.slots)

    def _begin(self, job: Job) -> None:
        job.started, job.forerunner = time.monotonic(), None
        try:
            slot = assign(self.slots, job)
            assert slot is not None  # _fits
            if job.traced is not None:
                self.tracer.start(job, slot.session)
        except Exception as reason:
            self.counters.failed += 1
            self.waiting.remove(job)
            job.ended = time.monotonic()
            job.results.put(reason)
            return
        slot.job, job.ran_on = job, slot.id
        self.waiting.remove(job)  # now: a job is always seen on one of the two
        slot.session.begin(slot.session.n_tokens, len(job.pending))
        job.n_cached = len(job.tokens) - len(job.pending)
        job.n_stored = min(job.n_cached, 0 if slot.session.stored is None else slot.session.stored.n_found)
        self.counters.cached_tokens += job.n_cached
        self.counters.dropped_tokens += job.dropped_tokens
        if job.progress:
            job.progress(job)
        if not len(job.pending):
            self._continue(slot, job, slot.session.last_logits)

    # ---- a step ----

    def can_step(self) -> bool:
        """Return whether a slot has something to do."""
        return any(slot.job is not None and (slot.job.cancelled or _can_run(slot.job)) for slot in self.slots)

    def step(self) -> None:
        """Evaluate one batch, and choose a token for every slot whose text is read."""
        shares = self.shares()
        if shares:
            started = time.monotonic()
            self._evaluate(shares)
            self.counters.busy_seconds += time.monotonic() - started

    def shares(self) -> list[Share]:
        """Return what each slot may evaluate: short wishes whole, the others as much as each other."""
        jobs = [(slot, slot.job) for slot in self.slots if slot.job is not None and _can_run(slot.job)]
        jobs.sort(key=lambda pair: len(pair[1].pending))
        left, shares = self._step_size, []
        for i, (slot, job) in enumerate(jobs):
            n = min(self._place(slot, job), left // (len(jobs) - i))
            if job.every_row:
                n = min(n, max(1, ROW_BYTES // (4 * self.context.n_vocab)))
            n = slot.session.next_step(n)
            left -= n
            shares.append((slot, job, job.pending[:n]))
        return shares

    def _place(self, slot: Slot, job: Job) -> int:
        """Take over what of a prompt comes from documents next; returns how many tokens follow until the next one."""
        if not (job.placed and job.is_reading):
            return len(job.pending)
        for place in job.placed:
            n = place.end - place.first
            if place.first == slot.session.n_tokens and n < len(job.pending):
                try:
                    slot.session.place(place, job.pending[:n])
                except LctxError as reason:
                    slot.session.say(f"a document is read where it stands: {reason}")
                    continue
                job.pending = job.pending[n:]
                job.n_cached += n
                self.counters.cached_tokens += n
        ahead = (place.first - slot.session.n_tokens for place in job.placed)
        return min([len(job.pending), *(n for n in ahead if n > 0)])

    def _evaluate(self, shares: list[Share]) -> None:
        with self._guard:
            self._running = [job for _, job, _ in shares]
            self._interrupted = self._is_in_vain()
            if self._interrupted:
                self.context.abort = True
        try:
            rows = self._evaluate_shares(shares)
        except Aborted as reason:
            if not self._interrupted:  # the user's abort; else the jobs are ended as cancelled ones
                for slot, _, _ in shares:
                    self.end(slot, reason)
        except ContextFull as reason:
            self._make_room(shares, reason)
        except LctxError as reason:
            for slot, _, _ in shares:
                self.end(slot, reason)
        else:
            self.counters.steps += 1
            for (slot, job, part), row in zip(shares, rows, strict=True):
                self._take(slot, job, part, row)
        finally:
            with self._guard:
                self._running = []
                if self._interrupted:
                    self.context.abort = False

    def _make_room(self, shares: list[Share], reason: ContextFull) -> None:
        """Forget the idle slot that was not used for longest; without one, find the jobs that do not fit."""
        idle = [slot for slot in self.slots if slot.job is None and slot.session.n_tokens]
        if idle:
            min(idle, key=lambda slot: slot.used).session.clear()
        elif len(shares) == 1:
            slot, job, _ = shares[0]
            if not self._shorten(slot, job):
                self.end(slot, reason)
        else:
            for share in shares:
                if share[0].job is share[1]:
                    self._evaluate([share])

    def _shorten(self, slot: Slot, job: Job) -> bool:
        """Let something leave a text whose answer goes on; False when nothing can."""
        cut = None if job.cuts is None or job.is_reading else job.cuts.next(slot.session.n_tokens)
        if cut is None:
            return False
        if refusal := slot.session.drop(cut.first, cut.end):
            slot.session.say(f"the answer ends where the context does, nothing can leave: {refusal}")
            return False
        job.note(cut)
        self.counters.dropped_tokens += cut.end - cut.first
        return True

    def _take(self, slot: Slot, job: Job, part: NDArray[np.int32], rows: Row) -> None:
        job.pending = job.pending[len(part) :]
        if job.is_reading:
            job.n_read += len(part)
            self.counters.prompt_tokens += len(part)
            if job.every_row:
                job.results.put(rows)
            if job.progress:
                job.progress(job)
        if not len(job.pending):
            self._continue(slot, job, rows[-1])

    def _find_document(self, document: Document) -> bool:
        """Let a document that was compressed before come from the store."""
        stored = self.slots[0].session.stored
        if document.ratio is None or stored is None:
            return False
        rows = stored.find(document)
        if rows is not None:
            self.documents.keep(document, rows)
        return rows is not None

    def _keep_document(self, slot: Slot, job: Job) -> Exception | None:
        """Keep the rows of a document when they were read; returns why that cannot be."""
        document, session = job.reads, slot.session
        if document is None:
            return None
        try:
            if document.ratio is not None:
                compress(session, document.ratio)
            self.documents.keep(document, self.context.part(0, session.n_tokens, slot.id))
        except (LctxError, MemoryError) as reason:
            return reason
        if document.ratio is not None:
            if session.stored is not None:
                session.stored.keep(document)
            session.clear()  # what is left of its rows is for prompts that have the document
        return None

    def _continue(self, slot: Slot, job: Job, row: Row) -> None:
        """Choose the next token of a slot."""
        if job.is_reading:
            job.read = time.monotonic()
        if job.limit == 0:
            self.end(slot, self._keep_document(slot, job))
            return
        try:
            token = job.choose(job.seen(slot.session.tokens), row)
        except LctxError as reason:
            self.end(slot, reason)
            return
        if token is None:
            self.end(slot)
            return
        job.n_generated += 1
        self.counters.generated_tokens += 1
        job.pending = np.array([token], np.int32)
        if job.cuts is not None:
            job.said.append(token)
        job.results.put((token, job.told(row)))
        if job.limit is not None and (job.n_generated >= job.limit or self.model.ends_generation(token)):
            self.end(slot)
        elif job.cuts is not None and slot.session.n_tokens + 1 >= slot.session.n_ctx:
            job.full = not self._shorten(slot, job)
            if job.full:
                self.end(slot)


def _can_run(job: Job) -> bool:
    job.stalled = True  # first, so that a reader who takes something now sees it
    job.stalled = job.is_ahead
    return not job.stalled
