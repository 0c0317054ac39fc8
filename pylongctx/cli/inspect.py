"""``pylongctx inspect``: what the heads read to answer a question, and what they keep of a text."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from pylongctx._units import bytes_text
from pylongctx.cli.console import show_table
from pylongctx.cli.options import add_methods, add_model_options, add_prompt_options, llama_arguments, model_path
from pylongctx.methods import LongHeads, Method, parse
from pylongctx.readers.files import plain_text

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from pylongctx.attention import Compression, Trace
    from pylongctx.engine.context import KVUsage
    from pylongctx.eval.passkey import Prompt, Trial
    from pylongctx.llama import Llama


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
    help = "prefill the beginning of a text file instead of asking a question"
    parser.add_argument("--text", metavar="FILE", help=help)
    parser.add_argument("--trial", type=int, default=0, metavar="T", help="index of the passkey question (0)")
    add_prompt_options(parser)
    help = "lengths of compression, queries of sparsity (16)"
    parser.add_argument("--samples", type=int, default=16, metavar="N", help=help)
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
        show_compression(args, methods)
    elif args.what == "sparsity":
        check_reads_all(method)
        show_sparsity(args, method)
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

    finding, kept = (None, keep_text(args, method)) if args.text else _ask(args, method, wanted)
    facts: dict[str, Any] = {}
    if finding:
        found = findings(finding.trace, finding.answer_chunks)
        facts |= asdict(finding.trial) | found
        show_table(_table(finding, found))
        print(finding.trial.method)
        if whole := read_whole(finding.trial):
            print(whole)
    if kept:
        facts |= (asdict(kept.trial) if kept.trial else {}) | kept_report(kept)
    write_json(args.json, facts)
    if finding:
        _draw(finding, Path(args.out))
    if kept:
        show_kept(args, kept)


def _ask(args: argparse.Namespace, method: Method, wanted: list[str]) -> tuple[Finding | None, Kept | None]:
    """Ask one question; returns the chunks read for the answer and the keys held after it, as requested."""
    from pylongctx.attention import chunks_of
    from pylongctx.eval.passkey import run_trial

    prompt = make_prompt(args)
    start = len(prompt.tokens) - 1  # the query that predicts the first token of the answer
    with ExitStack() as stack:
        llm = stack.enter_context(_open(args, method))
        traced = "chunks" in wanted
        trace = stack.enter_context(llm.trace(start, start + len(prompt.answer))) if traced else None
        trial = run_trial(llm, prompt)
        kept = read_kept(llm, prompt, trial) if "kept" in wanted else None
    if trace is None:
        return None, kept
    return Finding(trial, trace, list(chunks_of(*prompt.needle, trace.chunk_size))), kept


def _table(finding: Finding, found: dict[str, Any]) -> Table:
    from pylongctx.eval.report.grids import CHUNK_PARTS, CHUNKS, chunk_cells

    trial, trace = finding.trial, finding.trace
    cut = f"{len(finding.answer_chunks)} chunks: a border cuts it" if len(finding.answer_chunks) > 1 else "one chunk"
    table = Table(
        title=f"chunks read, {trial.model}, {trial.n_tokens} tokens",
        caption=f"answer: in {', '.join(map(str, finding.answer_chunks))} of {trace.n_chunks} ({cut}); "
        f"said {escape(trial.answer.strip())}: {'right' if trial.strict else f'wrong, not {trial.key}'}",
    )
    table.add_column("to predict")
    for name, _ in CHUNKS.values():
        table.add_column(name, justify="right")
    for part, label in CHUNK_PARTS.items():
        table.add_row(label, *chunk_cells(found[part]))
    return table


def read_whole(trial: Trial) -> str:
    """Return a note if the text is too short for chunks to be selected, else an empty string."""
    part = next((part for part in parse(trial.method).parts if isinstance(part, LongHeads)), None)
    most = max(part.select_from or 0, part.window or 0) if part else 0
    if trial.n_tokens > most:
        return ""
    return f"all {trial.n_tokens} tokens are read, as in any text of up to {most}: try --length {2 * most}"


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def _draw(finding: Finding, folder: Path) -> None:
    """Write the map of the query that predicts the first token of the answer."""
    from pylongctx.attention import chunkmap

    trial = finding.trial
    title = f"{trial.model}, {trial.length} tokens, trial {trial.trial}\n{trial.method}"
    name = f"chunks-{Path(trial.model).stem}-{trial.length}-{trial.trial}"
    write_picture(lambda: chunkmap.draw(finding.trace.query(0), finding.answer_chunks, title), folder / name)


# ---- the KV memory: kept keys, compression, sparsity ----


@dataclass(frozen=True)
class Kept:
    """The KV entries that heads hold after a text; with a question, the text is the prompt and its answer."""

    model: str
    method: str
    held: NDArray[np.bool_]
    usage: KVUsage
    prompt: Prompt | None = None
    trial: Trial | None = None

    @property
    def n_tokens(self) -> int:
        """The number of evaluated tokens."""
        return int(self.held.shape[-1])

    @property
    def needle(self) -> NDArray[np.bool_]:
        """Pass-key tokens held by each existing head, bool [n_head, n_needle]."""
        start, stop = self.prompt.needle if self.prompt else (0, 0)
        found: NDArray[np.bool_] = self.held[self.held.any(axis=-1)][:, start:stop]
        return found


def make_prompt(args: argparse.Namespace) -> Prompt:
    """Return the requested question."""
    from pylongctx.eval import passkey
    from pylongctx.eval.haystack import load_haystack
    from pylongctx.llama import Llama

    haystack = load_haystack(args.haystack)
    with Llama(model_path(args), vocab_only=True, verbose=False) as vocabulary:
        return passkey.make_prompt(vocabulary.tokenize, haystack, args.length, args.trial, args.seed, args.separator)


def _tokens(args: argparse.Namespace) -> list[int]:
    """Return the tokens to prefill: the first ``--length`` tokens of the text, or a question's prompt."""
    from pylongctx.llama import Llama

    if not args.text:
        return make_prompt(args).tokens
    with Llama(model_path(args), vocab_only=True, verbose=False) as vocabulary:
        tokens = vocabulary.tokenize(plain_text(args.text).encode())
    if not 1 <= args.length <= len(tokens):
        raise ValueError(f"--length must be from 1 to {len(tokens)}, the tokens of {args.text}, not {args.length}")
    return tokens[: args.length]


