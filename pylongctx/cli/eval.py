"""``pylongctx eval TASK``: evaluate a model on long-context tasks. Without a task: list the tasks."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from pylongctx.cli.arguments import Parser, command_list
from pylongctx.cli.eval_cells import (
    Measured,
    add_limit,
    add_run_options,
    add_seed,
    add_standard_options,
    evaluate,
    fields_of,
    float_list,
    int_list,
    length_table,
    show,
)
from pylongctx.cli.options import add_model_options, add_prompt_options
from pylongctx.eval.registry import TASKS, TaskEntry

EPILOG = """pylongctx eval TASK --help shows the options of a task.
pylongctx matrix runs many tasks and methods."""
SHOWN = {name: entry for name, entry in TASKS.items() if not entry.plans_only}


def add_parser(commands: Any) -> None:
    """Add the command and a parser for each task."""
    listed = command_list({"tasks": [(name, entry.help) for name, entry in SHOWN.items()]})
    parser = commands.add_parser("eval", description=__doc__, epilog=f"{listed}\n{EPILOG}")
    parser.set_defaults(run=show_tasks)
    tasks = parser.add_subparsers(dest="task", metavar="TASK", prog=parser.prog, help=argparse.SUPPRESS)
    for name, entry in SHOWN.items():
        _add_task(tasks.add_parser(name), name, entry)


def show_tasks(args: argparse.Namespace) -> int:
    """Print the list of tasks."""
    args.parser.print_help()
    return 0


def _add_task(parser: Parser, name: str, entry: TaskEntry) -> None:
    if name not in OWN_OPTIONS:
        add_standard_options(parser, entry)
        return
    about, add_options, run = OWN_OPTIONS[name]
    parser.description = f"``pylongctx eval {name}``: {about}"
    add_model_options(parser)
    add_options(parser)
    parser.set_defaults(run=run)


# ---- tasks that have options of their own ----


def _add_passkey(parser: argparse.ArgumentParser) -> None:
    add_run_options(parser)
    add = parser.add_argument
    add_limit(parser, 20, "trials per method and length")
    help = "prompts that fill the length (fill), or those of a paper or program"
    add("--style", choices=("fill", "landmark", "selfextend", "llama.cpp"), default="fill", help=help)
    add("--digits", type=int_list, metavar="N,N", help="digits of the key (5; 1 to 50000 with landmark and llama.cpp)")
    add("--depths", type=float_list, default=(), metavar="X,X", help="depths of the key, 0 to 1 (random)")
    add("--junk", type=int, metavar="N", help="lines of haystack, with selfextend and llama.cpp (as many as fit)")
    add("--pos", type=int, metavar="N", help="hide the key before this line (by depth)")
    add_prompt_options(parser)


def _run_passkey(args: argparse.Namespace) -> int:
    """Run all trials, show a progress bar, write the JSON lines, print the table."""
    from pylongctx.eval.passkey import Passkey

    fields = {"haystack": args.haystack, "separator": args.separator, "junk": args.junk, "position": args.pos}
    tasks = [Passkey(args.style, args.limit, n, args.depths, **fields) for n in args.digits or [None]]
    measured = evaluate(args, tasks, args.lengths, args.seed)
    return show(measured, length_table(measured, "pass key found", "strict: the answer begins with the key"))


# ---- needle ----


def _add_needle(parser: argparse.ArgumentParser) -> None:
    add_run_options(parser, lengths="")
    add = parser.add_argument
    help = "lengths in tokens, instead of the next three options"
    add("--lengths", "--context-lengths", type=int_list, metavar="N,N", help=help)
    add("--context-lengths-min", type=int, default=1000, metavar="N", help="(1000)")
    add("--context-lengths-max", type=int, default=16000, metavar="N", help="(16000)")
    add("--context-lengths-num-intervals", type=int, default=5, metavar="N", help="how many (5; the original: 35)")
    add("--document-depth-percents", type=float_list, metavar="X,X", help="depths, instead of the next four options")
    add("--document-depth-percent-min", type=float, default=0, metavar="X", help="(0)")
    add("--document-depth-percent-max", type=float, default=100, metavar="X", help="(100)")
    add("--document-depth-percent-intervals", type=int, default=5, metavar="N", help="how many (5; the original: 35)")
    add("--document-depth-percent-interval-type", choices=("linear", "sigmoid"), default="linear", help="(linear)")
    help = "tokens reserved for question and answer (200)"
    add("--final-context-length-buffer", type=int, default=200, metavar="N", help=help)
    add("--decoys", type=int, default=0, metavar="N", help="similar sentences with other answers (0)")
    add("--needle", metavar="TEXT", help="the sentence; {key} stands for five digits")
    add("--retrieval-question", metavar="TEXT")
    add("--expected", metavar="TEXT", help="the right answer")
    add("--passkey", action="store_true", help="hide a pass key instead, as in LongHeads' figure 7")
    help = "'synthetic', a text, or a folder of texts (synthetic)"
    add("--haystack", "--haystack-dir", default="synthetic", metavar="FILE", help=help)
    help = "scoring of answers (overlap; match with --passkey)"
    add("--scorer", choices=("overlap", "match", "exact", "rouge"), help=help)
    add("-n", "--predict", type=int, default=48, metavar="N", help="tokens of the answer (48)")
    add_limit(parser, 1, "samples per length and depth")
    add_seed(parser, what="seed of haystack and keys")


def _run_needle(args: argparse.Namespace) -> int:
    """Run the grid and print one table per method."""
    from pylongctx.eval.needle import PASSKEY, Needle, context_lengths, depth_grid

    spread = (args.context_lengths_min, args.context_lengths_max, args.context_lengths_num_intervals)
    lengths = args.lengths or context_lengths(*spread)
    percents = (args.document_depth_percent_min, args.document_depth_percent_max, args.document_depth_percent_intervals)
    depths = args.document_depth_percents or depth_grid(*percents, args.document_depth_percent_interval_type)
    names = ("needle", "retrieval_question", "expected", "scorer", "haystack", "final_context_length_buffer", "decoys")
    task = Needle(tuple(depths), **((PASSKEY if args.passkey else {}) | fields_of(args, *names)))
    measured = evaluate(args, [task], lengths, args.seed)
    methods = dict.fromkeys(m.cell.method for m in measured)
    return show(measured, *(_grid([m for m in measured if m.cell.method == method]) for method in methods))


def _grid(measured: list[Measured]) -> Table:
    cell = measured[0].cell
    table = Table(title=f"needle found, {cell.method}, {Path(cell.model).name}", caption="percent, by depth and length")
    summaries = [m.cell.task.summary(m.records) for m in measured]
    table.add_column("depth", justify="right")
    for m in measured:
        table.add_column(str(m.cell.length), justify="right")
    for name in (name for name in summaries[0] if name.startswith("depth ")):
        table.add_row(f"{name.removeprefix('depth ')} %", *(_colored(summary[name]) for summary in summaries))
    table.add_section()
    table.add_row("mean", *(_colored(summary["score"]) for summary in summaries))
    return table


def _colored(score: float) -> str:
    from pylongctx.eval.needle import COLORS

    return f"[{COLORS[min(2, int(3 * score))]}]{100 * score:.0f}[/]"


# ---- recall ----

ASKED = ("number", "literal", "paraphrase")


def _add_recall(parser: argparse.ArgumentParser) -> None:
    add_run_options(parser, chat=False)
    add = parser.add_argument
    add("--asked", choices=ASKED, action="append", help="kind of question; may be repeated (number)")
    add("--questions", type=int, default=5, metavar="N", help="facts per text, with one question each (5)")
    add("--decoys", type=int, default=0, metavar="N", help="similar sentences for each fact (0)")
    add("--haystack", default="synthetic", metavar="FILE", help="'synthetic', a text, or a folder of texts (synthetic)")
    add_limit(parser, 4, "texts per method and length")
    add("--fresh", type=int, default=0, metavar="N", help="questions per text also answered from an empty cache (0)")
    help = "tokens at the end of the text whose perplexity is reported (0)"
    add("--scored", type=int, default=0, metavar="N", help=help)
    help = "fraction of the text's KV entries that kvzip keeps (1)"
    add("--compress", type=float, default=1.0, metavar="RATIO", help=help)
    add_seed(parser, what="seed of haystack and facts")


def _run_recall(args: argparse.Namespace) -> int:
    """Run the texts and print the fraction of right answers by length, and how often a fresh prefill changes it."""
    from pylongctx.eval.recall import Recall

    names = ("questions", "decoys", "haystack", "fresh", "scored", "compress")
    fields = fields_of(args, *names)
    measured = evaluate(args, [Recall(asked, **fields) for asked in args.asked or ASKED[:1]], args.lengths, args.seed)
    tables = [length_table(measured, "facts recalled", "percent right")]
    if args.scored:
        caption = f"the last {args.scored} tokens of each text"
        tables.append(length_table(measured, "perplexity", caption, _recall_perplexity))
    status = show(measured, *tables)
    for m in measured if args.fresh else []:
        same = m.cell.task.summary(m.records)["same"]
        print(f"{m.cell.task.name}, {m.cell.method} at {m.cell.length}: {100 * same:.0f} % as with a fresh prefill")
    return status


def _recall_perplexity(measured: Measured) -> str:
    from pylongctx.eval.report.records import perplexity

    return f"{perplexity(measured.records):.2f}"


# ---- ruler ----

ESSAY = "essay"


def _add_ruler(parser: argparse.ArgumentParser) -> None:
    add_run_options(parser, lengths="4096")
    add = parser.add_argument
    add("--tasks", default="all", metavar="T,T", help="niah_single_1,vt,... (all whose data is available)")
    add_limit(parser, 20, "samples per task, method and length; RULER: 500")
    help = "essay=TEXT|FOLDER|JSON, qa_1=SQUAD.json, qa_2=HOTPOTQA.json, cwe=WORDS.json; may be repeated"
    add("--data", action="append", default=[], type=_data, metavar="NAME=FILE", help=help)
    add_seed(parser, 42, "RULER's")


def _data(text: str) -> tuple[str, str]:
    name, _, file = text.partition("=")
    if name not in (ESSAY, "qa_1", "qa_2", "cwe") or not file:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form essay=FILE or qa_1=FILE")
    return name, file


def _run_ruler(args: argparse.Namespace) -> int:
    """Run the tasks and print a table by length, with the mean of the tasks in the last row."""
    from pylongctx.eval.ruler import KINDS, NAMES, Ruler

    data = dict(args.data)
    names = [name for name in NAMES if not name.startswith("qa") or name in data]
    if args.tasks != "all":
        names = args.tasks.split(",")

    def file(name: str) -> str | None:
        wants_essay = name in KINDS and KINDS[name].type_haystack == ESSAY
        found: str | None = data.get(ESSAY if wants_essay else name)
        return found

    measured = evaluate(args, [Ruler(name, args.limit, file(name)) for name in names], args.lengths, args.seed)
    labels = {m.cell.task.name for m in measured for r in m.records if r["label"] != "RULER"}
    caption = f"RULER-compatible, with other data: {', '.join(sorted(labels))}" if labels else "RULER's prompts"
    table = length_table(measured, "RULER", caption)
    if len(names) > 1:
        table.add_section()
        for method in dict.fromkeys(m.cell.method for m in measured):
            table.add_row("mean", method, *(_mean(measured, method, n) for n in args.lengths))
    return show(measured, table)


def _mean(measured: list[Measured], method: str, length: int) -> str:
    chosen = [m for m in measured if (m.cell.method, m.cell.length) == (method, length)]
    return f"{100 * fmean(m.cell.task.summary(m.records)['string_match'] for m in chosen):.1f}"


# ---- longbench ----


def _add_longbench(parser: argparse.ArgumentParser) -> None:
    add_run_options(parser, lengths="4096")
    add = parser.add_argument
    add("--data", required=True, metavar="DIR", help="folder with LongBench's .jsonl files")
    add("--tasks", default="all", metavar="T,T", help="hotpotqa,trec,... (all that have a file)")
    add_limit(parser, None, "only the first samples of each task")
    add("-E", "--e", action="store_true", help="LongBench-E: report scores by text length")
    add("--max-length", type=int, metavar="N", help="maximum tokens of a prompt (the length minus the answer)")


def _run_longbench(args: argparse.Namespace) -> int:
    """Run the tasks and print a table by length, with -E one per range of text lengths."""
    from pylongctx.eval.longbench import BUCKETS, LongBench, tasks

    there = [name for name in tasks() if (Path(args.data) / f"{name}{'_e' * args.e}.jsonl").is_file()]
    names = there if args.tasks == "all" else args.tasks.split(",")
    if not names:
        raise ValueError(f"{args.data} contains no file of LongBench{'-E' * args.e}, such as trec{'_e' * args.e}.jsonl")
    chosen = [LongBench(name, args.data, args.limit, args.e, args.max_length) for name in names]
    measured = evaluate(args, chosen, args.lengths)

    def part(name: str) -> Any:
        def text(m: Measured) -> str:
            value = m.cell.task.summary(m.records)[name]
            return "" if value != value else f"{100 * value:.2f}"

        return text

    parts = ["score", *(BUCKETS if args.e else ())]
    captions = ["all samples", *(f"texts of {name} words" for name in BUCKETS)]
    title = f"LongBench{'-E' * args.e}"
    tables = (length_table(measured, title, caption, part(p)) for p, caption in zip(parts, captions, strict=False))
    return show(measured, *tables)


# ---- perplexity ----

MODES = {
    "llama.cpp": "the second half of each chunk, like llama-perplexity",
    "sliding": "the last tokens of windows that advance by the stride",
    "incremental": "every token given all previous ones, with a curve by position",
    "last": "the last tokens of passages that end at the same places for every length",
}
N_POINTS = 16  # rows of the printed curve; the JSON lines have all


def _add_perplexity(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "; ".join(f"{name}: {what}" for name, what in MODES.items())
    add_run_options(parser, lengths="", chat=False)
    add = parser.add_argument
    add("-f", "--file", action="append", required=True, metavar="FILE", help="plain text; may be repeated")
    help = "tokens (512)"
    add("-c", "--ctx-size", "--lengths", dest="lengths", type=int_list, default=[512], metavar="N,N", help=help)
    add("--mode", choices=MODES, help="see below (llama.cpp)")
    help = "maximum chunks, windows or passages of each text (all; incremental 1, last 4)"
    add("--chunks", type=int, metavar="N", help=help)
    help = "stride of windows, scored ends and curves (256); alone: --mode sliding"
    add("--ppl-stride", type=int, metavar="N", help=help)
    add("--kl-divergence", action="store_true", help="compare with another method, token by token")
    add("--base", default="full", metavar="M", help="the method to compare with, with an f16 cache (full)")


def _run_perplexity(args: argparse.Namespace) -> int:
    """Measure and print the table, llama-perplexity's last lines, and the curve."""
    if args.kl_divergence:
        return _divergence(args)
    from pylongctx.eval.perplexity import Perplexity

    mode = args.mode or ("llama.cpp" if args.ppl_stride is None else "sliding")
    stride = {} if args.ppl_stride is None else {"stride": args.ppl_stride}
    task = Perplexity(tuple(args.file), mode, args.chunks, **stride)
    measured = evaluate(args, [task], args.lengths)
    tables = [length_table(measured, f"perplexity of {_names(args)}", MODES[mode])]
    if mode == "incremental":
        tables += [_curves([m for m in measured if m.cell.length == n], task.stride) for n in args.lengths]
    status = show(measured, *tables)
    for m in measured:
        estimate = "PPL = {perplexity:.4f} +/- {error:.5f}".format(**task.summary(m.records))
        print(f"{m.cell.method} at {m.cell.length}: Final estimate: {estimate}")
    return status


