"""``pylongctx chat``: a conversation in the terminal, or of the lines of a pipe."""

from __future__ import annotations

import argparse
import glob
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from pylongctx._units import bytes_text
from pylongctx.cli.arguments import Options, file_text, on_off_auto
from pylongctx.cli.console import Messages, Meter, Output, Stop
from pylongctx.cli.conversation import Conversation
from pylongctx.cli.method import name_of, read_method, with_method
from pylongctx.cli.options import add_llama_options, open_llama
from pylongctx.cli.sampling import (
    add_loop_option,
    add_sampling_options,
    add_template_options,
    add_text_options,
    given_text,
    sampling_arguments,
    template_arguments,
)
from pylongctx.errors import ContextFull
from pylongctx.files import read_file, text_of

MOST_FILES = 100  # that one /glob reads
WAYS_OUT = (
    "/clear, a shorter message, a larger -c or --kv-limit, --overflow evict_middle, "
    "or a method that holds more: /method"
)
LOOPS = "--repeat-penalty 1.1 helps, --no-loop-stop lets it go on"
HELP = """/regen           another answer to the last message
/clear           forget the conversation, but for the system prompt
/save FILE       write the conversation and its KV cache
/load FILE       continue a conversation that /save wrote
/read FILE       put the text of a file before the next message
/glob PATTERN    the same for all files that match, ** for any folders
/method [SPEC]   show the method, or read the conversation with another one
/stats           what is held in memory
/exit            leave, as Ctrl-D and two Ctrl-C do; one Ctrl-C stops an answer
A backslash at the end of a line continues the message; triple quotes enclose several lines."""


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser("chat", help="talk with a model", description=__doc__, epilog=HELP, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_text_options(parser, "first message")
    options = Options(parser, "chat")
    options.add("-sys", "--system-prompt", metavar="TEXT", help="what the model is told before the conversation")
    options.add("-sysf", "--system-prompt-file", parse=file_text, metavar="FILE", help="the same, from a file")
    options.switch("-st", "--single-turn", help="leave after the first answer")
    help = "a line of speed and memory after each answer (on)"
    off = ("--no-show-timings",)
    options.switch("--show-timings", off=off, env="LLAMA_ARG_SHOW_TIMINGS", help=help, dest="show_timings")
    options.add("-co", "--color", parse=on_off_auto, metavar="on|off|auto", help="dim thoughts and notes (auto)")
    add_loop_option(parser)
    add_llama_options(parser)
    add_sampling_options(parser)
    add_template_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Talk until the end of the input; returns 1 when a scripted message could not be answered."""
    return Chat(args, Output(args.color)).run()


class Chat:
    """The loop: messages and commands in, answers and notes out."""

    def __init__(self, args: argparse.Namespace, output: Output) -> None:
        self.args = args
        self.output = output
        self.stop = Stop()
        self.meter = Meter(output.notes, self.stop)
        self.files: list[str] = []  # texts that go before the next message
        self.failed = False
        arguments = sampling_arguments(args) | template_arguments(args)
        self.first = first_message(args)
        self.single = bool(args.single_turn) or (args.prompt is not None and not sys.stdin.isatty())
        system = given_text(args, "system_prompt", "system_prompt_file")
        llm = open_llama(args, self.meter)
        self.conversation = Conversation(llm, system, arguments, args.loop_stop is not False)
        _ = self.conversation.llm.chat_template  # what is wrong with it is said before the first message
        self.commands: dict[str, Callable[[str], None]] = {
            "regen": self.regen,
            "clear": self.clear,
            "save": self.save,
            "load": self.load,
            "read": self.read,
            "glob": self.glob,
            "method": self.method,
            "stats": self.stats,
            "help": lambda rest: self.output.note(HELP),
        }

    def run(self) -> int:
        """Read messages until there are no more."""
        messages = Messages(self.output)
        if messages.interactive:
            llm = self.conversation.llm
            self.output.note(
                f"{Path(llm.model_path).name}, {name_of(llm.method)}, {llm.n_ctx()} tokens of context; /help"
            )
        try:
            for message in self._all(messages):
                self._take(message, messages.interactive)
        finally:
            self.conversation.llm.close()
        return int(self.failed and not messages.interactive)

    def _all(self, messages: Messages) -> Iterator[str]:
        if self.first is not None:
            yield self.first
            if self.single:
                return
        for message in messages:
            if message.strip() in ("/exit", "/quit"):
                return
            if message.strip():
                yield message
                if self.single and not message.startswith("/"):
                    return

    def _take(self, message: str, interactive: bool) -> None:
        command = re.fullmatch(r"/([a-z]+)(?:\s+(.*))?", message.strip(), re.DOTALL)
        try:
            with self.stop.listening() if interactive else nullcontext():
                if command is None:
                    self.ask(message)
                elif command[1] in self.commands:
                    self.commands[command[1]](command[2] or "")
                else:
                    raise ValueError(f"there is no command /{command[1]}; /help lists them")
        except KeyboardInterrupt:
            if not interactive:
                raise
            self.output.note("stopped: what was not answered is no part of the conversation")
        except (ValueError, RuntimeError, OSError, MemoryError) as reason:
            if isinstance(reason, BrokenPipeError):
                raise
            self.failed = True
            self.output.error(reason)
        finally:
            self.meter.close()

    # ---- answers ----

    def ask(self, text: str) -> None:
        """Answer a message, with the files that were read before it."""
        self._show(self.conversation.ask("".join(self.files) + text, self.stop))
        self.files.clear()

    def regen(self, rest: str) -> None:
        """Answer the last message again."""
        self._show(self.conversation.ask_again(self.stop))

    def _show(self, answer: Iterator[tuple[str, str]]) -> None:
        """Write an answer as it comes, then what it cost; KeyboardInterrupt when there was none."""
        last = None
        try:
            for kind, text in answer:
                self.output.write("\n\n" if last == "reasoning_content" != kind else "")
                self.output.write(text, dim=kind == "reasoning_content")
                last = kind
        except ContextFull as reason:
            raise ValueError(f"{reason}; ways out: {WAYS_OUT}") from reason
        finally:
            self.output.write("\n" if last else "")
        turn = self.conversation.turn
        if turn.looped:
            self.output.note(f"stopped: the answer repeats itself; {LOOPS}")
        if last is None and self.stop():
            raise KeyboardInterrupt
        if turn.reason is None:
            self.output.note("stopped; /regen for another answer")
        elif turn.reason == "length" and self.conversation.full:
            self.output.note(f"the answer ended where the context does, {self.conversation.used}; ways out: {WAYS_OUT}")
        if self.args.show_timings is not False:
            self.output.note(f"{turn}; {self.conversation.used}")

    # ---- commands ----

    def clear(self, rest: str) -> None:
        """Forget the conversation."""
        self.conversation.clear()
        self.files.clear()
        self.output.note("cleared")

    def save(self, path: str) -> None:
        """Write the conversation."""
        file = Path(_required(path, "/save FILE")).expanduser()
        self.conversation.save(file)
        self.output.note(f"saved: {self.conversation.llm.n_tokens} tokens, {bytes_text(file.stat().st_size)}")

    def load(self, path: str) -> None:
        """Continue another conversation."""
        conversation = self.conversation
        conversation.load(Path(_required(path, "/load FILE")).expanduser())
        self.output.note(f"loaded: {len(conversation.messages)} messages; {conversation.used}")

    def read(self, path: str) -> None:
        """Put a file before the next message."""
        self._read([_required(path, "/read FILE")])

    def glob(self, pattern: str) -> None:
        """Put all files that match before the next message."""
        found = glob.glob(str(Path(_required(pattern, "/glob PATTERN")).expanduser()), recursive=True)
        files = sorted(name for name in found if Path(name).is_file())
        if not files:
            raise ValueError(f"no file matches {pattern!r}")
        if len(files) > MOST_FILES:
            raise ValueError(f"{len(files)} files match {pattern!r}, more than {MOST_FILES}: use a narrower pattern")
        self._read(files)

    def _read(self, names: list[str]) -> None:
        texts = [self._file(name) for name in names]  # all of them, or none
        self.files += texts
        conversation = self.conversation
        llm = conversation.llm
        room = llm.n_ctx() - (0 if llm.session.evicts else llm.n_tokens)
        n = conversation.count("".join(self.files))
        self.output.note(f"{n} tokens of files go before the next message; there is room for {room}")
        if n >= room:
            self.output.note(f"that does not fit; ways out: {WAYS_OUT}")

    def _file(self, name: str) -> str:
        file = read_file(name)
        note = f" ({file.note})" if file.note else ""
        self.output.note(f"{name}: {self.conversation.count(file.text)} tokens{note}")
        return file.framed

    def stats(self, rest: str) -> None:
        """Show what is held."""
        llm = self.conversation.llm
        self.output.note(f"{llm.model_path}\n{name_of(llm.method)}")
        self.output.note(f"{len(self.conversation.messages)} messages; {self.conversation.used}")
        if llm.method is not None:
            usage = llm.kv_usage()
            rows = f"{usage.rows.min()} to {usage.rows.max()} rows per head"
            full = f"full attention would hold {bytes_text(usage.full_bytes)}"
            self.output.note(f"KV at most {bytes_text(usage.peak_bytes)} so far; {rows}; {full}")
            if usage.rest_bytes:
                self.output.note(f"windows, recurrent states and their checkpoints: {bytes_text(usage.rest_bytes)}")

    def method(self, spec: str) -> None:
        """Show the method, or open the context again with another one, which reads the conversation."""
        if not spec:
            self.output.note(name_of(self.conversation.llm.method))
            return
        read_method(spec)  # refused before anything is closed
        before, self.args = self.args, with_method(self.args, spec)
        try:
            self._open()
        except BaseException:
            self.args = before
            self._open()
            raise
        self.output.note(f"{name_of(self.conversation.llm.method)}; {self.conversation.used}")

    def _open(self) -> None:
        self.conversation.llm.close()
        self.conversation.switch(open_llama(self.args, self.meter))


def first_message(args: argparse.Namespace) -> str | None:
    """Return the message of --prompt, after the text of --file and of a pipe; None when there is none."""
    prompt = given_text(argparse.Namespace(**vars(args) | {"file": None}), "prompt", "file")
    piped = "" if prompt is None or sys.stdin.isatty() else text_of(sys.stdin.buffer.read(), "standard input").text
    parts = [part for part in (args.file, piped.strip("\n"), prompt) if part]
    return "\n\n".join(parts) if parts else None


def _required(text: str, usage: str) -> str:
    if not text:
        raise ValueError(f"usage: {usage}")
    return text
