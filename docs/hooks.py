"""What mkdocs makes of the pages before it renders them: files of the repository, tables of options and of routes.

``<!-- file: README.md -->`` is replaced by that file, its links turned to the pages. ``<!-- options: serve -->`` is a
table of the options of a command, ``<!-- options: serve: server -->`` of a group of its help, and
``<!-- options: evaluations -->`` of what all tasks of ``eval`` share; ``<!-- tasks -->`` is a section for each of them.
``<!-- routes -->`` is a table of the server's routes, ``<!-- fields -->`` one of the fields of requests,
``<!-- catalogue -->`` one of the models that have a name.
"""

import argparse
import re
from functools import cache
from pathlib import Path
from unittest.mock import MagicMock

ROOT = Path(__file__).resolve().parents[1]
EVAL = "eval "  # how the names of its tasks begin
MARK = re.compile(r"^<!-- (file|options|tasks|routes|fields|catalogue)(?:: (.+?))? -->$", re.MULTILINE)
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!\w+:)([^)#\s]+)(?:#[^)]*)?\)")  # to a file, not to an address or a picture
VARIABLE = re.compile(r" \[([A-Z_]+)\]$")


def on_page_markdown(markdown: str, **kwargs: object) -> str:
    """Return a page with its marks replaced."""
    makers = {"file": file, "options": options, "tasks": lambda _: tasks()}
    makers |= {"routes": lambda _: routes(), "fields": lambda _: fields(), "catalogue": lambda _: catalogue()}
    return MARK.sub(lambda mark: makers[mark[1]](mark[2]), markdown)


def file(name: str) -> str:
    """Return a file of the repository with links to its pages; links to other files of the repository become text."""
    text = (ROOT / name).read_text(encoding="utf-8")
    text = text.replace("](docs/", "](")
    text = text.replace("](CHANGELOG.md)", "](changelog.md)").replace("](CONTRIBUTING.md)", "](contributing.md)")
    folder = (ROOT / name).parent
    return LINK.sub(lambda link: link[1] if (folder / link[2]).exists() else link[0], text)


# ---- options ----


def options(what: str) -> str:
    """Return a table of options: ``evaluations``, ``COMMAND``, or ``COMMAND: GROUP, GROUP``."""
    if what == "evaluations":
        return _table(_shared())
    command, _, groups = (part.strip() for part in what.partition(":"))
    found = _options(command, [name.strip() for name in groups.split(",")] if groups else None)
    known = {_names(action) for action in _shared()} if command.startswith(EVAL) else set()
    return _table([action for action in found if _names(action) not in known])


def tasks() -> str:
    """Return a section for each task of ``pylongctx eval``: what it measures, and its options."""
    from pylongctx.eval.registry import TASKS

    found = [command for command in _commands() if command.startswith(EVAL)]
    texts = {command: TASKS[command.removeprefix(EVAL)].help for command in found}
    sections = (
        f"### pylongctx {name}\n\n{text[0].upper()}{text[1:]}.\n\n{options(name)}" for name, text in texts.items()
    )
    return "\n\n".join(sections)


def _shared() -> list[argparse.Action]:
    """Return the options of the first task which the others have too."""
    tasks = [_options(command) for command in _commands() if command.startswith(EVAL)]
    names = [{_names(action) for action in task} for task in tasks]
    return [action for action in tasks[0] if all(_names(action) in n for n in names)]


@cache
def _commands() -> dict[str, argparse.ArgumentParser]:
    from pylongctx.cli import make_parser

    return make_parser().commands()


def _options(command: str, groups: list[str] | None = None) -> list[argparse.Action]:
    """Return the options of a command that its help shows, of some groups of it or of all."""
    parser = _commands()[command]
    titles = [group.title for group in parser._action_groups]
    if unknown := set(groups or ()) - set(titles):
        raise ValueError(f"pylongctx {command} has no group {unknown}; it has {titles}")
    found = [group for group in parser._action_groups if groups is None or group.title in groups]
    actions = [action for group in found for action in group._group_actions]
    return [action for action in actions if action.help != argparse.SUPPRESS and action.dest not in ("help", "task")]


def _names(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else _value(action)
    return " ".join(filter(None, (", ".join(f"`{name}`" for name in action.option_strings), value and f"`{value}`")))


def _value(action: argparse.Action) -> str:
    if action.metavar:
        return str(action.metavar)
    return "|".join(map(str, action.choices)) if action.choices else action.dest.upper()


def _table(actions: list[argparse.Action]) -> str:
    rows = []
    for action in actions:
        text = (action.help or "") % {"default": action.default, "prog": "pylongctx"}
        variable = VARIABLE.search(text)
        rows.append((_names(action), VARIABLE.sub("", text), f"`{variable[1]}`" if variable else ""))
    return _markdown(("option", "meaning (default)", "environment"), rows)


# ---- routes ----


def routes() -> str:
    """Return a table of the routes that the server has."""
    from pylongctx.serve.app import create_app

    service = MagicMock()
    service.settings = MagicMock(static_folder=None, prefix="")
    paths = create_app(service).openapi()["paths"]
    found = [
        (method.upper(), path, route["summary"]) for path, group in paths.items() for method, route in group.items()
    ]
    return _markdown(("method", "path", "answer"), [(method, f"`{path}`", text) for method, path, text in found])


def fields() -> str:
    """Return a table of the fields of requests for tokens: their other names, and the routes that have them."""
    from pylongctx.serve import foreign
    from pylongctx.serve.anthropic import MessagesBody
    from pylongctx.serve.bodies import ChatBody, CompletionBody, InfillBody, NativeBody, names_of
    from pylongctx.serve.ollama import OllamaChatBody, OllamaGenerateBody
    from pylongctx.serve.responses import ResponsesBody

    bodies = {"/v1/completions": CompletionBody, "/completion": NativeBody, "/infill": InfillBody}
    bodies |= {"/v1/chat/completions": ChatBody, "/v1/messages": MessagesBody, "/v1/responses": ResponsesBody}
    bodies |= {"/api/chat": OllamaChatBody, "/api/generate": OllamaGenerateBody}
    others: dict[str, set[str]] = {}
    routes: dict[str, list[str]] = {}
    for route, body in bodies.items():
        for name, names in names_of(body).items():
            others.setdefault(name, set()).update(names)
            routes.setdefault(name, []).append(route)
    rows = []
    for name, found in sorted(routes.items(), key=lambda item: (-len(item[1]), item[0])):
        where = "all" if len(found) == len(bodies) else ", ".join(f"`{route}`" for route in found)
        also = ", ".join(f"`{one}`" for one in sorted(others[name] - {name, name.rstrip("_")}))
        elsewhere = "" if where == "all" else "refused" if name in foreign.REFUSED else "listed"
        rows.append((f"`{name.rstrip('_')}`", also, where, elsewhere))
    rows += [(f"`{name}`", "", "none", "refused") for name in sorted(foreign.REFUSED.keys() - routes.keys())]
    return _markdown(("field", "also", "routes that have it", "elsewhere"), rows)


# ---- models ----


def catalogue() -> str:
    """Return a table of the models that have a name."""
    from pylongctx._units import bytes_text
    from pylongctx.catalog import CATALOG
    from pylongctx.catalog.entry import LICENSES

    head = ("name", "file", "size", "trained on", "license", "source")
    rows = [
        (
            f"`{entry.name}`",
            f"`{entry.file}`",
            bytes_text(entry.size),
            f"{entry.n_ctx_train} tokens",
            f"[{entry.license}]({LICENSES[entry.license]})",
            f"{entry.origin}: {entry.source}",
        )
        for entry in CATALOG.values()
    ]
    return _markdown(head, rows)


def _markdown(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    filled = [i for i in range(len(head)) if any(row[i] for row in rows)]
    lines = [[head[i] for i in filled], ["---"] * len(filled), *([row[i] for i in filled] for row in rows)]
    return "\n".join("| " + " | ".join(map(_escaped, line)) + " |" for line in lines)


def _escaped(cell: str) -> str:
    """Return the text of a cell, bars outside of code spans escaped."""
    parts = cell.split("`")
    return "`".join(part if i % 2 else part.replace("|", "\\|") for i, part in enumerate(parts))
