"""``pylongctx completion``: a shell script that completes commands, options, methods, models and files."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from pylongctx.catalog import CATALOG
from pylongctx.cli.doctor import KV_TYPES
from pylongctx.cli.help import VARIABLE
from pylongctx.cli.parser import Parser
from pylongctx.cli.shells import SHELLS
from pylongctx.eval.registry import TASKS
from pylongctx.methods import METHODS, NONE

EPILOG = """where to put the script:
  bash  pylongctx completion bash > ~/.local/share/bash-completion/completions/pylongctx
  zsh   in ~/.zshrc, after compinit: source <(pylongctx completion zsh)
  fish  pylongctx completion fish > ~/.config/fish/completions/pylongctx.fish
"""
WORDS = re.compile(r"[a-z0-9_]+(?:[|,][a-z0-9_]+)+")  # a metavar such as on|off
FILES = re.compile(r"FILE|FOLDER|DIR|PATH")


class Value(NamedTuple):
    """The value of an option or argument: one of some words, a file, or both."""

    words: tuple[str, ...] = ()
    files: bool = False


class Option(NamedTuple):
    """An option: its names, its help, and its value (None for a switch)."""

    names: tuple[str, ...]
    help: str
    value: Value | None


class CommandWords(NamedTuple):
    """A command: its help, its options and its arguments."""

    help: str
    options: tuple[Option, ...]
    arguments: Value


METHOD = Value((*METHODS, NONE))
MODEL = Value(tuple(CATALOG), files=True)
KV = Value(KV_TYPES)
KNOWN = {"--method": METHOD, "--methods": METHOD, "--base": METHOD, "--model": MODEL, "model": MODEL, "NAME": MODEL}
KNOWN |= {"--cache-type-k": KV, "--cache-type-v": KV}


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser("completion", description=__doc__, epilog=EPILOG)
    parser.add_argument("shell", choices=list(SHELLS), help="the shell that reads the script")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    from pylongctx.cli import make_parser

    print(SHELLS[args.shell](table(make_parser())), end="")
    return 0


def table(parser: Parser) -> Mapping[str, CommandWords]:
    """Return the completions by command; a task of ``eval`` has the name ``eval passkey``."""
    from pylongctx.cli import COMMANDS

    texts = {name: help for name, (_, help) in COMMANDS.items()}
    texts |= {f"eval {name}": entry.help for name, entry in TASKS.items()}
    return {name: _command(one, texts[name]) for name, one in parser.commands().items()}


def _command(parser: Parser, help: str) -> CommandWords:
    shown = parser.shown()
    options = (
        Option(tuple(a.option_strings), VARIABLE.sub("", a.help or ""), _value(a)) for a in shown if a.option_strings
    )
    arguments = [_words(action) for action in shown if not action.option_strings]
    words = tuple(word for value in arguments for word in value.words)
    return CommandWords(help, tuple(options), Value(words, any(value.files for value in arguments)))


def _value(action: argparse.Action) -> Value | None:
    return None if action.nargs == 0 else _words(action)


def _words(action: argparse.Action) -> Value:
    """Return the value of an option or argument, from its name, its choices or its metavar."""
    metavar = str(action.metavar or "")
    for name in (*action.option_strings, metavar):
        if name in KNOWN:
            return KNOWN[name]
    if action.choices is not None:
        return Value(tuple(map(str, action.choices)))
    if WORDS.fullmatch(metavar.strip("{}")):
        return Value(tuple(re.split(r"[|,]", metavar.strip("{}"))))
    return Value(files=bool(FILES.search(metavar)))
