"""A folder of blocks that several processes share: a file is there whole or not at all, and the least used leave."""

import fcntl
import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from pylongctx._log import LOG
from pylongctx.errors import LctxError
from pylongctx.state import LlamaState, read_identity
from pylongctx.store.entries import KINDS, Entry, Link, leaving

ROOM = 0.9  # of the limit, to which the folder is cut back when it is over
UNFINISHED = ".writing."  # names of files that are being written begin so; whoever writes holds a lock on it


class Folder:
    """Files by name and kind.

    Names are hashes of what the files hold, so two processes that write one file write the same; the last one stays.

    Parameters
    ----------
    path : str or Path
        The folder; created for its owner only, whatever the umask is.
    limit : int
        Most bytes of all files; beyond, they leave as ``entries.leaving`` says.

    Raises
    ------
    OSError
        When the folder cannot be made.
    """

    def __init__(self, path: str | os.PathLike[str], limit: int) -> None:
        self.limit = limit
        Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = Path(path).resolve()  # a link that changes later does not lead elsewhere
        self._links: dict[str, Link] = {}  # of blocks that were looked at; a name never has another one
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
        """Record that blocks that follow each other are used now."""
        now = time.time_ns()
        for name in names:
            for kind in KINDS:
                with suppress(OSError):  # it has left, or there is none of this kind
                    os.utime(self.file(name, kind), ns=(now, now))

    def entries(self) -> list[Entry]:
        """Return all files."""
        return [entry for path in self.path.glob("??/*.*") if (entry := Entry.of(path)) is not None]

    def leaving(self, entries: Sequence[Entry] | None = None) -> list[Entry]:
        """Return all files, or those that were listed just now: those first that are to leave first."""
        entries = self.entries() if entries is None else entries
        self._links = {entry.name: link for entry in entries if (link := self._link(entry))}
        return leaving(entries, self._links)

    def trim(self, limit: int | None = None) -> int:
        """Remove what is over the limit, and what killed processes left; returns how many files were removed.

        Raises
        ------
        OSError
            When a file cannot be removed; others were.
        """
        limit = self.limit if limit is None else limit
        for path in self.path.glob(f"??/{UNFINISHED}*"):
            _remove_unfinished(path)
        self._unseen = 0
        entries = self.entries()
        total = sum(entry.n_bytes for entry in entries)
        return self._remove(entries, total - int(limit * ROOM)) if total > limit else 0

    def _remove(self, entries: Sequence[Entry], n_bytes: int) -> int:
        """Remove the files that leave first until ``n_bytes`` are free."""
        n_removed, failure = 0, None
        for entry in self.leaving(entries):
            if n_bytes <= 0:
                break
            try:
                entry.path.unlink(missing_ok=True)
            except OSError as reason:
                failure = reason
                continue
            n_bytes -= entry.n_bytes
            n_removed += 1
        if failure is not None:
            raise failure
        return n_removed

    def _link(self, entry: Entry) -> Link | None:
        """Return which block a file follows; None when its header cannot be read."""
        if entry.name in self._links:
            return self._links[entry.name]
        try:
            about = read_identity(entry.path)
        except (LctxError, OSError, MemoryError):
            return None
        before, end = about.get("before"), about.get("end")
        return Link(before, end) if isinstance(before, str) and isinstance(end, int) else None


def _remove_unfinished(path: Path) -> None:
    """Remove a file that nobody writes any more: a process that ends gives its lock up, however it ends."""
    with suppress(OSError), path.open("rb") as file:  # somebody writes it, or it is gone
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
