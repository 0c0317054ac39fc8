"""Who may write to the folder of a store: what it holds is used as if this process had computed it."""

import os
import shlex
import stat
from pathlib import Path

OTHERS = stat.S_IWGRP | stat.S_IWOTH


def check(path: Path) -> None:
    """Raise PermissionError when another user owns a folder, or may write to it; root may write everywhere anyway."""
    status = os.stat(path)
    if why := refusal(path, status.st_uid, status.st_mode, os.geteuid()):
        raise PermissionError(why)


def refusal(path: Path, owner: int, mode: int, user: int) -> str:
    """Return why a folder cannot be a store of a user, and the way out; "" when it can."""
    if owner not in (user, 0):
        why, command = f"user {owner} owns it, and this process is user {user}", f"chown -R {user}"
    elif mode & OTHERS:
        why, command = f"others may write to it (its mode is {stat.S_IMODE(mode):o})", "chmod -R go-w"
    else:
        return ""
    return (
        f"{path} cannot be a KV store: {why}. They could put there what gives wrong answers. Name another folder, or, "
        f"if you trust what is in this one: {command} {shlex.quote(str(path))}"
    )
