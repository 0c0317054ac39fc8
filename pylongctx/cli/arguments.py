"""Reading options from the command line, or else from llama.cpp's environment variables."""

import argparse
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

TRUE, FALSE = ("on", "enabled", "true", "1"), ("off", "disabled", "false", "0")  # as llama.cpp reads them
PREFIX = "LLAMA_ARG_"
RANGE = re.compile(r"(-?\d+)(?:-(\d+)(?:([+*])(\d+))?)?")


class FromEnvironment(str):
    """The value of an environment variable; the same option on the command line overrides it."""

    variable: str

    @classmethod
    def read(cls, variable: str, value: str | None = None) -> "FromEnvironment | None":
        """Return the variable's value, or ``value`` in its place; None if the variable is not set."""
        if variable not in os.environ:
            return None
        found = cls(os.environ[variable] if value is None else value)
        found.variable = variable
        return found


class Options:
    """Adds options to a parser, or to a titled group of its help.

    An option that is not given is None, so that defaults stay where they are defined. ``environment`` of the parsed
    arguments maps option names to the variables in use.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        The parser that receives the options.
    title : str or None
        The group in the help.
    environment : bool
        Whether environment variables are read.
    """

    def __init__(self, parser: argparse.ArgumentParser, title: str | None = None, environment: bool = True) -> None:
        self._parser = parser
        self._group = parser.add_argument_group(title) if title else parser
        self._environment = environment
        parser.set_defaults(environment=parser.get_default("environment") or {})

    def add(
        self,
        *names: str,
        help: str,
        parse: Callable[[str], Any] = lambda text: text,
        metavar: str = "N",
        env: str | None = None,
        optional: bool = False,
    ) -> None:
        """Add an option with one value; if ``optional``, an omitted value is the empty string."""
        value = FromEnvironment.read(env) if env and self._environment else None
        more: dict[str, Any] = {"nargs": "?", "const": ""} if optional else {}
        self._add(names, value, type=reported(parse), metavar=metavar, help=self._help(help, env), **more)

    def switch(
        self, *names: str, off: Sequence[str] = (), help: str, env: str | None = None, dest: str | None = None
    ) -> None:
        """Add a switch and the names that turn it off; LLAMA_ARG_NO_X turns it off too."""
        value = None
        if env and self._environment:
            value = FromEnvironment.read(env.replace(PREFIX, PREFIX + "NO_"), "0") or FromEnvironment.read(env)
        more = {"dest": dest} if dest else {}
        self._add((*names, *off), value, type=reported(switched), nargs=0, on=names, help=self._help(help, env), **more)

    def several(
        self, *names: str, help: str, parse: Callable[[str], Any] = lambda text: text, metavar: str = "N"
    ) -> None:
        """Add an option that may be repeated."""
        self._group.add_argument(*names, action="append", type=reported(parse), metavar=metavar, help=help)

    def refuse(self, *names: str, reason: str, env: str | None = None, but: Sequence[str] = ()) -> None:
        """Refuse an option of llama.cpp with a reason, and its variable unless it turns the option off.

        ``but``: values that are accepted because they request the existing behavior.
        """
        value = FromEnvironment.read(env) if env and self._environment else None
        refusal = _refusal(reason, but)
        self._add(names, value, type=reported(refusal), nargs="?", const="", help=argparse.SUPPRESS)

    def accept(self, *names: str, value: bool = False) -> None:
        """Accept an option that has no effect, with or without a value."""
        more: dict[str, Any] = {} if value else {"action": "store_true"}
        self._group.add_argument(*names, help=argparse.SUPPRESS, **more)

    def _add(self, names: Sequence[str], value: FromEnvironment | None, **kwargs: Any) -> None:
        action = self._group.add_argument(*names, action=_Store, default=value, **kwargs)
        if value is not None:
            self._parser.set_defaults(environment=self._parser.get_default("environment") | {action.dest: value})

    def _help(self, help: str, env: str | None) -> str:
        return f"{help} [{env}]" if env and self._environment else help


