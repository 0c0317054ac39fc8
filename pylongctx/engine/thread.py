"""An engine with a thread of its own, for many readers."""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from pylongctx.engine.engine import Engine, Snapshot
from pylongctx.engine.job import Cancelled, Job
from pylongctx.engine.session import Session
from pylongctx.errors import DeviceLost
from pylongctx.store.library import Library

Result = TypeVar("Result")


class EngineThread:
    """Runs an engine on several sequences of one context, which are decoded together.

    All that happens to the context happens in its thread, ``call`` included; the other methods may come from any.

    Parameters
    ----------
    sessions : list of Session
        The sequences, which must outlive this object.
    library : Library or None
        The KV store, which prompts may come from.
    step_seconds : float or None
        How long a step may take in which answers are written and prompts are evaluated; None: no bound.

    Attributes
    ----------
    context, slots, counters, tracer, documents
        Those of the engine; they change in its thread.
    failure : BaseException or None
        What ended the thread, when that was an error.
    on_lost : callable
        Called by the thread at its end, when a device was lost.
    """

    def __init__(
        self, sessions: list[Session], library: Library | None = None, step_seconds: float | None = None
    ) -> None:
        engine = self._engine = Engine(sessions, library, wake=self._notify, step_seconds=step_seconds)
        self.context, self.slots, self.counters = engine.context, engine.slots, engine.counters
        self.tracer, self.documents = engine.tracer, engine.documents
        self.failure: BaseException | None = None
        self.on_lost: Callable[[], None] = lambda: None
        self._wake = threading.Condition()
        self._inbox: deque[Job] = deque()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._closing = False
        self._asleep = False  # nothing to do
        self._stepped = time.monotonic()  # when the last step began
        self._computed, self._alive = 0.0, 0.0  # the thread's time of the processor, and when it was seen to grow
        self._thread = threading.Thread(target=self._run, name="pylongctx-engine", daemon=True)
        self._thread.start()

    @property
    def n_busy(self) -> int:
        """The number of slots with a job."""
        return self._engine.n_busy

    @property
    def n_waiting(self) -> int:
        """The number of jobs that have no slot yet."""
        return len(self.waiting)

    @property
    def waiting(self) -> list[Job]:
        """The jobs that have no slot yet."""
        return [*self._engine.waiting, *self._inbox]

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def stalled(self) -> float:
        """Return for how long the step that is being evaluated has not gone on, 0 while there is nothing to do.

        A step goes on while its thread uses a processor, however long it takes. Where a GPU or another machine computes
        that is not seen, and the seconds are those since the step began.
        """
        if self._asleep:
            return 0.0
        now, computed = time.monotonic(), self._processor_seconds()
        if computed > self._computed:
            self._computed, self._alive = computed, now
        return now - max(self._stepped, self._alive)

    def _processor_seconds(self) -> float:
        """Return the time of the processor that the thread has used."""
        if self._thread.ident is None or not self._thread.is_alive():
            return 0.0
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

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
            self._inbox.append(job)
            self._wake.notify()

    def cancel(self, job: Job, satisfied: bool = False) -> None:
        """Let a job end with the step that is being evaluated; ``satisfied``: it has told what was wanted.

        Its reader need not wait for the end of the step.
        """
        with self._wake:
            job.satisfied |= satisfied
            if not (job.cancelled or satisfied):
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
        """Forget an idle slot between two steps, see ``Engine.erase``."""
        return self.call(lambda: self._engine.erase(seq, owner))

    def save(self, seq: int, owner: str | None) -> "Future[Snapshot]":
        """Return what an idle slot holds, see ``Engine.save``."""
        return self.call(lambda: self._engine.save(seq, owner))

    def load(self, seq: int, owner: str | None, saved: Snapshot) -> "Future[int]":
        """Replace what an idle slot holds, see ``Engine.load``."""
        return self.call(lambda: self._engine.load(seq, owner, saved))

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
        """Wait for something to do, and do all but evaluating; returns False at the end."""
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
        engine.end_cancelled()  # before the calls: who has an answer may ask for what was recorded of it
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
