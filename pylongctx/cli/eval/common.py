"""Shared by the tasks of ``pylongctx eval``: options, the loop over methods and lengths, tables."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from rich.table import Table

from pylongctx._tables import show_table
from pylongctx.cli import arguments
from pylongctx.cli.method import add_methods
from pylongctx.cli.options import llama_arguments, model_path
from pylongctx.cli.progress import CellProgress, make_all
from pylongctx.methods import NONE, named

if TYPE_CHECKING:
    from pylongctx.eval.runner import Cell
    from pylongctx.eval.task import Record, Task

DEFAULT_METHODS = ("full", "selfextend", "longheads")
PARALLEL = "samples to answer concurrently, each in its own sequence; their times are not measured (1)"
int_list = arguments.reported(arguments.int_list)  # as the type of an option: "512,2048", "512-8192*2"


class Measured(NamedTuple):
    """A cell and its records."""

    cell: Cell
    records: list[Record]


def add_run_options(parser: argparse.ArgumentParser, lengths: str = "512,2048", chat: bool = True) -> None:
    """Add the methods, the lengths and the file of the records."""
    add = parser.add_argument
    help = "method such as selfextend or window,n_sink=4; may be repeated"
    add_methods(parser, f"{help} (LCTX_METHOD, or {' '.join(DEFAULT_METHODS)})")
    if lengths:
        what = f"context lengths in tokens, also 512-8192*2 or 512-2048+512 ({lengths})"
        add("--lengths", type=int_list, default=int_list(lengths), metavar="N,N", help=what)
    parser.set_defaults(chat=False)
    if chat:
        add("--chat", action="store_true", help="wrap the prompts in the model's chat template")
    add("-np", "--parallel", type=int, default=1, metavar="N", help=PARALLEL)
    add("--json", metavar="FILE", help="append one JSON line per sample; samples already in the file are skipped")


def add_limit(parser: argparse.ArgumentParser, default: int | None, what: str, without: str = "all") -> None:
    """Add the number of samples; ``without`` describes the default None."""
    help = f"{what} ({without if default is None else default})"
    parser.add_argument("--limit", "--tests", type=int, default=default, metavar="N", help=help)


def add_sharing(parser: argparse.ArgumentParser) -> None:
    """Add whether several questions share one prefilled text."""
    help = "prefill a text once for all questions about it, instead of once per question"
    parser.add_argument("--reuse", action="store_true", help=help)
    help = "with --reuse: fraction of a text's KV entries that kvzip keeps, or of a prompt's that snapkv keeps (1)"
    parser.add_argument("--compress", type=float, default=1.0, metavar="RATIO", help=help)


def add_seed(parser: argparse.ArgumentParser, default: int = 0, what: str = "seed of the samples") -> None:
    """Add the seed."""
    parser.add_argument("-s", "--seed", type=int, default=default, metavar="N", help=f"{what} ({default})")


def float_list(text: str) -> tuple[float, ...]:
    """Return the numbers of ``"0,12.5"``."""
    return tuple(float(part) for part in text.split(","))


def methods(args: argparse.Namespace) -> list[str]:
    """Return the requested methods, or the default ones."""
    asked = args.method or [os.environ.get("LCTX_METHOD")]
    return [str(named(spec) or NONE) for spec in asked if spec] or list(DEFAULT_METHODS)


def evaluate(args: argparse.Namespace, tasks: Sequence[Task], lengths: Sequence[int], seed: int = 0) -> list[Measured]:
    """Run every task with every method at every length; samples in the ``--json`` file are skipped."""
    from pylongctx.eval.runner import Cell, Results, run

    if getattr(args, "limit", None) is not None and args.limit < 1:
        raise ValueError(f"--limit must be at least 1, not {args.limit}")
    given = llama_arguments(args) | ({"n_parallel": args.parallel} if args.parallel != 1 else {})
    fields = {"model": model_path(args), "seed": seed, "chat": args.chat}
    if hasattr(args, "reuse"):
        fields |= {"reuse": args.reuse, "compress": args.compress}
    fields |= {name: given.pop(name) for name in ("type_k", "type_v") if name in given} | {"options": given}
    grid = dict.fromkeys(product(tasks, methods(args), lengths))
    cells = [Cell(method=method, task=task, length=n, **fields) for task, method, n in grid]
    results = Results(args.json)
    with CellProgress() as progress:
        samples = make_all(cells, progress)
        progress.begin(samples, results)
        for cell, wanted in samples:
            progress.at(cell)
            known = {record["digest"] for record in results.of(cell, wanted)}
            for record in run(cell, wanted, known):
                results.add(record)
                progress.count(cell)
    return [Measured(cell, results.of(cell, wanted)) for cell, wanted in samples]


# ---- tables ----


def length_table(
    measured: Sequence[Measured], title: str, caption: str, text: Callable[[Measured], str] | None = None
) -> Table:
    """Return a table with a row per task and method and a column per length."""
    several = len({m.cell.task.name for m in measured}) > 1
    lengths = list(dict.fromkeys(m.cell.length for m in measured))
    table = Table(title=title, caption=caption)
    for head in (["task"] if several else []) + ["method"]:
        table.add_column(head)
    for length in lengths:
        table.add_column(str(length), justify="right")
    cells = {(m.cell.task.name, m.cell.method, m.cell.length): (text or _text)(m) for m in measured}
    for name, method in dict.fromkeys((m.cell.task.name, m.cell.method) for m in measured):
        row = (cells.get((name, method, n), "") for n in lengths)
        table.add_row(*([name] if several else []), method, *row)
    return table


def _text(measured: Measured) -> str:
    return measured.cell.task.cell_text(measured.records) if measured.records else ""


def choices(measured: Sequence[Measured]) -> Iterator[str]:
    """Yield one line per automatic choice: the method, its lengths and the chosen options."""
    lengths: dict[tuple[str, str], dict[int, None]] = {}
    for cell, records in measured:
        for record in records:
            if record["method"] != record["asked"]:
                lengths.setdefault((record["asked"], record["method"]), {})[cell.length] = None
    for (method, chosen), used in lengths.items():
        options = [", ".join(part.split(",")[1:]) or part for part in chosen.split("+")]
        yield f"{method} at {', '.join(map(str, used))}: {' + '.join(options)}"


def show(measured: Sequence[Measured], *tables: Table) -> int:
    """Print the tables and the automatic choices; returns the exit status."""
    for table in tables:
        show_table(table)
    for line in choices(measured):
        print(line)
    return 0
