"""``pylongctx eval ruler``: RULER's retrieval, tracking, counting and question tasks, generated locally."""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean

from pylongctx.cli.eval.common import Measured, add_limit, add_run_options, add_seed, evaluate, length_table, show
from pylongctx.cli.options import add_model_options

ESSAY = "essay"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_model_options(parser)
    add_run_options(parser, lengths="4096")
    add = parser.add_argument
    add("--tasks", default="all", metavar="T,T", help="niah_single_1,vt,... (all whose data is available)")
    add_limit(parser, 20, "samples per task, method and length; RULER: 500")
    add(
        "--data",
        action="append",
        default=[],
        type=_data,
        metavar="NAME=FILE",
        help="essay=TEXT|FOLDER|JSON, qa_1=SQUAD.json, qa_2=HOTPOTQA.json, cwe=WORDS.json; may be repeated",
    )
    add_seed(parser, 42, "RULER's")


def _data(text: str) -> tuple[str, str]:
    name, _, file = text.partition("=")
    if name not in (ESSAY, "qa_1", "qa_2", "cwe") or not file:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form essay=FILE or qa_1=FILE")
    return name, file


def run(args: argparse.Namespace) -> int:
    """Run the tasks and print a table by length, with the mean of the tasks in the last row."""
    from pylongctx.eval.ruler import NAMES, Ruler
    from pylongctx.eval.ruler.niah import KINDS

    data = dict(args.data)
    names = [name for name in NAMES if not name.startswith("qa") or name in data]
    if args.tasks != "all":
        names = args.tasks.split(",")

    def file(name: str) -> str | None:
        wants_essay = name in KINDS and KINDS[name].type_haystack == ESSAY
        found: str | None = data.get(ESSAY if wants_essay else name)
        return found

    measured = evaluate(args, [Ruler(name, args.limit, file(name)) for name in names], args.lengths, args.seed)
    labels = {m.cell.task.name for m in measured for r in m.records if r["label"] != "RULER"}
    caption = f"RULER-compatible, with other data: {', '.join(sorted(labels))}" if labels else "RULER's prompts"
    title = f"RULER, {Path(measured[0].cell.model).name}"
    table = length_table(measured, title, caption)
    if len(names) > 1:
        table.add_section()
        for method in dict.fromkeys(m.cell.method for m in measured):
            table.add_row("mean", method, *(_mean(measured, method, n) for n in args.lengths))
    return show(measured, table)


def _mean(measured: list[Measured], method: str, length: int) -> str:
    chosen = [m for m in measured if (m.cell.method, m.cell.length) == (method, length)]
    return f"{100 * fmean(m.cell.task.summary(m.records)['string_match'] for m in chosen):.1f}"
