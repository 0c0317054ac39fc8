"""Terminal and pipe input and output: messages, answers, progress, Ctrl-C.

Lines are edited by Python's readline: prompt_toolkit asks the terminal for the position of the cursor and redraws the
prompt, which a terminal that only receives text cannot do, and its import takes a third of a second.
"""

import atexit
import glob
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from pylongctx._cache_folder import cache_folder

try:
    import readline  # gives input() line editing and history
except ImportError:  # a Python without it
    readline = None  # type: ignore[assignment]

THOUGHTS = "reasoning_content"
BLOCK = '"""'
PROMPT, MORE = "> ", ". "
LEAVE = "press Ctrl-C again or Ctrl-D to exit"
# control characters that a terminal would execute, except newline and tab
CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)], "\N{REPLACEMENT CHARACTER}")


class Stop:
    """Turns Ctrl-C into a flag that is checked between tokens; a second one raises KeyboardInterrupt at once."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self) -> bool:
        """Return True if Ctrl-C was pressed."""
        return self.asked

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Install the Ctrl-C handler, unless this process ignores Ctrl-C."""
        self.asked = False
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            yield
            return
        before = signal.signal(signal.SIGINT, self._ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _ask(self, number: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


class Meter:
    """A progress bar during the prefill of a long prompt, on a terminal; a ``progress_callback`` for Llama.

    ``stop`` is called after every step; if it returns true, KeyboardInterrupt ends the prefill.
    """

    def __init__(self, console: Console, stop: Stop | None = None) -> None:
        self._console = console
        self._visible = console.file.isatty()
        self._stop = stop
        self._progress: Progress | None = None

    def __call__(self, done: int, total: int) -> None:
        """Show ``done`` of ``total`` tokens."""
        if self._stop is not None and self._stop():
            self.close()
            raise KeyboardInterrupt
        if done < total and self._visible:
            self._show(done, total)
        elif done >= total:
            self.close()

    def close(self) -> None:
        """Remove the bar."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _show(self, done: int, total: int) -> None:
        if self._progress is None:
            columns = (TextColumn("reading"), BarColumn(), MofNCompleteColumn(), _Speed(), TimeRemainingColumn())
            self._progress = Progress(*columns, console=self._console, transient=True, auto_refresh=False)
            self._progress.add_task("", total=total, completed=done)
            self._progress.start()
        self._progress.update(self._progress.task_ids[0], completed=done, refresh=True)


class _Speed(ProgressColumn):
    def render(self, task: Task) -> Text:
        """Return tokens per second."""
        return Text(f"{task.speed:.0f} t/s" if task.speed else "")


class Output:
    """Answers on stdout, all else on stderr; ``color`` dims reasoning and notes, None where that is supported."""

    def __init__(self, color: bool | None) -> None:
        system: Any = "auto" if color is None else None
        self.notes = Console(stderr=True, color_system="standard" if color else system, force_terminal=color or None)
        self.answers = answers = Console(color_system=system)
        self._dims = color if color is not None else bool(answers.color_system) and not answers.no_color
        self.is_terminal = sys.stdout.isatty()
        self._wrapper = Wrapper(lambda: shutil.get_terminal_size().columns)
        if hasattr(sys.stdout, "reconfigure"):  # replace what the terminal's encoding lacks
            sys.stdout.reconfigure(errors="replace")

    def write(self, text: str, dim: bool = False) -> None:
        """Write part of an answer; a terminal shows each word once it is complete."""
        if self.is_terminal:
            text = self._wrapper.feed(text.translate(CONTROLS))
        sys.stdout.write(f"\x1b[2m{text}\x1b[22m" if dim and self._dims else text)
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """Print a note, which is not part of an answer."""
        self.notes.print(text.translate(CONTROLS), style="dim", markup=False, highlight=False, soft_wrap=True)

    def error(self, text: object) -> None:
        """Print an error."""
        message = f"pylongctx: error: {text}".translate(CONTROLS)
        self.notes.print(message, style="red", markup=False, highlight=False, soft_wrap=True)


class Messages:
    """The typed messages: one line each, or several joined by a trailing backslash or between triple quotes.

    Tab completes ``words`` at the beginning of a line, and paths after a space.
    """

    def __init__(self, output: Output, words: Sequence[str] = ()) -> None:
        self.interactive = sys.stdin.isatty()
        if self.interactive and readline is not None:
            prepare(readline, words)
        self._output = output
        self._asked_to_leave = False

    def __iter__(self) -> Iterator[str]:
        while True:
            try:
                message = self._message()
            except EOFError:
                if self.interactive:
                    self._output.note("")
                return
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                if self._leaves():
                    return
            else:
                self._asked_to_leave = False
                yield message

    def _message(self) -> str:
        line = self._line(PROMPT)
        if line.startswith(BLOCK):
            return self._block(line.removeprefix(BLOCK))
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._line_or_end())
        return "\n".join(lines)

    def _block(self, line: str) -> str:
        lines = [line]
        while not lines[-1].endswith(BLOCK):
            lines.append(self._line(MORE))
        lines[-1] = lines[-1].removesuffix(BLOCK)
        return "\n".join(lines).strip("\n")

    def _line_or_end(self) -> str:
        try:
            return self._line(MORE)
        except EOFError:
            return ""

    def _line(self, prompt: str) -> str:
        if self.interactive:
            return self._clean(_typed(prompt).encode("utf-8", "surrogateescape"))
        line = sys.stdin.buffer.readline()
        if not line:
            raise EOFError
        return self._clean(line.rstrip(b"\r\n"))

    def _clean(self, data: bytes) -> str:
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            self._output.note("the message is not UTF-8: invalid bytes are replaced")
            return data.decode("utf-8", "replace")

    def _leaves(self) -> bool:
        """Return True if Ctrl-C was pressed twice at an empty prompt."""
        self._output.note("")
        empty = readline is None or not readline.get_line_buffer()
        leaves, self._asked_to_leave = empty and self._asked_to_leave, empty
        if empty and not leaves:
            self._output.note(LEAVE)
        return leaves


def _typed(prompt: str) -> str:
    if sys.stdout.isatty():
        return input(prompt)
    print(prompt, end="", file=sys.stderr, flush=True)  # stdout is for answers
    return input()


# ---- word wrap ----

PIECES = re.compile(r"\n|[^\S\n]+|\S+")
CODE_MARK = "```"  # delimits code, which is not wrapped


class Wrapper:
    """Inserts line breaks before words that do not fit into the ``width()`` of the terminal.

    A word is held back until it is complete. Code between fences stays as it is.
    """

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._held = ""  # spaces and the beginning of the next word
        self._column = 0
        self._in_code = False

    def feed(self, text: str) -> str:
        """Return the part of the text that can be shown now."""
        pieces = PIECES.findall(self._held + text)
        n = 0 if not pieces or pieces[-1] == "\n" else 2 if len(pieces) > 1 and pieces[-2].isspace() else 1
        ready, self._held = pieces[: len(pieces) - n], "".join(pieces[len(pieces) - n :])
        return self._wrapped(ready)

    def flush(self) -> str:
        """Return the text that was held back."""
        ready, self._held = PIECES.findall(self._held), ""
        return self._wrapped(ready)

    def _wrapped(self, pieces: list[str]) -> str:
        shown, space = "", ""
        for piece in pieces:
            if piece == "\n":
                shown, space, self._column = shown + space + piece, "", 0
            elif piece.isspace():
                space = piece
            else:
                shown += self._word(space, piece)
                space = ""
        self._column += cell_len(space)
        return shown + space

    def _word(self, space: str, word: str) -> str:
        self._in_code ^= word.startswith(CODE_MARK) and self._column + len(space) == 0
        n = cell_len(word)
        overflows = self._column + len(space) + n > self._width()
        if space and self._column and overflows and not self._in_code:
            self._column = n
            return f"\n{word}"
        self._column += cell_len(space) + n
        return space + word


# ---- line editing ----

FILE = "history"  # in the cache folder
MAX_LINES = 1000  # lines


def prepare(readline: Any, words: Sequence[str]) -> None:
    """Set up readline: a paste is one line, lines are remembered, words and paths are completed."""
    path = cache_folder() / FILE
    readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off
    readline.parse_and_bind("tab: complete")
    readline.set_completer_delims("")
    readline.set_completer(lambda text, n: _nth(completions(text, words), n))
    readline.set_history_length(MAX_LINES)
    with suppress(OSError):
        readline.read_history_file(path)
    atexit.register(_write, readline, path)


def _write(readline: Any, path: Any) -> None:
    with suppress(OSError):  # a history file is optional
        path.parent.mkdir(parents=True, exist_ok=True)
        readline.write_history_file(path)
        os.chmod(path, 0o600)


def completions(line: str, words: Sequence[str]) -> list[str]:
    """Return the completions of a line: a word, or after the first space a path."""
    command, space, path = line.partition(" ")
    if not space:
        return [f"{word} " for word in words if line and word.startswith(line)]
    if command not in words:
        return []
    found = sorted(glob.glob(glob.escape(os.path.expanduser(path)) + "*"))
    return [f"{command} {name}{os.sep if os.path.isdir(name) else ''}" for name in found]


def _nth(found: Sequence[str], n: int) -> str | None:
    return found[n] if n < len(found) else None


# ---- tables ----

MAX_COLUMNS = 10_000  # columns of a pipe, wider than any table


def show_table(table: Table, console: Console | None = None) -> None:
    """Print a table with title and caption on separate lines.

    In a pipe it is as wide as needed. In a terminal that is too narrow for its words, each cell gets its own line.
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
