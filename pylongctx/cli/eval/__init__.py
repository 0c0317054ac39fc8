"""``pylongctx eval TASK``: evaluate a model on long-context tasks. Without a task: list the tasks."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

from pylongctx.cli.eval import standard
from pylongctx.cli.help import command_list
from pylongctx.cli.parser import Parser
from pylongctx.eval.registry import TASKS, TaskEntry

EPILOG = """pylongctx eval TASK --help shows the options of a task.
pylongctx matrix runs many tasks and methods."""
SHOWN = {name: entry for name, entry in TASKS.items() if not entry.plans_only}


def add_parser(commands: Any) -> None:
    """Add the command and a parser for each task."""
    listed = command_list({"tasks": [(name, entry.help) for name, entry in SHOWN.items()]})
    parser = commands.add_parser("eval", description=__doc__, epilog=f"{listed}\n{EPILOG}")
    parser.set_defaults(run=show_tasks)
    tasks = parser.add_subparsers(dest="task", metavar="TASK", prog=parser.prog, help=argparse.SUPPRESS)
    for name, entry in SHOWN.items():
        _add_task(tasks.add_parser(name), name, entry)


def show_tasks(args: argparse.Namespace) -> int:
    """Print the list of tasks."""
    args.parser.print_help()
    return 0


def _add_task(parser: Parser, name: str, entry: TaskEntry) -> None:
    if not entry.options:
        standard.add_options(parser, entry)
        return
    module = import_module(f"pylongctx.cli.eval.{name}")
    parser.description = module.__doc__
    module.add_options(parser)
    parser.set_defaults(run=module.run)
