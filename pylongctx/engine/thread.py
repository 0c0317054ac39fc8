"""An engine with its own thread, for many readers."""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from pylongctx._platform import thread_seconds
from pylongctx.engine.call_lock import NESTED
from pylongctx.engine.compress import CompressionReport
from pylongctx.engine.engine import Engine
from pylongctx.engine.job import Cancelled, Job
from pylongctx.engine.reuse import Library
from pylongctx.engine.session import Session
from pylongctx.engine.slots import Snapshot
from pylongctx.errors import DeviceLost

Result = TypeVar("Result")


class EngineThread:
    """Runs an engine on several sequences of one context, which are decoded in common batches.

    Only its thread uses the context, including functions of ``call``; the other methods are thread-safe.

    The sequences must outlive it. ``library``, ``step_seconds`` and ``parked_bytes`` are as for ``Engine``, whose
    attributes are changed by the thread.
    """

    def __init__(
        self,
        sessions: list[Session],
        library: Library | None = None,
        step_seconds: float | None = None,
        parked_bytes: int = 0,
    ) -> None:
        engine = self._engine = Engine(sessions, library, (), self._notify, step_seconds, parked_bytes)
        self.context, self.slots, self.counters = engine.context, engine.slots, engine.counters
        self.tracer, self.documents = engine.tracer, engine.documents
        self.parked = engine.parked
        self.failure: BaseException | None = None  # that ended the thread
        self.on_lost: Callable[[], None] = lambda: None  # called by the thread before it ends as a device was lost
        self._wake = threading.Condition()
        self._inbox: deque[Job] = deque()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._closing = False
        self._asleep = False  # idle
        self._stepped = time.monotonic()  # start of the last step
        self._computed, self._alive = 0.0, 0.0  # the thread's CPU time, and when it last increased
        self._thread = threading.Thread(target=self._run, name="pylongctx-engine", daemon=True)
        self._thread.start()

    @property
    def n_busy(self) -> int:
        """The number of slots with a job."""
        return self._engine.n_busy

    @property
    def n_waiting(self) -> int:
        """The number of jobs without a slot."""
        return len(self.waiting)

    @property
    def waiting(self) -> list[Job]:
        """The jobs without a slot."""
        return [*self._engine.waiting, *self._inbox]

    @property
    def is_alive(self) -> bool:
        """True while the thread runs."""
        return self._thread.is_alive()

    def stalled(self) -> float:
        """Return the seconds since the current step last made progress; 0 while idle.

        A step makes progress while its thread uses CPU time, however long it takes. Work on a GPU or another machine is
        not visible; then the seconds count from the start of the step.
        """
        if self._asleep:
            return 0.0
        now, computed = time.monotonic(), self._processor_seconds()
        if computed > self._computed:
            self._computed, self._alive = computed, now
        return now - max(self._stepped, self._alive)

    def _processor_seconds(self) -> float:
        """Return the CPU time of the thread."""
        if self._thread.ident is None or not self._thread.is_alive():
            return 0.0
        return thread_seconds(self._thread.ident)

    def refuse_nested(self) -> None:
        """Raise RuntimeError in the engine's own thread, which would wait for itself."""
        if threading.current_thread() is self._thread:
            raise RuntimeError(NESTED)

    def submit(self, job: Job) -> None:
        """Queue a job; its results come in ``job.results``."""
        self.refuse_nested()
        with self._wake:
            if job.submitted:
                return
            job.submitted = True
            job.wake = self._notify
            if self._closing or job.cancelled:
                job.results.put(Cancelled("the server is shutting down"))
                return
            self._inbox.append(job)
            self._wake.notify()

    def cancel(self, job: Job, reader_done: bool = False) -> None:
        """End a job after the current step; ``reader_done``: the reader has all it needs.

        The reader does not have to wait for the end of the step.
        """
        with self._wake:
            job.reader_done |= reader_done
            if not (job.cancelled or reader_done):
                job.results.put(Cancelled("cancelled"))
            job.cancelled = True
            self._engine.interrupt()
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

    def erase(self, seq: int, owner: str | None) -> "Future[int]":
        """Clear an idle slot between two steps, see ``IdleSlots.erase``."""
        return self.call(lambda: self._engine.idle.erase(seq, owner))

    def save(self, seq: int, owner: str | None) -> "Future[Snapshot]":
        """Return the content of an idle slot, see ``IdleSlots.save``."""
        return self.call(lambda: self._engine.idle.save(seq, owner))

    def load(self, seq: int, owner: str | None, saved: Snapshot) -> "Future[int]":
        """Replace the content of an idle slot, see ``IdleSlots.load``."""
        return self.call(lambda: self._engine.idle.load(seq, owner, saved))

    def compress(self, ratio: float, seq: int, owner: str | None, answer: str = "") -> "Future[CompressionReport]":
        """Evict most KV entries of an idle slot between two steps, see ``IdleSlots.compress``."""
        return self.call(lambda: self._engine.idle.compress(ratio, seq, owner, answer))

    def stop_compression(self) -> None:
        """Stop a compression, which leaves its text as it was."""
        self._engine.idle.stop_compression()

    def close(self, patience: float | None = None) -> bool:
        """End all jobs and the thread; returns False when its step has not ended after ``patience`` seconds."""
        with self._wake:
            self._closing = self._engine.closing = True
            self._engine.interrupt()
            self._wake.notify()
        self._thread.join(patience)
        if self._thread.is_alive():
            for job in [*self._engine.jobs, *self._inbox]:
                job.results.put(Cancelled("the server is shutting down"))
        return not self._thread.is_alive()

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    # ---- the thread ----

    def _run(self) -> None:
        try:
            while self.failure is None and self._next():
                self._engine.step()
                self.failure = self._engine.lost
        except BaseException as reason:
            self.failure = reason
            raise
        finally:
            self._end_all(self.failure or Cancelled("the server is shutting down"))
            if isinstance(self.failure, DeviceLost):
                self.on_lost()

    def _next(self) -> bool:
        """Wait for work, and do everything except evaluation; returns False at the end."""
        engine = self._engine
        with self._wake:
            while not (self._closing or self._calls or self._inbox or engine.can_assign() or engine.can_step()):
                self._asleep = True
                self._wake.wait()
            self._asleep, self._stepped = False, time.monotonic()
            calls = list(self._calls)
            self._calls.clear()
            engine.waiting.extend(self._inbox)
            self._inbox.clear()
        engine.end_cancelled()  # before the calls, which may request the trace of a finished answer
        for function, future in calls:
            _answer(function, future)
        engine.assign_waiting()
        return not self._closing

    def _end_all(self, reason: BaseException) -> None:
        with self._wake:
            self._closing = True
            self._engine.waiting.extend(self._inbox)
            self._inbox.clear()
            calls = list(self._calls)
            self._calls.clear()
        self._engine.end_all(reason)
        for _, future in calls:
            future.set_exception(reason)


def _answer(function: Callable[[], Any], future: "Future[Any]") -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except Exception as reason:
        future.set_exception(reason)
