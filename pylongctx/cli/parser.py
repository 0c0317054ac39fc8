"""The parser of the command line: errors are one line with a suggestion, without the usage."""

import argparse
import re
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from pylongctx._guess import guess
from pylongctx.cli.help import FullHelp, Help, is_common

CHOICE = re.compile(r"argument (\w+): invalid choice: '(.*?)' \(choose from (.*)\)", re.DOTALL)


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        assert isinstance(parser, Parser)
        print(parser.full_help(), end="")
        parser.exit()


class Parser(argparse.ArgumentParser):
    """An ArgumentParser with a short and a full help, whose errors suggest similar words."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", Help)
        super().__init__(add_help=False, **kwargs)
        self.set_defaults(parser=self)
        self.add_argument("-h", "--help", action="help", help="show this help and exit")
        self.add_argument("--help-all", action=_HelpAll, nargs=0, default=argparse.SUPPRESS, help=argparse.SUPPRESS)

    def format_help(self) -> str:
        """Return the help; a short one states the total number of options."""
        text = super().format_help()
        shown = self.shown()
        if self.formatter_class is FullHelp or all(map(is_common, shown)):
            return text
        return f"{text}\n--help-all shows all {sum(bool(action.option_strings) for action in shown)} options.\n"

    def full_help(self) -> str:
        """Return the help with all options."""
        before, self.formatter_class = self.formatter_class, FullHelp
        try:
            return self.format_help()
        finally:
            self.formatter_class = before

    def error(self, message: str) -> NoReturn:
        """Print a line about a mistake, and exit with status 2."""
        if (found := CHOICE.fullmatch(message)) is not None:
            names = re.findall(r"[\w-]+", found[3])
            message = f"there is no {found[1].lower()} {found[2]!r}{guess(found[2], names)}"
        self.exit(2, f"{self.prog}: error: {message}\n{self.prog} --help lists all choices\n")

    def shown(self) -> list[argparse.Action]:
        """Return the options and arguments that the full help shows."""
        return [action for action in self._actions if action.help != argparse.SUPPRESS]

    def commands(self) -> dict[str, "Parser"]:
        """Return the parsers of all commands, those of ``eval`` as ``eval passkey``."""
        found: dict[str, Parser] = {}
        for choices in (action.choices for action in self._actions if isinstance(action.choices, dict)):
            for name, parser in choices.items():
                if isinstance(parser, Parser):
                    found |= {name: parser} | {f"{name} {below}": one for below, one in parser.commands().items()}
        return found

    def options(self) -> Iterator[str]:
        """Yield the names of all options."""
        yield from re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", self.full_help())

    def refuse(self, rest: Sequence[str]) -> NoReturn:
        """Print a line about unrecognized words, and exit with status 2."""
        first = next((word for word in rest if word.startswith("-")), rest[0])
        if first.startswith("-"):
            name = first.partition("=")[0]
            self.error(f"there is no option {name}{guess(name, self.options())}")
        self.error(f"unexpected argument {first!r}")
