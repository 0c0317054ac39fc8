"""Tasks with only the standard options; each needs just a line in ``pylongctx.eval.registry``."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pylongctx._guess import guess
from pylongctx.cli.arguments import pair, reported
from pylongctx.cli.eval.common import add_limit, add_run_options, add_seed, add_sharing, evaluate, length_table, show
from pylongctx.cli.options import add_model_options
from pylongctx.eval.registry import TaskEntry, task_class

if TYPE_CHECKING:
    from pylongctx.eval.task import Task


def add_options(parser: argparse.ArgumentParser, entry: TaskEntry) -> None:
    """Add the options of a task, with ``--data`` if it reads files."""
    parser.description = f"{entry.help}."
    add_model_options(parser)
    add_run_options(parser, lengths=entry.lengths)
    add = parser.add_argument
    if entry.data:
        add("--data", action="append", required=True, metavar="FILE", help=f"{entry.data}; may be repeated")
    add_limit(parser, None, "samples of each file" if entry.data else "samples per length", "the task's")
    add("-n", "--predict", type=int, metavar="N", help="tokens of an answer (the task's)")
    add(
        "--set",
        action="append",
        default=[],
        type=reported(pair),
        metavar="NAME=VALUE",
        help="any other field of the task",
    )
    add_sharing(parser)
    add_seed(parser)
    parser.set_defaults(run=run, data=[])


def run(args: argparse.Namespace) -> int:
    """Run the task, once for each file, and print the table."""
    tasks = make(args.task, args.data, fields_of(args))
    measured = evaluate(args, tasks, args.lengths, args.seed)
    title = f"{args.task}, {Path(measured[0].cell.model).name}"
    return show(measured, length_table(measured, title, tasks[0].caption))


def fields_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a task that are set by options."""
    given = {"tests": args.limit, "max_tokens": args.predict}
    return {name: value for name, value in given.items() if value is not None} | dict(args.set)


def make(name: str, files: list[str], given: dict[str, Any]) -> list[Task]:
    """Return a task for each file, or one; ``given`` are its other fields.

    Raises
    ------
    ValueError
        When the task has no such field.
    """
    cls = task_class(name)
    known = [part.name for part in fields(cls) if part.init and part.name != "data"]  # type: ignore[arg-type]
    if unknown := [field for field in given if field not in known]:
        way_out = guess(unknown[0], known) or f"; it has {', '.join(known)}"
        raise ValueError(f"the task {name} has no field {unknown[0]}{way_out}")
    return [cls(**{"data": file} | given) for file in files] or [cls(**given)]
