"""``pylongctx chat``: a conversation in the terminal, or with the lines of a pipe."""

from __future__ import annotations

import argparse
import glob
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pylongctx._platform import unechoed
from pylongctx._units import bytes_text
from pylongctx.cli.arguments import Options, file_text, integer, number, on_off_auto
from pylongctx.cli.console import Messages, Meter, Stop
from pylongctx.cli.conversation import Autosave, Conversation, latest
from pylongctx.cli.default_model import CHAT_TOKENS, choose_model
from pylongctx.cli.generation import (
    add_answer_options,
    add_sampling_options,
    add_template_options,
    add_text_options,
    given_text,
    sampling_arguments,
    template_arguments,
)
from pylongctx.cli.markdown import AnswerOutput
from pylongctx.cli.options import (
    add_llama_options,
    advised_sampling,
    model_label,
    name_of,
    open_llama,
    read_method,
    short_name,
    with_method,
)
from pylongctx.engine.sampling.params import KEYWORDS, NUMBERS
from pylongctx.errors import ContextFull, PromptTooLong
from pylongctx.readers.files import read_file, text_of, without_notes

if TYPE_CHECKING:
    from pylongctx.engine.compress import CompressionReport


MAX_FILES = 100  # per /glob
SUGGESTIONS = (
    "/clear, a shorter message, a larger -c or --kv-limit, --overflow evict_middle, "
    "or a method that holds more: /method"
)
# the settings of /set, and how their values are parsed
SETTINGS: dict[str, Callable[[str], float]] = {
    **{one.keyword: integer if one.kind is int else number for one in NUMBERS if one.keyword in KEYWORDS},
    **dict.fromkeys(("seed", "max_tokens"), integer),
}
LEAVE = ("exit", "quit", "bye")


@dataclass(frozen=True)
class Command:
    """A command: its usage, a short help text, and the function that receives its argument."""

    usage: str
    help: str
    run: Callable[[str], None]


