"""``pylongctx kv``: list, verify and clean up a KV store."""

import argparse
from pathlib import Path
from typing import Any

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
    parser.add_argument(
        "action", choices=list(ACTIONS), help=", ".join(f"{name}: {help}" for name, help in ACTIONS.items())
    )
    parser.add_argument("folder", metavar="FOLDER", help="the folder of --kv-store")
    parser.add_argument("text", nargs="*", metavar="TEXT", help="rm: names shown by ls, or their first characters")
    parser.add_argument("--no-words", action="store_true", help="ls: hide the first words and the names of texts")
    parser.add_argument(
        "--unused", type=float, metavar="DAYS", help="rm: remove entries that were not used for DAYS days"
    )
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
    from pylongctx.cli import stored  # loads the library
    from pylongctx.store.folder import Folder

    actions = {"ls": stored.list_texts, "rm": stored.remove, "verify": stored.verify, "stats": stored.show_stats}
    return actions[args.action](Folder(args.folder, limit=2**63), args)
