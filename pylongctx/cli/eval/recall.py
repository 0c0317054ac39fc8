"""``pylongctx eval recall``: facts hidden in a text that is prefilled once, and a question about each.

Questions use the fact's own words, other words (as in NoLiMa), or ask among similar facts.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pylongctx.cli.eval.common import Measured, add_limit, add_run_options, add_seed, evaluate, length_table, show
from pylongctx.cli.options import add_model_options

ASKED = ("number", "literal", "paraphrase")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_model_options(parser)
    add_run_options(parser, chat=False)
    add = parser.add_argument
    add("--asked", choices=ASKED, action="append", help="kind of question; may be repeated (number)")
    add("--questions", type=int, default=5, metavar="N", help="facts per text, with one question each (5)")
    add("--decoys", type=int, default=0, metavar="N", help="similar sentences for each fact (0)")
    add("--haystack", default="synthetic", metavar="FILE", help="'synthetic', a text, or a folder of texts (synthetic)")
    add_limit(parser, 4, "texts per method and length")
    add("--fresh", type=int, default=0, metavar="N", help="questions per text also answered from an empty cache (0)")
    add("--anew", type=_renamed, help=argparse.SUPPRESS)
    add(
        "--scored",
        type=int,
        default=0,
        metavar="N",
        help="tokens at the end of the text whose perplexity is reported (0)",
    )
    add(
        "--compress",
        type=float,
        default=1.0,
        metavar="RATIO",
        help="fraction of the text's KV entries that kvzip keeps (1)",
    )
    add_seed(parser, what="seed of haystack and facts")


def _renamed(_: str) -> int:
    raise argparse.ArgumentTypeError("this option has another name now: use --fresh")


def run(args: argparse.Namespace) -> int:
    """Run the texts and print the fraction of right answers by length, and how often a fresh prefill changes it."""
    from pylongctx.eval.recall import Recall

    names = ("questions", "decoys", "haystack", "fresh", "scored", "compress")
    fields = {"tests": args.limit} | {name: getattr(args, name) for name in names}
    measured = evaluate(args, [Recall(asked, **fields) for asked in args.asked or ASKED[:1]], args.lengths, args.seed)
    title = f"facts recalled, {Path(measured[0].cell.model).name}"
    tables = [length_table(measured, title, "percent right")]
    if args.scored:
        caption = f"the last {args.scored} tokens of each text"
        tables.append(length_table(measured, f"perplexity, {Path(measured[0].cell.model).name}", caption, _perplexity))
    status = show(measured, *tables)
    for m in measured if args.fresh else []:
        same = m.cell.task.summary(m.records)["same"]
        print(f"{m.cell.task.name}, {m.cell.method} at {m.cell.length}: {100 * same:.0f} % as with a fresh prefill")
    return status


def _perplexity(measured: Measured) -> str:
    from pylongctx.eval.report.records import perplexity

    return f"{perplexity(measured.records):.2f}"
