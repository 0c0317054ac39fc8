"""Options from the command line or from llama.cpp's environment variables, the parser that reads them, and its help."""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from pylongctx._enums import AUTO_LAYERS, HOST, OFFLOADS, ROPE_SCALINGS, SPLIT_MODES
from pylongctx._guess import guess

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

    An option that is not given is None, so that defaults stay where they are defined. ``env`` is an option's variable,
    True for the one that llama.cpp names after the first long name; without ``environment`` none is read. Of the parsed
    arguments, ``environment`` maps option names to the variables in use, and ``variables`` maps all variables that are
    read to options.
    """

    def __init__(self, parser: argparse.ArgumentParser, title: str | None = None, environment: bool = True) -> None:
        self._parser = parser
        self._group = parser.add_argument_group(title) if title else parser
        self._environment = environment
        parser.set_defaults(environment=parser.get_default("environment") or {})
        parser.set_defaults(variables=parser.get_default("variables") or {})

    def add(
        self,
        *names: str,
        help: str,
        parse: Callable[[str], Any] = lambda text: text,
        metavar: str = "N",
        env: str | bool | None = None,
        optional: bool = False,
    ) -> None:
        """Add an option with one value; if ``optional``, an omitted value is the empty string."""
        env = _variable(names, env)
        value = self._read(names, env)
        more: dict[str, Any] = {"nargs": "?", "const": ""} if optional else {}
        self._add(names, value, type=reported(parse), metavar=metavar, help=self._help(help, env), **more)

    def switch(
        self,
        *names: str,
        off: Sequence[str] | bool = (),
        help: str,
        env: str | bool | None = None,
        dest: str | None = None,
    ) -> None:
        """Add a switch and the names that turn it off, True for --no-X; LLAMA_ARG_NO_X turns it off too."""
        env = _variable(names, env)
        off = [f"--no-{_long_name(names)}"] if off is True else off or ()
        value = self._read(off, env and env.replace(PREFIX, PREFIX + "NO_"), "0") or self._read(names, env)
        more = {"dest": dest} if dest else {}
        self._add((*names, *off), value, type=reported(switched), nargs=0, on=names, help=self._help(help, env), **more)

    def several(
        self,
        *names: str,
        help: str,
        parse: Callable[[str], Any] = lambda text: text,
        metavar: str = "N",
        env: str | None = None,
    ) -> None:
        """Add an option that may be repeated; ``env`` is a variable that the caller reads in its place."""
        if env:
            self._parser.get_default("variables")[env] = names[0]
        help = self._help(help, env)
        self._group.add_argument(*names, action="append", type=reported(parse), metavar=metavar, help=help)

    def refuse(self, *names: str, reason: str, env: str | None = None, but: Sequence[str] = ()) -> None:
        """Refuse an option of llama.cpp with a reason, and its variable unless it turns the option off.

        ``but``: values that are accepted because they request the existing behavior.
        """
        refusal = _refusal(reason, but)
        self._add(names, self._read(names, env), type=reported(refusal), nargs="?", const="", help=argparse.SUPPRESS)

    def accept(self, *names: str, value: bool = False) -> None:
        """Accept an option that has no effect, with or without a value."""
        more: dict[str, Any] = {} if value else {"action": "store_true"}
        self._group.add_argument(*names, help=argparse.SUPPRESS, **more)

    def _read(self, names: Sequence[str], env: str | None, value: str | None = None) -> FromEnvironment | None:
        if not env or not self._environment:
            return None
        self._parser.get_default("variables")[env] = (*names, "")[0]
        return FromEnvironment.read(env, value)

    def _add(self, names: Sequence[str], value: FromEnvironment | None, **kwargs: Any) -> None:
        action = self._group.add_argument(*names, action=_Store, default=value, **kwargs)
        if value is not None:
            self._parser.set_defaults(environment=self._parser.get_default("environment") | {action.dest: value})

    def _help(self, help: str, env: str | None) -> str:
        return f"{help} [{env}]" if env and self._environment else help


def _variable(names: Sequence[str], env: str | bool | None) -> str | None:
    """Return the variable of an option; for True, the one that llama.cpp names after the first long name."""
    if env is not True:
        return env or None
    return PREFIX + _long_name(names).upper().replace("-", "_")


def _long_name(names: Sequence[str]) -> str:
    return next(name for name in names if name.startswith("--")).removeprefix("--")


class _Store(argparse.Action):
    """Store a value or the state of a switch, and drop the variable that it overrides."""

    def __init__(self, *args: Any, on: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.on = on

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if self.nargs == "?" and values == "":
            values = self.type("")  # type: ignore[operator,misc]
        setattr(namespace, self.dest, option_string in self.on if self.nargs == 0 else values)
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


def unread_variables(args: argparse.Namespace) -> list[str]:
    """Return the variables of llama.cpp that are set and that no option of the command reads."""
    known = getattr(args, "variables", None)
    return [] if not known else sorted(name for name in os.environ if name.startswith(PREFIX) and name not in known)


def one(args: argparse.Namespace, *names: str) -> Any:
    """Return the value of the one option that was given; ValueError when several were."""
    given = [name for name in names if getattr(args, name, None) is not None]
    if len(given) > 1:
        raise ValueError(f"give one of {' and '.join('--' + name.replace('_', '-') for name in given)}")
    return getattr(args, given[0]) if given else None


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
    """Return the numbers of ``"1,2"``, ``"first-last"``, ``"first-last+step"`` or ``"first-last*factor"``."""
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
    if text not in TRUE + FALSE:
        raise ValueError(f"{str(text)!r} is not on, off or auto")
    return text in TRUE


def one_of(words: Sequence[str]) -> Callable[[str], str]:
    """Return a function that accepts one of these words."""

    def word(text: str) -> str:
        if text not in words:
            raise ValueError(f"{str(text)!r} is not one of {', '.join(words)}")
        return str(text)

    return word


def file_text(path: str) -> str:
    """Return the text of a file, without a newline at its end."""
    from pylongctx.readers.files import plain_text

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


# ---- values of options that only some commands have ----

ON = -1  # an option that takes a number was given without one
AUTO = "auto"


def shares(text: str) -> list[float]:
    """Return the numbers of ``"3/1"`` or ``"3,1"``."""
    return [number(share) for share in text.replace("/", ",").split(",")]


def offload(text: str) -> tuple[str, int | None] | int:
    """Return where K and V are and the MiB that lie close, None for auto; ON: neither was given."""
    if not text:
        return ON
    where, comma, close = text.partition(",")
    if where not in OFFLOADS:
        where, close = HOST, text
    elif not comma:
        close = AUTO
    return where, None if close == AUTO else integer(close)


def mib(text: str) -> int:
    """Return a number of MiB in bytes."""
    return integer(text) << 20


def layers(text: str) -> int | str:
    """Return a number of layers, -1 for all, or "auto"."""
    if text == AUTO_LAYERS:
        return text
    return -1 if text == "all" else integer(text)


def split_mode(text: str) -> int:
    """Return the number of a split mode."""
    return SPLIT_MODES[one_of(tuple(SPLIT_MODES))(text)]


def rope_scaling(text: str) -> int:
    """Return the number of a RoPE scaling."""
    return ROPE_SCALINGS[one_of(tuple(ROPE_SCALINGS))(text)]


def flash_attention(text: str) -> None:
    """Refuse to turn off what cannot be turned off."""
    if on_off_auto(text) is False:
        raise ValueError("pylongctx's attention is always a flash attention and cannot be turned off")


# ---- help ----

# --help shows only the common options of these groups, --help-all shows all
SHARED = ("model and context", "long context", "devices", "positions", "sampling", "conversation", "server")
COMMON = {
    *("--model", "--hf-repo", "--ctx-size", "--threads", "--lora", "--verbose"),
    *("--method", "--kv-limit", "--overflow", "--kv-store"),
    *("--gpu-layers",),
    *("--predict", "--seed", "--temp", "--top-k", "--top-p", "--min-p", "--repeat-penalty", "--json-schema"),
    *("--chat-template", "--reasoning"),
    *("--host", "--port", "--models", "--parallel", "--api-key", "--cors-origin", "--embedding", "--reranking"),
}
VARIABLE = re.compile(r" \[[A-Z_]+\]$")
WIDEST_NAMES = 30  # columns for an option; longer ones push their help to the next line


class Help(argparse.HelpFormatter):
    """Help with the common options and without environment variables."""

    everything = False

    def __init__(self, prog: str, **kwargs: int) -> None:
        super().__init__(prog, **{"max_help_position": WIDEST_NAMES} | kwargs)

    def add_usage(
        self, usage: str | None, actions: Iterable[argparse.Action], groups: Any, prefix: str | None = None
    ) -> None:
        """Add the usage line; options are listed below it."""
        words = [_placeholder(action) for action in actions if not action.option_strings]
        super().add_usage(usage or " ".join(["%(prog)s", "[options]", *words]), (), groups, prefix)

    def add_text(self, text: str | None) -> None:
        """Add a paragraph without the marks of inline code."""
        super().add_text(text.replace("``", "") if text else text)

    def add_argument(self, action: argparse.Action) -> None:
        """Add an option if this help shows it."""
        if self.everything or is_common(action):
            super().add_argument(action)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if self.everything or not action.help else VARIABLE.sub("", action.help)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """Show the metavar once, after the last name."""
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wrap a paragraph; a list stays as it is."""
        return text if "\n  " in text else super()._fill_text(text, width, indent)


