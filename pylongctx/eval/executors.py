"""Run units of samples in processes of this machine, or on a Dask cluster.

Dask's scheduler moves the units of a lost worker to another one. Models must be at the same path on every worker.
``dask worker --nthreads 1`` runs one model at a time.
"""

from __future__ import annotations

import os
import signal
from collections import Counter, deque
from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import Any, Protocol

from pylongctx._free import available_cpus
from pylongctx._lib import InvalidInput
from pylongctx.eval.runner import Cell, context_window, digest, plan_of, run
from pylongctx.eval.task import Record, Sample, by_text
from pylongctx.planning import most

SAMPLES_PER_UNIT = 8  # few enough to distribute and repeat, enough to be worth opening a model


@dataclass(frozen=True, eq=False)
class Unit:
    """Some samples of a cell, which can be pickled."""

    cell: Cell
    samples: Sequence[Sample]  # all of the cell, from which its context window is derived
    todo: tuple[str, ...]  # digests of those to run

    def without(self, done: Container[str]) -> Unit:
        """Return the unit without the samples of these digests."""
        return replace(self, todo=tuple(name for name in self.todo if name not in done))

    def records(self) -> Iterator[Record]:
        """Run the samples and yield their records."""
        others = {name for sample in self.samples if (name := digest(self.cell, sample)) not in self.todo}
        return run(self.cell, self.samples, others)


@dataclass(frozen=True)
class Failed:
    """The reason why the samples of a unit have no records."""

    reason: str


class Executor(Protocol):
    """Runs units, in any order."""

    def run(self, units: Sequence[Unit]) -> Iterator[tuple[Unit, Record | Failed]]:
        """Yield each record, or why there is none, with its unit; the caller writes the records."""


def units_of(cell: Cell, samples: Sequence[Sample], done: Container[str]) -> list[Unit]:
    """Return units of the samples whose digests are not in ``done``."""
    todo = {name: sample for sample in samples if (name := digest(cell, sample)) not in done}
    if cell.reads_once:  # all questions on a text
        names = {sample.id: name for name, sample in todo.items()}
        return [Unit(cell, samples, tuple(names[s.id] for s in group)) for group in by_text(list(todo.values()))]
    parts = (tuple(todo)[at : at + SAMPLES_PER_UNIT] for at in range(0, len(todo), SAMPLES_PER_UNIT))
    return [Unit(cell, samples, part) for part in parts]


def reason_of(error: BaseException) -> str:
    """Return an exception as a line."""
    return f"{type(error).__name__}: {error}"


# ---- processes of this machine ----

TRIES = 3  # workers that may die on a sample before it is given up
SPAWN = get_context("spawn")  # a fork copies locks that other threads hold

Bytes = Counter[str]  # by device


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    unit: Unit
    tries: int


