"""The command line: ``pylongctx ask``, ``chat``, ``serve``, and commands that download, measure and inspect."""

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
# command name: its module and its help text
COMMANDS = {
    "ask": ("ask", "ask about files"),
    "chat": ("chat", "chat with a model in the terminal"),
    "complete": ("complete", "continue a text"),
    "serve": ("serve", "serve a model to OpenAI's clients, and a chat page"),
    "get": ("get", "list and download models"),
    "kv": ("store", "list, verify and clean up a KV store"),
    "eval": ("eval", "evaluate a model on long-context tasks"),
    "bench": ("bench", "benchmark speed and memory, like llama-bench"),
    "matrix": ("matrix", "run every method on every task and length"),
    "report": ("report", "turn results into tables and plots"),
    "inspect": ("inspect", "show what attention heads read and keep"),
    "doctor": ("doctor", "check the installation"),
    "completion": ("completion", "print a shell completion script"),
    "rpc-server": ("rpc_server", "share this machine's devices over the network"),
}
GROUPS = {
    "talk": ("ask", "chat", "complete", "serve"),
    "models": ("get", "kv"),
    "measure": ("eval", "bench", "matrix", "report", "inspect"),
    "machine": ("doctor", "completion", "rpc-server"),
}
MOVED = ("passkey", "needle", "recall", "ruler", "longbench", "leval", "perplexity")  # now tasks of `eval`


def make_parser(command: str | None = None) -> Parser:
    """Return the parser for all commands, or for one, so that only its module is imported.

    Parameters
    ----------
    command : str or None
        The command; None: all of them. Other commands are registered by name only.
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
    """Return the arguments of a command line; exits on a word that its command does not accept."""
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
    except BrokenPipeError:  # the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, RuntimeError, ImportError, OSError, MemoryError) as reason:
        print(f"pylongctx: error: {reason_of(reason)}", file=sys.stderr)
        return 1
    return status
