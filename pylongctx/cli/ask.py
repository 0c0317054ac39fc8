"""``pylongctx ask``: an answer about files, which are read once and kept for the next question."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from pylongctx._cache_folder import cache_folder
from pylongctx.cli.arguments import Options
from pylongctx.cli.console import Meter, Stop
from pylongctx.cli.conversation import Conversation
from pylongctx.cli.generation import (
    add_answer_options,
    add_sampling_options,
    add_template_options,
    sampling_arguments,
    template_arguments,
)
from pylongctx.cli.markdown import AnswerOutput
from pylongctx.cli.options import add_llama_options, advised_sampling, model_label, model_path, open_llama, short_name
from pylongctx.readers.files import FileText, read_all, text_of

if TYPE_CHECKING:
    from pylongctx.llama import Llama

DEFAULT = "smollm2-135m"
STORE = "kv"  # in the cache folder
ANSWER = 1024  # tokens that a context has for the question and the answer
CONTEXT_MULTIPLE = 4096  # n_ctx is a multiple of it, so that the next question finds the stored text
FULL_UP_TO = 8192  # tokens up to which full attention is as fast as any method
LIMIT = 512  # tokens of an answer
EXAMPLES = """examples:
  pylongctx ask book.txt "Who is the thief?"
  pylongctx ask notes/ report.pdf "What was decided in May?" -m qwen3-0.6b
  man tar | pylongctx ask "How do I list an archive?"
"""


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser("ask", description=__doc__, epilog=EXAMPLES, allow_abbrev=False)
    help = "files (text, PDF, EPUB, DOCX, ...), or folders of them (standard input), and last the question"
    parser.add_argument("words", nargs="+", metavar="FILE... QUESTION", help=help)
    options = Options(parser, "ask")
    options.switch("--no-store", help="keep nothing on disk of what was read")
    add_answer_options(parser)
    add_llama_options(parser, positional=False)
    add_sampling_options(parser)
    add_template_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read the files, and answer the question."""
    output, stop = AnswerOutput(None, args.markdown is not False), Stop()
    names, question = split(args.words)
    text = "".join(file.framed for file in _texts(names, output))
    if not args.model:
        args.model = DEFAULT
    meter = Meter(output.notes, stop)
    _choose(args, _count(args, text + question))
    given = {name: value for name, value in sampling_arguments(args).items() if value is not None}
    arguments = {"max_tokens": LIMIT} | advised_sampling(args) | given | template_arguments(args)
    conversation = Conversation(open_llama(args, meter), None, arguments, args.loop_stop is not False)
    try:
        with stop.listening():
            read = _read(conversation, text, question, bool(args.kv_store))
            output.answer(conversation.ask(f"{text}\n{question}", stop))
        if conversation.turn.looped:
            output.note("stopped: the answer repeats itself; --repeat-penalty 1.1 helps")
        output.note(f"{model_label(args)}, {_where(conversation.llm)}; {read}; {conversation.turn.answer}")
    finally:
        meter.close()
        conversation.llm.close()
    return 130 if stop() else 0


def split(words: Sequence[str]) -> tuple[list[str], str]:
    """Return the files and the question, which is the last word."""
    *names, question = words
    if Path(question).exists() and " " not in question:
        raise ValueError(f"the last word must be the question, and {question} is a file: pylongctx ask FILE QUESTION")
    if not names and sys.stdin.isatty():
        raise ValueError("there is nothing to ask about: name a file before the question, or pipe a text in")
    return names, question


def _texts(names: Sequence[str], output: AnswerOutput) -> list[FileText]:
    files, left_out = read_all(names) if names else ([text_of(sys.stdin.buffer.read(), "")], [])
    for file in files:
        for note in file.notes:
            output.note(f"{file.name or 'standard input'}: {note}")
    for line in left_out:
        output.note(line)
    return files


def _count(args: argparse.Namespace, text: str) -> int:
    """Return how many tokens a text has for the model."""
    from pylongctx.llama import Llama

    with Llama(model_path(args), vocab_only=True, verbose=False) as vocabulary:
        return len(vocabulary.tokenize(text.encode()))


def _choose(args: argparse.Namespace, n_tokens: int) -> None:
    """Choose what was not given: the context for the text, the method for the context, and the store."""
    needed = n_tokens + ANSWER
    if args.ctx_size is None:
        args.ctx_size = -(-needed // CONTEXT_MULTIPLE) * CONTEXT_MULTIPLE
    if args.method is None:
        args.method = "full" if args.ctx_size <= FULL_UP_TO else "longheads"
    if args.kv_store is None and not args.no_store:
        args.kv_store = os.fspath(cache_folder() / STORE)


def _read(conversation: Conversation, text: str, question: str, stores: bool) -> str:
    """Evaluate the files alone, so that the store keeps all of them for another question; returns what it took."""
    import numpy as np

    from pylongctx.engine.prefix import longest_prefix

    llm, start = conversation.llm, perf_counter()
    whole, other = (conversation.tokens_of(f"{text}\n{one}") for one in (question, f"\n{question}"))
    llm.prefill(whole[: longest_prefix(np.array(whole), np.array(other))])
    store = f", {llm.kv_store_usage().tokens} of them from the store" if stores else ""
    return f"text of {llm.n_tokens} tokens{store}, read in {perf_counter() - start:.1f} s"


def _where(llm: "Llama") -> str:
    return f"{short_name(llm.method)}, {llm.n_ctx()} tokens of context"
