"""Terminal conversations on disk, saved after every answer for ``chat --continue``."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pylongctx._cache_folder import cache_folder

FOLDER = "chats"  # in the cache folder
MAX_FILES = 100  # files to keep

Messages = list[dict[str, Any]]


class Autosave:
    """The file of one conversation.

    Parameters
    ----------
    path : Path or None
        The file of a conversation to continue; None: a new one.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path

    def save(self, messages: Sequence[dict[str, Any]]) -> None:
        """Write the messages to a file that only this user can read; OSError when that fails."""
        folder = cache_folder() / FOLDER
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._path is None:
            self._path = folder / f"{time.strftime('%Y-%m-%d %H.%M.%S')} {os.getpid()}.json"
        new = self._path.with_suffix(".new")
        with open(os.open(new, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "w", encoding="utf-8") as file:
            json.dump({"messages": list(messages)}, file, ensure_ascii=False)
        new.replace(self._path)
        for old in sorted(folder.glob("*.json"))[:-MAX_FILES]:
            old.unlink(missing_ok=True)


def latest() -> tuple[Path, Messages]:
    """Return the file of the most recent conversation, and its messages.

    Raises
    ------
    ValueError
        When there is none, or it cannot be read.
    """
    found = sorted((cache_folder() / FOLDER).glob("*.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ValueError("there is no conversation to continue: chat saves one after its first answer")
    try:
        messages = json.loads(found[-1].read_text(encoding="utf-8"))["messages"]
        if not all(isinstance(one["role"], str) and isinstance(one["content"], str) for one in messages):
            raise TypeError
    except (ValueError, KeyError, TypeError) as reason:
        raise ValueError(f"the conversation in {found[-1]} is damaged; remove the file") from reason
    return found[-1], messages
