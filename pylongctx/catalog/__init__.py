"""Models that have a name: ``pylongctx get`` lists and fetches them, and a name stands wherever a model's path does."""

import difflib
import os
from pathlib import Path

from pylongctx._guess import guess
from pylongctx._log import LOG
from pylongctx.catalog.entry import Entry, Progress
from pylongctx.catalog.table import ENTRIES

CATALOG: dict[str, Entry] = {entry.name: entry for entry in ENTRIES}

__all__ = ["CATALOG", "Entry", "Progress", "find", "lookup", "resolve"]


def lookup(name: str) -> Entry:
    """Return the model of a name.

    Raises
    ------
    ValueError
        When there is none; the message has similar names.
    """
    if name in CATALOG:
        return CATALOG[name]
    near = difflib.get_close_matches(name, CATALOG, n=3)
    hint = f"is it {' or '.join(near)}?" if near else f"it has {', '.join(CATALOG)}"
    raise ValueError(f"the catalogue has no model {name!r}; {hint}")


def find(path: str | os.PathLike[str]) -> Entry | None:
    """Return the model that a path is the name of; None when a file of that name is there."""
    entry = CATALOG.get(str(path))
    return None if entry is None or Path(path).is_file() else entry


def resolve(path: str | os.PathLike[str]) -> str:
    """Return the file of a path or a name. A model that is not here is fetched, and a warning says so.

    Raises
    ------
    ConnectionError, OSError, ValueError, ImportError
        When the model cannot be fetched, see ``Entry.fetch``.
    """
    entry = find(path)
    if entry is None and not Path(path).exists():
        raise ValueError(f"Model path does not exist: {path}{guess(str(path), CATALOG)}")
    if entry is None:
        return str(path)
    here = entry.path()
    if here is None:
        LOG.warning("fetching %s", entry.about)
        here = entry.fetch()
    return str(here)
