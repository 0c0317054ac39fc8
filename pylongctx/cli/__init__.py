"""The command line: ``pylongctx ask``, ``chat``, ``serve``, and commands that fetch, measure and show."""

import argparse
import os
import sys
from collections.abc import Sequence

from pylongctx import __version__
from pylongctx._log import show
from pylongctx.cli.parser import Parser


def make_parser() -> Parser:
    """Return the parser with all subcommands."""
    from pylongctx.cli import (
        ask,
        bench,
        chat,
        complete,
        doctor,
        get,
        inspect,
        leval,
        longbench,
        matrix,
        needle,
        passkey,
        perplexity,
        recall,
        report,
        rpc_server,
        ruler,
        serve,
        store,
    )

    parser = Parser(prog="pylongctx", description="Training-free long context for GGUF models.")
    parser.add_argument("--version", action="version", version=f"pylongctx {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    evaluations = (passkey, needle, recall, ruler, longbench, leval, perplexity)
    for module in (
        ask,
        get,
        chat,
        complete,
        serve,
        *evaluations,
        matrix,
        report,
        bench,
        inspect,
        store,
        rpc_server,
        doctor,
    ):
        module.add_parser(commands)
    for one in commands.choices.values():
        one.set_defaults(parser=one)
    return parser


def parse(parser: Parser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments of a command line; a word that its command does not know ends the process."""
    args, rest = parser.parse_known_args(argv)
    if rest:
        args.parser.refuse(rest)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 for an error, 130 for Ctrl-C."""
    args = parse(make_parser(), argv)
    show()
    args.argv = sys.argv[1:] if argv is None else list(argv)
    try:
        status: int = args.run(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # who reads the output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, RuntimeError, ImportError, OSError, MemoryError) as reason:
        print(f"pylongctx: error: {reason}", file=sys.stderr)
        return 1
    return status