class Local:
    """Up to ``n_workers`` processes; None: as many as memory and cores allow."""

    def __init__(self, n_workers: int | None = 1) -> None:
        if n_workers is not None and n_workers < 1:
            raise ValueError(f"there must be at least 1 worker, not {n_workers}")
        self._most = n_workers

    def run(self, units: Sequence[Unit]) -> Iterator[tuple[Unit, Record | Failed]]:
        """Yield records as they come, or why there are none."""
        if not units:
            return
        n_workers, n_threads = self.plan(units)
        waiting = deque((with_threads(unit, n_threads), 1) for unit in units)
        idle: list[tuple[BaseProcess, Connection]] = []
        busy: dict[Connection, _Worker] = {}
        try:
            while waiting or busy:
                while waiting and len(busy) < n_workers:
                    worker = _give(idle.pop() if idle else _start(), *waiting.popleft())
                    busy[worker.connection] = worker
                for connection in wait(list(busy)):
                    assert isinstance(connection, Connection)
                    yield from _receive(busy, connection, idle, waiting)
        finally:
            for process, connection in [*idle, *((w.process, w.connection) for w in busy.values())]:
                process.terminate()
                process.join()
                connection.close()

    def plan(self, units: Sequence[Unit]) -> tuple[int, int]:
        """Return the number of workers and the threads of each, so that the largest cell fits into memory for all."""
        cores = available_cpus()
        wanted = min(cores if self._most is None else self._most, len(units))
        if wanted > 1:
            needs = [memory_of(unit) for unit in {id(unit.cell): unit for unit in units}.values()]
            wanted = max(1, most(wanted, lambda n: all(_fits(need, n) for need in needs)))
        return wanted, max(1, cores // wanted)


# ---- memory ----


@dataclass(frozen=True)
class Need:
    """Bytes of a cell by device: weights, which processes share on the host, and everything else; and free bytes."""

    shared: Bytes
    own: Bytes
    free: Bytes


def _fits(need: Need, n: int) -> bool:
    return all(need.shared[device] + n * need.own[device] <= free for device, free in need.free.items())


def memory_of(unit: Unit) -> Need:
    """Return the bytes of a cell, estimated as by ``Llama(preflight=True)``; none if the library refuses it."""
    cell = unit.cell
    given = {**cell.options, "type_k": cell.type_k, "type_v": cell.type_v, "n_ctx": context_window(cell, unit.samples)}
    need = Need(Counter(), Counter(), Counter())
    try:
        with plan_of(cell.model, cell.method, (1, 1), given) as plan:
            sizes = plan.sizes()
    except InvalidInput:
        return need  # running it reports the reason
    for i, size in enumerate(sizes):
        (need.own if i else need.shared)[size.device] += size.weights
        need.own[size.device] += size.total - size.weights
        if size.free is not None:
            need.free[size.device] = size.free
    return need


def with_threads(unit: Unit, n_threads: int) -> Unit:
    """Return a unit whose cell uses ``n_threads``, unless its options set the number of threads."""
    threads = {"n_threads": n_threads, "n_threads_batch": n_threads}
    cell: Cell = replace(unit.cell, options={**threads, **unit.cell.options})
    return replace(unit, cell=cell)


# ---- processes ----


def _start() -> tuple[BaseProcess, Connection]:
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _give(worker: tuple[BaseProcess, Connection], unit: Unit, tries: int) -> _Worker:
    process, connection = worker
    with suppress(BrokenPipeError):  # it has died, which _receive handles
        connection.send(unit)
    return _Worker(process, connection, unit, tries)


def _receive(
    busy: dict[Connection, _Worker],
    connection: Connection,
    idle: list[tuple[BaseProcess, Connection]],
    waiting: deque[tuple[Unit, int]],
) -> Iterator[tuple[Unit, Record | Failed]]:
    """Handle a message of a worker: a record, a failure, or None for the end. The unit of a dead worker is repeated."""
    worker = busy[connection]
    try:
        message: Record | Failed | None = connection.recv()
    except (EOFError, OSError):
        del busy[connection]
        worker.process.join()
        connection.close()
        if worker.tries < TRIES:
            waiting.appendleft((worker.unit, worker.tries + 1))
        else:
            yield worker.unit, Failed(f"{TRIES} workers died of it, the last with {_status(worker.process)}")
        return
    if isinstance(message, dict):
        worker.unit, worker.tries = worker.unit.without({message["digest"]}), 1
    else:
        del busy[connection]
        idle.append((worker.process, connection))
    if message is not None:
        yield worker.unit, message


def _status(process: BaseProcess) -> str:
    code = process.exitcode or 0
    return f"status {code}" if code >= 0 else signal.Signals(-code).name


def serve(connection: Connection) -> None:
    """Run units until there are no more; the other process handles Ctrl-C, and its end also ends a running sample."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            unit: Unit = connection.recv()
        except EOFError:
            return
        try:
            for record in unit.records():
                connection.send(record)
            connection.send(None)
        except BrokenPipeError:
            return
        except Exception as reason:
            connection.send(Failed(reason_of(reason)))


def _end_with_parent() -> None:
    if (parent := parent_process()) is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)


# ---- a Dask cluster ----

HOW_TO_INSTALL = "an executor dask:// needs Dask: pip install 'pylongctx[cluster]'"


def run_unit(unit: Unit) -> list[Record]:
    """Return the records of a unit; runs on a worker."""
    return list(unit.records())


class Cluster:
    """The workers of the scheduler at ``address``, "host:port"."""

    def __init__(self, address: str) -> None:
        try:
            import distributed
        except ImportError as reason:
            raise ImportError(HOW_TO_INSTALL) from reason
        self._distributed: Any = distributed
        self._address = address

    def run(self, units: Sequence[Unit]) -> Iterator[tuple[Unit, Record | Failed]]:
        """Yield the records of complete units; a unit that Dask repeats is yielded once."""
        with self._distributed.Client(self._address) as client:
            futures = {client.submit(run_unit, unit, pure=False): unit for unit in units}
            for future in self._distributed.as_completed(list(futures)):
                unit = futures.pop(future)
                if future.status == "finished":
                    yield from ((unit, record) for record in future.result())
                else:
                    yield unit, Failed(reason_of(future.exception()))


# ---- by name ----

LOCAL, DASK = "local", "dask://"


def make_executor(name: str, n_workers: int | None = 1) -> Executor:
    """Return the executor of ``"local"``, with up to ``n_workers`` processes, or ``"dask://host:port"``."""
    if name == LOCAL:
        return Local(n_workers)
    if name.startswith(DASK) and len(name) > len(DASK):
        return Cluster(name.removeprefix(DASK))
    raise ValueError(f"unknown executor {name!r}; it is {LOCAL}, or {DASK}HOST:PORT of a Dask scheduler")
