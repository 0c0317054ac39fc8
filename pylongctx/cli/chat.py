"""``pylongctx chat``: a conversation in the terminal, or with the lines of a pipe."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from pylongctx.cli.arguments import Options, file_text, on_off_auto
from pylongctx.cli.autosave import Autosave, latest
from pylongctx.cli.chat_commands import LEAVE, SUGGESTIONS, Commands
from pylongctx.cli.console import Messages, Meter, Output, Stop
from pylongctx.cli.conversation import Conversation
from pylongctx.cli.method import short_name
from pylongctx.cli.options import add_llama_options, advised_sampling, model_label, open_llama
from pylongctx.cli.sampling import (
    add_answer_options,
    add_sampling_options,
    add_template_options,
    add_text_options,
    given_text,
    sampling_arguments,
    template_arguments,
)
from pylongctx.cli.typing import unechoed
from pylongctx.errors import ContextFull, PromptTooLong
from pylongctx.files import text_of
from pylongctx.models import embedded_model

LOOPS = "--repeat-penalty 1.1 helps, --no-loop-stop lets it continue"
TOY = "this is the built-in test model of 4.5 million parameters; try: pylongctx chat smollm2-135m"
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
    off = ("--no-autosave",)
    options.switch(
        "--autosave", off=off, help="save the conversation for --continue after each answer (on)", dest="autosave"
    )
    help = "print speed and memory after each answer (on)"
    off = ("--no-show-timings",)
    options.switch("--show-timings", off=off, env="LLAMA_ARG_SHOW_TIMINGS", help=help, dest="show_timings")
    options.add("-co", "--color", parse=on_off_auto, metavar="on|off|auto", help="dim reasoning and notes (auto)")
    add_answer_options(parser)
    add_llama_options(parser)
    add_sampling_options(parser)
    add_template_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Chat until the end of the input; returns 1 when a scripted message could not be answered."""
    return ChatLoop(args, Output(args.color, args.markdown is not False)).run()


class ChatLoop(Commands):
    """The loop: messages and commands in, answers and notes out."""

    def __init__(self, args: argparse.Namespace, output: Output) -> None:
        stop = Stop()
        meter = Meter(output.notes, stop)
        self.failed = self._interactive = False
        arguments = advised_sampling(args) | sampling_arguments(args) | template_arguments(args)
        self.first = first_message(args)
        self.single = bool(args.single_turn) or (args.prompt is not None and not sys.stdin.isatty())
        system = given_text(args, "system_prompt", "system_prompt_file")
        path, messages = latest() if args.continues else (None, [])
        conversation = Conversation(open_llama(args, meter), system, arguments, args.loop_stop is not False)
        super().__init__(args, output, stop, meter, conversation)
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
            if Path(llm.model_path) == Path(embedded_model()):
                self.output.note(TOY)
            if self.args.continues:
                self.history("")
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
        self._save()

    def _save(self) -> None:
        """Save the conversation for --continue; a failure is reported once."""
        if self.args.autosave is False or not self._interactive:
            return
        try:
            self.autosave.save([one for one in self.conversation.messages if one["role"] != "system"])
        except OSError as reason:
            self.args.autosave = False
            self.output.note(f"the conversation is not saved for --continue: {reason}")


def first_message(args: argparse.Namespace) -> str | None:
    """Return the texts of --file, of a pipe and of --prompt as one message; None when there is none."""
    prompt = given_text(argparse.Namespace(**vars(args) | {"file": None}), "prompt", "file")
    piped = "" if prompt is None or sys.stdin.isatty() else text_of(sys.stdin.buffer.read(), "standard input").text
    parts = [part for part in (args.file, piped.strip("\n"), prompt) if part]
    return "\n\n".join(parts) if parts else None