class _Store(argparse.Action):
    """Store a value or the state of a switch, and drop the variable that it overrides."""

    def __init__(self, *args: Any, on: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._on = on

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if self.nargs == "?" and values == "":
            values = self.type("")  # type: ignore[operator,misc]
        setattr(namespace, self.dest, option_string in self._on if self.nargs == 0 else values)
        others = {name: value for name, value in namespace.environment.items() if name != self.dest}
        namespace.environment = others


def reported(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Let argparse print the message of a ValueError and the variable that supplied the value."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except (ValueError, OSError) as reason:
            origin = f" (from {text.variable})" if isinstance(text, FromEnvironment) else ""
            raise argparse.ArgumentTypeError(f"{reason_of(reason)}{origin}") from reason

    return parsed


def reason_of(error: BaseException) -> str:
    """Return the message of an error; for an OSError, the file and the reason."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def with_origins(reason: Exception, args: argparse.Namespace) -> str:
    """Return the reason for a failure, and the environment variables that supplied arguments."""
    names = ", ".join(f"{value.variable}={value}" for value in args.environment.values())
    return f"{reason} (from the environment: {names})" if names else str(reason)


def _refusal(reason: str, but: Sequence[str]) -> Callable[[str], None]:
    def refuse(text: str) -> None:
        if text not in but and not (isinstance(text, FromEnvironment) and text in FALSE):
            raise ValueError(f"not supported: {reason}")

    return refuse


# ---- values ----


def integer(text: str) -> int:
    """Return a whole number."""
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{str(text)!r} is not an integer") from None


def number(text: str) -> float:
    """Return a number."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{str(text)!r} is not a number") from None


def int_list(text: str, lowest: int = 0) -> list[int]:
    """Return the numbers of ``"1,2"``, ``"first-last"``, ``"first-last+step"`` or ``"first-last*factor"``.

    Raises
    ------
    ValueError
        When the text has another form, a number is below ``lowest``, or a range is empty or never ends.
    """
    numbers = [n for part in text.split(",") for n in _range(part)]
    if too_low := [n for n in numbers if n < lowest]:
        raise ValueError(f"{too_low[0]} is below {lowest}")
    return numbers


def _range(text: str) -> Iterator[int]:
    match = RANGE.fullmatch(text)
    if not match:
        raise ValueError(f"{text!r} is neither a number nor a range; examples: 512  0-4096+1024  256-4096*2")
    first, last, sign, step = int(match[1]), int(match[2] or match[1]), match[3] or "+", int(match[4] or 1)
    if last < first:
        raise ValueError(f"the range {text!r} is empty: it ends before it begins")
    n = first
    while n <= last:
        yield n
        n, before = (n + step if sign == "+" else n * step), n
        if n <= before:
            raise ValueError(f"the range {text!r} never ends: its step goes from {before} to {n}")


def switched(text: str) -> bool:
    """Return True for a word that means on, False for one that means off."""
    if text in TRUE or text in FALSE:
        return text in TRUE
    raise ValueError(f"{str(text)!r} is neither on nor off")


def on_off_auto(text: str) -> bool | None:
    """Return True, False, or None for auto."""
    if text in ("auto", "-1"):
        return None
    if text in TRUE or text in FALSE:
        return text in TRUE
    raise ValueError(f"{str(text)!r} is not on, off or auto")


def one_of(words: Sequence[str]) -> Callable[[str], str]:
    """Return a function that accepts one of these words."""

    def word(text: str) -> str:
        if text not in words:
            raise ValueError(f"{str(text)!r} is not one of {', '.join(words)}")
        return str(text)

    return word


def file_text(path: str) -> str:
    """Return the text of a file, without a newline at its end."""
    from pylongctx.files import plain_text

    return plain_text(path).removesuffix("\n")


def pair(text: str) -> tuple[str, Any]:
    """Return the name and the value of ``"name=value"``: a number, true or false, else the text itself."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ValueError(f"{str(text)!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def json_object(text: str) -> dict[str, Any]:
    """Return a JSON object."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"{str(text)!r} is not a JSON object")
    return found
