"""A table of texts, for a terminal, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from rich.table import Table


@dataclass(frozen=True)
class Grid:
    """A table of texts.

    Attributes
    ----------
    rows : sequence
        A label, then a cell per column; a row with only a label is the head of a group.
    """

    title: str
    note: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """Return it as Markdown."""
        head = f"| {' | '.join(self.columns)} |\n|---|{'---:|' * (len(self.columns) - 1)}"
        lines = [f"| {' | '.join(_bars(cell) for cell in self._cells(row, '*'))} |" for row in self.rows]
        return "\n".join([f"**{self.title}**", "", head, *lines, "", self.note])

    def html(self) -> str:
        """Return it as HTML."""
        head = "".join(f"<th>{escape(column)}</th>" for column in self.columns)
        lines = [self._html_row(row) for row in self.rows]
        caption = f"<caption><b>{escape(self.title)}</b><br>{escape(self.note)}</caption>"
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"

    def rich(self) -> Table:
        """Return it for a terminal."""
        table = Table(title=self.title, caption=self.note)
        for i, column in enumerate(self.columns):
            table.add_column(column, justify="right" if i else "left")
        for row in self.rows:
            table.add_row(*self._cells(row, ""))
        return table

    def _cells(self, row: Sequence[str], mark: str) -> list[str]:
        if len(row) == 1:
            return [f"{mark}{row[0]}{mark}", *[""] * (len(self.columns) - 1)]
        return list(row)

    def _html_row(self, row: Sequence[str]) -> str:
        if len(row) == 1:
            return f'<tr><th class="group" colspan="{len(self.columns)}">{escape(row[0])}</th></tr>'
        return f"<tr><th>{escape(row[0])}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in row[1:])}</tr>"


def _bars(text: str) -> str:
    return text.replace("|", "\\|")
