"""The engine, which runs jobs on slots step by step and generates all tokens."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from pylongctx.engine.documents import Documents
from pylongctx.engine.drafting import StepTimes
from pylongctx.engine.job import Cancelled, Counters, Job, Row
from pylongctx.engine.loader import Loader, Readers, is_missing
from pylongctx.engine.parked import Parked, PromptEnd, evicts
from pylongctx.engine.reuse import Library, Source
from pylongctx.engine.session import Part, Session, evaluate
from pylongctx.engine.share import Pace, Share, divide, keep_guess
from pylongctx.engine.slots import IdleSlots, Slot, choose, forerunner
from pylongctx.engine.tracer import Tracer
from pylongctx.errors import Aborted, ContextFull, DeviceLost, LctxError


class Engine:
    """Continuous batching: a step evaluates one token of each generating slot, and splits the rest among prompts.

    It has no thread: its driver calls ``assign_waiting`` and ``step``. Other threads may only call ``interrupt``.

    Each of the sequences, all of one context, is a slot. Sources of prompts are these, the ``library`` (the KV store),
    ``states``, and up to ``parked_bytes`` of sequences that lost their slots. Other threads call ``wake`` when
    ``can_step`` or ``can_assign`` may have become true. ``step_seconds`` limits a step with both answers and prompts,
    see ``Pace``.
    """

    def __init__(
        self,
        sessions: list[Session],
        library: Library | None = None,
        states: Sequence[Source] = (),
        wake: Callable[[], None] = lambda: None,
        step_seconds: float | None = None,
        parked_bytes: int = 0,
    ) -> None:
        self.model, self.context = sessions[0].model, sessions[0].context
        self.slots = [Slot(session) for session in sessions]
        self.idle = IdleSlots(self.slots, library)
        self.waiting: deque[Job] = deque()
        self.counters = Counters()
        self.documents = Documents(self.model, self.context)
        self.tracer = Tracer(sessions[0])
        self.library = library
        self.parked = Parked(parked_bytes)
        if parked_bytes:
            for session in filter(evicts, sessions):
                session.watchers.append(PromptEnd(session, self.parked))
        self.closing = False
        self.lost: DeviceLost | None = None  # if set, evaluation is no longer possible
        self._pace = Pace(step_seconds)
        self._times = StepTimes()
        self._loader = Loader(self.slots, self.counters, library, states, self.parked, wake)
        self._readers = Readers(self.documents, library, wake)
        self._rows = np.empty((len(sessions), self.context.n_vocab), np.float32)
        self._n_ended = 0
        self._guard = threading.Lock()  # guards the next two, and the context's abort flag
        self._running: list[Job] = []  # jobs of the current step
        self._interrupted = False

    @property
    def n_busy(self) -> int:
        """The number of slots with a job."""
        return sum(slot.job is not None for slot in self.slots)

    @property
    def jobs(self) -> list[Job]:
        """The jobs on slots and the waiting ones."""
        return [*(slot.job for slot in self.slots if slot.job is not None), *self.waiting]

    # ---- queue ----

    def can_assign(self) -> bool:
        """Return True if a waiting job can be assigned to a slot or ended."""
        return any(
            job.cancelled or self._fits(job) or (job.search is not None and job.search.ready) for job in self.waiting
        )

    def assign_waiting(self) -> bool:
        """Assign waiting jobs to slots in order; returns whether one left the queue."""
        before = len(self.waiting)
        for job in list(self.waiting):
            new = list(self._readers.before(job, self.jobs))
            self.waiting.extendleft(new)
            before += len(new)
            if self._readers.find(job):
                self.waiting.remove(job)
                job.ended_at = time.monotonic()
                job.results.put(None)
        for job in list(self.waiting):
            if self._fits(job) and not job.forerunner_searched:
                job.forerunner, job.forerunner_searched = forerunner(self.slots, job, self.context.n_step), True
            if job.cancelled:
                self.counters.cancelled += 1
                self.waiting.remove(job)
                job.results.put(Cancelled("cancelled"))
            elif self._fits(job):
                self._begin(job)
        return len(self.waiting) < before

    def end_cancelled(self) -> None:
        """End cancelled jobs."""
        for slot in self.slots:
            if slot.job is not None and slot.job.cancelled:
                self.end(slot, None if slot.job.reader_done else Cancelled("cancelled"))

    def end(self, slot: Slot, reason: BaseException | None = None) -> None:
        """End the job of a slot; ``reason``: the exception for its reader, None for a complete job."""
        job = slot.job
        assert job is not None
        self._loader.stop(job, slot.session)
        job.ended_at = time.monotonic()
        job.prefilled_at = job.prefilled_at or job.ended_at
        self.counters.longest = max(self.counters.longest, slot.session.n_tokens)
        self.counters.prompt_seconds += job.prompt_seconds
        self.counters.answer_seconds += job.answer_seconds
        self.counters.count_drafts(job.draft)
        if job.traced:
            self.tracer.end(job, slot.session)
        self._n_ended += 1
        name = "completed" if reason is None else "cancelled" if isinstance(reason, Cancelled) else "failed"
        setattr(self.counters, name, getattr(self.counters, name) + 1)  # before the slot becomes idle
        slot.job, slot.last, slot.used = None, job, self._n_ended
        job.results.put(reason)

    def release(self, job: Job) -> None:
        """Release a job that has not ended, because its reader is gone."""
        if job in self.waiting:
            self.waiting.remove(job)
        for slot in self.slots:
            if slot.job is job:
                self._loader.stop(job, slot.session)
                self._n_ended += 1
                slot.job, slot.used = None, self._n_ended

    def end_all(self, reason: BaseException) -> None:
        """End all jobs, including waiting ones."""
        for slot in self.slots:
            if slot.job is not None:
                self.end(slot, reason)
        while self.waiting:
            self.waiting.popleft().results.put(reason)

    def interrupt(self) -> None:
        """Stop the current step if all of its jobs are cancelled, and at the end a compression. Thread-safe."""
        if self.closing:
            self.idle.stop_compression()
        with self._guard:
            if self._running and self._is_unneeded():
                self._interrupted = self.context.abort = True

    def _is_unneeded(self) -> bool:
        return self.closing or all(job.cancelled for job in self._running)

    def _fits(self, job: Job) -> bool:
        if job.search is not None or any(is_missing(place.document) for place in job.placed):
            return False
        if job.forerunner is not None and job.forerunner.is_reading:
            return False
        if job.traced and self.tracer.busy:
            return False  # only one trace at a time
        return any(slot.job is None and job.may_run_on(slot.id) for slot in self.slots)

    def _begin(self, job: Job) -> None:
        job.started_at, job.forerunner = time.monotonic(), None
        try:
            slot, other = choose(self.slots, job)
            self._loader.prepare(job, slot, other)
            if job.traced:
                self.tracer.start(job, slot.session)
        except Exception as reason:
            self.counters.failed += 1
            self.waiting.remove(job)
            job.ended_at = time.monotonic()
            job.results.put(reason)
            return
        slot.job, job.ran_on = job, slot.id
        self.waiting.remove(job)  # only now: observers always see it in one place
        self.counters.dropped_tokens += job.dropped_tokens
        if self._loader.load(job, slot.session):
            self._evaluate_rest(slot, job)

    def _evaluate_rest(self, slot: Slot, job: Job) -> None:
        """Start to evaluate a prompt where its sources end; if no tokens are left, its logits are known."""
        if not job.begun:
            job.begun = True
            slot.session.begin(len(job.pending))
            if job.progress:
                job.progress(job)
        if not len(job.pending):
            self._continue(slot, job, slot.session.last_logits)

    # ---- a step ----

    def can_step(self) -> bool:
        """Return True if a slot has work."""
        return any(slot.job is not None and (slot.job.cancelled or _can_run(slot.job)) for slot in self.slots)

    def step(self) -> bool:
        """Evaluate one batch, and sample a token for every slot after its prefill; returns whether it could run."""
        runs = [(slot, slot.job) for slot in self.slots if slot.job is not None and _can_run(slot.job)]
        ready = [(slot, job) for slot, job in runs if self._make_ready(slot, job)]
        shares = divide(ready, self._pace, self._times, self.end)
        if shares:
            started = time.monotonic()
            n_prompt = sum(len(share.part) for share in shares if share.job.is_reading)
            self._evaluate(shares)
            seconds = time.monotonic() - started
            self.counters.busy_seconds += seconds
            self._pace.add(n_prompt, seconds)
            if not n_prompt:
                self._times.add(sum(len(share.part) for share in shares), seconds)
        return bool(runs)

    def _make_ready(self, slot: Slot, job: Job) -> bool:
        """Return True if a job needs a step, after loading from its sources and accepting draft tokens.

        Entries that the cache has lost, such as after an interrupt, are evaluated again.
        """
        if not job.begun or job.pieces:
            if not self._loader.load(job, slot.session):
                return False
            if job.is_reading:
                self._evaluate_rest(slot, job)
            if not job.is_reading:  # everything was cached, and a token is sampled
                return False
        if job.draft is not None and (row := job.draft.accept(job.pending)) is not None:
            slot.session.settle(slot.session.n_tokens + 1, row)
            self._take(slot, job, job.pending, row[np.newaxis])
            return False
        if job.unsettled:
            lost = slot.session.mend(quiet=job.draft is not None)
            job.pending, job.unsettled = np.concatenate([lost, job.pending]), False
        return True

    def _evaluate(self, shares: list[Share]) -> None:
        with self._guard:
            self._running = [share.job for share in shares]
            self._interrupted = self._is_unneeded()
            if self._interrupted:
                self.context.abort = True
        try:
            rows = evaluate([Part(share.slot.session, share.part, share.n_rows) for share in shares], self._rows)
        except Aborted as reason:
            if not self._interrupted:  # aborted by the user; else the jobs are ended as cancelled
                for share in shares:
                    self.end(share.slot, reason)
        except ContextFull as reason:
            for share in shares:
                share.job.unsettled = True
            self._make_room(shares, reason)
        except LctxError as reason:
            if isinstance(reason, DeviceLost):
                self.lost = reason
            for share in shares:
                self.end(share.slot, reason)
        else:
            self.counters.steps += 1
            self.counters.sequences += len(shares)
            for share, found in zip(shares, rows, strict=True):
                self._take(share.slot, share.job, share.part[: share.n_own], keep_guess(share, found))
        finally:
            with self._guard:
                self._running = []
                if self._interrupted:
                    self.context.abort = False

    def _make_room(self, shares: list[Share], reason: ContextFull) -> None:
        """Leave out drafts, or clear the least recently used idle slot; else find the jobs that do not fit."""
        drafts = [share.job.draft for share in shares if share.job.draft is not None and share.n_guess]
        for draft in drafts:
            draft.pause()
        if drafts:
            return
        idle = [slot for slot in self.slots if slot.job is None and slot.session.n_tokens]
        if idle:
            session = min(idle, key=lambda slot: slot.used).session
            self.parked.park(session)
            session.clear()
        elif len(shares) == 1:
            slot, job = shares[0].slot, shares[0].job
            if not self._shorten(slot, job):
                self.end(slot, reason)
        else:
            for share in shares:
                if share.slot.job is share.job:
                    self._evaluate([share])

    def _shorten(self, slot: Slot, job: Job) -> bool:
        """Evict tokens of a text so that its answer can continue; False if that is impossible."""
        eviction = None if job.evictions is None or job.is_reading else job.evictions.next(slot.session.n_tokens)
        if eviction is None:
            return False
        if refusal := slot.session.drop(eviction.first, eviction.end):
            slot.session.log(f"the answer ends because the context is full and nothing can be evicted: {refusal}")
            return False
        job.note(eviction)
        self.counters.dropped_tokens += eviction.end - eviction.first
        return True

    def _take(self, slot: Slot, job: Job, part: NDArray[np.int32], rows: Row) -> None:
        job.pending = job.pending[len(part) :]
        if job.is_reading:
            job.n_read += len(part)
            self.counters.prompt_tokens += len(part)
            if job.every_row:
                job.results.put(rows.copy())
            if job.progress:
                job.progress(job)
        if not len(job.pending):
            self._continue(slot, job, rows[-1])

    def _continue(self, slot: Slot, job: Job, row: Row) -> None:
        """Sample the next token of a slot."""
        if job.is_reading:
            job.prefilled_at = time.monotonic()
        if job.limit == 0:
            self.end(slot, self._readers.keep(job, slot.session))
            return
        try:
            token = job.choose(job.all_tokens(slot.session.tokens), row)
        except Exception as reason:  # of the sampler, or of a user's function: other jobs continue
            self.end(slot, reason)
            return
        if token is None:
            self.end(slot)
            return
        job.n_generated += 1
        self.counters.generated_tokens += 1
        job.pending = np.array([token], np.int32)
        if job.evictions is not None:
            job.answer_tokens.append(token)
        job.results.put((token, job.reported_row(row)))
        if job.limit is not None and (job.n_generated >= job.limit or job.ends(self.model, token)):
            self.end(slot)
        elif job.evictions is not None and slot.session.n_tokens + 1 >= slot.session.n_ctx:
            job.full = not self._shorten(slot, job)
            if job.full:
                self.end(slot)


def _can_run(job: Job) -> bool:
    if job.fetch is not None and not job.fetch.ready:
        return False
    job.stalled = True  # set first, so that a reader that takes a result now sees it
    job.stalled = job.is_ahead
    return not job.stalled
