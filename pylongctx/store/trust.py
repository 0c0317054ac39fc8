"""Check of the owner and mode of a store's folder, whose content is trusted like this process's own results."""

import os
import shlex
import stat
import sys
from pathlib import Path

OTHERS = stat.S_IWGRP | stat.S_IWOTH


def check(path: Path) -> None:
    """Raise PermissionError when another user, except root, owns a folder or may write to it.

    On Windows, folders have access control lists instead, which are not checked.
    """
    if sys.platform == "win32":
        return
    status = os.stat(path)
    if why := refusal(path, status.st_uid, status.st_mode, os.geteuid()):
        raise PermissionError(why)


def refusal(path: Path, owner: int, mode: int, user: int) -> str:
    """Return why a folder cannot be a user's store, and the way out; "" if it can."""
    if owner not in (user, 0):
        why, command = f"user {owner} owns it, and this process is user {user}", f"chown -R {user}"
    elif mode & OTHERS:
        why, command = f"others may write to it (its mode is {stat.S_IMODE(mode):o})", "chmod -R go-w"
    else:
        return ""
    return (
        f"{path} cannot be a KV store: {why}. Other users could plant wrong data there. Use another folder, or, "
        f"if you trust its content: {command} {shlex.quote(str(path))}"
    )
