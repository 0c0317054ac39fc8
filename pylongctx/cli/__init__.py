"""The command line: ``pylongctx ask``, ``chat``, ``serve``, and commands that fetch, measure and show."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from pylongctx import __version__
from pylongctx._log import show
from pylongctx.cli.arguments import reason_of
from pylongctx.cli.help import command_list
from pylongctx.cli.parser import Parser

PROGRAM = "pylongctx"
# name: the module of the command, and what it is for
COMMANDS = {
    "ask": ("ask", "ask about files"),
    "chat": ("chat", "talk with a model"),
    "complete": ("complete", "continue a text"),
    "serve": ("serve", "serve a model to OpenAI's clients, and a chat page"),
    "get": ("get", "list and fetch models"),
    "kv": ("store", "show and clean a KV store"),
    "eval": ("eval", "measure what a model can do with a long text"),
    "bench": ("bench", "measure speed and memory, as llama-bench"),
    "matrix": ("matrix", "every method on every task and length"),
    "report": ("report", "tables and pictures of what was measured"),
    "inspect": ("inspect", "show what the heads read and keep"),
    "doctor": ("doctor", "show the installation"),
    "completion": ("completion", "print a script that completes words in a shell"),
    "rpc-server": ("rpc_server", "lend this machine to another"),
}
GROUPS = {
    "talk": ("ask", "chat", "complete", "serve"),
    "models": ("get", "kv"),
    "measure": ("eval", "bench", "matrix", "report", "inspect"),
    "machine": ("doctor", "completion", "rpc-server"),
}
MOVED = ("passkey", "needle", "recall", "ruler", "longbench", "leval", "perplexity")  # which eval has now


def make_parser(command: str | None = None) -> Parser:
    """Return the parser: of all commands, or of one, whose module alone is loaded.

    Parameters
    ----------
    command : str or None
        The command; None: all of them. Of the others the names are known.
    """
    listed = command_list({title: [(name, COMMANDS[name][1]) for name in names] for title, names in GROUPS.items()})
    epilog = f"{listed}\npylongctx COMMAND --help shows the options of a command."
    parser = Parser(prog=PROGRAM, description="Training-free long context for GGUF models.", epilog=epilog)
    parser.add_argument("--version", action="version", version=f"pylongctx {__version__}")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", prog=PROGRAM, help=argparse.SUPPRESS
    )
    for name, (module, _) in COMMANDS.items():
        if command in (None, name):
            import_module(f"pylongctx.cli.{module}").add_parser(commands)
        else:
            commands.add_parser(name)
    return parser


def parse(parser: Parser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments of a command line; a word that its command does not know ends the process."""
    args, rest = parser.parse_known_args(argv)
    if rest:
        args.parser.refuse(rest)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 for an error, 130 for Ctrl-C."""
    words = sys.argv[1:] if argv is None else argv
    parser = make_parser(words[0] if words else "")
    if words and words[0] in MOVED:
        parser.error(f"{words[0]!r} is now 'pylongctx eval {words[0]}'")
    show()
    args = parse(parser, argv)
    args.argv = sys.argv[1:] if argv is None else list(argv)
    try:
        status: int = args.run(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # who reads the output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, RuntimeError, ImportError, OSError, MemoryError) as reason:
        print(f"pylongctx: error: {reason_of(reason)}", file=sys.stderr)
        return 1
    return status
