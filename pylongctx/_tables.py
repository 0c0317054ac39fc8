"""Tables in a terminal or a pipe, without truncated cells or broken words."""

import io
from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

MAX_COLUMNS = 10_000  # columns of a pipe, wider than any table


def show_table(table: Table, console: Console | None = None) -> None:
    """Print a table with title and caption on separate lines.

    In a pipe it is as wide as needed. In a terminal that is too narrow for its words, each cell gets its own line.

    Examples
    --------
    >>> table = Table("model", "size", title="models", box=None)
    >>> table.add_row("smollm2-135m", "93.81 MiB")
    >>> show_table(table, Console(width=12, force_terminal=False))
    models
     model         size
     smollm2-135m  93.81 MiB
    """
    console = console or Console()
    title, caption, table.title, table.caption = table.title, table.caption, None, None
    _line(console, title, "table.title")
    for column in table.columns:
        column.overflow = "fold"
    if not console.is_terminal:
        console = _pipe(console, table)
    if _measured(table, console).minimum <= console.width:
        console.print(table)
    else:
        for line in _records(table):
            console.print(line, soft_wrap=True)
    _line(console, caption, "table.caption")


def table_text(table: Table) -> str:
    """Return a table as text, as wide as needed.

    Examples
    --------
    >>> table = Table("model", box=None, pad_edge=False)
    >>> table.add_row("smollm2-135m")
    >>> table_text(table).split()
    ['model', 'smollm2-135m']
    """
    file = io.StringIO()
    show_table(table, Console(file=file))
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())


def _pipe(console: Console, table: Table) -> Console:
    """Return a console as wide as a table needs."""
    return Console(file=console.file, width=max(console.width, _measured(table, console).maximum), color_system=None)


def _measured(table: Table, console: Console) -> Measurement:
    """Return the table's width with one word per line, and with one cell per line."""
    return Measurement.get(console, console.options.update(max_width=MAX_COLUMNS), table)


def _line(console: Console, text: RenderableType | None, style: str) -> None:
    if text:
        console.print(text, style=style, highlight=False, soft_wrap=not console.is_terminal)


def _records(table: Table) -> Iterator[Text]:
    """Yield the cells of each row as lines, with an empty line after each row."""
    rows = zip(*(column.cells for column in table.columns), strict=True)
    for row in rows:
        for column, cell in zip(table.columns, row, strict=True):
            value = cell if isinstance(cell, Text) else Text.from_markup(str(cell))
            head = Text.from_markup(f"{column.header}: ") if column.header else Text()
            if value:
                yield head + value
        yield Text()