class FullHelp(Help):
    """Help with all options, and their environment variables."""

    everything = True


def is_common(action: argparse.Action) -> bool:
    """Return True if the short help shows an option."""
    title = getattr(getattr(action, "container", None), "title", None)
    return title not in SHARED or not action.option_strings or not COMMON.isdisjoint(action.option_strings)


def command_list(groups: Mapping[str, Iterable[tuple[str, str]]]) -> str:
    """Return the names and help texts of commands, in groups."""
    return "\n".join(_list_lines(groups))


def _list_lines(groups: Mapping[str, Iterable[tuple[str, str]]]) -> Iterator[str]:
    width = max(len(name) for commands in groups.values() for name, _ in commands)
    for title, commands in groups.items():
        yield f"{title}:"
        yield from (f"  {name:{width}}  {help}" for name, help in commands)
        yield ""


def _placeholder(action: argparse.Action) -> str:
    name = str(action.metavar or action.dest)
    return {"?": f"[{name}]", "*": f"[{name} ...]", argparse.PARSER: f"{name} ..."}.get(str(action.nargs), name)


# ---- the parser ----

GLUED = re.compile(r"-[a-zA-Z]{2}[\w-]*(=.*)?")  # a short option and its value in one word, or an unknown option
CHOICE = re.compile(r"argument (\w+): invalid choice: '(.*?)' \(choose from (.*)\)", re.DOTALL)


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        assert isinstance(parser, Parser)
        print(parser.full_help(), end="")
        parser.exit()


