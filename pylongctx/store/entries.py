"""The files of a store, and the order of their removal."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

KINDS = ("rows", "point", "tail", "document")
NAME = re.compile(r"[0-9a-f]{40}(-[0-9a-f]{40})?\.[a-z]+")


@dataclass(frozen=True)
class StoredFile:
    """A file of the folder.

    Attributes
    ----------
    name, kind : str
        The name of the block, and the kind of data in the file.
    n_bytes : int
        Its size.
    used : float
        Time of the last write or use, in seconds since the epoch.
    """

    path: Path
    name: str
    kind: str
    n_bytes: int
    used: float

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

    Parameters
    ----------
    entries : iterable of StoredFile
        The files.
    links : mapping
        Links by name; a missing name has no previous block.

    Returns
    -------
    list of StoredFile
        ``used`` is the last use of any text with the block, so a common prefix of many texts outlives each of them.
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
