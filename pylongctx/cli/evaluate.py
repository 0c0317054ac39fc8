"""What the commands that evaluate models share: options, the loop over methods and lengths, tables."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from pylongctx.cli import arguments
from pylongctx.cli.options import llama_arguments, model_path
from pylongctx.methods import parse

if TYPE_CHECKING:
    from pylongctx.eval.runner import Job
    from pylongctx.eval.task import Record, Sample, Task

DEFAULT_METHODS = ("full", "selfextend", "longheads")
int_list = arguments.reported(arguments.int_list)  # as the type of an option: "512,2048", "512-8192*2"


class Measured(NamedTuple):
    """A job and its records."""

    job: Job
    records: list[Record]


def add_run_options(parser: argparse.ArgumentParser, lengths: str = "512,2048", chat: bool = True) -> None:
    """Add which methods and lengths are run, and where the records go."""
    parser.add_argument(
        "--method",
        action="append",
        metavar="M",
        help="method such as selfextend or window,n_sink=4; may be repeated"
        f" (default: LCTX_METHOD, or {' '.join(DEFAULT_METHODS)})",
    )
    if lengths:
        add = parser.add_argument
        what = f"tokens, also 512-8192*2 or 512-2048+512 ({lengths})"
        add("--lengths", type=int_list, default=int_list(lengths), metavar="N,N", help=what)
    parser.set_defaults(chat=False)
    if chat:
        parser.add_argument("--chat", action="store_true", help="surround the prompts by the model's chat template")
    parser.add_argument(
        "--json", metavar="FILE", help="append one JSON line per sample; a sample that the file has is not run again"
    )


def float_list(text: str) -> tuple[float, ...]:
    """Return the numbers of ``"0,12.5"``."""
    return tuple(float(part) for part in text.split(","))


def methods(args: argparse.Namespace) -> list[str]:
    """Return the methods that were asked for, or the default ones."""
    asked = args.method or [os.environ.get("LCTX_METHOD")]
    return [str(parse(spec)) for spec in asked if spec] or list(DEFAULT_METHODS)


def evaluate(args: argparse.Namespace, tasks: Sequence[Task], lengths: Sequence[int], seed: int = 0) -> list[Measured]:
    """Run every task with every method at every length, showing progress; what ``--json`` holds is not run again."""
    from pylongctx.eval.runner import Job, Results, run

    if getattr(args, "tests", None) is not None and args.tests < 1:
        raise ValueError(f"--tests must be at least 1, not {args.tests}")
    given = llama_arguments(args)
    fields = {"model": model_path(args), "seed": seed, "chat": args.chat}
    fields |= {name: given.pop(name) for name in ("type_k", "type_v") if name in given} | {"options": given}
    jobs = [Job(method=m, task=t, length=n, **fields) for t in tasks for m in methods(args) for n in lengths]
    results = Results(args.json)
    with progress_bar() as progress:
        samples = _make(jobs, progress)
        bar = progress.add_task("", total=sum(len(s) * job.length for job, s in samples), n=0, of=0)
        progress.update(bar, of=sum(len(s) for _, s in samples))
        for job, wanted in samples:
            progress.update(bar, description=f"{job.task.name}: {parse(job.method)} at {job.length}")
            known = results.of(job, wanted)
            advance(progress, bar, job.length, len(known))
            for record in run(job, wanted, {record["digest"] for record in known}):
                results.add(record)
                advance(progress, bar, job.length, 1)
    return [Measured(job, results.of(job, wanted)) for job, wanted in samples]


def _make(jobs: Sequence[Job], progress: Progress) -> list[tuple[Job, list[Sample]]]:
    """Return the samples of all jobs; methods share theirs."""
    from pylongctx.eval.runner import make_samples

    made: dict[tuple[int, int], list[Sample]] = {}
    bar = progress.add_task("", total=None, n=0, of=len(jobs))
    for job in jobs:
        progress.update(bar, description=f"making the samples of {job.task.name} at {job.length}")
        key = (id(job.task), job.length)
        if key not in made:
            made[key] = make_samples(job)
    progress.remove_task(bar)
    return [(job, made[id(job.task), job.length]) for job in jobs]


def advance(progress: Progress, bar: Any, length: int, n: int) -> None:
    """Move a bar by ``n`` samples of a length."""
    done = next(task.fields["n"] for task in progress.tasks if task.id == bar)
    progress.update(bar, advance=n * length, n=done + n)


def progress_bar() -> Progress:
    """Return a bar with the numbers of samples, the time gone and the time left."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[n]}/{task.fields[of]}"))
    console = Console(stderr=True)
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True)


# ---- tables ----


def length_table(
    measured: Sequence[Measured], title: str, caption: str, cell: Callable[[Measured], str] | None = None
) -> Table:
    """Return a table with a row per task and method and a column per length."""
    several = len({m.job.task.name for m in measured}) > 1
    lengths = list(dict.fromkeys(m.job.length for m in measured))
    table = Table(title=title, caption=caption)
    for head in (["task"] if several else []) + ["method"]:
        table.add_column(head)
    for length in lengths:
        table.add_column(str(length), justify="right")
    cells = {(m.job.task.name, m.job.method, m.job.length): (cell or _cell)(m) for m in measured}
    for name, method in dict.fromkeys((m.job.task.name, m.job.method) for m in measured):
        row = (cells.get((name, method, n), "") for n in lengths)
        table.add_row(*([name] if several else []), method, *row)
    return table


def _cell(measured: Measured) -> str:
    return measured.job.task.cell(measured.records) if measured.records else ""


def choices(measured: Sequence[Measured]) -> Iterator[str]:
    """Yield one line per automatic choice: the method, the lengths it was made for, what was chosen."""
    lengths: dict[tuple[str, str], dict[int, None]] = {}
    for job, records in measured:
        for record in records:
            if record["method"] != record["asked"]:
                lengths.setdefault((record["asked"], record["method"]), {})[job.length] = None
    for (method, chosen), used in lengths.items():
        options = [", ".join(part.split(",")[1:]) or part for part in chosen.split("+")]
        yield f"{method} at {', '.join(map(str, used))}: {' + '.join(options)}"


def show(measured: Sequence[Measured], *tables: Table) -> int:
    """Print tables and what was chosen; returns the exit status."""
    console = Console()
    for table in tables:
        console.print(table)
    for line in choices(measured):
        print(line)
    return 0