def _open(args: argparse.Namespace, method: Method) -> Llama:
    """Open the model with a method, for a text of ``--length`` tokens."""
    from pylongctx.llama import Llama

    return Llama(model_path(args), n_ctx=args.length, method=method, **llama_arguments(args))


def _name(args: argparse.Namespace) -> str:
    return Path(model_path(args)).name


def write_picture(draw: Callable[[], Figure], stem: Path) -> None:
    """Write the plot of ``draw`` as PNG and SVG and print their names; without matplotlib say how to install it."""
    from pylongctx.attention import canvas

    try:
        figure = draw()
    except ImportError as reason:
        print(f"pylongctx: no map: {reason}", file=sys.stderr)
        return
    for path in canvas.save(figure, stem):
        print(path)


def write_json(path: str | None, facts: dict[str, Any]) -> None:
    """Write the numbers to the ``--json`` file, if there is one."""
    if path:
        Path(path).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


# ---- kept keys ----


def read_kept(llm: Llama, prompt: Prompt | None = None, trial: Trial | None = None) -> Kept:
    """Return the KV entries that the heads hold now."""
    from pylongctx.attention import held_map

    return Kept(Path(llm.model_path).name, str(llm.method), held_map(llm), llm.kv_usage(), prompt, trial)


def keep_text(args: argparse.Namespace, method: Method) -> Kept:
    """Evaluate a text and return the KV entries that the heads hold after it."""
    tokens = _tokens(args)
    with _open(args, method) as llm:
        llm.eval(tokens)
        return read_kept(llm)


