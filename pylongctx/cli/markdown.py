"""Markdown of an answer that is streamed to a terminal.

A block is plain text until it is complete, then rich renders it. ``rich.live`` cannot keep text that is higher than the
screen.
"""

import re
import shutil
import sys
from collections.abc import Callable, Iterable
from typing import ClassVar

from markdown_it import MarkdownIt
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Heading, Markdown
from rich.syntax import Syntax

from pylongctx.cli.console import CONTROLS, THOUGHTS, Output, Wrapper

FENCE = re.compile(r"\s*(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$")
HEADING = re.compile(r"#{1,6}\s")
MARKS = re.compile(r"[*_`#>|~\[\\<&]|^\s*(?:[-+]|\d+[.)])\s|^\s*[-=]+\s*$", re.MULTILINE)
FORMULA = re.compile(r"\\(?=[()\[\]])")  # \( and \[ are LaTeX here, not escaped brackets
STYLE = re.compile("\x1b\\[[\\d;]*m")
THEME = "ansi_dark"  # the terminal's own colors
CONTEXT = 100  # previous lines of code that are lexed together with a line

_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])


class _Heading(Heading):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the text left-aligned, without a box."""
        self.text.justify = "left"
        yield self.text


class _Document(Markdown):
    """Markdown whose raw HTML is shown as text."""

    elements: ClassVar = {**Markdown.elements, "heading_open": _Heading}

    def __init__(self, text: str) -> None:
        super().__init__("", code_theme=THEME, hyperlinks=False)
        self.markup = text
        self.parsed = _PARSER.parse(FORMULA.sub(r"\\\\", text))


class MarkdownWriter:
    """Writes streamed Markdown to a terminal.

    A paragraph, list or table is written as plain text and replaced by its rendering once it is complete; a line of
    fenced code likewise. A block that is higher than the screen stays plain, since a terminal cannot rewrite it.
    ``write`` writes to the terminal, and ``size()`` are its columns and rows.
    """

    def __init__(
        self,
        write: Callable[[str], object],
        console: Console,
        size: Callable[[], tuple[int, int]] = shutil.get_terminal_size,
    ) -> None:
        self._write = write
        self._console = console
        self._size = size
        self._fence = ""  # the mark that closes the code
        self._code: list[str] = []
        self._lexer = ""
        self._begin()

    def feed(self, text: str) -> None:
        """Write a piece of the text."""
        for piece in re.findall(r"[^\n]*\n|[^\n]+", text):
            self._piece(piece)

    def finish(self) -> None:
        """Render the unfinished last block."""
        self._end()
        self._fence = ""

    def _begin(self) -> None:
        self._source = ""  # the source of the block, or of the line of code
        self._shown = ""  # the part of it on the screen
        self._wrapper = Wrapper(lambda: self._size()[0])

    def _piece(self, piece: str) -> None:
        if self._source.endswith("\n\n") and not piece[0].isspace():
            self._end()
        self._source += piece
        self._show(piece if self._fence else self._wrapper.feed(piece))
        if piece.endswith("\n"):
            self._line_ended()

    def _line_ended(self) -> None:
        line = self._source[:-1].rpartition("\n")[2]
        if self._fence:
            self._code_line(line)
        elif (found := FENCE.match(line)) is not None:
            self._split(line)
            self._erase()
            self._fence, self._lexer, self._code = found[1], found[2], []
            self._begin()
        elif HEADING.match(line):
            self._split(line)
            self._end()

    def _split(self, line: str) -> None:
        """End the block before its last line, which then starts a new block."""
        before = self._source[: -len(line) - 1]
        if not before:
            return
        if self._erase():
            self._write(self._rendered(before))
            self._begin()
            self._source = self._shown = f"{line}\n"
            self._write(self._shown)
        else:
            self._begin()
            self._source = f"{line}\n"

    def _closes(self, line: str) -> bool:
        mark = line.strip()
        return set(mark) == {self._fence[0]} and len(mark) >= len(self._fence)

    def _code_line(self, line: str) -> None:
        if self._closes(line):
            self._erase()
            self._fence = ""
        else:
            self._code.append(line)
            if self._erase():
                self._write(self._highlighted() + "\n")
        self._begin()

    def _end(self) -> None:
        """Replace the block on the screen by its rendering, if that differs."""
        if self._fence:
            if self._closes(self._source):
                self._erase()
        elif MARKS.search(self._source) and self._erase():
            self._write(self._rendered(self._source))
        else:
            self._write(self._wrapper.flush())
        self._begin()

    def _show(self, text: str) -> None:
        self._shown += text
        self._write(text)

    def _erase(self) -> bool:
        """Erase the block from the screen; returns whether all of it was still visible."""
        columns, rows = self._size()
        height = sum(max(1, -(-cell_len(line) // columns)) for line in self._shown.split("\n"))
        if height >= rows:
            return False
        up = f"\x1b[{height - 1}A" if height > 1 else ""
        self._write(f"\r{up}\x1b[J")
        return True

    def _rendered(self, source: str) -> str:
        text = source.strip("\n")
        before, after = source.split(text)
        with self._console.capture() as capture:
            self._console.print(_Document(text), width=self._size()[0])
        lines = [line.rstrip() for line in capture.get().split("\n")]
        seen = [n for n, line in enumerate(lines) if STYLE.sub("", line).strip()]
        return before + "\n".join(lines[seen[0] : seen[-1] + 1] if seen else []) + after

    def _highlighted(self) -> str:
        lines = self._code[-CONTEXT:]
        code = Syntax("", self._lexer or "text", theme=THEME).highlight("\n".join(lines))
        line = code.split("\n", allow_blank=True)[len(lines) - 1]
        with self._console.capture() as capture:
            self._console.print(line, end="", soft_wrap=True, highlight=False)
        return capture.get()


class AnswerOutput(Output):
    """An output whose answers are rendered as Markdown on a terminal, unless ``markdown`` is false."""

    def __init__(self, color: bool | None, markdown: bool = True) -> None:
        super().__init__(color)
        self._markdown = markdown and self.is_terminal and not self.answers.is_dumb_terminal

    def answer(self, pieces: Iterable[tuple[str, str]]) -> bool:
        """Stream an answer of (kind, text) pairs; returns whether there was any text."""
        writer, last = MarkdownWriter(sys.stdout.write, self.answers), None
        try:
            for kind, text in pieces:
                self.write("\n\n" if last == THOUGHTS != kind else "")
                if self._markdown and kind != THOUGHTS:
                    writer.feed(text.translate(CONTROLS))
                    sys.stdout.flush()
                else:
                    self.write(text, dim=kind == THOUGHTS)
                last = kind
        finally:
            writer.finish()
            self.write("\n" if last else "")
        return last is not None