LOOPS = "--repeat-penalty 1.1 helps, --no-loop-stop lets it continue"
EPILOG = "In the conversation /help lists commands: /read FILE, /regen, /undo, /set, /save FILE, /method and others."


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser("chat", description=__doc__, epilog=EPILOG, allow_abbrev=False)
    add_text_options(parser, "first message")
    options = Options(parser, "chat")
    options.add("-sys", "--system-prompt", metavar="TEXT", help="system prompt of the conversation")
    options.add("-sysf", "--system-prompt-file", parse=file_text, metavar="FILE", help="system prompt, from a file")
    options.switch("-st", "--single-turn", help="exit after the first answer")
    options.switch("--continue", help="continue the most recent conversation", dest="continues")
    options.switch("--autosave", off=True, help="save the conversation for --continue after each answer (on)")
    options.switch("--show-timings", off=True, env=True, help="print speed and memory after each answer (on)")
    options.add("-co", "--color", parse=on_off_auto, metavar="on|off|auto", help="dim reasoning and notes (auto)")
    add_answer_options(parser)
    add_llama_options(parser)
    add_sampling_options(parser)
    add_template_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Chat until the end of the input; returns 1 when a scripted message could not be answered."""
    return ChatLoop(args, AnswerOutput(args.color, args.markdown is not False)).run()


class ChatLoop:
    """The loop: messages and commands in, answers and notes out."""

    def __init__(self, args: argparse.Namespace, output: AnswerOutput) -> None:
        stop = Stop()
        meter = Meter(output.notes, stop)
        self.failed = self._interactive = False
        choose_model(args, CHAT_TOKENS, output.note)
        arguments = advised_sampling(args) | sampling_arguments(args) | template_arguments(args)
        self.first = first_message(args)
        self.single = bool(args.single_turn) or (args.prompt is not None and not sys.stdin.isatty())
        system = given_text(args, "system_prompt", "system_prompt_file")
        path, messages = latest() if args.continues else (None, [])
        conversation = Conversation(open_llama(args, meter), system, arguments, args.loop_stop is not False)
        self.args, self.output, self.stop, self.meter = args, output, stop, meter
        self.conversation = conversation
        self.files: list[tuple[str, str]] = []  # names and texts to put before the next message
        self.table = {one.usage[1:].partition(" ")[0]: one for one in self._commands()}
        conversation.messages += messages
        self.autosave = Autosave(path)
        _ = conversation.llm.chat_template  # report a faulty template before the first message

    def run(self) -> int:
        """Read messages until there are no more."""
        messages = Messages(self.output, [f"/{name}" for name in (*self.table, *LEAVE)])
        self._interactive = messages.interactive
        if messages.interactive:
            llm = self.conversation.llm
            method = short_name(llm.method)
            self.output.note(f"{model_label(self.args)}, {method}, {llm.n_ctx()} tokens of context; /help")
            if self.args.continues:
                self._history("")
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
            if message.strip() in [f"/{name}" for name in LEAVE]:
                return
            if message.strip():
                yield message
                if self.single and not message.startswith("/"):
                    return

    def _take(self, message: str, interactive: bool) -> None:
        command = re.fullmatch(r"/([a-z]+|\?)(?:\s+(.*))?", message.strip(), re.DOTALL)
        try:
            with self.stop.listening() if interactive else nullcontext(), unechoed():
                if command is None:
                    self.ask(message)
                else:
                    self.run_command(command[1], command[2] or "")
        except KeyboardInterrupt:
            if not interactive:
                raise
            waiting = "; its files are kept for the next message, /drop removes them" if self.files else ""
            self.output.note(f"stopped: the unanswered message is not part of the conversation{waiting}")
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
        self.show(self.conversation.ask("".join(text for _, text in self.files) + text, self.stop))
        self.files.clear()

    def show(self, answer: Iterator[tuple[str, str]]) -> None:
        """Stream an answer, then print its cost; KeyboardInterrupt when there was none."""
        try:
            shown = self.output.answer(answer)
        except PromptTooLong as reason:
            sizes = f"{reason.n_tokens} tokens do not fit into the context of {reason.n_ctx}"
            raise ValueError(f"{sizes}; try {'/drop, ' if self.files else ''}{SUGGESTIONS}") from reason
        except ContextFull as reason:
            raise ValueError(f"{reason}; try {SUGGESTIONS}") from reason
        turn = self.conversation.turn
        if turn.looped:
            self.output.note(f"stopped: the answer repeats itself; {LOOPS}")
        if not shown and self.stop():
            raise KeyboardInterrupt
        if turn.reason is None:
            self.output.note("stopped; /regen for another answer")
        elif turn.reason == "length" and self.conversation.full:
            self.output.note(
                f"the answer was cut off: the context is full, {self.conversation.used}; try {SUGGESTIONS}"
            )
        if self.args.show_timings is not False:
            self.output.note(f"{turn}; {self.conversation.used}")
        self._autosave()

    def _autosave(self) -> None:
        """Save the conversation for --continue; a failure is reported once."""
        if self.args.autosave is False or not self._interactive:
            return
        try:
            self.autosave.save([one for one in self.conversation.messages if one["role"] != "system"])
        except OSError as reason:
            self.args.autosave = False
            self.output.note(f"the conversation is not saved for --continue: {reason}")

    # ---- commands ----

    def _commands(self) -> tuple[Command, ...]:
        return (
            Command("/regen", "answer the last message again", self._regen),
            Command("/undo", "remove the last message and its answer", self._undo),
            Command("/clear", "remove all messages except the system prompt", self._clear),
            Command("/system [TEXT]", "show or replace the system prompt", self._system),
            Command("/set [NAME VALUE]", "show or change the sampling settings", self._set),
            Command("/history", "show the messages", self._history),
            Command("/read FILE", "put the text of a file before the next message", self._read),
            Command("/glob PATTERN", "/read for all matching files; ** matches any folders", self._glob),
            Command("/drop", "remove the files added for the next message", self._drop),
            Command("/save FILE", "save the conversation and its KV cache", self._save),
            Command("/load FILE", "continue a conversation saved with /save", self._load),
            Command("/method [SPEC]", "show the method, or prefill the conversation with another one", self._method),
            Command(
                "/compress PERCENT", "keep a part of the KV cache of all messages (--method kvzip)", self._compress
            ),
            Command("/stats", "show memory use", self._stats),
            Command("/help", "show this list, like /?", self._help),
        )

    def run_command(self, name: str, rest: str) -> None:
        """Run a command; ValueError for an unknown one."""
        command = self.table.get("help" if name == "?" else name)
        if command is None:
            raise ValueError(f"there is no command /{name}; /help lists them")
        command.run(rest)

    # ---- the conversation ----

    def _regen(self, rest: str) -> None:
        self.show(self.conversation.ask_again(self.stop))

    def _undo(self, rest: str) -> None:
        self.conversation.undo()
        self.output.note(f"the last turn is removed; {len(self.conversation.messages)} messages are left")

    def _clear(self, rest: str) -> None:
        self.conversation.clear()
        self.files.clear()
        self.output.note("cleared")

    def _system(self, text: str) -> None:
        if text:
            self.conversation.set_system(text)
        self.output.note(self.conversation.system or "there is no system prompt")

    def _set(self, rest: str) -> None:
        words = rest.split()
        if not words:
            given = {name: self.conversation.arguments.get(name) for name in SETTINGS}
            lines = [f"{name} {'default' if value is None else value}" for name, value in given.items()]
            self.output.note("\n".join(lines))
            return
        if len(words) != 2 or words[0] not in SETTINGS:
            raise ValueError(f"usage: /set NAME VALUE, where NAME is one of {', '.join(SETTINGS)}")
        name, value = words
        if value == "default":
            self.conversation.arguments.pop(name, None)
        else:
            try:
                self.conversation.arguments[name] = SETTINGS[name](value)
            except ValueError:
                raise ValueError(f"{name} must be a number, not {value!r}") from None
        self.output.note(f"{name} {value}")

    def _history(self, rest: str) -> None:
        for message in self.conversation.messages:
            self.output.note(f"{message['role']}: {message['content']}")
        if not self.conversation.messages:
            self.output.note("there are no messages")

    def _save(self, path: str) -> None:
        file = _path(path, "/save FILE")
        self.conversation.save(file)
        self.output.note(f"saved: {self.conversation.llm.n_tokens} tokens, {bytes_text(file.stat().st_size)}")

    def _load(self, path: str) -> None:
        conversation = self.conversation
        conversation.load(_path(path, "/load FILE"))
        self._history("")
        self.output.note(f"loaded: {len(conversation.messages)} messages; {conversation.used}")

    # ---- files ----

    def _read(self, path: str) -> None:
        self._add_files([str(_path(path, "/read FILE"))])

    def _glob(self, pattern: str) -> None:
        found = glob.glob(str(_path(pattern, "/glob PATTERN")), recursive=True)
        files = sorted(name for name in found if Path(name).is_file())
        if not files:
            raise ValueError(f"no file matches {pattern!r}")
        if len(files) > MAX_FILES:
            raise ValueError(f"{len(files)} files match {pattern!r}, more than {MAX_FILES}: use a narrower pattern")
        self._add_files(files)

    def _drop(self, rest: str) -> None:
        if not self.files:
            raise ValueError("there are no files to drop: /read and /glob add them to the next message")
        self.output.note(f"dropped: {', '.join(name for name, _ in self.files)}")
        self.files.clear()

    def _add_files(self, names: list[str]) -> None:
        texts = [(name, self._file(name)) for name in names]  # all or none
        self.files += texts
        conversation = self.conversation
        held = 0 if conversation.llm.session.evicts else len(conversation.tokens()) if conversation.messages else 0
        room = conversation.llm.n_ctx() - held
        n = conversation.count("".join(text for _, text in self.files))
        self.output.note(f"{n} tokens of files go before the next message; there is room for {room}")
        if n >= room:
            self.output.note(f"the files do not fit; try /drop, {SUGGESTIONS}")

    def _file(self, name: str) -> str:
        file = read_file(name)
        note = f" ({'; '.join(file.notes)})" if file.notes else ""
        self.output.note(f"{name}: {self.conversation.count(file.text)} tokens{note}")
        return file.framed

    # ---- the model ----

    def _stats(self, rest: str) -> None:
        llm = self.conversation.llm
        self.output.note(f"{llm.model_path}\n{name_of(llm.method)}")
        self.output.note(f"{len(self.conversation.messages)} messages; {self.conversation.used}")
        if self.files:
            self.output.note(f"files for the next message: {', '.join(name for name, _ in self.files)}")
        if llm.method is not None:
            usage = llm.kv_usage()
            rows = f"{usage.rows.min()} to {usage.rows.max()} KV entries per head"
            full = f"full attention would hold {bytes_text(usage.full_bytes)}"
            self.output.note(f"KV at most {bytes_text(usage.peak_bytes)} so far; {rows}; {full}")
            if usage.rest_bytes:
                self.output.note(f"windows, recurrent states and their checkpoints: {bytes_text(usage.rest_bytes)}")

    def _method(self, spec: str) -> None:
        if not spec:
            self.output.note(name_of(self.conversation.llm.method))
            return
        read_method(spec)  # fail before anything is closed
        before, self.args = self.args, with_method(self.args, spec)
        try:
            self._open()
        except BaseException:
            self.args = before
            self._open()
            raise
        self.output.note(f"{name_of(self.conversation.llm.method)}; {self.conversation.used}")

    def _compress(self, percent: str) -> None:
        from pylongctx.engine.compress import compression_prefills

        conversation, ratio = self.conversation, _share(percent)
        llm = conversation.llm
        if llm.method is None or not llm.method.replays:
            raise ValueError("/compress needs a method that compresses: /method kvzip, or start with --method kvzip")
        if not conversation.messages:
            raise ValueError("there is nothing to compress: there are no messages")
        conversation.read()
        speed = conversation.turn.prompt_speed
        about = f", about {compression_prefills(llm.method) * llm.n_tokens / speed:.0f} s" if speed else ""
        self.output.note(f"replaying {llm.n_tokens} tokens{about}; Ctrl-C leaves the KV cache as it is")
        self.report(llm.compress(ratio))

    def report(self, done: CompressionReport) -> None:
        """Show what a compression freed, and warn if predictions have changed."""
        sizes = f"{bytes_text(done.bytes_before)} to {bytes_text(done.bytes_after)}"
        self.output.note(f"compressed {done.n_tokens} tokens from {sizes} in {done.seconds:.0f} s")
        if done.drifts:
            change = f"where the model repeats the text, its predictions changed by {done.divergence:.2f} nats"
            self.output.note(f"{change}: answers may be wrong; start again and keep more")

    def _open(self) -> None:
        self.conversation.llm.close()
        self.conversation.switch(open_llama(self.args, self.meter))

    def _help(self, rest: str) -> None:
        width = max(len(one.usage) for one in self.table.values())
        lines = [f"{one.usage:{width}}  {one.help}" for one in self.table.values()]
        lines += [f"{'/bye':{width}}  exit, like /exit, Ctrl-D and pressing Ctrl-C twice", *TYPING]
        self.output.note("\n".join(lines))


TYPING = (
    "One Ctrl-C stops an answer. Pasted lines form one message. A backslash at the end of a line",
    'continues it; """ encloses several lines. Tab completes commands and paths.',
)


def _share(text: str) -> float:
    """Return a share: ``30``, ``30%`` and ``0.3`` are the same."""
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        raise ValueError("usage: /compress PERCENT, for instance /compress 30%") from None
    share = number if number < 1 and not text.endswith("%") else number / 100
    if not 0 < share <= 1:
        raise ValueError(f"/compress keeps more than 0 and at most 100 percent, not {text}")
    return share


def _path(text: str, usage: str) -> Path:
    """Return a path, which may be quoted as in a shell."""
    if not text:
        raise ValueError(f"usage: {usage}")
    if text[0] in "\"'" and len(words := shlex.split(text)) == 1:
        text = words[0]
    return Path(text).expanduser()


def first_message(args: argparse.Namespace) -> str | None:
    """Return the texts of --file, of a pipe and of --prompt as one message; None when there is none."""
    prompt = given_text(argparse.Namespace(**vars(args) | {"file": None}), "prompt", "file")
    piped = (
        ""
        if prompt is None or sys.stdin.isatty()
        else without_notes(text_of(sys.stdin.buffer.read(), "standard input"))
    )
    parts = [part for part in (args.file, piped.strip("\n"), prompt) if part]
    return "\n\n".join(parts) if parts else None
