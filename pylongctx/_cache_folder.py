"""The folder of files that are downloaded or computed once."""

import os
from pathlib import Path

VARIABLE = "LCTX_CACHE"


def cache_folder() -> Path:
    """Return the folder named by ``LCTX_CACHE``, or ``pylongctx`` in the user's cache folder."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pylongctx"
