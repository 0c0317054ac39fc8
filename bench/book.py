"""A novel twice as long as a model's trained context, with a pass key in it: what two methods answer, side by side.

``make demo`` ends with it. The model is fetched when it is not here; without a network the program says so and ends.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pylongctx.cli.console import Meter
from pylongctx.cli.get import fetched
from pylongctx.eval.matrix import read_positions
from pylongctx.eval.needle import PASSKEY, Needle
from pylongctx.eval.runner import Cell, make_samples, run
from pylongctx.eval.task import Sample

BOOK = Path(__file__).with_name("emma.txt")
METHODS = ("longheads", "full")
TASK = Needle((50.0,), haystack=str(BOOK), max_tokens=8, final_context_length_buffer=64, **PASSKEY)


def answer(cell: Cell, sample: Sample) -> tuple[str, float]:
    """Return the answer of a cell's method in one line, and the seconds that reading and answering took."""
    start = perf_counter()
    (record,) = run(cell, [sample])
    return " ".join(record["answer"].split()), perf_counter() - start


def demonstrate(model: str, console: Console) -> None:
    """Ask for the pass key under every method and print a table."""
    n_trained = read_positions(model).n_ctx_train
    cells = [Cell(model, m, TASK, 2 * n_trained, options={"progress_callback": Meter(console)}) for m in METHODS]
    (sample,) = make_samples(cells[0])
    console.print(f"{BOOK.name} says in its middle that the pass key is {sample.answers[0]}", highlight=False)
    table = Table(title=TASK.retrieval_question)
    for head in ("method", "answer", "seconds"):
        table.add_column(head)
    for cell in cells:
        console.print(f"reading {2 * n_trained} tokens of it with {cell.method}", highlight=False)
        text, seconds = answer(cell, sample)
        table.add_row(cell.method, Text(text), f"{seconds:.0f}")
    console.print(table)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a file, or a name that pylongctx get lists")
    args = parser.parse_args(argv)
    console = Console()
    try:
        model = fetched(args.model)
    except (OSError, ValueError, ImportError) as reason:
        console.print(f"skipped: {reason}", soft_wrap=True, highlight=False, markup=False)
        return
    demonstrate(model, console)


if __name__ == "__main__":
    main()
