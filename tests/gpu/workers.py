"""Items run in processes of their own: what aborts or hangs one of them fails that item, and the rest run."""

import multiprocessing as mp
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

SECONDS = 120  # after which an item counts as hanging


@dataclass(frozen=True)
class Lost:
    """Why an item has no result."""

    reason: str


class Worker:
    """A process that runs one item after the other."""

    def __init__(self) -> None:
        spawn = mp.get_context("spawn")  # a forked process cannot use CUDA
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def run(self, function: Callable[[Any], Any], item: Any, seconds: float) -> Any:
        """Return the result, or a `Lost`; an exception of the function is raised."""
        self._pipe.send((function, item))
        try:
            if not self._pipe.poll(seconds):
                return Lost(f"no result after {seconds} s")
            result = self._pipe.recv()
        except EOFError:
            self._process.join()
            return Lost(f"the process ended with status {self._process.exitcode}")
        if isinstance(result, Exception):
            raise result
        return result

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def serve(pipe: Connection) -> None:
    """Answer items until the process is ended."""
    while True:
        function, item = pipe.recv()
        try:
            pipe.send(function(item))
        except Exception as reason:
            pipe.send(reason)


def in_processes(n: int, function: Callable[[Any], Any], items: Iterable[Any], seconds: float = SECONDS) -> Iterator:
    """Yield the result of every item in order, or a `Lost`, from ``n`` processes."""
    own, workers = threading.local(), []

    def run(item: Any) -> Any:
        if getattr(own, "worker", None) is None:
            own.worker = Worker()
            workers.append(own.worker)
        result = own.worker.run(function, item, seconds)
        if isinstance(result, Lost):
            own.worker.end()
            own.worker = None
        return result

    with ThreadPoolExecutor(n) as threads:
        try:
            yield from threads.map(run, items)
        finally:
            for worker in workers:
                worker.end()


def each_in(n: int) -> Callable[..., Iterator]:
    """Return what maps a function over items: in this process, or in ``n`` others."""
    return partial(in_processes, n) if n else map
