"""``pylongctx eval needle``: find one sentence in a long text, by context length and depth.

Options are named as in gkamradt's LLMTest_NeedleInAHaystack; answers are scored without a model.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.table import Table

from pylongctx.cli.eval.common import (
    Measured,
    add_limit,
    add_run_options,
    add_seed,
    evaluate,
    float_list,
    int_list,
    show,
)
from pylongctx.cli.options import add_model_options


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_model_options(parser)
    add_run_options(parser, lengths="")
    add = parser.add_argument
    add(
        "--lengths",
        "--context-lengths",
        type=int_list,
        metavar="N,N",
        help="lengths in tokens, instead of the next three options",
    )
    add("--context-lengths-min", type=int, default=1000, metavar="N", help="(1000)")
    add("--context-lengths-max", type=int, default=16000, metavar="N", help="(16000)")
    add("--context-lengths-num-intervals", type=int, default=5, metavar="N", help="how many (5; the original: 35)")
    add("--document-depth-percents", type=float_list, metavar="X,X", help="depths, instead of the next four options")
    add("--document-depth-percent-min", type=float, default=0, metavar="X", help="(0)")
    add("--document-depth-percent-max", type=float, default=100, metavar="X", help="(100)")
    add("--document-depth-percent-intervals", type=int, default=5, metavar="N", help="how many (5; the original: 35)")
    add("--document-depth-percent-interval-type", choices=("linear", "sigmoid"), default="linear", help="(linear)")
    add(
        "--final-context-length-buffer",
        type=int,
        default=200,
        metavar="N",
        help="tokens reserved for question and answer (200)",
    )
    add("--decoys", type=int, default=0, metavar="N", help="similar sentences with other answers (0)")
    add("--needle", metavar="TEXT", help="the sentence; {key} stands for five digits")
    add("--retrieval-question", metavar="TEXT")
    add("--expected", metavar="TEXT", help="the right answer")
    add("--passkey", action="store_true", help="hide a pass key instead, as in LongHeads' figure 7")
    add(
        "--haystack",
        "--haystack-dir",
        default="synthetic",
        metavar="FILE",
        help="'synthetic', a text, or a folder of texts (synthetic)",
    )
    add(
        "--scorer",
        choices=("overlap", "match", "exact", "rouge"),
        help="scoring of answers (overlap; match with --passkey)",
    )
    add("-n", "--predict", type=int, default=48, metavar="N", help="tokens of the answer (48)")
    add_limit(parser, 1, "samples per length and depth")
    add_seed(parser, what="seed of haystack and keys")


def run(args: argparse.Namespace) -> int:
    """Run the grid and print one table per method."""
    from pylongctx.eval.needle import PASSKEY, Needle, context_lengths, depth_grid

    lengths = args.lengths or context_lengths(
        args.context_lengths_min, args.context_lengths_max, args.context_lengths_num_intervals
    )
    depths = args.document_depth_percents or depth_grid(
        args.document_depth_percent_min,
        args.document_depth_percent_max,
        args.document_depth_percent_intervals,
        args.document_depth_percent_interval_type,
    )
    names = ("needle", "retrieval_question", "expected", "scorer")
    texts = {name: value for name in names if (value := getattr(args, name)) is not None}
    fields = {"haystack": args.haystack, "final_context_length_buffer": args.final_context_length_buffer}
    fields |= {"max_tokens": args.predict, "tests": args.limit, "decoys": args.decoys}
    task = Needle(tuple(depths), **((PASSKEY if args.passkey else {}) | texts | fields))
    measured = evaluate(args, [task], lengths, args.seed)
    methods = dict.fromkeys(m.cell.method for m in measured)
    return show(measured, *(_grid([m for m in measured if m.cell.method == method]) for method in methods))


def _grid(measured: list[Measured]) -> Table:
    cell = measured[0].cell
    table = Table(title=f"needle found, {cell.method}, {Path(cell.model).name}", caption="percent, by depth and length")
    summaries = [m.cell.task.summary(m.records) for m in measured]
    table.add_column("depth", justify="right")
    for m in measured:
        table.add_column(str(m.cell.length), justify="right")
    for name in (name for name in summaries[0] if name.startswith("depth ")):
        table.add_row(f"{name.removeprefix('depth ')} %", *(_colored(summary[name]) for summary in summaries))
    table.add_section()
    table.add_row("mean", *(_colored(summary["score"]) for summary in summaries))
    return table


def _colored(score: float) -> str:
    from pylongctx.eval.needle import COLORS

    return f"[{COLORS[min(2, int(3 * score))]}]{100 * score:.0f}[/]"
