"""``pylongctx completion``: a shell script that completes commands, options, methods, models and files.

shtab writes the scripts from the parser: compared with a writer of our own, it also has a native script for zsh, and
completes arguments by their place.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

from pylongctx.catalog import CATALOG
from pylongctx.cli.arguments import Parser
from pylongctx.cli.doctor import KV_TYPES
from pylongctx.eval.registry import TASKS
from pylongctx.methods import METHODS, NONE

EPILOG = """where to put the script:
  bash  pylongctx completion bash > ~/.local/share/bash-completion/completions/pylongctx
  zsh   in ~/.zshrc, after compinit: eval "$(pylongctx completion zsh)"
  fish  pylongctx completion fish > ~/.config/fish/completions/pylongctx.fish
"""
SHELLS = ("bash", "zsh", "fish")
WORDS = re.compile(r"\{?([a-z0-9_]+(?:[|,][a-z0-9_]+)+)\}?")  # a metavar such as on|off
FILES = re.compile(r"FILE|FOLDER|DIR|PATH")
LONG_FISH_OPTION = re.compile(r"(?<= )-s (\w{2,})(?= )")  # shtab takes -sm for a letter, which fish refuses
METHOD, KV_TYPE = [*METHODS, NONE], list(KV_TYPES)
KNOWN = {"--method": METHOD, "--methods": METHOD, "--base": METHOD}
KNOWN |= {"--cache-type-k": KV_TYPE, "--cache-type-v": KV_TYPE}
MODEL = ("--model", "model", "NAME")  # a file, or a name of the catalogue
NAMES = " ".join(CATALOG)
MODEL_COMPLETION = {
    "bash": "_pylongctx_model",
    "zsh": "_pylongctx_model",
    "fish": f"{NAMES} (__fish_complete_path (commandline -ct))",
    "preamble": {
        "bash": f'_pylongctx_model() {{ compgen -W "{NAMES}" -- "$1"; compgen -f -- "$1"; }}',
        "zsh": f"_pylongctx_model() {{ _alternative 'names:name:({NAMES})' 'files:file:_files'; }}",
    },
}


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser("completion", description=__doc__.partition("\n")[0], epilog=EPILOG)
    parser.add_argument("shell", choices=SHELLS, help="the shell that reads the script")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    from pylongctx.cli import make_parser

    print(script(make_parser(), args.shell), end="")
    return 0


def script(parser: Parser, shell: str) -> str:
    """Return the completion script of a shell."""
    try:
        import shtab
    except ImportError as reason:
        raise ImportError("completion needs shtab: pip install 'pylongctx[cli]'") from reason
    written = str(shtab.complete(_listed(parser), shell=shell))
    return LONG_FISH_OPTION.sub(r"-o \1", written) if shell == "fish" else written


def _listed(parser: Parser) -> argparse.ArgumentParser:
    """Return a parser whose help lists the commands and the tasks, since shtab completes what the help shows."""
    from pylongctx.cli import COMMANDS

    found = parser.commands()
    listed = argparse.ArgumentParser(prog=parser.prog)
    commands = listed.add_subparsers()
    for name, (_, help) in COMMANDS.items():
        if name != "eval":
            commands.add_parser(name, help=help, parents=[_with_values(found[name])], add_help=False)
            continue
        tasks = commands.add_parser(name, help=help).add_subparsers()
        for task, entry in TASKS.items():
            if (one := found.get(f"{name} {task}")) is not None:
                tasks.add_parser(task, help=entry.help, parents=[_with_values(one)], add_help=False)
    return listed


def _with_values(parser: Parser) -> Parser:
    """Tell shtab how the values of options and arguments are completed, from their names, choices or metavars."""
    for action in parser.shown():
        metavar = str(action.metavar or "")
        names = set(action.option_strings) or {metavar}
        if not names.isdisjoint(MODEL):
            action.complete = MODEL_COMPLETION  # type: ignore[attr-defined]
        elif action.nargs == 0 or action.choices is not None:
            continue
        elif (known := next((KNOWN[name] for name in names if name in KNOWN), None)) is not None:
            action.choices = known
        elif (words := WORDS.fullmatch(metavar)) is not None:
            action.choices = re.split(r"[|,]", words[1])
        elif FILES.search(metavar):
            action.complete = _files()  # type: ignore[attr-defined]
    return parser


def _files() -> Any:
    import shtab

    return shtab.FILE
