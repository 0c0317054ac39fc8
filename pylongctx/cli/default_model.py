"""The model of a command that names none: what is chosen is said in a line, and a large download is asked for once."""

import argparse
import sys
from collections.abc import Callable

from pylongctx._cache_folder import cache_folder
from pylongctx._free import disk_free
from pylongctx._units import bytes_text
from pylongctx.catalog.choice import Candidate, Choice, choose, declined, remember_declined

BYTES_PER_TOKEN = 4  # of an English text
CHAT_TOKENS = 2048  # of a conversation
MOST_UNASKED = 200 * 10**6  # bytes that are downloaded without a question
DISK_TIMES = 2  # of a download must be free on the disk: parts of it are unpacked
TYPICAL_SPEED = 10 * 2**20  # bytes per second of a download, for the estimate in the question


def choose_model(args: argparse.Namespace, n_tokens: int, note: Callable[[str], None]) -> None:
    """Set the model for a text when none is given, and say which one and why.

    On a terminal a download of more than 200 MB is asked for once, and an answer "no" is remembered. Elsewhere a model
    is downloaded if the disk has twice its size. Otherwise the next best model is used.
    """
    if args.model or args.positional_model or getattr(args, "hf_repo", None):
        return
    without = declined()
    found = choose(n_tokens, without)
    while not found.model.here and not _may_fetch(args, found.model, note):
        without = [*without, found.model.entry.name]
        found = choose(n_tokens, without)
    args.model = found.model.entry.name
    note(_line(found))


def _line(found: Choice) -> str:
    if found.model.answers:
        return str(found)
    return f"{found}; it is too small to answer well: a larger one needs memory, disk or a network"


def _may_fetch(args: argparse.Namespace, model: Candidate, note: Callable[[str], None]) -> bool:
    entry = model.entry
    if getattr(args, "offline", None):
        return False
    free = disk_free(cache_folder())
    if free is not None and free < DISK_TIMES * entry.size:
        needed = bytes_text(DISK_TIMES * entry.size)
        note(f"{entry.name} is not downloaded: it needs {needed} of disk, {bytes_text(free)} are free")
        return False
    if entry.size <= MOST_UNASKED or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    minutes = max(1, round(entry.size / TYPICAL_SPEED / 60))
    what = f"{entry.name}, {bytes_text(entry.size)} from {entry.origin}, about {minutes} min at 10 MiB/s"
    sys.stderr.write(f"Download {what}? [Y/n] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() in ("", "y", "yes"):
        return True
    remember_declined(entry.name)
    return False
