"""``pylongctx inspect``: which chunks the heads read when a hidden number is asked for."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pylongctx.cli.options import add_model_options, add_prompt_options, llama_arguments, model_path
from pylongctx.methods import parse

if TYPE_CHECKING:
    from pylongctx.eval.passkey import Trial
    from pylongctx.inspect import Trace

TOPS = (1, 5)


@dataclass(frozen=True)
class Finding:
    """One answered question: how it went, what the queries that predict the answer read, and where it stands."""

    trial: Trial
    trace: Trace
    answer_chunks: list[int]


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser("inspect", help="show which chunks the heads read", description=__doc__)
    add_model_options(parser)
    parser.add_argument("--method", metavar="M", help="method that reads chunks (default: LCTX_METHOD, or longheads)")
    parser.add_argument("--length", type=int, default=2048, metavar="N", help="tokens (2048)")
    parser.add_argument("--trial", type=int, default=0, metavar="T", help="which of the questions of passkey (0)")
    add_prompt_options(parser)
    parser.add_argument("--out", default=".", metavar="DIR", help="where the map goes, as PNG and SVG (here)")
    parser.add_argument("--json", metavar="FILE", help="write the numbers")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ask one question, print the numbers, write them and the map."""
    if args.trial < 0:
        raise ValueError(f"--trial must be at least 0, not {args.trial}")
    finding = _find(args, str(parse(args.method or os.environ.get("LCTX_METHOD") or "longheads")))
    numbers = {"first": _numbers(finding.trace.query(0), finding), "all": _numbers(finding.trace, finding)}
    Console().print(_table(finding, numbers))
    print(finding.trial.method)
    if args.json:
        Path(args.json).write_text(json.dumps(_report(finding, numbers), indent=2) + "\n", encoding="utf-8")
    _draw(finding, Path(args.out))
    return 0


def _find(args: argparse.Namespace, method: str) -> Finding:
    from pylongctx.eval.passkey import load_haystack, make_prompt, run_trial
    from pylongctx.inspect import chunks_of
    from pylongctx.llama import Llama

    haystack, path = load_haystack(args.haystack), model_path(args)
    with Llama(path, vocab_only=True, verbose=False) as vocabulary:
        prompt = make_prompt(vocabulary.tokenize, haystack, args.length, args.trial, args.seed, args.separator)
    start = len(prompt.tokens) - 1  # the query that predicts the first token of the answer
    with (
        Llama(path, n_ctx=args.length, method=method, **llama_arguments(args)) as llm,
        llm.trace(start, start + len(prompt.answer)) as trace,
    ):
        trial = run_trial(llm, prompt)
    return Finding(trial, trace, list(chunks_of(*prompt.needle, trace.chunk_size)))


def _numbers(trace: Trace, finding: Finding) -> dict[str, float | None]:
    """Return the numbers of table 3; None where a hit rate says nothing."""
    from pylongctx.inspect import cover_rate, hit_rate, uniformity

    hits = {f"hit_rate_top{top}": hit_rate(trace, finding.answer_chunks, top) for top in TOPS}
    return {"cover_rate": cover_rate(trace), "gini": uniformity(trace)} | {
        name: None if math.isnan(value) else value for name, value in hits.items()
    }


def _report(finding: Finding, numbers: dict[str, dict[str, float | None]]) -> dict[str, Any]:
    trace = finding.trace
    return asdict(finding.trial) | {
        "chunk_size": trace.chunk_size,
        "n_chunks": trace.n_chunks,
        "answer_chunks": finding.answer_chunks,
        "positions": trace.positions.tolist(),
        **numbers,
    }


def _table(finding: Finding, numbers: dict[str, dict[str, float | None]]) -> Table:
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
    for label, row in zip(("first answer token", "all answer tokens"), numbers.values(), strict=True):
        cover, gini, *hits = ("-" if value is None else value for value in row.values())
        table.add_row(label, _percent(cover), f"{gini:.2f}", *map(_percent, hits))
    return table


def _percent(value: float | str) -> str:
    return value if isinstance(value, str) else f"{100 * value:.0f} %"


def _draw(finding: Finding, folder: Path) -> None:
    """Write the map of the query that predicts the first token of the answer."""
    from pylongctx.inspect import chunkmap

    trial = finding.trial
    title = f"{trial.model}, {trial.length} tokens, trial {trial.trial}\n{trial.method}"
    try:
        figure = chunkmap.draw(finding.trace.query(0), finding.answer_chunks, title)
    except ImportError as reason:
        print(f"pylongctx: no map: {reason}", file=sys.stderr)
        return
    name = f"chunks-{Path(trial.model).stem}-{trial.length}-{trial.trial}"
    for path in chunkmap.save(figure, folder / name):
        print(path)
