"""``pylongctx kv``: list, verify and clean up a KV store."""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pylongctx._units import age_text, bytes_text
from pylongctx.cli.console import show_table
from pylongctx.errors import LctxError

if TYPE_CHECKING:
    from pylongctx.store.folder import Folder, StoredFile

EPILOG = "A text is the stored prefix of a prompt, in blocks of 512 tokens. Texts share blocks of a common prefix."
ACTIONS = {
    "ls": "list the texts",
    "rm": "remove texts, or entries that were not used for some days",
    "verify": "read every file and remove damaged ones; status 1 if any is damaged or unreadable",
    "stats": "show files and bytes of each model and method",
}


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser("kv", description=__doc__, epilog=EPILOG)
    help = ", ".join(f"{name}: {help}" for name, help in ACTIONS.items())
    parser.add_argument("action", choices=list(ACTIONS), help=help)
    parser.add_argument("folder", metavar="FOLDER", help="the folder of --kv-store")
    parser.add_argument("text", nargs="*", metavar="TEXT", help="rm: names shown by ls, or their first characters")
    parser.add_argument("--no-words", action="store_true", help="ls: hide the first words and the names of texts")
    help = "rm: remove entries that were not used for DAYS days"
    parser.add_argument("--unused", type=float, metavar="DAYS", help=help)
    parser.add_argument("--all", action="store_true", help="rm: remove everything")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the action; ValueError when the folder does not exist."""
    if not Path(args.folder).is_dir():
        raise ValueError(f"{args.folder} is not a folder")
    if args.action != "rm" and (args.text or args.all or args.unused is not None):
        raise ValueError(f"{args.action} takes only a folder")
    if args.no_words and args.action != "ls":
        raise ValueError(f"--no-words is for ls, not for {args.action}")
    from pylongctx.store.folder import Folder

    actions = {"ls": list_texts, "rm": remove, "verify": verify, "stats": show_stats}
    return actions[args.action](Folder(args.folder, limit=2**63), args)


# ---- the actions ----


@dataclass
class StoredBlock:
    """The files of a block."""

    name: str
    about: dict[str, Any]
    files: list[StoredFile] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The tokens of a text up to the end of the block."""
        return int(self.about["end"])

    @property
    def n_tokens(self) -> int:
        """The tokens of the block."""
        return self.end - int(self.about["first"])

    @property
    def n_bytes(self) -> int:
        """Bytes of its files."""
        return sum(file.n_bytes for file in self.files)


def list_texts(folder: Folder, args: argparse.Namespace) -> int:
    """Print the texts of each model and method, most recently used first."""
    blocks = _blocks(folder)
    groups: dict[str, list[StoredBlock]] = defaultdict(list)
    for block in sorted(_ends(blocks), key=lambda block: -_used(_text(blocks, block))):
        groups[_of(block.about)].append(block)
    if not groups:
        Console().print("no texts")
    for name, ends in sorted(groups.items()):
        show_table(_texts(name, blocks, ends, not args.no_words))
    return 0


def _texts(name: str, blocks: dict[str, StoredBlock], ends: list[StoredBlock], with_words: bool) -> Table:
    """Return the texts of one model and method."""
    from pylongctx.store.layout import shown  # loads the library

    table = Table(title=Text(name), box=None)
    for head in ("text", "tokens", "size", "age", "used"):
        table.add_column(head, justify="left" if head == "text" else "right", no_wrap=True)
    for head in ("source", "begins") if with_words else ("source",):
        table.add_column(head)
    for block in ends:
        text, now = _text(blocks, block), time.time()
        size = bytes_text(sum(part.n_bytes for part in text))
        times = (_age(now, block.about.get("written")), _age(now, _used(text)))
        words = [Text(shown(str(block.about.get("words", "")))) for _ in range(with_words)]
        table.add_row(block.name[:12], f"{block.end:,}", size, *times, Text(_source(block.about, with_words)), *words)
    return table


def _age(now: float, then: Any) -> str:
    return age_text(now - then) if isinstance(then, int | float) else "-"


