"""The command line: evaluations such as ``pylongctx passkey``, ``bench``, ``inspect``, ``rpc-server``, ``doctor``."""

import argparse
import sys
from collections.abc import Sequence

from pylongctx import __version__


def make_parser() -> argparse.ArgumentParser:
    """Return the parser with all subcommands."""
    from pylongctx.cli import bench, doctor, inspect, leval, longbench, needle, passkey, perplexity, rpc_server, ruler

    parser = argparse.ArgumentParser(prog="pylongctx", description="Training-free long context for GGUF models.")
    parser.add_argument("--version", action="version", version=f"pylongctx {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    evaluations = (passkey, needle, ruler, longbench, leval, perplexity)
    for module in (*evaluations, bench, inspect, rpc_server, doctor):
        module.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 for an error, 130 for Ctrl-C."""
    args = make_parser().parse_args(argv)
    try:
        status: int = args.run(args)
    except KeyboardInterrupt:
        return 130
    except (ValueError, RuntimeError, ImportError, OSError, MemoryError) as reason:
        print(f"pylongctx: error: {reason}", file=sys.stderr)
        return 1
    return status
