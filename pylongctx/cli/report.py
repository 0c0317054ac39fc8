"""``pylongctx report``: the records of a folder as Markdown and as one HTML file, with tables and plots."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser("report", description=__doc__)
    parser.add_argument(
        "folder", metavar="DIR", help="the --out folder of pylongctx matrix, or a folder of --json files"
    )
    parser.add_argument(
        "--out", metavar="FILE", help="output file report.md or report.html; both are written (DIR/report)"
    )
    parser.add_argument("--no-pictures", action="store_true", help="write tables only")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the report and print the names of its files."""
    from pylongctx.eval.report import write_report

    for path in write_report(args.folder, args.out, draw=not args.no_pictures):
        print(path)
    return 0
