"""Tables: whole words in every width, and a title that is not wrapped over a narrow table."""

import io

import pytest
from rich.console import Console
from rich.table import Table

from pylongctx.cli.console import show_table
from pylongctx.cli.get import model_table

pytestmark = pytest.mark.check

TITLE = "KV memory of a-model-with-a-long-name.gguf"
PATH = "/usr/lib/python3/site-packages/pylongctx/lib/libllama.so"


def made():
    table = Table(title=TITLE, caption="mean of all samples")
    table.add_column("name")
    table.add_column("bytes held", justify="right")
    table.add_row("library", PATH)
    table.add_row("[bold]held[/]", "12 of 40")
    return table


def printed(table, width, terminal):
    file = io.StringIO()
    show_table(table, Console(file=file, width=width, force_terminal=terminal, color_system=None))
    return file.getvalue()


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("terminal", [False, True])
def test_no_width_cuts_a_cell_or_a_word(width, terminal):
    shown = printed(made(), width, terminal)
    assert all(word in shown for word in (PATH, "bytes held", "12 of 40", *TITLE.split(), "mean of all samples"))
    assert "\u2026" not in shown and "[bold]" not in shown
    assert all(len(line) <= width or PATH in line for line in shown.splitlines()) or not terminal


@pytest.mark.parametrize("width", [40, 80])
def test_the_list_of_models_is_whole_in_a_narrow_terminal(width):
    shown, piped = printed(model_table(), width, terminal=True), printed(model_table(), width, terminal=False)
    table = model_table()
    cells = [str(cell) for column in table.columns for cell in column.cells]
    assert len(cells) > 20
    assert not [cell for cell in cells if cell not in shown or cell not in piped]
    assert max(map(len, shown.splitlines())) <= width


def test_a_pipe_gets_a_table_as_wide_as_it_needs(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    file = io.StringIO()
    show_table(made(), Console(file=file))
    lines = [line.rstrip() for line in file.getvalue().rstrip().splitlines()]
    assert lines[0] == TITLE and lines[-1] == "mean of all samples"
    assert len({len(line) for line in lines[1:-1]}) == 1
    assert [PATH in line for line in lines].count(True) == 1
