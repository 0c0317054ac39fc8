"""``pylongctx passkey``: how often a hidden number is found, by method and length."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from pylongctx.cli.options import add_model_options, add_prompt_options, llama_arguments, model_path
from pylongctx.methods import parse

if TYPE_CHECKING:
    from pylongctx.eval.passkey import Prompt, Trial

DEFAULT_METHODS = ["full", "selfextend", "longheads"]


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser("passkey", help="hide a number in a long text and ask for it", description=__doc__)
    add_model_options(parser)
    parser.add_argument(
        "--method",
        action="append",
        metavar="M",
        help="method such as selfextend or window,n_sink=4; may be repeated"
        f" (default: LCTX_METHOD, or {' '.join(DEFAULT_METHODS)})",
    )
    parser.add_argument("--lengths", type=_lengths, default=[512, 2048], metavar="N,N", help="tokens (512,2048)")
    parser.add_argument("--tests", type=int, default=20, metavar="N", help="trials per method and length (20)")
    add_prompt_options(parser)
    parser.add_argument("--json", metavar="FILE", help="write one JSON line per trial")
    parser.set_defaults(run=run)


def _lengths(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def run(args: argparse.Namespace) -> int:
    """Run all trials, show a progress bar, write the JSON lines, print the table."""
    methods = [str(parse(spec)) for spec in args.method or [os.environ.get("LCTX_METHOD")] if spec] or DEFAULT_METHODS
    if args.tests < 1:
        raise ValueError(f"--tests must be at least 1, not {args.tests}")
    console = Console(stderr=True)
    path = model_path(args)
    prompts = _prompts(path, args)
    trials: list[tuple[str, Trial]] = []
    with ExitStack() as stack:
        out = stack.enter_context(open(args.json, "w", encoding="utf-8")) if args.json else None
        progress = stack.enter_context(_progress(console))
        task = progress.add_task("", total=len(methods) * sum(map(len, prompts.values())))
        for method, trial in _trials(path, methods, prompts, args, partial(progress.update, task)):
            trials.append((method, trial))
            progress.advance(task)
            if out:
                print(json.dumps(asdict(trial)), file=out, flush=True)
    Console().print(_table(methods, args.lengths, trials))
    for line in _choices(trials):
        print(line)
    return 0


def _prompts(path: str, args: argparse.Namespace) -> dict[int, list[Prompt]]:
    from pylongctx.eval.passkey import load_haystack, make_prompt
    from pylongctx.llama import Llama

    haystack = load_haystack(args.haystack)
    with Llama(path, vocab_only=True, verbose=False) as vocabulary:

        def make(length: int, trial: int) -> Prompt:
            return make_prompt(vocabulary.tokenize, haystack, length, trial, args.seed, args.separator)

        return {length: [make(length, trial) for trial in range(args.tests)] for length in args.lengths}


def _trials(
    path: str,
    methods: list[str],
    prompts: dict[int, list[Prompt]],
    args: argparse.Namespace,
    describe: Callable[..., None],
) -> Iterator[tuple[str, Trial]]:
    """Yield (method as asked for, trial); one context per method and length, so that automatic choices fit it."""
    from pylongctx.eval.passkey import run_trial
    from pylongctx.llama import Llama

    for method in methods:
        for length, questions in prompts.items():
            describe(description=f"{method} at {length}")
            with Llama(path, n_ctx=length, method=method, **llama_arguments(args)) as llm:
                for prompt in questions:
                    yield method, run_trial(llm, prompt)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True)


def _table(methods: list[str], lengths: list[int], trials: list[tuple[str, Trial]]) -> Table:
    table = Table(title=f"pass key found, {trials[0][1].model}", caption="strict: every answer token is right")
    table.add_column("method")
    for length in lengths:
        table.add_column(str(length), justify="right")
    for method in methods:
        table.add_row(method, *(_cell([t for m, t in trials if (m, t.length) == (method, n)]) for n in lengths))
    return table


def _cell(trials: list[Trial]) -> str:
    return f"{100 * sum(trial.strict for trial in trials) / len(trials):.0f} %"


def _choices(trials: list[tuple[str, Trial]]) -> Iterator[str]:
    """Yield one line per automatic choice: the method, the lengths it was made for, what was chosen."""
    lengths: dict[tuple[str, str], dict[int, None]] = {}
    for method, trial in trials:
        if trial.method != method:
            lengths.setdefault((method, trial.method), {})[trial.length] = None
    for (method, chosen), used in lengths.items():
        options = [", ".join(part.split(",")[1:]) or part for part in chosen.split("+")]
        yield f"{method} at {', '.join(map(str, used))}: {' + '.join(options)}"
