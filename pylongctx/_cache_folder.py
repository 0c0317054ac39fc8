"""Where files lie that are fetched or made once."""

import os
from pathlib import Path

VARIABLE = "LCTX_CACHE"


def cache_folder() -> Path:
    """Return the folder that ``LCTX_CACHE`` names, or ``pylongctx`` in the user's cache folder."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pylongctx"
