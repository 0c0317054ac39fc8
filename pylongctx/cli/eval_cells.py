"""Shared by the commands that evaluate: options, the loop over methods and lengths, progress, tables."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from pylongctx._guess import guess
from pylongctx.cli import arguments
from pylongctx.cli.arguments import json_object, pair, reported, switched
from pylongctx.cli.console import show_table
from pylongctx.cli.options import add_methods, add_model_options, llama_arguments, model_path
from pylongctx.eval.registry import TaskEntry, task_class
from pylongctx.methods import NONE, named

if TYPE_CHECKING:
    from pylongctx.eval.runner import Cell, Results
    from pylongctx.eval.task import Chat, Record, Sample, Task


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
    parser.set_defaults(chat=False, reasoning=None, chat_template_kwargs=None)
    if chat:
        add("--chat", action="store_true", help="wrap the prompts in the model's chat template")
        help = "with --chat: let reasoning models reason within the tokens of an answer; only the rest is graded (off)"
        add("-rea", "--reasoning", type=reported(switched), metavar="on|off", help=help)
        help = "with --chat: JSON object of variables for the template"
        add("--chat-template-kwargs", type=reported(json_object), metavar="JSON", help=help)
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
    fields: dict[str, Any] = {"model": model_path(args), "seed": seed, "chat": chat_of(args)}
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


def chat_of(args: argparse.Namespace) -> bool | Chat:
    """Return whether prompts have the chat template of the model, or how."""
    from pylongctx.eval.task import Chat

    if not args.chat:
        given = {"--reasoning": args.reasoning, "--chat-template-kwargs": args.chat_template_kwargs}
        if unused := [name for name, value in given.items() if value is not None]:
            raise ValueError(f"{unused[0]} is about the chat template: add --chat")
        return False
    return Chat(bool(args.reasoning), json.dumps(args.chat_template_kwargs or {}, sort_keys=True))


# ---- tables ----


def length_table(
    measured: Sequence[Measured], title: str, caption: str, text: Callable[[Measured], str] | None = None
) -> Table:
    """Return a table with a row per task and method and a column per length; the title ends with the model."""
    several = len({m.cell.task.name for m in measured}) > 1
    lengths = list(dict.fromkeys(m.cell.length for m in measured))
    table = Table(title=f"{title}, {Path(measured[0].cell.model).name}", caption=caption)
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


# ---- progress ----

Cells = list[tuple["Cell", list["Sample"]]]
Key = tuple[Any, ...]
Refusal = tuple["Cell", str]


class CellProgress(Progress):
    """Bars with sample counts, elapsed and remaining time; in a pipe lines instead."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[n]}/{task.fields[of]}"))
        times = (TimeElapsedColumn(), TimeRemainingColumn())
        super().__init__(*columns, *times, console=Console(stderr=True), transient=True)
        self._since = perf_counter()
        self._n_cells = 0
        self._left: dict[Key, int] = {}

    def begin(self, cells: Cells, results: Results) -> None:
        """Show a bar scaled by the tokens of all samples, and count those that already have results."""
        self._results, self._samples = results, {_key(cell): samples for cell, samples in cells}
        self._left = {key: len(samples) for key, samples in self._samples.items()}
        self._n_cells = len(cells)
        self._bar = self.add_bar(sum(self._left.values()), sum(cell.length * len(samples) for cell, samples in cells))
        for cell, samples in cells:
            self.count(cell, len(results.of(cell, samples)))

    def count(self, cell: Cell, n: int = 1) -> None:
        """Count ``n`` samples of a cell; after the last one, print the cell's result to a pipe."""
        self.move(self._bar, n, cell.length)
        key = _key(cell)
        self._left[key] -= n
        if not self._left[key] and not self.console.is_terminal:
            records = self._results.of(cell, self._samples[key])
            n_done = sum(not left for left in self._left.values())
            text = cell.task.cell_text(records) if records else "failed"
            line = f"[{n_done}/{self._n_cells}, {perf_counter() - self._since:.0f} s] {name_of(cell)}: {text}"
            self.say(line)

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def at(self, cell: Cell) -> None:
        """Show which cell is being measured."""
        self.update(self._bar, description=name_of(cell))

    def add_bar(self, n: int, work: float) -> TaskID:
        """Add a bar for ``n`` samples with a total of ``work`` tokens."""
        return self.add_task("", total=work, n=0, of=n)

    def move(self, bar: TaskID, n: int, work: int = 1) -> None:
        """Advance a bar by ``n`` samples of ``work`` tokens each."""
        done: int = next(task.fields["n"] for task in self.tasks if task.id == bar)
        self.update(bar, advance=n * work, n=done + n)


