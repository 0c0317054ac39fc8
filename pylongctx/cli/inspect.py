"""``pylongctx inspect``: what the heads read to answer a question, and what they keep of a text."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from pylongctx._tables import show_table
from pylongctx.cli import kv
from pylongctx.cli.method import add_methods
from pylongctx.cli.options import add_model_options, add_prompt_options, llama_arguments, model_path
from pylongctx.methods import LongHeads, Method, parse

if TYPE_CHECKING:
    from pylongctx.attention import Trace
    from pylongctx.eval.passkey import Trial

WHAT = {"chunks": "longheads", "kept": "corm", "compression": "corm", "sparsity": "full"}  # with the default method


@dataclass(frozen=True)
class Finding:
    """One answered question: the result, the chunks read to predict the answer, and the answer's chunks."""

    trial: Trial
    trace: Trace
    answer_chunks: list[int]


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser("inspect", description=__doc__)
    add_model_options(parser)
    defaults = ", ".join(f"{method} for {what}" for what, method in WHAT.items())
    add_methods(parser, f"method, for compression repeatable (LCTX_METHOD, or {defaults})")
    parser.add_argument(
        "--what",
        choices=WHAT,
        help="chunks that are read; keys that are kept; bytes held by length; fraction of keys that matter "
        "(default: chunks, keys or both, depending on the method)",
    )
    parser.add_argument("--length", type=int, default=2048, metavar="N", help="length in tokens (2048)")
    parser.add_argument(
        "--text", metavar="FILE", help="prefill the beginning of a text file instead of asking a question"
    )
    parser.add_argument("--trial", type=int, default=0, metavar="T", help="index of the passkey question (0)")
    add_prompt_options(parser)
    parser.add_argument(
        "--samples", type=int, default=16, metavar="N", help="lengths of compression, queries of sparsity (16)"
    )
    parser.add_argument("--out", default=".", metavar="DIR", help="folder for PNG and SVG plots (the current one)")
    parser.add_argument("--json", metavar="FILE", help="write the numbers")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Evaluate one text, print the numbers, write them and the plots."""
    from pylongctx.attention.kept import check_evicts, check_reads_all

    _check(args)
    default = os.environ.get("LCTX_METHOD") or WHAT[args.what or "chunks"]
    method, *others = methods = [parse(spec) for spec in args.method or [default]]
    if others and args.what != "compression":
        raise ValueError("only --what compression takes several methods; give one --method")
    if args.what == "compression":
        kv.show_compression(args, methods)
    elif args.what == "sparsity":
        check_reads_all(method)
        kv.show_sparsity(args, method)
    else:
        wanted = [args.what] if args.what else _fitting(args, method)
        if "kept" in wanted:
            check_evicts(method)
        _show(args, method, wanted)
    return 0


def _check(args: argparse.Namespace) -> None:
    for name, least in (("trial", 0), ("samples", 1)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name} must be at least {least}, not {getattr(args, name)}")
    if args.text and args.what == "chunks":
        raise ValueError("chunks are shown for a question: --haystack instead of --text")
    if args.text and not Path(args.text).is_file():
        raise ValueError(f"there is no file {args.text!r}")


def _fitting(args: argparse.Namespace, method: Method) -> list[str]:
    """Return the plot of a method: chunks if it selects them, keys if it evicts."""
    from pylongctx.attention.kept import evicts

    chunks = any(isinstance(part, LongHeads) for part in method.parts) or not evicts(method)
    return ["chunks"] * (chunks and not args.text) + ["kept"] * (evicts(method) or bool(args.text))


def _show(args: argparse.Namespace, method: Method, wanted: list[str]) -> None:
    from pylongctx.attention import findings

    finding, kept = (None, kv.keep_text(args, method)) if args.text else _ask(args, method, wanted)
    facts: dict[str, Any] = {}
    if finding:
        found = findings(finding.trace, finding.answer_chunks)
        facts |= asdict(finding.trial) | found
        show_table(_table(finding, [found["first"], found["all"]]))
        print(finding.trial.method)
        if whole := read_whole(finding.trial):
            print(whole)
    if kept:
        facts |= (asdict(kept.trial) if kept.trial else {}) | kv.kept_report(kept)
    kv.write_json(args.json, facts)
    if finding:
        _draw(finding, Path(args.out))
    if kept:
        kv.show_kept(args, kept)


def _ask(args: argparse.Namespace, method: Method, wanted: list[str]) -> tuple[Finding | None, kv.Kept | None]:
    """Ask one question; returns the chunks read for the answer and the keys held after it, as requested."""
    from pylongctx.attention import chunks_of
    from pylongctx.eval.passkey import run_trial
    from pylongctx.llama import Llama

    prompt = kv.make_prompt(args)
    start = len(prompt.tokens) - 1  # the query that predicts the first token of the answer
    with ExitStack() as stack:
        llm = stack.enter_context(Llama(model_path(args), n_ctx=args.length, method=method, **llama_arguments(args)))
        traced = "chunks" in wanted
        trace = stack.enter_context(llm.trace(start, start + len(prompt.answer))) if traced else None
        trial = run_trial(llm, prompt)
        kept = kv.read_kept(llm, prompt, trial) if "kept" in wanted else None
    if trace is None:
        return None, kept
    return Finding(trial, trace, list(chunks_of(*prompt.needle, trace.chunk_size))), kept


def _table(finding: Finding, numbers: Sequence[dict[str, float | None]]) -> Table:
    from pylongctx.attention.stats import TOPS

    trial, trace = finding.trial, finding.trace
    cut = f"{len(finding.answer_chunks)} chunks: a border cuts it" if len(finding.answer_chunks) > 1 else "one chunk"
    table = Table(
        title=f"chunks read, {trial.model}, {trial.n_tokens} tokens",
        caption=f"answer: in {', '.join(map(str, finding.answer_chunks))} of {trace.n_chunks} ({cut}); "
        f"said {escape(trial.answer.strip())}: {'right' if trial.strict else f'wrong, not {trial.key}'}",
    )
    table.add_column("to predict")
    for name in ("cover rate", "Gini", *(f"hit rate, top {top}" for top in TOPS)):
        table.add_column(name, justify="right")
    for label, row in zip(("first answer token", "all answer tokens"), numbers, strict=True):
        cover, gini, *hits = ("-" if value is None else value for value in row.values())
        table.add_row(label, _percent(cover), f"{gini:.2f}", *map(_percent, hits))
    return table


def read_whole(trial: Trial) -> str:
    """Return a note if the text is too short for chunks to be selected, else an empty string."""
    part = next((part for part in parse(trial.method).parts if isinstance(part, LongHeads)), None)
    most = max(part.select_from or 0, part.window or 0) if part else 0
    if trial.n_tokens > most:
        return ""
    return f"all {trial.n_tokens} tokens are read, as in any text of up to {most}: try --length {2 * most}"


def _percent(value: float | str) -> str:
    return value if isinstance(value, str) else f"{100 * value:.0f} %"


def _draw(finding: Finding, folder: Path) -> None:
    """Write the map of the query that predicts the first token of the answer."""
    from pylongctx.attention import chunkmap

    trial = finding.trial
    title = f"{trial.model}, {trial.length} tokens, trial {trial.trial}\n{trial.method}"
    name = f"chunks-{Path(trial.model).stem}-{trial.length}-{trial.trial}"
    kv.write_picture(lambda: chunkmap.draw(finding.trace.query(0), finding.answer_chunks, title), folder / name)