def _source(about: dict[str, Any], with_name: bool) -> str:
    """Return the source of a text: a prompt or a document, and for a server with several keys the user."""
    from pylongctx.store.layout import shown

    source = shown(str(about.get("source", "")))
    source = source if with_name else source.split(" ")[0]
    return f"{source}, user {shown(str(about['owner']))[:8]}" if about.get("owner") else source


def remove(folder: Folder, args: argparse.Namespace) -> int:
    """Remove texts, or entries that were not used for some days."""
    if not (args.text or args.all or args.unused is not None):
        raise ValueError("name texts, or give --unused DAYS or --all")
    blocks = _blocks(folder)
    going: list[StoredFile] = folder.entries() if args.all else []
    if args.unused is not None:
        going += [file for file in folder.leaving() if file.used < time.time() - args.unused * 86400]
    ends = _ends(blocks)
    for name in args.text:
        found = [block for block in ends if block.name.startswith(name)]
        if len(found) != 1:
            raise ValueError(f"{name!r} matches {len(found)} texts, not one: give more characters")
        shared = {part.name for end in ends if end is not found[0] for part in _text(blocks, end)}
        going += [file for part in _text(blocks, found[0]) if part.name not in shared for file in part.files]
    removed = {file.path: file.n_bytes for file in going}
    for path in removed:
        path.unlink(missing_ok=True)
    Console().print(f"removed {len(removed)} files, {bytes_text(sum(removed.values()))}")
    return 0


def verify(folder: Folder, args: argparse.Namespace) -> int:
    """Read every file and remove damaged ones; returns 1 if any is damaged or unreadable."""
    entries, unread = folder.entries(), []
    n_damaged = 0
    for entry in entries:
        try:
            n_damaged += folder.load(entry.path) is None and not entry.path.exists()
        except (OSError, MemoryError) as reason:
            unread.append(f"{entry.path.name}: {str(reason) or 'no memory'}")
    Console().print(f"{len(entries)} files, {n_damaged} damaged and removed, {len(unread)} unreadable")
    for text in unread:
        Console().print(text, markup=False, soft_wrap=True)
    return 1 if n_damaged or unread else 0


def show_stats(folder: Folder, args: argparse.Namespace) -> int:
    """Print files and bytes of each model and method."""
    groups: dict[str, list[StoredBlock]] = defaultdict(list)
    for block in _blocks(folder).values():
        groups[_of(block.about)].append(block)
    table = Table()
    for head in ("of", "blocks", "tokens", "size"):
        table.add_column(head, justify="left" if head == "of" else "right")
    for name, blocks in sorted(groups.items()):
        size = bytes_text(sum(block.n_bytes for block in blocks))
        table.add_row(Text(name), str(len(blocks)), f"{sum(block.n_tokens for block in blocks):,}", size)
    show_table(table)
    return 0


def _blocks(folder: Folder) -> dict[str, StoredBlock]:
    """Return the blocks by name; other files are skipped."""
    from pylongctx.engine.saved_state import read_identity  # loads the library

    blocks: dict[str, StoredBlock] = {}
    for entry in folder.entries():
        try:
            about = read_identity(entry.path)
        except (LctxError, OSError, MemoryError):
            continue  # verify reports the reason
        if all(isinstance(about.get(key), kind) for key, kind in (("first", int), ("end", int), ("before", str))):
            blocks.setdefault(entry.name, StoredBlock(entry.name, about)).files.append(entry)
    return blocks


def _ends(blocks: dict[str, StoredBlock]) -> list[StoredBlock]:
    """Return the last blocks of texts, which no other block follows."""
    before = {block.about["before"] for block in blocks.values()}
    return [block for block in blocks.values() if block.name not in before]


def _text(blocks: dict[str, StoredBlock], end: StoredBlock) -> list[StoredBlock]:
    """Return a block and its predecessors, as far as they exist."""
    text = [end]
    while (before := blocks.get(text[-1].about["before"])) is not None and before.end < text[-1].end:
        text.append(before)
    return text


def _used(blocks: Iterable[StoredBlock]) -> float:
    return max(file.used for block in blocks for file in block.files)


def _of(about: dict[str, Any]) -> str:
    from pylongctx.store.layout import line

    types = f"{about.get('type_k')}/{about.get('type_v')}"
    return line(f"{about.get('model')}, {about.get('method') or 'llama.cpp'}, {types}")
