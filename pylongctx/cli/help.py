"""The layout of help: commands in groups, and only the common ones among shared options."""

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

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
