"""Text that is collected from the elements of a document."""

import re

SPACE = re.compile(r"[ \t\n\r\f]+")
GAPS = ("", " ", "\n", "\n\n")  # the larger one wins
# not-breaking spaces; soft hyphens, zero-width spaces and marks of byte order have no width
PLAIN = str.maketrans({"\u00a0": " ", "\u202f": " ", "\u00ad": None, "\u200b": None, "\ufeff": None, "\u2060": None})


def without_trailing_spaces(text: str) -> str:
    """Return a text whose lines do not end in spaces."""
    return "\n".join(line.rstrip(" ") for line in text.split("\n"))


class Flow:
    """Words, lines, paragraphs and rows of tables in their order; white space collapses as in HTML."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._gap = ""
        self._cells: list[int] = []  # of the current row of every open table
        self._at_cell = False  # nothing of the cell yet

    def __str__(self) -> str:
        """Return the text, with at most one empty line in a row."""
        text = without_trailing_spaces("".join(self._parts).translate(PLAIN))
        return re.sub(r"\n{3,}", "\n\n", text).strip("\n")

    @property
    def ends_in_word(self) -> bool:
        """Whether another letter would continue a word."""
        return bool(self._parts) and not self._gap and self._parts[-1][-1:].isalnum()

    def text(self, data: str) -> None:
        """Add text of a paragraph."""
        words = SPACE.sub(" ", data)
        if words.startswith(" "):
            self._space(" ")
        if words.strip(" "):
            self.verbatim(words.strip(" "))
            if words.endswith(" "):
                self._space(" ")

    def verbatim(self, data: str) -> None:
        """Add text with its white space."""
        if data:
            self._parts += (self._gap if self._parts else "", data)
            self._gap, self._at_cell = "", False

    def line(self) -> None:
        """End the line."""
        self._space("\n")

    def paragraph(self) -> None:
        """End the paragraph."""
        self._space("\n\n")

    def break_line(self) -> None:
        """End the line, even when it is empty."""
        if self._gap == "\n":
            self._gap = "\n\n"
        else:
            self._space("\n")

    def table(self) -> None:
        """Begin a table."""
        self._space("\n\n")
        self._cells.append(0)

    def row(self) -> None:
        """Begin a row."""
        self._space("\n")
        if self._cells:
            self._cells[-1] = 0

    def cell(self) -> None:
        """Begin a cell: a tab separates it from the cell on the left."""
        if not self._cells:
            self._space("\n")
            return
        if self._cells[-1]:
            self.verbatim("\t")
        self._cells[-1] += 1
        self._at_cell = True

    def end_cell(self) -> None:
        """End a cell, whose last paragraph does not end the row."""
        if not self._at_cell:
            self._gap = ""
        self._at_cell = False

    def end_table(self) -> None:
        """End a table."""
        if self._cells:
            self._cells.pop()
            self._at_cell = False
        self._space("\n\n")

    def _space(self, gap: str) -> None:
        if not self._at_cell:
            self._gap = max(gap, self._gap, key=GAPS.index)
