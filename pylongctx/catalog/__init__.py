"""Named models, which ``pylongctx get`` lists and downloads; a name can be used instead of a model's path."""

import difflib
import os
from pathlib import Path

from pylongctx._log import LOG
from pylongctx.catalog.entry import CatalogEntry, Progress
from pylongctx.catalog.table import ENTRIES

CATALOG: dict[str, CatalogEntry] = {entry.name: entry for entry in ENTRIES}

__all__ = ["CATALOG", "CatalogEntry", "Progress", "find", "lookup", "resolve"]


def lookup(name: str) -> CatalogEntry:
    """Return the model of a name.

    Raises
    ------
    ValueError
        When the name is unknown; the message suggests similar names.
    """
    if name in CATALOG:
        return CATALOG[name]
    near = difflib.get_close_matches(name, CATALOG, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(CATALOG)}"
    raise ValueError(f"the catalogue has no model {name!r}; {hint}")


def find(path: str | os.PathLike[str]) -> CatalogEntry | None:
    """Return the model with a path as its name; None if a file with this path exists."""
    entry = CATALOG.get(str(path))
    return None if entry is None or Path(path).is_file() else entry


def resolve(path: str | os.PathLike[str]) -> str:
    """Return the file of a path or a name. A missing model is downloaded with a warning.

    Raises
    ------
    ConnectionError, OSError, ValueError, ImportError
        When the model cannot be downloaded, see ``CatalogEntry.fetch``.
    """
    entry = find(path)
    if entry is None:
        return str(path)
    here = entry.path()
    if here is None:
        LOG.warning("downloading %s", entry.about)
        here = entry.fetch()
    return str(here)
