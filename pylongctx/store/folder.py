"""A folder of blocks shared by several processes: files are written atomically, the least recently used are removed."""

import os
import re
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pylongctx._log import LOG
from pylongctx._platform import take_lock
from pylongctx.engine.saved_state import LlamaState, read_identity
from pylongctx.errors import LctxError

KINDS = ("rows", "point", "tail", "document")
NAME = re.compile(r"[0-9a-f]{40}(-[0-9a-f]{40})?\.[a-z]+")
TARGET_FILL = 0.9  # fraction of the limit to which an oversized folder is reduced
UNFINISHED = ".writing."  # prefix of unfinished files, which their writers lock


@dataclass(frozen=True)
class StoredFile:
    """A file of the folder."""

    path: Path
    name: str  # of the block
    kind: str
    n_bytes: int
    used: float  # time of the last write or use, in seconds since the epoch

    @classmethod
    def of(cls, path: Path) -> "StoredFile | None":
        """Return the entry of a file; None when it is not a file of a block, or is gone."""
        if not NAME.fullmatch(path.name):
            return None
        try:
            status = path.stat()
        except OSError:
            return None
        return cls(path, path.stem, path.suffix[1:], status.st_size, status.st_mtime)


@dataclass(frozen=True)
class Link:
    """The position of a block in its texts: the block before it, and the tokens up to its end."""

    before: str = ""
    end: int = 0


def leaving(entries: Iterable[StoredFile], links: Mapping[str, Link]) -> list[StoredFile]:
    """Return files in the order of removal: the least recently used first, a block after all that follow it.

    A name without a link has no previous block. ``used`` becomes the last use of any text with the block, so a common
    prefix of many texts outlives each of them.
    """
    entries = list(entries)
    used: dict[str, float] = {}
    for entry in entries:
        used[entry.name] = max(entry.used, used.get(entry.name, 0.0))
    end = {name: links.get(name, Link()).end for name in used}
    for name in sorted(used, key=end.__getitem__, reverse=True):
        before = links.get(name, Link()).before
        if before in used:
            used[before] = max(used[before], used[name])
    found = [replace(entry, used=used[entry.name]) for entry in entries]
    return sorted(found, key=lambda entry: (entry.used, -end[entry.name], entry.kind == "rows"))


class Folder:
    """Files by name and kind.

    Names are hashes of the contents, so processes that write the same file write the same data.

    The folder is created for its owner only, regardless of the umask. Beyond ``limit`` bytes, files are removed in the
    order of ``leaving``. Raises OSError when the folder cannot be created.
    """

    def __init__(self, path: str | os.PathLike[str], limit: int) -> None:
        self.limit = limit
        Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = Path(path).resolve()  # so that a symlink that changes later has no effect
        self._links: dict[str, Link] = {}  # cache of links; they never change for a name
        self._unseen: float = float("inf")  # bytes written since the last listing

    def file(self, name: str, kind: str) -> Path:
        """Return the file of a block."""
        return self.path / name[:2] / f"{name}.{kind}"

    def tails(self, name: str) -> list[Path]:
        """Return the files of tails that follow a block; empty when the folder cannot be listed."""
        try:
            return list((self.path / name[:2]).glob(f"{name}-*.tail"))
        except OSError:
            return []

    def has(self, name: str, kind: str) -> bool:
        """Return True if a block exists and is accessible."""
        return os.path.isfile(self.file(name, kind))  # False on every error, unlike Path.is_file

    def write(self, name: str, kind: str, state: LlamaState) -> int:
        """Write a block, and make room for it; returns its size in bytes."""
        path = self.file(name, kind)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=UNFINISHED, delete=False) as file:
            try:
                take_lock(file)
                file.writelines(state.parts())
                file.flush()
                n = file.tell()
                os.replace(file.name, path)
            except BaseException:
                with suppress(OSError):  # keep the first error
                    os.unlink(file.name)
                raise
        self._unseen += n
        if self._unseen > self.limit / 64:
            self.trim()
        return n

    def read(self, name: str, kind: str) -> LlamaState | None:
        """Return a block; None when it is missing, or damaged and therefore removed.

        Raises OSError or MemoryError when it cannot be read. It is kept, since it may not be damaged.
        """
        return self.load(self.file(name, kind))

    def load(self, path: Path) -> LlamaState | None:
        """Return the block of a file, like ``read``."""
        try:
            return LlamaState.load(path)
        except FileNotFoundError:
            return None
        except (ValueError, LctxError) as reason:  # the data is damaged
            path.unlink(missing_ok=True)
            LOG.warning("removed from the KV store: %s", reason)
            return None

    def touch(self, names: Iterable[str]) -> None:
        """Record the use of consecutive blocks."""
        now = time.time_ns()
        for name in names:
            for kind in KINDS:
                with suppress(OSError):  # removed, or none of this kind
                    os.utime(self.file(name, kind), ns=(now, now))

    def entries(self) -> list[StoredFile]:
        """Return all files."""
        return [entry for path in self.path.glob("??/*.*") if (entry := StoredFile.of(path)) is not None]

    def leaving(self, entries: Sequence[StoredFile] | None = None) -> list[StoredFile]:
        """Return all files, or the given ones, in the order of removal."""
        entries = self.entries() if entries is None else entries
        self._links = {entry.name: link for entry in entries if (link := self._link(entry))}
        return leaving(entries, self._links)

    def trim(self, limit: int | None = None) -> int:
        """Remove files beyond the limit, and leftovers of killed processes; returns how many files were removed.

        Raises OSError when a file cannot be removed; others may have been.
        """
        limit = self.limit if limit is None else limit
        for path in self.path.glob(f"??/{UNFINISHED}*"):
            _remove_unfinished(path)
        self._unseen = 0
        entries = self.entries()
        total = sum(entry.n_bytes for entry in entries)
        return self._remove(entries, total - int(limit * TARGET_FILL)) if total > limit else 0

    def _remove(self, entries: Sequence[StoredFile], n_bytes: int) -> int:
        """Remove files in order until ``n_bytes`` are free."""
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

    def _link(self, entry: StoredFile) -> Link | None:
        """Return the link of a file; None when its header cannot be read."""
        if entry.name in self._links:
            return self._links[entry.name]
        try:
            about = read_identity(entry.path)
        except (LctxError, OSError, MemoryError):
            return None
        before, end = about.get("before"), about.get("end")
        return Link(before, end) if isinstance(before, str) and isinstance(end, int) else None


def _remove_unfinished(path: Path) -> None:
    """Remove an unfinished file without a writer; a process that ends in any way releases its lock."""
    with suppress(OSError), path.open("rb") as file:  # it is being written, or gone
        take_lock(file, wait=False)
        path.unlink()
