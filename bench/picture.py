"""A picture of a terminal: a command runs in one, keys are typed, and what the screen shows becomes an SVG file.

Needs the package pyte. The pictures under docs/assets were made so, in bench/ask:

    python bench/picture.py ask.svg 'pylongctx ask blue-carbuncle.txt "In which river was the stone found?" --quote'
    python bench/picture.py chat.svg 'pylongctx chat qwen2.5-coder-1.5b' --until '> ' --type "$MESSAGE"
"""

import argparse
import fcntl
import os
import pty
import re
import select
import shlex
import struct
import subprocess
import termios
from collections.abc import Iterator, Sequence
from io import StringIO

import pyte
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import MONOKAI
from rich.text import Text

COLUMNS, ROWS = 100, 40
PASTE = "\x1b[200~{}\x1b[201~\n"  # several lines as one paste
PATIENCE = 600  # seconds
NAMES = {"brown": "yellow"}  # pyte's name of ANSI's color 3
# rich's own form names a font of another host
FRAME = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>text {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: {char_height}px; }}
{styles}</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""


class Recorder:
    """A command in a terminal, and the screen that it writes to."""

    def __init__(self, command: Sequence[str]) -> None:
        self.screen = pyte.Screen(COLUMNS, ROWS)
        self._stream = pyte.ByteStream(self.screen)
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)
        os.close(slave)

    def type(self, text: str) -> None:
        """Type a text, as one paste."""
        os.write(self._master, PASTE.format(text).encode())

    def until(self, ending: str | None) -> None:
        """Read until the line of the cursor begins with a text, or the command ends."""
        while select.select([self._master], [], [], PATIENCE)[0]:
            try:
                data = os.read(self._master, 1 << 16)
            except OSError:  # the command has closed its end
                return
            self._stream.feed(data)
            line = self.screen.display[self.screen.cursor.y]
            if ending and line.startswith(ending) and not line[len(ending) :].strip():
                return

    def lines(self) -> Iterator[Text]:
        """Yield the lines of the screen, up to the last one that is not empty."""
        filled = [row for row in range(ROWS) if self.screen.display[row].strip()]
        for row in range(filled[-1] + 1):
            text = Text()
            for column in range(COLUMNS):
                cell = self.screen.buffer[row][column]
                text.append(cell.data, _style(cell))
            text.rstrip()
            yield text


def _style(cell: pyte.screens.Char) -> Style:
    color = None if cell.fg == "default" else NAMES.get(cell.fg, cell.fg)
    if color and re.fullmatch("[0-9a-f]{6}", color):
        color = f"#{color}"
    elif color:
        color = re.sub("^bright(?=[a-z])", "bright_", color)
    return Style(color=color, bold=cell.bold, italic=cell.italics, underline=cell.underscore)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("command")
    parser.add_argument("--until", help="what the line of the cursor is when the command waits for a text")
    parser.add_argument("--type", action="append", default=[], help="a text; may be repeated")
    args = parser.parse_args()
    recorder = Recorder(shlex.split(args.command))
    for text in args.type:
        recorder.until(args.until)
        recorder.type(text)
    recorder.until(args.until)
    recorder.process.terminate()
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    console.print(f"[bold green]$[/] {args.command}", highlight=False)
    for line in recorder.lines():
        console.print(line, soft_wrap=True)
    console.save_svg(args.file, title="", theme=MONOKAI, code_format=FRAME)


if __name__ == "__main__":
    main()