def show_kept(args: argparse.Namespace, kept: Kept) -> None:
    """Print the table and write the map."""
    from pylongctx.attention import kvmap

    show_table(_kept_table(kept))
    title = f"{kept.model}, {kept.n_tokens} tokens of {_source(args)}\n{kept.method}"
    needle = kept.prompt.needle if kept.prompt else None
    stem = f"kept-{Path(kept.model).stem}-{args.length}" + ("" if args.text else f"-{args.trial}")
    write_picture(lambda: kvmap.draw_kept(kept.held, needle, title), Path(args.out) / stem)


def _source(args: argparse.Namespace) -> str:
    return Path(args.text).name if args.text else f"{Path(args.haystack).name}, trial {args.trial}"


def kept_report(kept: Kept) -> dict[str, Any]:
    """Return the numbers for JSON; for a question also whether the pass key is still held."""
    usage = kept.usage
    facts: dict[str, Any] = {
        "model": kept.model,
        "method": kept.method,
        "n_evaluated": kept.n_tokens,
        "rows": usage.rows.tolist(),
        **usage.sizes(),
        "ratio": usage.bytes / usage.full_bytes,
        "row_share": _row_share(kept),
    }
    return facts | ({"needle": list(kept.prompt.needle), "needle_held": kept.needle.mean()} if kept.prompt else {})


def _row_share(kept: Kept) -> float:
    return float(kept.usage.rows.sum() / (int((kept.usage.rows > 0).sum()) * kept.n_tokens))


def _kept_table(kept: Kept) -> Table:
    usage = kept.usage
    table = Table(title=f"keys held, {kept.model}, {kept.n_tokens} tokens", show_header=False)
    table.add_row("method", escape(kept.method.replace(",", ", ")))
    for layer, shown in enumerate(_by_head(usage.rows)):
        table.add_row(f"layer {layer}" + (", KV entries per head" if not layer else ""), shown)
    table.add_row("KV entries held / seen", f"{_row_share(kept):.2f}")
    table.add_row("held", bytes_text(usage.bytes))
    table.add_row("peak", bytes_text(usage.peak_bytes))
    table.add_row("full cache", bytes_text(usage.full_bytes))
    if usage.rest_bytes:
        table.add_row("windows and states", bytes_text(usage.rest_bytes))
    table.add_row("held / full", f"{usage.bytes / usage.full_bytes:.2f}")
    if kept.trial:
        _add_answer(table, kept, kept.trial)
    return table


def _by_head(rows: NDArray[np.int32]) -> list[str]:
    """Return one line per layer with the numbers of its heads right-aligned; missing heads have none."""
    width = len(str(rows.max()))
    return [" ".join(f"{row or '-':>{width}}" for row in layer) for layer in rows.tolist()]


def _add_answer(table: Table, kept: Kept, trial: Trial) -> None:
    needle = kept.needle
    whole = int(needle.all(axis=1).sum())
    table.add_row("pass key held", f"{_percent(float(needle.mean()))}, all of it by {whole} of {len(needle)} KV heads")
    right = "right" if trial.strict else f"wrong, not {trial.key}"
    table.add_row("answer", f"{escape(trial.answer.strip())}: {right}")


# ---- compression ----


def _spread(first: int, last: int, n: int) -> NDArray[np.int64]:
    """Return up to ``n`` different, evenly spaced numbers, including the first and the last one."""
    import numpy as np

    return np.unique(np.linspace(first, last, n).astype(np.int64))


