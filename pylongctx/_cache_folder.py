"""The folder of files that are downloaded or computed once, and of what commands remember."""

import json
import os
from pathlib import Path
from typing import Any

VARIABLE = "LCTX_CACHE"


def cache_folder() -> Path:
    """Return the folder named by ``LCTX_CACHE``, or ``pylongctx`` in the user's cache folder."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pylongctx"


def recall(name: str) -> dict[str, Any]:
    """Return what ``remember`` kept under a name; nothing where the file is missing or damaged."""
    try:
        found = json.loads((cache_folder() / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def remember(name: str, values: dict[str, Any]) -> None:
    """Keep values that JSON can hold in a file of the folder; OSError when that fails."""
    path = cache_folder() / name
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps(values), encoding="utf-8")
    new.replace(path)
