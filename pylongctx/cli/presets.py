"""Options per model: the INI file of ``serve --models-preset``, in the form of llama-server's."""

import argparse
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from pylongctx.cli.arguments import Parser, file_text, switched

ALL = "*"  # the section of options for every model
LOADED = "load-on-startup"
# keys of llama-server that are not options
OTHERS = {
    "stop-timeout": "--grace of the server is the time for running requests",
    "dedup-cache-models": "only models of --models and of this file are listed",
}
HEADER = re.compile(r"\[\s*([^\]]*?)\s*\]")
Words = list[str]
Value = TypeVar("Value")


class Line(NamedTuple):
    """A key with its value, and where it is."""

    where: str  # the file, the line and the section
    key: str
    value: str


def read(path: str) -> dict[str, dict[str, Line]]:
    """Return the lines of each section by key; ValueError names the line that cannot be read."""
    found: dict[str, dict[str, Line]] = {}
    section = None
    for number, line in enumerate(file_text(path).splitlines(), 1):
        text = re.split("[;#]", line, maxsplit=1)[0].strip()  # as in llama-server, a comment may follow a value
        if not text:
            continue
        where = f"{path}, line {number}"
        if (header := HEADER.fullmatch(text)) is not None:
            section = header[1]
            if not section or section in found:
                raise ValueError(f"{where}: the section [{section}] {'is there twice' if section else 'has no name'}")
            found[section] = {}
            continue
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not key:
            raise ValueError(f"{where}: {line.strip()[:60]!r} is neither [MODEL] nor OPTION = VALUE")
        if key == "version":
            continue
        if section is None:
            raise ValueError(f"{where}: {key} is in no section: put it below [MODEL], or below [{ALL}] for all models")
        found[section][key] = Line(f"{where}, section [{section}]", key, value)
    return found


@dataclass(frozen=True)
class Presets:
    """The options of a file as words of ``pylongctx serve``."""

    common: Mapping[str, Words] = field(default_factory=dict)  # words by destination, for every model
    own: Mapping[str, Mapping[str, Words]] = field(default_factory=dict)  # and those of each section
    models: Mapping[str, str] = field(default_factory=dict)  # files or names of models, by section
    first: Mapping[str, bool] = field(default_factory=dict)  # whether models are loaded when the server starts
    places: Mapping[str, str] = field(default_factory=dict)  # of sections, for messages

    def words(self, name: str) -> Words:
        """Return the options of a model; those of its section replace those for every model."""
        chosen = {**self.common, **self.own.get(name, {})}
        return [word for words in chosen.values() for word in words]

    def loads(self, name: str) -> bool:
        """Return True if a model is loaded when the server starts."""
        return self.first.get(name, self.first.get(ALL, False))

    def check(self, names: Collection[str]) -> None:
        """Raise ValueError if a section belongs to no model."""
        for name, place in self.places.items():
            if name not in names:
                raise ValueError(f"{place}: there is no model {name!r}: add model = FILE to the section")


def presets(args: argparse.Namespace, path: str | None, forbidden: Collection[str]) -> Presets:
    """Return the presets of a file; what the command line says has precedence. None: there are none.

    ValueError names section and line of an unknown option, of an invalid value, and of a ``forbidden`` option, which is
    one of the whole server.
    """
    if path is None:
        return Presets()
    reader = _Reader(args, forbidden)
    sections = read(path)
    own = {name: reader.options(lines) for name, lines in sections.items()}
    common = own.pop(ALL, {})
    if "model" in common:
        raise ValueError(f"{sections[ALL]['model'].where}: a model needs a section of its own")
    models = {name: words.pop("model")[0] for name, words in own.items() if "model" in words}
    first = {name: _checked(lines[LOADED], switched) for name, lines in sections.items() if LOADED in lines}
    places = {name: f"{path}, section [{name}]" for name in own if name not in models}
    return Presets(common, own, models, first, places)


class _Reader:
    """Turns keys into words, by the parser of a command line."""

    def __init__(self, args: argparse.Namespace, forbidden: Collection[str]) -> None:
        self._args, self._forbidden = args, set(forbidden)
        parser: Parser = args.parser
        named = parser.named()
        self._named = {name.lstrip("-"): (name, action) for name, action in named.items()}
        self._named |= {name: (option, named[option]) for name, option in args.variables.items() if option in named}

    def options(self, lines: Mapping[str, Line]) -> dict[str, Words]:
        """Return the words of a section by destination; its model is the path or name alone."""
        found: dict[str, Words] = {}
        for key, line in lines.items():
            found |= {} if key == LOADED else self._option(line)
        return found

    def _option(self, line: Line) -> dict[str, Words]:
        if line.key not in self._named:
            hint = f": {OTHERS[line.key]}" if line.key in OTHERS else ""
            raise ValueError(f"{line.where}: there is no option {line.key}{hint}")
        name, action = self._named[line.key]
        if set(action.option_strings) & self._forbidden:
            raise ValueError(f"{line.where}: {line.key} is an option of the whole server: use the command line")
        if action.dest == "model":
            return {"model": [_checked(line, _not_empty)]}
        words = list(self._words(line, name, action))
        return {} if self._is_given(action.dest) else {action.dest: words}

    def _words(self, line: Line, name: str, action: argparse.Action) -> Iterator[str]:
        if action.nargs == 0:
            wanted = _checked(line, switched)
            on = getattr(action, "on", action.option_strings)
            off = [other for other in action.option_strings if other not in on]
            yield from ((on if wanted == (name in on) else off) or [])[:1]
            return
        _checked(line, action.type if callable(action.type) else str)
        long = max(action.option_strings, key=len)
        yield f"{long}={line.value}" if line.value or action.nargs != "?" else long

    def _is_given(self, dest: str) -> bool:
        """Return True if the command line has the option; variables of the environment do not count."""
        return getattr(self._args, dest, None) is not None and dest not in self._args.environment


def _not_empty(text: str) -> str:
    if not text:
        raise ValueError("the value is missing")
    return text


def _checked(line: Line, parse: Callable[[str], Value]) -> Value:
    try:
        return parse(line.value)
    except (ValueError, argparse.ArgumentTypeError) as reason:
        raise ValueError(f"{line.where}: {line.key}: {reason}") from None