def name_of(cell: Cell) -> str:
    """Return the task, the method and the length of a cell."""
    return f"{cell.task.name}: {label_of(cell)} at {cell.length}"


def label_of(cell: Cell) -> str:
    """Return the label of a cell's method in tables."""
    from pylongctx.eval.report.records import label

    return label(cell.facts)


def make_all(cells: Sequence[Cell], progress: CellProgress, refused: list[Refusal] | None = None) -> Cells:
    """Return the samples of all cells; cells that differ in method or KV types share them.

    A task without samples of a length is an error, unless ``refused`` is given: then the cell and the reason are added
    to that list, and the other cells are prepared.
    """
    from pylongctx.eval.executors import reason_of
    from pylongctx.eval.runner import make_samples

    made: dict[Key, list[Sample]] = {}
    reasons: dict[Key, str] = {}
    bar = progress.add_bar(len(cells), len(cells))
    for cell in cells:
        progress.update(bar, description=f"preparing the samples of {cell.task.name} at {cell.length}")
        if (key := _content(cell)) not in made | reasons:
            try:
                made[key] = make_samples(cell)
            except ValueError as reason:
                if refused is None:
                    raise
                reasons[key] = reason_of(reason)
                progress.say(f"failed: {cell.task.name} at {cell.length}: {reason}")
        progress.move(bar, 1)
    progress.remove_task(bar)
    if refused is not None:
        refused += [(cell, reasons[key]) for cell in cells if (key := _content(cell)) in reasons]
    return [(cell, made[key]) for cell in cells if (key := _content(cell)) in made]


def _key(cell: Cell) -> Key:
    """Return the facts that distinguish the cells of a run, without a worker's threads."""
    return *_content(cell), cell.method, cell.rope, cell.type_k, cell.type_v, cell.reuse, cell.compress


def _content(cell: Cell) -> Key:
    return cell.model, cell.task, cell.length, cell.seed, cell.chat


# ---- tasks with the standard options only ----


def add_standard_options(parser: argparse.ArgumentParser, entry: TaskEntry) -> None:
    """Add the options of a task, with ``--data`` if it reads files."""
    parser.description = f"{entry.help}."
    add_model_options(parser)
    add_run_options(parser, lengths=entry.lengths)
    add = parser.add_argument
    if entry.data:
        add("--data", action="append", required=True, metavar="FILE", help=f"{entry.data}; may be repeated")
    add_limit(parser, None, "samples of each file" if entry.data else "samples per length", "the task's")
    add("-n", "--predict", type=int, metavar="N", help="tokens of an answer (the task's)")
    help = "any other field of the task"
    add("--set", action="append", default=[], type=reported(pair), metavar="NAME=VALUE", help=help)
    add_sharing(parser)
    add_seed(parser)
    parser.set_defaults(run=run_standard, data=[])


def run_standard(args: argparse.Namespace) -> int:
    """Run the task, once for each file, and print the table."""
    tasks = make_tasks(args.task, args.data, fields_of(args) | dict(args.set))
    measured = evaluate(args, tasks, args.lengths, args.seed)
    return show(measured, length_table(measured, args.task, tasks[0].caption))


def fields_of(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return the fields of a task that are set by options: by --limit, --predict and those of these names."""
    given = {"tests": args.limit, "max_tokens": getattr(args, "predict", None)}
    given |= {name: getattr(args, name) for name in names}
    return {name: value for name, value in given.items() if value is not None}


def make_tasks(name: str, files: list[str], given: dict[str, Any]) -> list[Task]:
    """Return a task for each file, or one; ``given`` are its other fields."""
    cls = task_class(name)
    known = [part.name for part in fields(cls) if part.init and part.name != "data"]  # type: ignore[arg-type]
    if unknown := [field for field in given if field not in known]:
        way_out = guess(unknown[0], known) or f"; it has {', '.join(known)}"
        raise ValueError(f"the task {name} has no field {unknown[0]}{way_out}")
    return [cls(**{"data": file} | given) for file in files] or [cls(**given)]