class Parser(argparse.ArgumentParser):
    """An ArgumentParser with a short and a full help, whose errors suggest similar words.

    Words without an option may stand anywhere if ``anywhere`` is the argument that takes them; argparse alone gives it
    those before the first option in between.
    """

    anywhere: str | None = None

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

    def named(self) -> dict[str, argparse.Action]:
        """Return all options by name, also those that no help shows."""
        return {name: action for action in self._actions for name in action.option_strings}

    def options(self) -> Iterator[str]:
        """Yield the names of all options."""
        yield from re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", self.full_help())

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse, and refuse an unknown ``-ag`` where options are llama.cpp's: argparse alone reads it as ``-a g``."""
        words = list(sys.argv[1:] if args is None else args)
        known = self.named()
        for word in words[: words.index("--")] if "--" in words else words:
            if not self.allow_abbrev and GLUED.fullmatch(word) and word.partition("=")[0] not in known:
                self.refuse([word])
        found, rest = super().parse_known_args(words, namespace)
        if self.anywhere is not None and not any(word.startswith("-") for word in rest):
            getattr(found, self.anywhere).extend(rest)
            rest = []
        return found, rest

    def refuse(self, rest: Sequence[str]) -> NoReturn:
        """Print a line about unrecognized words, and exit with status 2."""
        first = next((word for word in rest if word.startswith("-")), rest[0])
        if first.startswith("-"):
            name = first.partition("=")[0]
            self.error(f"there is no option {name}{guess(name, self.options())}")
        self.error(f"unexpected argument {first!r}")
