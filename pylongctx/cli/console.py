"""Terminal and pipe input and output: messages, answers, progress, Ctrl-C.

Lines are edited by Python's readline: prompt_toolkit asks the terminal for the position of the cursor and redraws the
prompt, which a terminal that only receives text cannot do, and its import takes a third of a second. Answers are not
drawn by ``rich.live``, which cannot keep text that is higher than the screen; rich renders each block.
"""

import atexit
import glob
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

from markdown_it import MarkdownIt
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Heading, Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.syntax import Syntax
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
    """A progress bar on stderr during the prefill of a long prompt; a ``progress_callback`` for Llama.

    Parameters
    ----------
    console : rich.console.Console
        Where the bar is drawn; nothing is shown unless it is a terminal.
    stop : callable
        Called after every step; if it returns true, KeyboardInterrupt ends the prefill.
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
    """Answers on stdout, everything else on stderr.

    Parameters
    ----------
    color : bool or None
        Whether reasoning and notes are dimmed; None: on terminals that support it.
    markdown : bool
        Whether answers are rendered as Markdown on a terminal.
    """

    def __init__(self, color: bool | None, markdown: bool = True) -> None:
        system: Any = "auto" if color is None else None
        self.notes = Console(stderr=True, color_system="standard" if color else system, force_terminal=color or None)
        answers = self._answers = Console(color_system=system)
        self._dims = color if color is not None else bool(answers.color_system) and not answers.no_color
        self._safe = sys.stdout.isatty()
        self._markdown = markdown and self._safe and not answers.is_dumb_terminal
        self._wrapper = Wrapper(lambda: shutil.get_terminal_size().columns)
        if hasattr(sys.stdout, "reconfigure"):  # replace what the terminal's encoding lacks
            sys.stdout.reconfigure(errors="replace")

    def write(self, text: str, dim: bool = False) -> None:
        """Write part of an answer; a terminal shows each word once it is complete."""
        if self._safe:
            text = self._wrapper.feed(text.translate(CONTROLS))
        sys.stdout.write(f"\x1b[2m{text}\x1b[22m" if dim and self._dims else text)
        sys.stdout.flush()

    def answer(self, pieces: Iterable[tuple[str, str]]) -> bool:
        """Stream an answer of (kind, text) pairs; returns whether there was any text."""
        writer, last = MarkdownWriter(sys.stdout.write, self._answers), None
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

    def note(self, text: str) -> None:
        """Print a note, which is not part of an answer."""
        self.notes.print(text.translate(CONTROLS), style="dim", markup=False, highlight=False, soft_wrap=True)

    def error(self, text: object) -> None:
        """Print an error."""
        message = f"pylongctx: error: {text}".translate(CONTROLS)
        self.notes.print(message, style="red", markup=False, highlight=False, soft_wrap=True)


class Messages:
    """The typed messages: one line each, or several joined by a trailing backslash or between triple quotes.

    Parameters
    ----------
    output : Output
        Receives notes about bytes that are not UTF-8, and about how to exit.
    words : sequence of str
        Completions for Tab at the beginning of a line; after a space it completes paths.
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
    """Inserts line breaks before words that do not fit.

    A word is held back until it is complete. Code between fences stays as it is.

    Parameters
    ----------
    width : callable
        Returns the number of columns of the terminal.

    Examples
    --------
    >>> wrapper = Wrapper(lambda: 10)
    >>> wrapper.feed("one two thr") + wrapper.feed("ee four") + wrapper.flush()
    'one two\\nthree four'
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


# ---- Markdown ----

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

    Parameters
    ----------
    write : callable
        Writes text to the terminal.
    console : rich.console.Console
        Renders the blocks.
    size : callable
        Returns the columns and rows of the terminal.

    Examples
    --------
    >>> writer = MarkdownWriter(sys.stdout.write, Console())
    >>> writer.feed("Some **bold** text.")
    >>> writer.finish()
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


@contextmanager
def unechoed() -> Iterator[None]:
    """Turn off echo during an answer; the next prompt receives what is typed."""
    import termios

    try:
        before = termios.tcgetattr(sys.stdin)
    except (termios.error, ValueError):  # not a terminal, or closed
        yield
        return
    quiet = before.copy()
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def completions(line: str, words: Sequence[str]) -> list[str]:
    """Return the completions of a line: a word, or after the first space a path.

    Examples
    --------
    >>> completions("/re", ["/read", "/regen", "/save"])
    ['/read ', '/regen ']
    """
    command, space, path = line.partition(" ")
    if not space:
        return [f"{word} " for word in words if line and word.startswith(line)]
    if command not in words:
        return []
    found = sorted(glob.glob(glob.escape(os.path.expanduser(path)) + "*"))
    return [f"{command} {name}{os.sep if os.path.isdir(name) else ''}" for name in found]


def _nth(found: Sequence[str], n: int) -> str | None:
    return found[n] if n < len(found) else None
