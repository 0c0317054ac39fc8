"""The command line: ``pylongctx ask``, ``chat``, ``serve``, and commands that download, measure and inspect."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from pylongctx import __version__
from pylongctx._log import LOG, show
from pylongctx.cli.arguments import Parser, command_list, reason_of, unread_variables

PROGRAM = "pylongctx"
INSTALL = "pip install 'pylongctx[cli]'"
# command name: its module, with the function that adds it unless that is add_parser, and its help text
COMMANDS = {
    "ask": ("ask", "ask about files"),
    "chat": ("chat", "chat with a model in the terminal"),
    "complete": ("complete", "continue a text"),
    "serve": ("serve", "serve a model to OpenAI's clients, and a chat page"),
    "get": ("get", "list and download models"),
    "kv": ("kv", "list, verify and clean up a KV store"),
    "eval": ("eval", "evaluate a model on long-context tasks"),
    "bench": ("bench", "benchmark speed and memory, like llama-bench"),
    "matrix": ("matrix", "run every method on every task and length"),
    "report": ("matrix:add_report_parser", "turn results into tables and plots"),
    "inspect": ("inspect", "show what attention heads read and keep"),
    "doctor": ("doctor", "check the installation"),
    "completion": ("completion", "print a shell completion script"),
    "rpc-server": ("serve:add_rpc_parser", "share this machine's devices over the network"),
}
GROUPS = {
    "talk": ("ask", "chat", "complete", "serve"),
    "models": ("get", "kv"),
    "measure": ("eval", "bench", "matrix", "report", "inspect"),
    "machine": ("doctor", "completion", "rpc-server"),
}


def make_parser(command: str | None = None) -> Parser:
    """Return the parser for all commands, or for one, so that only its module is imported; others have a name only."""
    listed = command_list({title: [(name, COMMANDS[name][1]) for name in names] for title, names in GROUPS.items()})
    epilog = f"{listed}\npylongctx COMMAND --help shows the options of a command."
    parser = Parser(prog=PROGRAM, description="Training-free long context for GGUF models.", epilog=epilog)
    parser.add_argument("--version", action="version", version=f"pylongctx {__version__}")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", prog=PROGRAM, help=argparse.SUPPRESS
    )
    for name, (place, _) in COMMANDS.items():
        if command in (None, name):
            module, _, function = place.partition(":")
            getattr(import_module(f"pylongctx.cli.{module}"), function or "add_parser")(commands)
        else:
            commands.add_parser(name)
    return parser


def parse(parser: Parser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments of a command line; exits on a word that its command does not accept."""
    args: argparse.Namespace
    args, rest = parser.parse_known_args(argv)
    if rest:
        args.parser.refuse(rest)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 for an error, 130 for Ctrl-C."""
    words = sys.argv[1:] if argv is None else argv
    try:
        parser = make_parser(words[0] if words else "")
    except ModuleNotFoundError as reason:
        print(f"pylongctx: error: the command line needs more packages ({reason}): {INSTALL}", file=sys.stderr)
        return 1
    show()
    args = parse(parser, argv)
    for name in unread_variables(args):
        LOG.warning("%s has no effect: no option of pylongctx %s reads it", name, args.command)
    args.argv = sys.argv[1:] if argv is None else list(argv)
    try:
        status: int = args.run(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, RuntimeError, ImportError, OSError, MemoryError) as reason:
        print(f"pylongctx: error: {reason_of(reason)}", file=sys.stderr)
        return 1
    return status
