"""Reading rows ahead in a thread while the engine evaluates other texts."""

import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Generic, TypeVar

NICE = 10  # reading takes at most a tenth of a core from evaluation

Item = TypeVar("Item")


class Now(Generic[Item]):
    """The items of an iterator that never blocks, with the interface of ``Fetch``."""

    ready = True

    def __init__(self, items: Iterator[Item]) -> None:
        self._items = items

    def take(self) -> Item | None:
        """Return the next item; None after the last one."""
        return next(self._items, None)

    def go_on(self, rest: float = 0.0) -> None:
        """Do nothing: the next item is always available."""

    def cancel(self) -> None:
        """Do nothing: nothing is read ahead."""


class Fetch(Generic[Item]):
    """The items of an iterator, read one ahead by a separate thread.

    Parameters
    ----------
    items : iterator
        Used only by the thread.
    wake : callable
        Called by the thread when an item is available.
    """

    def __init__(self, items: Iterator[Item], wake: Callable[[], None]) -> None:
        self._items, self._wake = items, wake
        self._queue: queue.SimpleQueue[Item | Exception | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(1)
        self._cancelled = threading.Event()
        self._rest = 0.0
        threading.Thread(target=self._run, name="pylongctx-fetch", daemon=True).start()

    @property
    def ready(self) -> bool:
        """True if ``take`` returns at once."""
        return not self._queue.empty()

    def take(self) -> Item | None:
        """Wait for the next item, None after the last one; raises the iterator's exceptions."""
        item = self._queue.get()
        if isinstance(item, Exception):
            raise item
        return item

    def go_on(self, rest: float = 0.0) -> None:
        """Request the next item, after a pause of ``rest`` seconds."""
        self._rest = rest
        self._room.release()

    def cancel(self) -> None:
        """Stop reading."""
        self._cancelled.set()
        self._room.release()

    def _run(self) -> None:
        if hasattr(os, "setpriority"):
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)  # only this thread, on Linux
        end: Exception | None = None
        try:
            for item in self._items:
                self._room.acquire()
                if self._cancelled.wait(self._rest):
                    return
                self._queue.put(item)
                self._wake()
        except Exception as reason:  # passed on to the engine
            end = reason
        self._queue.put(end)
        self._wake()
