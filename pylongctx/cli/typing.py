"""Line editing of the terminal: pastes of several lines, history of earlier sessions, Tab."""

import atexit
import glob
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from pylongctx._cache_folder import cache_folder

FILE = "history"  # in the cache folder
MAX_LINES = 1000  # lines


def prepare(readline: Any, words: Sequence[str]) -> None:
    """Set up readline: a paste is one line, lines are remembered, words and paths are completed."""
    path = cache_folder() / FILE
    readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off
    readline.parse_and_bind("tab: complete")
    readline.set_completer_delims("")
    readline.set_completer(lambda text, n: _nth(completions(text, words), n))
    readline.set_history_length(MAX_LINES)
    with suppress(OSError):
        readline.read_history_file(path)
    atexit.register(_write, readline, path)


def _write(readline: Any, path: Any) -> None:
    with suppress(OSError):  # a history file is optional
        path.parent.mkdir(parents=True, exist_ok=True)
        readline.write_history_file(path)
        os.chmod(path, 0o600)


@contextmanager
def unechoed() -> Iterator[None]:
    """Turn off echo during an answer; the next prompt receives what is typed."""
    import termios

    try:
        before = termios.tcgetattr(sys.stdin)
    except (termios.error, ValueError):  # not a terminal, or closed
        yield
        return
    quiet = before.copy()
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def completions(line: str, words: Sequence[str]) -> list[str]:
    """Return the completions of a line: a word, or after the first space a path.

    Examples
    --------
    >>> completions("/re", ["/read", "/regen", "/save"])
    ['/read ', '/regen ']
    """
    command, space, path = line.partition(" ")
    if not space:
        return [f"{word} " for word in words if line and word.startswith(line)]
    if command not in words:
        return []
    found = sorted(glob.glob(glob.escape(os.path.expanduser(path)) + "*"))
    return [f"{command} {name}{os.sep if os.path.isdir(name) else ''}" for name in found]


def _nth(found: Sequence[str], n: int) -> str | None:
    return found[n] if n < len(found) else None
