"""A novel twice as long as a model's trained context, with ten facts in it: what three methods recall, side by side.

``make demo`` ends with it. The model is fetched when it is not here; without a network the program says so and ends.
"""

import argparse
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pylongctx.cli.console import Meter, show_table
from pylongctx.cli.get import fetched
from pylongctx.eval.matrix import read_positions
from pylongctx.eval.recall import Recall
from pylongctx.eval.runner import Cell, make_samples, run
from pylongctx.eval.task import Record

BOOK = Path(__file__).with_name("emma.txt")
METHODS = ("full", "dca", "longheads")
TASK = Recall(tests=1, questions=10, haystack=str(BOOK), scored=512)


def row(method: str, record: Record) -> list[str]:
    """Return what the table says of one method."""
    right = sum(turn["right"] for turn in record["turns"])
    logprob = sum(turn["logprob"] for turn in record["turns"]) / len(record["turns"])
    perplexity = math.exp(record["nll"] / record["n_scored"])
    return [
        method,
        f"{right:.0f} of {len(record['turns'])}",
        f"{logprob:.1f}",
        f"{perplexity:.1f}",
        f"{record['seconds']:.0f}",
    ]


def demonstrate(model: str, console: Console) -> None:
    """Ask for the facts with every method and print a table."""
    n_trained = read_positions(model).n_ctx_train
    cells = [Cell(model, m, TASK, 2 * n_trained, options={"progress_callback": Meter(console)}) for m in METHODS]
    (sample,) = make_samples(cells[0])
    question = " ".join(sample.facts["turns"][0]["question"].split())
    say = partial(console.print, highlight=False, emoji=False, soft_wrap=True)
    say(f"{BOOK.name}, {2 * n_trained} tokens, with ten facts; the model was trained on {n_trained}")
    say(f"one of the questions: {question} {sample.answers[0]}")
    table = Table(title="ten facts in a novel of twice the trained context")
    for head in ("method", "recalled", "log-probability of an answer", "perplexity at the end", "seconds"):
        table.add_column(head)
    for cell in cells:
        say(f"reading it with {cell.method}")
        (record,) = run(cell, [sample])
        table.add_row(*row(str(cell.method), record))
    show_table(table, console)


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
