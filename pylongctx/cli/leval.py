"""``pylongctx leval``: multiple choice on long documents, from L-Eval's files."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pylongctx.cli.evaluate import add_run_options, evaluate, length_table, show
from pylongctx.cli.options import add_model_options


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser("leval", description=__doc__)
    add_model_options(parser)
    add_run_options(parser, lengths="4096")
    add = parser.add_argument
    add("--data", action="append", required=True, metavar="FILE", help="such as quality.jsonl; may be repeated")
    add("--tests", type=int, metavar="N", help="only the first questions of each file")
    add("-n", "--predict", type=int, default=16, metavar="N", help="tokens of the answer (16)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ask all questions and print the table."""
    from pylongctx.eval.leval import Choices

    tasks = [Choices(file, args.tests, max_tokens=args.predict) for file in args.data]
    measured = evaluate(args, tasks, args.lengths)
    title = f"right choices, {Path(measured[0].cell.model).name}"
    return show(measured, length_table(measured, title, "percent; a quarter for some of several right letters"))
