"""``pylongctx eval longbench``: LongBench's tasks, from its files."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pylongctx.cli.eval.common import Measured, add_limit, add_run_options, evaluate, length_table, show
from pylongctx.cli.options import add_model_options


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_model_options(parser)
    add_run_options(parser, lengths="4096")
    add = parser.add_argument
    add("--data", required=True, metavar="DIR", help="folder with LongBench's .jsonl files")
    add("--tasks", default="all", metavar="T,T", help="hotpotqa,trec,... (all that have a file)")
    add_limit(parser, None, "only the first samples of each task")
    add("-E", "--e", action="store_true", help="LongBench-E: report scores by text length")
    add("--max-length", type=int, metavar="N", help="maximum tokens of a prompt (the length minus the answer)")


def run(args: argparse.Namespace) -> int:
    """Run the tasks and print a table by length, with -E one per range of text lengths."""
    from pylongctx.eval.longbench import BUCKETS, LongBench, tasks

    there = [name for name in tasks() if (Path(args.data) / f"{name}{'_e' * args.e}.jsonl").is_file()]
    names = there if args.tasks == "all" else args.tasks.split(",")
    if not names:
        raise ValueError(f"{args.data} contains no file of LongBench{'-E' * args.e}, such as trec{'_e' * args.e}.jsonl")
    chosen = [LongBench(name, args.data, args.limit, args.e, args.max_length) for name in names]
    measured = evaluate(args, chosen, args.lengths)
    title = f"LongBench{'-E' * args.e}, {Path(measured[0].cell.model).name}"

    def part(name: str) -> Any:
        def text(m: Measured) -> str:
            value = m.cell.task.summary(m.records)[name]
            return "" if value != value else f"{100 * value:.2f}"

        return text

    parts = ["score", *(BUCKETS if args.e else ())]
    captions = ["all samples", *(f"texts of {name} words" for name in BUCKETS)]
    tables = (length_table(measured, title, caption, part(p)) for p, caption in zip(parts, captions, strict=False))
    return show(measured, *tables)
