"""``pylongctx matrix``: methods x RoPE scalings x KV types x lengths x tasks, from a TOML file or options.

Samples that already have a record in the --out folder are skipped. ``pylongctx report`` draws the results.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from pylongctx._free import available_cpus
from pylongctx.cli.arguments import pair, reported
from pylongctx.cli.console import show_table
from pylongctx.cli.eval_cells import PARALLEL, CellProgress, Cells, Refusal, int_list, label_of, make_all
from pylongctx.cli.get import fetched
from pylongctx.cli.options import add_methods
from pylongctx.methods import named

if TYPE_CHECKING:
    from pylongctx.cli.eval_cells import Cells
    from pylongctx.eval.executors import Executor, Unit
    from pylongctx.eval.matrix import Matrix
    from pylongctx.eval.runner import Cell, Results


AUTO = "auto"


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser("matrix", description=__doc__)
    add = parser.add_argument
    add("plan", nargs="?", metavar="FILE.toml", help="the plan to run; the options below override it")
    add("--out", required=True, metavar="DIR", help="folder of the records; an existing one is continued")
    help = "GGUF file or a name of pylongctx get; may be repeated (the embedded model)"
    add("-m", "--model", action="append", metavar="FILE", help=help)
    add_methods(parser, "such as longheads, ntk, selfextend@yarn; may be repeated (all)")
    add("--lengths", type=int_list, metavar="N,N", help="tokens")
    add("-f", "--file", action="append", metavar="FILE", help="texts instead of those named by tasks; may be repeated")
    add("--kv", type=lambda text: text.split(","), metavar="T,T", help="KV types such as q8_0 or q8_0/f16 (f16)")
    help = "such as passkey,tests=5; may be repeated"
    add("--task", action="append", type=reported(_task), metavar="KIND,KEY=VALUE", help=help)
    add("--data", metavar="DIR", help="folder of the files named by tasks (that of FILE.toml)")
    add("--estimate", action="store_true", help="print how much is left to measure and how long it takes, then exit")
    add("-s", "--seed", type=int, metavar="N", help="(0)")
    add("-t", "--threads", type=int, metavar="N", help="threads per worker (its share of the cores)")
    add("-ngl", "--n-gpu-layers", type=int, metavar="N", help="layers on devices (0)")
    add("-np", "--parallel", type=int, metavar="N", help=PARALLEL)
    add("--executor", default="local", metavar="E", help="local, or the dask://HOST:PORT of a scheduler (local)")
    add("--workers", type=_workers, default=1, metavar="N", help="maximum processes of local; auto: as many as fit (1)")
    parser.set_defaults(run=run)


def _workers(text: str) -> int | None:
    return None if text == AUTO else int(text)


def _task(text: str) -> dict[str, Any]:
    kind, *options = text.split(",")
    return {"kind": kind} | dict(map(pair, options))


def run(args: argparse.Namespace) -> int:
    """Run the missing samples and print the tables; returns 1 when something failed."""
    from pylongctx.eval.executors import make_executor
    from pylongctx.eval.matrix import make
    from pylongctx.eval.report.records import RECORDS
    from pylongctx.eval.runner import Results

    matrix = make(_table(args))
    executor = make_executor(args.executor, args.workers)
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    cells = matrix.cells()
    write_about(folder, matrix, cells, args.argv)
    results = Results(str(folder / RECORDS))
    with CellProgress() as progress:
        failed: list[Refusal] = []
        samples = make_all(cells, progress, failed)
        if not args.estimate:
            failed += measure(samples, executor, results, progress)
    if args.estimate:
        print(*estimates(samples, results), sep="\n")
        return int(bool(failed))
    write_failures(folder, failed)
    return show(results, cells, failed)


def _table(args: argparse.Namespace) -> dict[str, Any]:
    """Return the plan of the file, overridden by options."""
    from pylongctx.eval.matrix import read, with_texts

    table = read(args.plan, args.data) if args.plan else {}
    given = {"model": args.model, "methods": args.method, "lengths": args.lengths, "kv": args.kv}
    given |= {"tasks": args.task, "seed": args.seed}
    llama = {"n_threads": args.threads, "n_threads_batch": args.threads, "n_gpu_layers": args.n_gpu_layers}
    llama |= {"n_parallel": args.parallel}
    table |= {key: value for key, value in given.items() if value is not None}
    if args.file:
        table["tasks"] = with_texts(table.get("tasks", []), args.file)
    if "model" in table:
        table["model"] = [fetched(name) for name in table["model"]]
    more = {key: value for key, value in llama.items() if value is not None}
    return table | {"llama": table.get("llama", {}) | more}


# ---- running ----


def measure(cells: Cells, executor: Executor, results: Results, progress: CellProgress) -> list[Refusal]:
    """Run the samples without a record, writing each result at once; returns the failures and their reasons."""
    from pylongctx.eval.executors import Failed, units_of

    units = [unit for cell, samples in cells for unit in units_of(cell, samples, results.records)]
    progress.begin(cells, results)
    failed: list[Refusal] = []
    for unit, outcome in executor.run(units):
        progress.at(unit.cell)
        if isinstance(outcome, Failed):
            failed.append((unit.cell, outcome.reason))
            progress.count(unit.cell, len(unit.todo))
        elif outcome["digest"] not in results.records:
            results.add(outcome)
            progress.count(unit.cell)
    return failed


# ---- output ----


def write_about(folder: Path, matrix: Matrix, cells: Sequence[Cell], argv: Sequence[str]) -> None:
    """Write the metadata of the records; models and methods of earlier runs stay."""
    from pylongctx import __version__
    from pylongctx.eval.bench.record import cpu_name
    from pylongctx.eval.matrix import read_positions
    from pylongctx.eval.report.records import ABOUT

    file = folder / ABOUT
    before: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    models = {Path(model).name: read_positions(model).n_ctx_train for model in matrix.models}
    about = {
        "command": shlex.join(["pylongctx", *argv]),
        "version": __version__,
        "machine": f"{cpu_name()}, {available_cpus()} cores",
        "models": {**before.get("models", {}), **models},
        "methods": list(dict.fromkeys([*before.get("methods", []), *map(label_of, cells)])),
    }
    file.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def write_failures(folder: Path, failed: Sequence[Refusal]) -> None:
    """Write the failures of this run; the next run retries them."""
    from pylongctx.eval.report.records import FAILED

    lines = [
        {"task": cell.task.name, "length": cell.length, "method": label_of(cell), "reason": why} for cell, why in failed
    ]
    (folder / FAILED).write_text(json.dumps(lines, indent=2) + "\n", encoding="utf-8")


def show(results: Results, cells: Sequence[Cell], failed: Sequence[Refusal]) -> int:
    """Print the requested tables and the failures; returns the exit status."""
    from pylongctx.eval.report.grids import grids
    from pylongctx.eval.report.records import Evidence, in_order

    wanted, keys = [cell.facts for cell in cells], cells[0].facts
    found = [record for record in results.records.values() if {key: record.get(key) for key in keys} in wanted]
    console, evidence = Console(), Evidence(in_order(found, [label_of(cell) for cell in cells]))
    for model in evidence.models:
        for grid in grids(evidence.of(model)):
            show_table(grid.rich())
    for cell, reason in failed:
        console.print(
            f"failed: {cell.task.name}, {label_of(cell)} at {cell.length}: {reason}", markup=False, soft_wrap=True
        )
    return int(bool(failed))


# ---- the command report ----


def add_report_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser("report", description=__doc__)
    help = "the --out folder of pylongctx matrix, or a folder of --json files"
    parser.add_argument("folder", metavar="DIR", help=help)
    help = "output file report.md or report.html; both are written (DIR/report)"
    parser.add_argument("--out", metavar="FILE", help=help)
    parser.add_argument("--no-pictures", action="store_true", help="write tables only")
    parser.set_defaults(run=run_report)


def run_report(args: argparse.Namespace) -> int:
    """Write the report and print the names of its files."""
    from pylongctx.eval.report import write_report

    for path in write_report(args.folder, args.out, draw=not args.no_pictures):
        print(path)
    return 0


# ---- how long it takes ----

TRIED = 512  # tokens of the prefill that measures the speed


def estimates(cells: Cells, results: Results) -> Iterator[str]:
    """Yield a line per model: samples and tokens left, and the hours they take."""
    from pylongctx.eval.executors import units_of

    for model in dict.fromkeys(cell.model for cell, _ in cells):
        here = [(cell, samples) for cell, samples in cells if cell.model == model]
        units = [unit for cell, samples in here for unit in units_of(cell, samples, results.records)]
        n_left, n_all = sum(len(unit.todo) for unit in units), sum(len(samples) for _, samples in here)
        line = f"{Path(model).name}: {n_left} of {n_all} samples are left"
        if n_left:
            n_tokens, speed = sum(map(_tokens, units)), _speed(model)
            hours = n_tokens / speed / 3600
            line += (
                f", with at most {n_tokens} tokens to prefill: about {hours:.1f} hours at {speed:.0f} tokens/s, "
                f"the speed of the first {TRIED} tokens with full attention on {available_cpus()} cores; "
                "it drops as the context grows"
            )
        yield line


def _tokens(unit: Unit) -> int:
    """Return an upper bound of the tokens of a unit; a shared text counts once, and its replay as prefills."""
    from pylongctx.engine.compress import compression_prefills

    cell, n_texts = unit.cell, 1 if unit.cell.reads_once else len(unit.todo)
    method = named(cell.method)
    n_replays = compression_prefills(method) if method is not None and cell.compress < 1 else 0.0
    return round(cell.length * n_texts * (1 + n_replays))


def _speed(model: str) -> float:
    from pylongctx.eval.advice import prefill_seconds, sample_tokens
    from pylongctx.llama import Llama

    with Llama(model, method="full", n_ctx=2 * TRIED, verbose=False) as llm:
        return TRIED / prefill_seconds(llm, sample_tokens(llm, TRIED))
