"""The exception of a call on a closed object."""

import threading


def at_exit() -> bool:
    """Return True in a daemon thread that still runs during interpreter shutdown, when objects are closed."""
    return threading.current_thread().daemon and not threading.main_thread().is_alive()


def closed() -> BaseException:
    """Return RuntimeError; for a daemon thread at exit SystemExit, which ends it without a traceback."""
    return SystemExit() if at_exit() else RuntimeError("this Llama is closed")
