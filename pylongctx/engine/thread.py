"""An engine with a thread of its own, for many readers."""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np

from pylongctx.engine.engine import Engine, Share, Snapshot
from pylongctx.engine.job import Cancelled, Job, Row
from pylongctx.engine.session import Session

Result = TypeVar("Result")


class EngineThread:
    """Runs an engine on several sequences of one context, which are decoded together.

    All that happens to the context happens in its thread, ``call`` included; the other methods may come from any.

    Parameters
    ----------
    sessions : list of Session
        The sequences, which must outlive this object.

    Attributes
    ----------
    context, slots, counters, tracer, documents
        Those of the engine; they change in its thread.
    failure : BaseException or None
        What ended the thread, when that was an error.
    """

    def __init__(self, sessions: list[Session]) -> None:
        engine = self._engine = Engine(sessions, self._decode)
        self.context, self.slots, self.counters = engine.context, engine.slots, engine.counters
        self.tracer, self.documents = engine.tracer, engine.documents
        self.failure: BaseException | None = None
        self._rows = np.empty((len(sessions), engine.context.n_vocab), np.float32)
        self._wake = threading.Condition()
        self._inbox: deque[Job] = deque()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._closing = False
        self._asleep = False  # nothing to do
        self._stepped = time.monotonic()  # when the last step began
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
        """Return the seconds since the step began that is being evaluated, 0 while there is nothing to do."""
        return 0.0 if self._asleep else time.monotonic() - self._stepped

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

    def erase(self, seq: int) -> "Future[int]":
        """Forget an idle slot between two steps; the result is how many tokens it held."""
        return self.call(lambda: self._engine.erase(seq))

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
            while self._next():
                self._engine.step()
        except BaseException as reason:
            self.failure = reason
            raise
        finally:
            self._end_all(self.failure or Cancelled("the server is shutting down"))

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

    def _decode(self, shares: list[Share]) -> list[Row]:
        """Evaluate the shares of a step in one batch, see ``Evaluate``."""
        sizes = [len(part) for _, _, part in shares]
        starts = [slot.session.n_tokens for slot, _, _ in shares]
        wanted = [_wanted(job, len(part)) for _, job, part in shares]
        counts = [int(np.count_nonzero(rows)) for rows in wanted]
        logits = self._buffer(shares, sum(counts))
        self.context.decode_batch(
            np.concatenate([part for _, _, part in shares]),
            np.concatenate([np.arange(p, p + n, dtype=np.int32) for p, n in zip(starts, sizes, strict=True)]),
            np.repeat(np.array([slot.id for slot, _, _ in shares], np.int32), sizes),
            np.concatenate(wanted),
            logits,
        )
        found = np.split(logits, np.cumsum(counts)[:-1])
        for (slot, job, part), rows in zip(shares, found, strict=True):
            slot.session.advance(part, rows[-1] if len(part) == len(job.pending) else None)
        return found

    def _buffer(self, shares: list[Share], n: int) -> Row:
        """Return room for ``n`` rows of logits: the same in every step, but where readers keep them."""
        if any(job.every_row for _, job, _ in shares):
            return np.empty((n, self.context.n_vocab), np.float32)
        return self._rows[:n]

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


def _wanted(job: Job, n: int) -> "np.ndarray[Any, np.dtype[np.bool_]]":
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
