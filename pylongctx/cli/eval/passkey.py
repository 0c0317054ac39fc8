"""``pylongctx eval passkey``: how often a hidden number is found, by method and length."""

from __future__ import annotations

import argparse
from pathlib import Path

from pylongctx.cli.eval.common import add_limit, add_run_options, evaluate, float_list, int_list, length_table, show
from pylongctx.cli.options import add_model_options, add_prompt_options


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_model_options(parser)
    add_run_options(parser)
    add = parser.add_argument
    add_limit(parser, 20, "trials per method and length")
    add(
        "--style",
        choices=("fill", "landmark", "selfextend", "llama.cpp"),
        default="fill",
        help="prompts that fill the length (fill), or those of a paper or program",
    )
    add("--digits", type=int_list, metavar="N,N", help="digits of the key (5; 1 to 50000 with landmark and llama.cpp)")
    add("--depths", type=float_list, default=(), metavar="X,X", help="depths of the key, 0 to 1 (random)")
    add("--junk", type=int, metavar="N", help="lines of haystack, with selfextend and llama.cpp (as many as fit)")
    add("--pos", type=int, metavar="N", help="hide the key before this line (by depth)")
    add_prompt_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run all trials, show a progress bar, write the JSON lines, print the table."""
    from pylongctx.eval.passkey import Passkey

    fields = {"haystack": args.haystack, "separator": args.separator, "junk": args.junk, "position": args.pos}
    tasks = [Passkey(args.style, args.limit, n, args.depths, **fields) for n in args.digits or [None]]
    measured = evaluate(args, tasks, args.lengths, args.seed)
    title = f"pass key found, {Path(measured[0].cell.model).name}"
    return show(measured, length_table(measured, title, "strict: the answer begins with the key"))
