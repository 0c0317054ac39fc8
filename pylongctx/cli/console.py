"""Terminal and pipe input and output: messages, answers, progress, Ctrl-C."""

import shutil
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from pylongctx.cli import typing
from pylongctx.cli.wrap import Wrapper

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
        from pylongctx.cli.markdown import MarkdownWriter

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
            typing.prepare(readline, words)
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