def _names(args: argparse.Namespace) -> str:
    return ", ".join(Path(file).name for file in args.file)


def _curves(measured: list[Measured], stride: int) -> Table:
    from pylongctx.eval.perplexity import curve

    table = Table(title="perplexity by position")
    table.add_column("position", justify="right")
    curves = []
    for m in measured:
        table.add_column(m.cell.method, justify="right")
        curves.append(curve(m.records, stride))
    positions = curves[0][0]
    step = -(-len(positions) // N_POINTS)
    for i in range(0, len(positions), step):
        table.add_row(str(positions[i]), *(f"{values[i]:.2f}" for _, values in curves))
    return table


def _divergence(args: argparse.Namespace) -> int:
    from pylongctx.eval.perplexity import Divergence

    if args.mode not in (None, "llama.cpp") or args.ppl_stride is not None:
        raise ValueError("--kl-divergence is measured on llama.cpp's chunks: leave --mode and --ppl-stride out")
    task = Divergence(tuple(args.file), args.chunks, args.base)
    measured = evaluate(args, [task], args.lengths)
    title = f"KL divergence from {args.base}, {_names(args)}"
    status = show(measured, length_table(measured, title, "nats per token"))
    for m in measured:
        print(f"\n====== {m.cell.method} at {m.cell.length} ======")
        for line in _statistics(task.summary(m.records)):
            print(line)
    return status


def _statistics(found: dict[str, float]) -> Iterator[str]:
    for label, value in found.items():
        if not label.endswith(" error"):
            error = found.get(f"{label} error")
            yield f"{label:<30}: {value:12.6f}" + ("" if error is None else f" \u00b1 {error:.6f}")


# the tasks with options of their own: the description, and the functions that add the options and run the task
OWN_OPTIONS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]] = {
    "passkey": ("how often a hidden number is found, by method and length.", _add_passkey, _run_passkey),
    "needle": (
        "find one sentence in a long text, by context length and depth.\n\n"
        "Options are named as in gkamradt's LLMTest_NeedleInAHaystack; answers are scored without a model.",
        _add_needle,
        _run_needle,
    ),
    "recall": (
        "facts hidden in a text that is prefilled once, and a question about each.\n\n"
        "Questions use the fact's own words, other words (as in NoLiMa), or ask among similar facts.",
        _add_recall,
        _run_recall,
    ),
    "ruler": ("RULER's retrieval, tracking, counting and question tasks, generated locally.", _add_ruler, _run_ruler),
    "longbench": ("LongBench's tasks, from its files.", _add_longbench, _run_longbench),
    "perplexity": ("how well a text is predicted, by method and length.", _add_perplexity, _run_perplexity),
}
