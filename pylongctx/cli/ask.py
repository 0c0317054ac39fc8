"""``pylongctx ask``: an answer about files, which are read once and kept for the next question."""

import argparse
import json
import os
import re
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, time
from typing import Any

from pylongctx._cache_folder import cache_folder, recall, remember
from pylongctx.catalog.choice import remember_speed
from pylongctx.chat.asking import INSTRUCTION, Quote, prompt, quotes
from pylongctx.cli.arguments import Options
from pylongctx.cli.console import Meter, Output, Stop
from pylongctx.cli.conversation import Conversation
from pylongctx.cli.default_model import BYTES_PER_TOKEN, choose_model
from pylongctx.cli.generation import (
    add_answer_options,
    add_sampling_options,
    add_template_options,
    sampling_arguments,
    template_arguments,
)
from pylongctx.cli.markdown import AnswerOutput
from pylongctx.cli.options import add_llama_options, advised_sampling, model_label, model_path, open_llama, short_name
from pylongctx.methods import NONE
from pylongctx.readers.extract import listed
from pylongctx.readers.files import FileText, read_all, text_of

STORE = "kv"  # in the cache folder
FIRST_ASKED = "asked.json"  # in the cache folder: when folders were first asked about
ANSWER = 1024  # tokens that a context has for the question and the answer
CONTEXT_MULTIPLE = 4096  # n_ctx is a multiple of it, so that the next question finds the stored text
TRAINED_TIMES = 4  # of the trained context are read at most, unless -c is given
FULL_UP_TO = 8192  # tokens up to which full attention is as fast as any method
TYPE_BLOCK = 32  # channels of q8_0 with one scale
SAMPLING: dict[str, Any] = {"max_tokens": 512, "temperature": 0.0}  # a text says one thing
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
    parser.anywhere = "words"
    options = Options(parser, "ask")
    options.switch("--no-store", help="keep nothing on disk of what was read")
    options.switch("--quote", help="show the passages that the answer rests on, with their places")
    options.switch("--json", help="print the answer, its passages, and what they took as JSON")
    add_answer_options(parser)
    add_llama_options(parser, positional=False)
    add_sampling_options(parser)
    add_template_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read the files, and answer the question; returns 1 when there is no answer."""
    output, stop = AnswerOutput(None, args.markdown is not False), Stop()
    names, question = split(args.words)
    files = _files(names, output)
    if not args.no_store:
        files = changed_last(files, names)
    choose_model(args, sum(len(file.text.encode()) for file in files) // BYTES_PER_TOKEN, output.note)
    meter = Meter(output.notes, stop)
    files, n_tokens, facts = _fitting(args, files, question, output)
    text = "".join(file.framed for file in files)
    _choose(args, n_tokens, facts)
    given = {name: value for name, value in sampling_arguments(args).items() if value is not None}
    arguments = advised_sampling(args) | SAMPLING | given | template_arguments(args)
    conversation = Conversation(open_llama(args, meter), INSTRUCTION, arguments, args.loop_stop is not False)
    try:
        with stop.listening():
            read = _read(conversation, text, question, bool(args.kv_store))
            remember_speed(model_label(args), read.n_evaluated, read.seconds)
            found = _answer(conversation, text, question, stop, None if args.json else output)
        shown = quotes(files, question, found) if args.quote or args.json else []
        _report(args, conversation, read, found, shown, output)
    finally:
        meter.close()
        conversation.llm.close()
    return 130 if stop() else int(not found.strip())


@dataclass(frozen=True)
class Reading:
    """What it took to read the text."""

    n_tokens: int
    n_evaluated: int
    n_stored: int | None  # tokens that came from the store; None without one
    seconds: float

    def __str__(self) -> str:
        """All of it in words."""
        store = "" if self.n_stored is None else f", {self.n_stored} of them from the store"
        return f"text of {self.n_tokens} tokens{store}, read in {self.seconds:.1f} s"


def _answer(conversation: Conversation, text: str, question: str, stop: Stop, output: AnswerOutput | None) -> str:
    """Return the answer without its thoughts, shown on an output as it is generated."""
    pieces = conversation.ask(prompt(text, question), stop)
    if output is None:
        deque(pieces, maxlen=0)
    else:
        output.answer(pieces)
    last = conversation.messages[-1]
    return str(last["content"]) if last["role"] == "assistant" else ""


def _report(
    args: argparse.Namespace, conversation: Conversation, read: Reading, answer: str, shown: list[Quote], output: Output
) -> None:
    """Print the passages and what the answer took, or all of it as JSON."""
    turn, llm = conversation.turn, conversation.llm
    if args.json:
        facts = {"answer": answer, "answered": bool(answer.strip()), "model": model_label(args)}
        facts |= {"method": str(llm.method or NONE), "n_ctx": llm.n_ctx(), "tokens": read.n_tokens}
        facts |= {"type_k": args.cache_type_k or "f16", "type_v": args.cache_type_v or "f16"}
        facts |= {"tokens_stored": read.n_stored or 0, "tokens_evaluated": read.n_evaluated}
        facts |= {"tokens_answer": turn.n_answer, "repeated_itself": turn.looped}
        facts |= {"seconds_read": round(read.seconds, 3), "seconds_answer": round(turn.answer_seconds, 3)}
        print(json.dumps(facts | {"quotes": [asdict(one) for one in shown]}, ensure_ascii=False))
        return
    for quote in shown:
        output.note(str(quote))
    if turn.looped:
        output.note("stopped: the answer repeats itself; --repeat-penalty 1.1 helps")
    output.note(
        f"{model_label(args)}, {short_name(llm.method)}, {llm.n_ctx()} tokens of context; {read}; {turn.answer}"
    )


def split(words: Sequence[str]) -> tuple[list[str], str]:
    """Return the files and the question, which is the last word."""
    *names, question = words
    if Path(question).exists() and " " not in question:
        raise ValueError(f"the last word must be the question, and {question} is a file: pylongctx ask FILE QUESTION")
    if not names and sys.stdin.isatty():
        raise ValueError("there is nothing to ask about: name a file before the question, or pipe a text in")
    return names, question


def _files(names: Sequence[str], output: AnswerOutput) -> list[FileText]:
    files, left_out = read_all(names) if names else ([text_of(sys.stdin.buffer.read(), "")], [])
    for file in files:
        for note in file.notes:
            output.note(f"{file.name or 'standard input'}: {note}")
    for line in left_out:
        output.note(line)
    return files


def changed_last(files: Sequence[FileText], names: Sequence[str]) -> list[FileText]:
    """Return files with those last that have changed since the first question about a folder.

    The store keeps what stands before a change, so a file that is edited again and again is all that is read again.
    """
    if not any(os.path.isdir(os.path.expanduser(name)) for name in names):
        return list(files)
    since = _first_asked(names)

    def changed(file: FileText) -> float:
        at = 0.0 if file.name in names else os.stat(file.name).st_mtime
        return at if at > since else 0.0

    return sorted(files, key=changed)


def _first_asked(names: Sequence[str]) -> float:
    """Return when files were first asked about together, which is kept in the cache folder."""
    known, key = recall(FIRST_ASKED), json.dumps([os.path.abspath(name) for name in names])
    if not isinstance(known.get(key), float):
        known[key] = time()
        remember(FIRST_ASKED, known)
    return float(known[key])


def _fitting(
    args: argparse.Namespace, files: list[FileText], question: str, output: Output
) -> tuple[list[FileText], int, Mapping[str, str]]:
    """Return the files that fit into the context, the tokens of them and the question, and the model's metadata.

    Files that do not fit are named.
    """
    from pylongctx.llama import Llama

    with Llama(model_path(args), vocab_only=True, verbose=False) as vocabulary:
        sizes = [len(vocabulary.tokenize(file.framed.encode(), add_bos=False)) for file in files]
        used = len(vocabulary.tokenize(question.encode()))
        facts = vocabulary.metadata
    trained = int(facts[f"{facts['general.architecture']}.context_length"])
    most = args.ctx_size or TRAINED_TIMES * trained
    kept: list[FileText] = []
    left_out: list[FileText] = []
    for file, size in zip(files, sizes, strict=True):
        fits = used + size + ANSWER <= most or len(files) == 1  # a text of its own is refused by its context
        (kept if fits else left_out).append(file)
        used += size if fits else 0
    if left_out:
        names = listed([file.name for file in left_out])
        output.note(f"left out, as {most} tokens are the most: {names}; ask about fewer files, or raise -c")
    if not kept:
        raise ValueError(f"none of {len(files)} files fits into {most} tokens: ask about a part of one, or raise -c")
    return kept, used, facts


def _choose(args: argparse.Namespace, n_tokens: int, facts: Mapping[str, str]) -> None:
    """Choose what was not given: the context for the text, the method for the context, types of K and V, the store."""
    needed = n_tokens + ANSWER
    if args.ctx_size is None:
        args.ctx_size = -(-needed // CONTEXT_MULTIPLE) * CONTEXT_MULTIPLE
    if args.method is None:
        args.method = "full" if args.ctx_size <= FULL_UP_TO else "longheads"
    if args.cache_type_k is None and args.cache_type_v is None and args.method != NONE and heads_have_blocks(facts):
        from pylongctx.planning import SMALL_TYPE  # half of the bytes to read from the store

        args.cache_type_k = args.cache_type_v = SMALL_TYPE
    if args.kv_store is None and not args.no_store:
        args.kv_store = os.fspath(cache_folder() / STORE)


def heads_have_blocks(facts: Mapping[str, str]) -> bool:
    """Return whether the metadata of a model says that all heads consist of whole blocks of ``TYPE_BLOCK`` channels."""
    arch = facts["general.architecture"]
    sizes = [facts[name] for name in facts if re.fullmatch(rf"{arch}\.attention\.(key|value)_length(_\w+)?", name)]
    if not sizes:
        width, n_head = (facts.get(f"{arch}.{name}", "") for name in ("embedding_length", "attention.head_count"))
        if not (width.isdigit() and n_head.isdigit()):  # heads differ between layers
            return False
        sizes = [str(int(width) // int(n_head))]
    return all(size.isdigit() and int(size) % TYPE_BLOCK == 0 for size in sizes)


def _read(conversation: Conversation, text: str, question: str, stores: bool) -> Reading:
    """Evaluate the files alone, so that the store keeps all of them for another question."""
    from pylongctx.engine.prefix import longest_prefix

    llm, start = conversation.llm, perf_counter()
    before = llm.session.n_evaluated
    whole, alone = (conversation.tokens_of(prompt(some, question)) for some in (text, ""))
    n_after = len(alone) - longest_prefix(whole, alone)
    llm.prefill(whole[: len(whole) - n_after])
    n_stored = llm.kv_store_usage().tokens if stores else None
    return Reading(llm.n_tokens, llm.session.n_evaluated - before, n_stored, perf_counter() - start)
