"""The lock of an object that calls functions of its user, which must not call the object again."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

NESTED = (
    "a function that a model calls (logits processor, stopping criterion, draft model, progress) "
    "called the same model, which cannot answer before the function returns: use another Llama there, or return first"
)


class CallLock:
    """A re-entrant lock that refuses calls from inside of a user's function instead of changing what it waits for.

    Examples
    --------
    >>> lock = CallLock()
    >>> with lock, lock:
    ...     pass
    >>> with lock, lock.calling():
    ...     with lock:
    ...         pass
    Traceback (most recent call last):
    RuntimeError: a function that a model calls ...
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._caller: int | None = None  # the thread that runs a user's function

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Refuse the lock to this thread while the block runs a user's function."""
        before, self._caller = self._caller, threading.get_ident()
        try:
            yield
        finally:
            self._caller = before

    def __enter__(self) -> None:
        if self._caller == threading.get_ident():
            raise RuntimeError(NESTED)
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()
