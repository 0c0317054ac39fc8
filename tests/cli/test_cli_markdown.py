"""Markdown in a terminal: what is on the screen at the end."""

import io
import re

import pytest
from rich.console import Console

from pylongctx.cli.markdown import MarkdownWriter

COLUMNS, ROWS = 40, 12
RULE = "\N{BOX DRAWINGS LIGHT HORIZONTAL}"
CODES = re.compile("\x1b\\[(\\d*)([AJm])|\r|\n|[^\x1b\r\n]+|\x1b[^m]*m")


class Screen(io.StringIO):
    """A terminal that knows what the writer uses: up, erase below, carriage return and newline."""

    def __init__(self):
        super().__init__()
        self.lines, self.row, self.column = [""], 0, 0

    def write(self, text):
        for code in CODES.finditer(text):
            if code[2] == "A":
                self.row -= int(code[1])
                assert self.row >= max(0, len(self.lines) - ROWS), "the cursor cannot leave the screen"
            elif code[2] == "J":
                del self.lines[self.row + 1 :]
                self.lines[self.row] = self.lines[self.row][: self.column]
            elif code[0] == "\r":
                self.column = 0
            elif code[0] == "\n":
                self._down()
            elif not code[0].startswith("\x1b"):
                for character in code[0]:
                    if self.column == COLUMNS:
                        self._down()
                    line = self.lines[self.row]
                    self.lines[self.row] = line[: self.column] + character + line[self.column + 1 :]
                    self.column += 1

    def _down(self):
        self.row, self.column = self.row + 1, 0
        if self.row == len(self.lines):
            self.lines.append("")

    def shown(self):
        return "\n".join(line.rstrip() for line in self.lines)


def written(text, size=1):
    """Return what a screen shows of a text that came in pieces."""
    screen = Screen()
    console = Console(file=screen, force_terminal=True, color_system="standard", width=COLUMNS)
    writer = MarkdownWriter(screen.write, console, lambda: (COLUMNS, ROWS))
    for start in range(0, len(text), size):
        writer.feed(text[start : start + size])
    writer.finish()
    return screen.shown()


CASES = {
    "plain": ("Two words.\n\nMore.", "Two words.\n\nMore."),
    "marks": ("A **bold** `word`.\n\nNext.", "A bold word.\n\nNext."),
    "wrapped": (
        "*one* two three four five six seven eight nine ten",
        "one two three four five six seven eight\nnine ten",
    ),
    "heading": ("# Title\nText\n## Second\n\nMore", "Title\nText\nSecond\n\nMore"),
    "list": ("Things:\n- a\n- *b*\n  - c\n\nEnd", "Things:\n\n \N{BULLET} a\n \N{BULLET} b\n    \N{BULLET} c\n\nEnd"),
    "numbers": ("3. c\n\n4. d", " 3 c\n\n 4 d"),
    "code": ("See:\n```python\ndef f():\n    return '*a*'\n```\nDone", "See:\ndef f():\n    return '*a*'\nDone"),
    "code at the end": ("```\na\n```", "a\n"),
    "tilde": ("~~~\n```\n~~~\nx", "```\nx"),
    "open code": ("```\na\nb", "a\nb"),
    "table": ("| a | b |\n|---|---|\n| 1 | `2` |\n\nEnd", f" a  b\n {4 * RULE}\n 1  2\n\nEnd"),
    "html": ("<b>x</b> and *y*", "<b>x</b> and y"),
    "formula": (r"\(a_1\) is **new**", r"\(a_1\) is new"),
    "link": ("[a](https://example.org)", "a (https://example.org)"),
    "empty": ("", ""),
}


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("name", CASES)
def test_the_screen_at_the_end(name, size):
    text, expected = CASES[name]
    assert written(text, size) == expected


def test_what_is_higher_than_the_screen_stays_as_it_came():
    items = [f"- *item* {i}" for i in range(2 * ROWS)]
    shown = written("\n".join([*items, "", "An *end*."]), 7)
    assert shown == "\n".join([*items, "", "An end."])


def test_long_code_is_colored_line_by_line():
    screen = Screen()
    raw = []
    write = screen.write
    screen.write = lambda text: (raw.append(text), write(text))
    console = Console(file=screen, force_terminal=True, color_system="standard", width=COLUMNS)
    writer = MarkdownWriter(screen.write, console, lambda: (COLUMNS, ROWS))
    lines = ['x = """', *(f"def f{i}" for i in range(3 * ROWS)), '"""', "def g(): pass"]
    writer.feed("```python\n" + "\n".join(lines) + "\n```\n")
    writer.finish()
    assert screen.shown() == "\n".join([*lines, ""])
    keyword = next(text for text in raw if "def" in text and "g" in text and "\x1b[" in text and "pass" in text)
    inside = next(text for text in raw if "f30" in text and "\x1b[" in text)
    assert keyword.split("def")[0] != inside.split("def")[0]  # a string over lines is known as one
