"""A folder of blocks that several processes share: a file is there whole or not at all, and the least used leave."""

import fcntl
import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pylongctx._log import LOG
from pylongctx.errors import LctxError
from pylongctx.state import LlamaState

ROOM = 0.9  # of the limit, to which the folder is cut back when it is over
KINDS = ("rows", "point", "tail", "document")
UNFINISHED = ".writing."  # names of files that are being written begin so; whoever writes holds a lock on it


@dataclass(frozen=True)
class Entry:
    """A file of the folder.

    Attributes
    ----------
    name, kind : str
        Of the block, and what of it the file holds.
    n_bytes : int
        Its size.
    used : float
        When it was written or read last, in seconds since the epoch.
    """

    path: Path
    name: str
    kind: str
    n_bytes: int
    used: float


class Folder:
    """Files by name and kind.

    Names are hashes of what the files hold, so two processes that write one file write the same; the last one stays.

    Parameters
    ----------
    path : str or Path
        The folder; created for its owner only, whatever the umask is.
    limit : int
        Most bytes of all files; what was used least recently is removed.

    Raises
    ------
    OSError
        When the folder cannot be made.
    """

    def __init__(self, path: str | os.PathLike[str], limit: int) -> None:
        self.limit = limit
        Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = Path(path).resolve()  # a link that changes later does not lead elsewhere
        self._unseen: float = float("inf")  # bytes written since all files were looked at

    def file(self, name: str, kind: str) -> Path:
        """Return where a block lies."""
        return self.path / name[:2] / f"{name}.{kind}"

    def tails(self, name: str) -> list[Path]:
        """Return the files of tails that follow a block; none when the folder cannot be listed."""
        try:
            return list((self.path / name[:2]).glob(f"{name}-*.tail"))
        except OSError:
            return []

    def has(self, name: str, kind: str) -> bool:
        """Return whether a block is there and the system lets us see it."""
        return os.path.isfile(self.file(name, kind))  # False on every error, unlike Path.is_file

    def write(self, name: str, kind: str, state: LlamaState) -> int:
        """Write a block, and make room for it; returns its bytes."""
        path = self.file(name, kind)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=UNFINISHED, delete=False) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.writelines(state.parts())
                file.flush()
                n = file.tell()
                os.replace(file.name, path)
            except BaseException:
                with suppress(OSError):  # the first error is the one to report
                    os.unlink(file.name)
                raise
        self._unseen += n
        if self._unseen > self.limit / 64:
            self.trim()
        return n

    def read(self, name: str, kind: str) -> LlamaState | None:
        """Return a block; None when it is not there, or was damaged and is removed now.

        Raises
        ------
        OSError, MemoryError
            When it cannot be read now. It stays: nothing says that it is damaged.
        """
        return self.load(self.file(name, kind))

    def load(self, path: Path) -> LlamaState | None:
        """Return the block of a file, as ``read`` does."""
        try:
            return LlamaState.load(path)
        except FileNotFoundError:
            return None
        except (ValueError, LctxError) as reason:  # its bytes are wrong
            path.unlink(missing_ok=True)
            LOG.warning("removed from the KV store: %s", reason)
            return None

    def touch(self, names: Iterable[str]) -> None:
        """Take note that blocks that follow each other were used: the last of them is to leave first."""
        now = time.time_ns()
        for i, name in enumerate(names):
            for kind in KINDS:
                with suppress(OSError):  # it has left, or there is none of this kind
                    os.utime(self.file(name, kind), ns=(now - i * 1000, now - i * 1000))

    def entries(self) -> list[Entry]:
        """Return all files, the least recently used first."""
        found = [entry for path in self.path.glob("??/*.*") if (entry := _entry(path)) is not None]
        return sorted(found, key=lambda entry: entry.used)

    def trim(self, limit: int | None = None) -> int:
        """Remove what is over the limit, and what killed processes left; returns how many files were removed."""
        limit = self.limit if limit is None else limit
        for path in self.path.glob(f"??/{UNFINISHED}*"):
            _remove_unfinished(path)
        entries = self.entries()
        total = sum(entry.n_bytes for entry in entries)
        leaving = list(_first(entries, total - int(limit * ROOM))) if total > limit else []
        for entry in leaving:
            entry.path.unlink(missing_ok=True)
        self._unseen = 0
        return len(leaving)


def _first(entries: list[Entry], n_bytes: int) -> Iterator[Entry]:
    for entry in entries:
        if n_bytes <= 0:
            return
        n_bytes -= entry.n_bytes
        yield entry


def _entry(path: Path) -> Entry | None:
    if not re.fullmatch(r"[0-9a-f]{40}(-[0-9a-f]{40})?\.[a-z]+", path.name):
        return None
    try:
        status = path.stat()
    except OSError:
        return None  # it has left
    return Entry(path, path.stem, path.suffix[1:], status.st_size, status.st_mtime)


def _remove_unfinished(path: Path) -> None:
    """Remove a file that nobody writes any more: a process that ends gives its lock up, however it ends."""
    with suppress(OSError), path.open("rb") as file:  # somebody writes it, or it is gone
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
