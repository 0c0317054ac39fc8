"""The parser of the command line: errors are a line with a guess, not the whole usage."""

import argparse
import re
from collections.abc import Iterator, Sequence
from typing import NoReturn

from pylongctx._guess import guess

CHOICE = re.compile(r"argument (\w+): invalid choice: '(.*?)' \(choose from (.*)\)", re.DOTALL)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors say what was meant, perhaps, and where the options are listed."""

    def error(self, message: str) -> NoReturn:
        """Print a line about a mistake, and exit with status 2."""
        if (found := CHOICE.fullmatch(message)) is not None:
            names = re.findall(r"[\w-]+", found[3])
            message = f"there is no {found[1].lower()} {found[2]!r}{guess(found[2], names)}"
        self.exit(2, f"{self.prog}: error: {message}\n{self.prog} --help lists what there is\n")

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
        yield from re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", self.format_help())

    def refuse(self, rest: Sequence[str]) -> NoReturn:
        """Print a line about words that the parser does not know, and exit with status 2."""
        first = next((word for word in rest if word.startswith("-")), rest[0])
        if first.startswith("-"):
            name = first.partition("=")[0]
            self.error(f"there is no option {name}{guess(name, self.options())}")
        self.error(f"there is no place for {first!r}")
