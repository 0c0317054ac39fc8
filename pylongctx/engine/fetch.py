"""Rows that a thread reads while the engine evaluates other texts."""

import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Generic, TypeVar

NICE = 10  # reading takes a tenth of a core from the threads that evaluate, if they need them all

Item = TypeVar("Item")


class Now(Generic[Item]):
    """The items of an iterator that waits for nothing, with the interface of ``Fetch``."""

    ready = True

    def __init__(self, items: Iterator[Item]) -> None:
        self._items = items

    def take(self) -> Item | None:
        """Return the next item, None after the last one."""
        return next(self._items, None)

    def go_on(self, rest: float = 0.0) -> None:
        """Do nothing: the next item is there."""

    def cancel(self) -> None:
        """Do nothing: nothing is read ahead."""


class Fetch(Generic[Item]):
    """The items of an iterator, read ahead by a thread of its own: one while the one before is used.

    Parameters
    ----------
    items : iterator
        Is used by the thread alone.
    wake : callable
        Called, by the thread, when there is something to take.
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
        """Whether ``take`` returns at once."""
        return not self._queue.empty()

    def take(self) -> Item | None:
        """Wait for the next item, None after the last one; raises what the iterator raised."""
        item = self._queue.get()
        if isinstance(item, Exception):
            raise item
        return item

    def go_on(self, rest: float = 0.0) -> None:
        """Offer the item after the one that was taken, ``rest`` seconds from now at the earliest."""
        self._rest = rest
        self._room.release()

    def cancel(self) -> None:
        """Read no further."""
        self._cancelled.set()
        self._room.release()

    def _run(self) -> None:
        if hasattr(os, "setpriority"):
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)  # of this thread, on Linux
        end: Exception | None = None
        try:
            for item in self._items:
                self._room.acquire()
                if self._cancelled.wait(self._rest):
                    return
                self._queue.put(item)
                self._wake()
        except Exception as reason:  # the engine decides what follows
            end = reason
        self._queue.put(end)
        self._wake()
