"""The engine: one thread that decodes several sequences together."""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pylongctx._lib import Aborted, ContextFull
from pylongctx._session import Session
from pylongctx.errors import LctxError
from pylongctx.serve.counters import Counters
from pylongctx.serve.host import Host
from pylongctx.serve.job import Cancelled, Job
from pylongctx.serve.slots import Slot, assign, forerunner
from pylongctx.serve.tracing import Tracer

ROW_BYTES = 1 << 26  # most bytes of logits that a step of a scored prompt makes

Result = TypeVar("Result")
Share = tuple[Slot, Job, NDArray[np.int32]]  # a sequence, its job, and the tokens that a step evaluates of it


class Engine:
    """Continuous batching: a step evaluates one token of each sequence that writes, and shares the rest among prompts.

    All that happens to the context happens in its thread, ``call`` included.

    Parameters
    ----------
    host : Host
        The model and its context, which must outlive the engine.
    """

    def __init__(self, host: Host) -> None:
        first = host.session
        self.context = first.context
        self.model = first.model
        sessions = [first, *(Session(self.model, self.context, False, first.verbose, i) for i in range(1, host.n_seq))]
        self.slots = [Slot(session) for session in sessions]
        self.counters = Counters()
        self.tracer = Tracer(host)
        self._step_size = min(self.context.n_batch, self.context.n_ubatch)
        if self._step_size < host.n_seq:
            raise ValueError(f"{host.n_seq} sequences need batches of as many tokens, not {self._step_size}: raise -ub")
        self._rows = np.empty((host.n_seq, self.context.n_vocab), np.float32)
        self._wake = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._running: list[Job] = []  # jobs of the step that is being evaluated
        self._closing = False
        self._n_ended = 0
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="pylongctx-engine", daemon=True)
        self._thread.start()

    # ---- for other threads ----

    @property
    def n_waiting(self) -> int:
        """The number of jobs that have no sequence yet."""
        return len(self._waiting)

    @property
    def n_busy(self) -> int:
        """The number of sequences with a job."""
        return sum(slot.job is not None for slot in self.slots)

    def submit(self, job: Job) -> None:
        """Queue a job; its results come in ``job.results``."""
        with self._wake:
            if job.submitted:
                return
            job.submitted = True
            job.wake = self._notify
            if self._closing or job.cancelled:
                job.results.put(Cancelled("the server is shutting down"))
                return
            self._waiting.append(job)
            self._wake.notify()

    def cancel(self, job: Job, satisfied: bool = False) -> None:
        """Let a job end with the step that is being evaluated; ``satisfied``: it has told what was wanted."""
        with self._wake:
            job.satisfied |= satisfied
            job.cancelled = True
            if self._running and all(running.cancelled for running in self._running):
                self.context.abort = True
            self._wake.notify()

    def call(self, function: Callable[[], Result]) -> "Future[Result]":
        """Run a function between two steps."""
        future: Future[Result] = Future()
        with self._wake:
            if self._closing:
                future.set_exception(Cancelled("the server is shutting down"))
            else:
                self._calls.append((function, future))
                self._wake.notify()
        return future

    def close(self) -> None:
        """End all jobs and the thread."""
        with self._wake:
            self._closing = True
            self.context.abort = True
            self._wake.notify()
        self._thread.join()

    def erase(self, seq: int) -> int:
        """Forget an idle sequence; returns how many tokens it held. For ``call``."""
        slot = self.slots[seq]
        if slot.job is not None:
            raise ValueError(f"sequence {seq} is busy")
        n = slot.session.n_tokens
        slot.session.clear()
        slot.used = 0
        return n

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    # ---- the thread ----

    def _run(self) -> None:
        try:
            while self._next():
                self._step()
        except BaseException as reason:
            self.failure = reason
            raise
        finally:
            self._end_all(self.failure or Cancelled("the server is shutting down"))

    def _next(self) -> bool:
        """Wait for something to do, and do all but evaluating; returns False at the end."""
        with self._wake:
            while not (self._closing or self._calls or self._can_assign() or self._can_step()):
                self._wake.wait()
            calls = list(self._calls)
            self._calls.clear()
        for slot in self.slots:  # before the calls: who has an answer may ask for what was recorded of it
            if slot.job is not None and slot.job.cancelled:
                self._end(slot, None if slot.job.satisfied else Cancelled("cancelled"))
        for function, future in calls:
            _answer(function, future)
        self._assign_waiting()
        return not self._closing

    def _can_assign(self) -> bool:
        return any(job.cancelled for job in self._waiting) or any(self._fits(job) for job in self._waiting)

    def _fits(self, job: Job) -> bool:
        if job.forerunner is not None and job.forerunner.is_reading:
            return False
        if job.traced is not None and self.tracer.busy:
            return False  # one record at a time
        return any(slot.job is None for slot in self.slots)

    def _can_step(self) -> bool:
        return any(slot.job is not None and (slot.job.cancelled or self._can_run(slot.job)) for slot in self.slots)

    def _can_run(self, job: Job) -> bool:
        job.stalled = True  # first, so that a reader who takes something now sees it
        job.stalled = job.is_ahead
        return not job.stalled

    def _assign_waiting(self) -> None:
        with self._wake:
            jobs = list(self._waiting)
        for job in jobs:
            if self._fits(job) and not job.considered:
                job.forerunner, job.considered = forerunner(self.slots, job, self._step_size), True
            if not (job.cancelled or self._fits(job)):
                continue
            with self._wake:
                self._waiting.remove(job)
            if job.cancelled:
                self.counters.cancelled += 1
                job.results.put(Cancelled("cancelled"))
                continue
            self._begin(job)

    def _begin(self, job: Job) -> None:
        job.started, job.forerunner = time.monotonic(), None
        try:
            slot = assign(self.slots, job)
            assert slot is not None  # _fits
            if job.traced is not None:
                self.tracer.start(job, slot.session)
        except Exception as reason:
            self.counters.failed += 1
            job.results.put(reason)
            return
        slot.job = job
        job.n_cached = len(job.tokens) - len(job.pending)
        self.counters.cached_tokens += job.n_cached
        if not len(job.pending):
            self._continue(slot, job, slot.session.last_logits)

    def _step(self) -> None:
        shares = self._shares()
        if shares:
            started = time.monotonic()
            self._evaluate(shares)
            self.counters.busy_seconds += time.monotonic() - started

    def _shares(self) -> list[Share]:
        """Return what each sequence may evaluate: short wishes whole, the others as much as each other."""
        jobs = [(slot, slot.job) for slot in self.slots if slot.job is not None and self._can_run(slot.job)]
        jobs.sort(key=lambda pair: len(pair[1].pending))
        left, shares = self._step_size, []
        for i, (slot, job) in enumerate(jobs):
            n = min(len(job.pending), left // (len(jobs) - i))
            if job.every_row:
                n = min(n, max(1, ROW_BYTES // (4 * self.context.n_vocab)))
            n = self.context.step(slot.session.n_tokens, n)
            left -= n
            shares.append((slot, job, job.pending[:n]))
        return shares

    def _evaluate(self, shares: list[Share]) -> None:
        try:
            rows = self._decode(shares)
        except Aborted:
            return  # by the last of the jobs that were running, or the end of the server
        except ContextFull as reason:
            self._make_room(shares, reason)
        except LctxError as reason:
            for slot, _, _ in shares:
                self._end(slot, reason)
                slot.session.clear()
        else:
            self.counters.steps += 1
            for (slot, job, part), row in zip(shares, rows, strict=True):
                self._take(slot, job, part, row)

    def _decode(self, shares: list[Share]) -> list[NDArray[np.float32]]:
        """Evaluate one batch; returns for each share the logits that are wanted, [0, n_vocab] for none."""
        with self._wake:
            self._running = [job for _, job, _ in shares]
            self.context.abort = self._closing or all(job.cancelled for job in self._running)
        try:
            sizes = [len(part) for _, _, part in shares]
            starts = [slot.session.n_tokens for slot, _, _ in shares]
            wanted = [_wanted(job, len(part)) for _, job, part in shares]
            logits = self._buffer(shares, sum(map(np.count_nonzero, wanted)))
            self.context.decode_batch(
                np.concatenate([part for _, _, part in shares]),
                np.concatenate([np.arange(p, p + n, dtype=np.int32) for p, n in zip(starts, sizes, strict=True)]),
                np.repeat(np.array([slot.id for slot, _, _ in shares], np.int32), sizes),
                np.concatenate(wanted),
                logits,
            )
            return np.split(logits, np.cumsum([np.count_nonzero(rows) for rows in wanted])[:-1])
        finally:
            with self._wake:
                self._running = []
                self.context.abort = False

    def _buffer(self, shares: list[Share], n: int) -> NDArray[np.float32]:
        """Return room for ``n`` rows of logits: the same in every step, but where readers keep them."""
        if any(job.every_row for _, job, _ in shares):
            return np.empty((n, self.context.n_vocab), np.float32)
        return self._rows[:n]

    def _make_room(self, shares: list[Share], reason: ContextFull) -> None:
        """Forget the idle sequence that was not used for longest; without one, find the jobs that do not fit."""
        idle = [slot for slot in self.slots if slot.job is None and slot.session.n_tokens]
        if idle:
            min(idle, key=lambda slot: slot.used).session.clear()
        elif len(shares) == 1:
            self._end(shares[0][0], reason)
        else:
            for share in shares:
                if share[0].job is share[1]:
                    self._evaluate([share])

    def _take(self, slot: Slot, job: Job, part: NDArray[np.int32], rows: NDArray[np.float32]) -> None:
        job.pending = job.pending[len(part) :]
        slot.session.advance(part, None if len(job.pending) else rows[-1])
        if job.is_reading:
            job.n_read += len(part)
            self.counters.prompt_tokens += len(part)
            if job.every_row:
                job.results.put(rows)
            if job.progress:
                job.progress(job)
        if not len(job.pending):
            self._continue(slot, job, rows[-1])

    def _continue(self, slot: Slot, job: Job, row: NDArray[np.float32]) -> None:
        """Choose the next token of a sequence."""
        if job.is_reading:
            job.read = time.monotonic()
        if not job.limit:
            self._end(slot)
            return
        try:
            token = job.sampler.sample(row)
        except LctxError as reason:
            self._end(slot, reason)
            return
        job.n_generated += 1
        self.counters.generated_tokens += 1
        job.pending = np.array([token], np.int32)
        job.results.put((token, row.copy() if job.with_rows else None))
        if job.n_generated >= job.limit or self.model.ends_generation(token):
            self._end(slot)

    def _end(self, slot: Slot, reason: BaseException | None = None) -> None:
        job = slot.job
        assert job is not None
        job.ended = time.monotonic()
        job.read = job.read or job.ended
        if job.traced is not None:
            self.tracer.end(job, slot.session)
        self._n_ended += 1
        slot.job, slot.last, slot.used = None, job, self._n_ended
        name = "completed" if reason is None else "cancelled" if isinstance(reason, Cancelled) else "failed"
        setattr(self.counters, name, getattr(self.counters, name) + 1)
        job.results.put(reason)

    def _end_all(self, reason: BaseException) -> None:
        with self._wake:
            self._closing = True
            waiting, calls = list(self._waiting), list(self._calls)
            self._waiting.clear()
            self._calls.clear()
        for slot in self.slots:
            if slot.job is not None:
                self._end(slot, reason)
        for job in waiting:
            job.results.put(reason)
        for _, future in calls:
            future.set_exception(reason)


def _wanted(job: Job, n: int) -> NDArray[np.bool_]:
    """Return after which of the next ``n`` tokens the logits are wanted."""
    wanted = np.full(n, job.every_row)
    wanted[-1] |= n == len(job.pending)
    return wanted


def _answer(function: Callable[[], Any], future: "Future[Any]") -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except Exception as reason:
        future.set_exception(reason)
