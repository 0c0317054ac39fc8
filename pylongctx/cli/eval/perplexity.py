"""``pylongctx eval perplexity``: how well a text is predicted, by method and length."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from rich.table import Table

from pylongctx.cli.eval.common import Measured, add_run_options, evaluate, int_list, length_table, show
from pylongctx.cli.options import add_model_options

MODES = {
    "llama.cpp": "the second half of each chunk, like llama-perplexity",
    "sliding": "the last tokens of windows that advance by the stride",
    "incremental": "every token given all previous ones, with a curve by position",
    "last": "the last tokens of passages that end at the same places for every length",
}
N_POINTS = 16  # rows of the printed curve; the JSON lines have all


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    modes = "; ".join(f"{name}: {what}" for name, what in MODES.items())
    parser.epilog = modes
    add_model_options(parser)
    add_run_options(parser, lengths="", chat=False)
    add = parser.add_argument
    add("-f", "--file", action="append", required=True, metavar="FILE", help="plain text; may be repeated")
    add(
        "-c",
        "--ctx-size",
        "--lengths",
        dest="lengths",
        type=int_list,
        default=[512],
        metavar="N,N",
        help="tokens (512)",
    )
    add("--mode", choices=MODES, help="see below (llama.cpp)")
    add(
        "--chunks",
        type=int,
        metavar="N",
        help="maximum chunks, windows or passages of each text (all; incremental 1, last 4)",
    )
    add(
        "--ppl-stride",
        type=int,
        metavar="N",
        help="stride of windows, scored ends and curves (256); alone: --mode sliding",
    )
    add("--kl-divergence", action="store_true", help="compare with another method, token by token")
    add("--base", default="full", metavar="M", help="the method to compare with, with an f16 cache (full)")


def run(args: argparse.Namespace) -> int:
    """Measure and print the table, llama-perplexity's last lines, and the curve."""
    if args.kl_divergence:
        return _divergence(args)
    from pylongctx.eval.perplexity import Perplexity

    mode = args.mode or ("llama.cpp" if args.ppl_stride is None else "sliding")
    stride = {} if args.ppl_stride is None else {"stride": args.ppl_stride}
    task = Perplexity(tuple(args.file), mode, args.chunks, **stride)
    measured = evaluate(args, [task], args.lengths)
    title = f"perplexity of {_names(args)}, {Path(measured[0].cell.model).name}"
    tables = [length_table(measured, title, MODES[mode])]
    if mode == "incremental":
        tables += [_curves([m for m in measured if m.cell.length == n], task.stride) for n in args.lengths]
    status = show(measured, *tables)
    for m in measured:
        found = task.summary(m.records)
        estimate = f"PPL = {found['perplexity']:.4f} +/- {found['error']:.5f}"
        print(f"{m.cell.method} at {m.cell.length}: Final estimate: {estimate}")
    return status


def _names(args: argparse.Namespace) -> str:
    return ", ".join(Path(file).name for file in args.file)


def _curves(measured: list[Measured], stride: int) -> Table:
    from pylongctx.eval.perplexity import curve

    table = Table(title="perplexity by position")
    table.add_column("position", justify="right")
    curves = []
    for m in measured:
        table.add_column(m.cell.method, justify="right")
        curves.append(curve(m.records, stride))
    positions = curves[0][0]
    step = -(-len(positions) // N_POINTS)
    for i in range(0, len(positions), step):
        table.add_row(str(positions[i]), *(f"{values[i]:.2f}" for _, values in curves))
    return table


def _divergence(args: argparse.Namespace) -> int:
    from pylongctx.eval.kld import Divergence

    if args.mode not in (None, "llama.cpp") or args.ppl_stride is not None:
        raise ValueError("--kl-divergence is measured on llama.cpp's chunks: leave --mode and --ppl-stride out")
    task = Divergence(tuple(args.file), args.chunks, args.base)
    measured = evaluate(args, [task], args.lengths)
    title = f"KL divergence from {args.base}, {_names(args)}, {Path(measured[0].cell.model).name}"
    status = show(measured, length_table(measured, title, "nats per token"))
    for m in measured:
        print(f"\n====== {m.cell.method} at {m.cell.length} ======")
        for line in _statistics(task.summary(m.records)):
            print(line)
    return status


def _statistics(found: dict[str, float]) -> Iterator[str]:
    for label, value in found.items():
        if not label.endswith(" error"):
            error = found.get(f"{label} error")
            yield f"{label:<30}: {value:12.6f}" + ("" if error is None else f" \u00b1 {error:.6f}")