def show_compression(args: argparse.Namespace, methods: list[Method]) -> None:
    """Run every method once, print the bytes held at several lengths, write the plot."""
    from pylongctx.attention import kvmap

    tokens = _tokens(args)
    lengths = _spread(0, len(tokens), args.samples + 1)[1:]
    runs = dict(_compress(args, method, tokens, lengths) for method in methods)
    for name, run in runs.items():
        show_table(_compression_table(args, name, run))
    write_json(args.json, {name: _compression_report(run) for name, run in runs.items()})
    title = f"{_name(args)}, {len(tokens)} tokens of {_source(args)}"
    stem = f"compression-{Path(_name(args)).stem}-{args.length}"
    write_picture(lambda: kvmap.draw_compression(runs, title), Path(args.out) / stem)


def _compress(
    args: argparse.Namespace, method: Method, tokens: list[int], lengths: NDArray[np.int64]
) -> tuple[str, Compression]:
    from pylongctx.attention import compression

    with _open(args, method) as llm:
        return str(llm.method), compression(llm, tokens, lengths)


def _compression_table(args: argparse.Namespace, name: str, run: Compression) -> Table:
    table = Table(title=f"KV memory, {_name(args)}, {escape(name.replace(',', ', '))}")
    for column in ("tokens", "held", "peak", "full", "held/full", "peak/full", "KV entries held"):
        table.add_column(column, justify="right")
    columns = zip(run.lengths, run.bytes, run.peak_bytes, run.full_bytes, strict=True)
    ratios = zip(run.ratio, run.peak_ratio, run.row_share, strict=True)
    for (length, *sizes), row in zip(columns, ratios, strict=True):
        table.add_row(str(length), *map(bytes_text, sizes), *(f"{value:.2f}" for value in row))
    return table


def _compression_report(run: Compression) -> dict[str, Any]:
    names = ("lengths", "bytes", "peak_bytes", "full_bytes", "ratio", "peak_ratio", "row_share")
    return {name: getattr(run, name).tolist() for name in names}


# ---- sparsity ----


def show_sparsity(args: argparse.Namespace, method: Method) -> None:
    """Measure the fraction of keys that is important to queries of the text's second half; print and draw it."""
    from pylongctx.attention import kvmap

    tokens = _tokens(args)
    positions = _spread(len(tokens) // 2, len(tokens) - 1, args.samples)
    shares = _measure(args, method, tokens, positions)
    mean = shares.mean(axis=0)
    show_table(_sparsity_table(args, mean, positions))
    facts = {"model": _name(args), "method": str(method), "positions": positions.tolist()}
    write_json(args.json, facts | {"important": [[_known(x) for x in layer] for layer in mean.tolist()]})
    title = f"{_name(args)}, {method}, {len(positions)} queries at {positions[0]} to {positions[-1]} of {_source(args)}"
    stem = f"sparsity-{Path(_name(args)).stem}-{args.length}"
    write_picture(lambda: kvmap.draw_sparsity(mean, f"{title}\n{IMPORTANT}"), Path(args.out) / stem)


IMPORTANT = "important: weight at least 1 / keys read, for some query head of the KV head"


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _measure(
    args: argparse.Namespace, method: Method, tokens: list[int], positions: NDArray[np.int64]
) -> NDArray[np.float64]:
    from pylongctx.attention import observer, sparsity

    with _open(args, observer(method, args.length)) as llm:
        return sparsity(llm, tokens, positions)


def _sparsity_table(args: argparse.Namespace, mean: NDArray[np.float64], positions: NDArray[np.int64]) -> Table:
    table = Table(
        title=f"important keys in percent, {_name(args)}",
        caption=f"{IMPORTANT}; mean of {len(positions)} queries at {positions[0]} to {positions[-1]}",
    )
    table.add_column("layer", justify="right")
    table.add_column("mean", justify="right")
    table.add_column("each KV head")
    for layer, row in enumerate(100 * mean):
        heads = " ".join("   -" if math.isnan(value) else f"{value:4.1f}" for value in row)
        known = [value for value in row if not math.isnan(value)]
        table.add_row(str(layer), f"{fmean(known):.1f}" if known else "-", heads)
    return table
