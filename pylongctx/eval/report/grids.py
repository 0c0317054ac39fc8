"""Tables of a report, in the papers' layout: for a terminal, Markdown and HTML."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any

from pylongctx._units import bytes_text
from pylongctx.attention.stats import TOPS
from pylongctx.eval.chunks import means
from pylongctx.eval.intervals import LEVEL, Interval, kept_share, mean_interval, paired_difference
from pylongctx.eval.longbench import tasks as longbench_tasks
from pylongctx.eval.report.records import (
    Evidence,
    grouped,
    has_score,
    is_full,
    kv_types,
    label,
    labels,
    mean_of,
    mean_score,
    measure,
    perplexity,
    score,
)
from pylongctx.eval.ruler import NAMES as RULER
from pylongctx.eval.scorers import mean
from pylongctx.eval.task import Record
from pylongctx.methods import NONE, Full

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Grid:
    """A table of texts."""

    title: str
    note: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]  # a label, then a cell per column; only a label: the head of a group

    def markdown(self) -> str:
        """Return it as Markdown."""
        head = f"| {' | '.join(self.columns)} |\n|---|{'---:|' * (len(self.columns) - 1)}"
        lines = [f"| {' | '.join(_bars(cell) for cell in self._cells(row, '*'))} |" for row in self.rows]
        return "\n".join([f"**{self.title}**", "", head, *lines, "", self.note])

    def html(self) -> str:
        """Return it as HTML."""
        head = "".join(f"<th>{escape(column)}</th>" for column in self.columns)
        lines = [self._html_row(row) for row in self.rows]
        caption = f"<caption><b>{escape(self.title)}</b><br>{escape(self.note)}</caption>"
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"

    def rich(self) -> Table:
        """Return it for a terminal."""
        from rich.table import Table

        table = Table(title=self.title, caption=self.note)
        for i, column in enumerate(self.columns):
            table.add_column(column, justify="right" if i else "left")
        for row in self.rows:
            table.add_row(*self._cells(row, ""))
        return table

    def _cells(self, row: Sequence[str], mark: str) -> list[str]:
        if len(row) == 1:
            return [f"{mark}{row[0]}{mark}", *[""] * (len(self.columns) - 1)]
        return list(row)

    def _html_row(self, row: Sequence[str]) -> str:
        if len(row) == 1:
            return f'<tr><th class="group" colspan="{len(self.columns)}">{escape(row[0])}</th></tr>'
        return f"<tr><th>{escape(row[0])}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in row[1:])}</tr>"


def _bars(text: str) -> str:
    return text.replace("|", "\\|")


# ---- what the model can do at all ----

MIN_ABILITY = 50.0  # percent right, below which a task measures the model rather than a method


@dataclass(frozen=True)
class Own:
    """The score of full attention at the longest length inside the trained context, in percent."""

    length: int
    percent: float

    @property
    def enough(self) -> bool:
        """True if the task can compare methods."""
        return self.percent >= MIN_ABILITY


def abilities(evidence: Evidence) -> dict[str, Own]:
    """Return the scores of full attention for each task that has them."""
    trained = evidence.trained(evidence.models[0]) or 0
    answered = [record for record in evidence.records if has_score(record)]
    inside = [record for record in answered if record["length"] <= trained and _is_plain(record)]
    return {task: _ability(found) for task, found in grouped(inside, "task").items()}


def _is_plain(record: Record) -> bool:
    return record["asked"] in (Full.name, NONE) and not record.get("rope") and kv_types(record) == "f16"


def _ability(records: Sequence[Record]) -> Own:
    by_length = grouped(records, "length")
    longest = max(by_length)
    return Own(longest, mean_score(by_length[longest]))


def remark(own: Mapping[str, Own], task: str) -> str:
    """Return a note for the table of a task that the model cannot do; "" for other tasks."""
    found = own.get(task)
    if found is None or found.enough:
        return ""
    return f"; the model cannot do this: full attention has {found.percent:.0f} % right at {found.length} tokens"


# ---- all tasks and settings at once ----

SHARE = "of the mean score of full"
MEMORY = "KV memory of that of full"


@dataclass(frozen=True)
class Setting:
    """A method with its types of K and V, on all tasks where full attention has answered the same samples.

    Attributes
    ----------
    tasks : dict of str to pair
        Records of full attention and of this setting for the samples of a task, in the same order.
    """

    name: str
    tasks: Mapping[str, tuple[list[Record], list[Record]]]

    @cached_property
    def share(self) -> Interval:
        """What it keeps of full attention's mean score; NaN where that is 0."""
        return kept_share([([*map(score, base)], [*map(score, own)]) for base, own in self.tasks.values()])

    @property
    def memory(self) -> float:
        """KV bytes as a fraction of full attention's with K and V in f16, mean of the tasks; NaN when unknown."""
        known = [pair for pair in self.tasks.values() if all("kv_bytes" in record for part in pair for record in part)]
        held = mean_of("kv_bytes")
        return mean(held(own) / held(base) for base, own in known) if known else math.nan


def settings(records: Sequence[Record]) -> list[Setting]:
    """Return full attention and all settings that answered samples of it."""
    answered = [record for record in records if has_score(record)]
    found = {name: grouped(part, _family) for name, part in grouped(answered, label).items()}
    bases = {task: _by_sample(part) for task, part in found.get(Full.name, {}).items()}
    every = [Setting(name, _pairs(bases, found[name])) for name in labels(answered)]
    return [setting for setting in every if setting.tasks]


def _family(record: Record) -> str:
    task = "RULER" if record["task"] in RULER else record["task"]
    return f"{task} at {record['length']}"


def _pairs(
    bases: Mapping[str, dict[str, Record]], found: Mapping[str, list[Record]]
) -> dict[str, tuple[list[Record], list[Record]]]:
    pairs = {}
    for task, base in bases.items():
        own = _by_sample(found.get(task, []))
        if common := [sample for sample in base if sample in own]:
            pairs[task] = [base[sample] for sample in common], [own[sample] for sample in common]
    return pairs


def overview(records: Sequence[Record], model: str) -> Iterator[Grid]:
    """Yield a row for each task and a column for each setting, and what each keeps of full attention's scores."""
    columns = settings(records)
    tasks = columns[0].tasks if columns else {}
    if len(columns) < 2 or len(tasks) < 2:
        return

    def cell(setting: Setting, task: str) -> str:
        return score_text(setting.tasks[task][1]) if task in setting.tasks else ""

    rows = [[f"{task}, {len(tasks[task][0])} samples", *(cell(one, task) for one in columns)] for task in tasks]
    rows.append([SHARE, *map(_share_text, columns)])
    rows.append([MEMORY, *("" if math.isnan(one.memory) else percent(one.memory) for one in columns)])
    note = f"percent right; {SHARE}: on samples that both answered, each task counts as much, {LEVEL:.0%} intervals"
    yield Grid(f"Tasks and settings, {model}", note, ["Task", *(one.name for one in columns)], rows)


def _share_text(setting: Setting) -> str:
    found = setting.share
    if setting.name == Full.name or math.isnan(found.mean):
        return ""
    return f"{found.mean:.2f} [{found.low:.2f}, {found.high:.2f}]"


# ---- methods compared ----

COLUMNS = (
    *("Method", "samples", "score", "difference from full", "ratio"),
    *("tokens per sample", "seconds per sample", "KV memory"),
)
NOTE = f"scores in percent, {LEVEL:.0%} bootstrap intervals; differences are over the same samples"


def compared(records: Sequence[Record], model: str) -> Iterator[Grid]:
    """Yield a table with each task and length that full attention and another method have results of."""
    answered = grouped([record for record in records if has_score(record)], "task", "length")
    parts = {f"{task} at {length} tokens": found for (task, length), found in answered.items() if _comparable(found)}
    if parts:
        rows = [row for name, found in parts.items() for row in ([name], *_rows(found))]
        yield Grid(f"Methods on the same samples, {model}", NOTE, COLUMNS, rows)


def _comparable(records: Sequence[Record]) -> bool:
    names = labels(records)
    return len(names) > 1 and Full.name in names


def _rows(records: Sequence[Record]) -> list[list[str]]:
    by_label = grouped(records, label)
    base = _scores(by_label[Full.name])
    return [[name, *_cells(by_label[name], {} if name == Full.name else base)] for name in labels(records)]


def _cells(records: list[Record], base: dict[str, float]) -> list[str]:
    scores = _scores(records)
    found = mean_interval([*scores.values()])
    cells = [str(found.n), f"{100 * found.mean:.1f} [{100 * found.low:.1f}, {100 * found.high:.1f}]"]
    return [*cells, *_against(scores, base), *_cost_cells(records)]


def _against(scores: dict[str, float], base: dict[str, float]) -> list[str]:
    """Return the difference and ratio to full attention on common samples."""
    common = scores.keys() & base.keys()
    if not common:
        return ["", ""]
    found = paired_difference({name: base[name] for name in common}, {name: scores[name] for name in common})
    gap = found.difference
    ratio = "" if math.isnan(found.ratio) else f"{found.ratio:.2f}"
    return [f"{100 * gap.mean:+.1f} [{100 * gap.low:+.1f}, {100 * gap.high:+.1f}]", ratio]


def _cost_cells(records: Sequence[Record]) -> list[str]:
    seconds = [record["seconds"] for record in records if "seconds" in record]
    read = [record.get("tokens_read", record.get("n_tokens")) for record in records]
    held = [record["kv_bytes"] for record in records if "kv_bytes" in record]
    known = [n for n in read if n is not None]
    return [
        f"{mean(known):.0f}" if known else "",
        f"{mean(seconds):.1f}" if seconds else "",
        bytes_text(mean(held)) if held else "",
    ]


def _by_sample(records: Sequence[Record]) -> dict[str, Record]:
    """Return records by what is the same for all methods."""
    return {" ".join(str(r[key]) for key in ("task", "length", "seed", "id")): r for r in records}


def _scores(records: Sequence[Record]) -> dict[str, float]:
    return {sample: score(record) for sample, record in _by_sample(records).items()}


# ---- tables ----

N_PARTS = 8  # columns of perplexity by position
MAX_PERPLEXITY = 1000  # larger perplexities are shortened as in the papers
GROUPS = {True: "Full attention", False: "Restricted attention"}
# LongBench's tasks as in LongHeads' table 2; others follow under their own names
LONGBENCH = {
    "narrativeqa": "NQA", "qasper": "Qspr.", "multifieldqa_en": "MulFi", "hotpotqa": "HQA", "2wikimqa": "WMQA",
    "musique": "Musq.", "gov_report": "GRpt", "qmsum": "QMSM", "multi_news": "MulN", "trec": "TREC",
    "triviaqa": "TriQA", "samsum": "SMSM", "passage_count": "PsgC", "passage_retrieval_en": "PsgR", "lcc": "Lcc",
    "repobench-p": "Repo",
}  # fmt: skip
RETRIEVAL = ("passkey", "needle", "recall")  # first words of tasks, as in passkey-9-digits


def percent(value: float) -> str:
    """Return a fraction in the papers' form."""
    return f"{100 * value:.0f} %"


CHUNK_PARTS = {"first": "first answer token", "all": "all answer tokens"}
CHUNK_NOTE = "Gini: 0 if all are read equally; hit rate: a chunk with the pass key is among the most chosen"
CHUNKS: dict[str, tuple[str, Callable[[float], str]]] = {
    "cover_rate": ("cover rate", percent),
    "gini": ("Gini", "{:.2f}".format),
    **{f"hit_rate_top{top}": (f"hit rate, top {top}", percent) for top in TOPS},
}


def grids(evidence: Evidence) -> Iterator[Grid]:
    """Yield the tables for the records of one model."""
    records, model = evidence.records, evidence.models[0]
    yield from _perplexities(records, model)
    answered = [record for record in records if has_score(record)]
    by_task, own = grouped(answered, "task"), abilities(evidence)
    yield from overview(records, model)
    yield from _own(own, model)
    yield from _of_lengths(by_task, own, model)
    yield from _of_tasks(by_task, model)
    yield from compared(records, model)
    yield from _chunks(records, model)
    yield from _costs(records, model)


def _sections(records: Sequence[Record], columns: Sequence[Any], cell: Callable[[str, Any], str]) -> list[list[str]]:
    """Return a row per label, under the papers' groups if both exist."""
    groups = {full: labels(found) for full, found in sorted(grouped(records, is_full).items(), reverse=True)}
    rows: list[list[str]] = []
    for full, names in groups.items():
        rows += [[GROUPS[full]]] if len(groups) > 1 else []
        rows += [[name, *(cell(name, column) for column in columns)] for name in names]
    return rows


def length_grid(title: str, note: str, records: Sequence[Record], text: Callable[[list[Record]], str]) -> Grid:
    """Return a row per method and a column per length."""
    lengths = sorted({record["length"] for record in records})
    found = grouped(records, label, "length")

    def cell(name: str, length: int) -> str:
        return text(found[name, length]) if (name, length) in found else ""

    return Grid(title, note, ["Method", *map(str, lengths)], _sections(records, lengths, cell))


def _perplexities(records: Sequence[Record], model: str) -> Iterator[Grid]:
    """Yield LongHeads' table 1, SelfExtend's table 1: perplexity by context window, for each way of measuring."""
    measured = [record for record in records if "n_scored" in record]
    for way, found in grouped(measured, measure).items():
        title = f"Perplexity ({way}) by evaluation context window, {model}"
        yield length_grid(title, f"{_samples(found)}; lower is better", found, _perplexity_text)
        yield from _positions([record for record in found if "curve" in record], model)
    diverged = [record for record in records if record["task"] == "kld"]
    if diverged:
        note = f"{_samples(diverged)}; nats per token, lower is better"
        yield length_grid(f"Mean KL divergence from full attention, {model}", note, diverged, _divergence_text)


def _positions(records: Sequence[Record], model: str) -> Iterator[Grid]:
    """Yield perplexity by position for each length, in ``N_PARTS`` parts of the text or fewer."""
    for length, found in sorted(grouped(records, "length").items()):
        n_points = max(len(record["curve"]) for record in found)
        size = -(-n_points // N_PARTS)
        parts = [slice(start, start + size) for start in range(0, n_points, size)]
        stride = found[0]["stride"]
        heads = [f"to {min(length, part.stop * stride)}" for part in parts]
        by_label = grouped(found, label)

        def cell(name: str, part: slice, by_label: dict[str, list[Record]] = by_label) -> str:
            points = [point for record in by_label[name] for point in record["curve"][part]]
            return _large(perplexity([{"nll": nll, "n_scored": n} for nll, n in points])) if points else ""

        title = f"Perplexity by position in texts of {length} tokens, {model}"
        note = f"{_samples(found)}; each column starts at the end of the previous one"
        yield Grid(title, note, ["Method", *heads], _sections(found, parts, cell))


def _perplexity_text(records: list[Record]) -> str:
    return _large(perplexity(records))


def _large(value: float) -> str:
    return f">{MAX_PERPLEXITY:.0e}".replace("e+0", "e") if value > MAX_PERPLEXITY else f"{value:.2f}"


def _divergence_text(records: list[Record]) -> str:
    return f"{mean(value for record in records for value in record['kld']):.4f}"


def score_text(records: list[Record]) -> str:
    """Return the mean score in percent."""
    return f"{mean_score(records):.1f}"


def is_retrieval(task: str) -> bool:
    """Return True if a task's table is by length: pass keys, needles, facts, RULER."""
    return task in RULER or task.partition("-")[0] in RETRIEVAL


def _own(own: dict[str, Own], model: str) -> Iterator[Grid]:
    """Yield the scores of full attention, if there are tasks that the model cannot do."""
    if all(found.enough for found in own.values()):
        return
    rows = [
        [task, str(found.length), f"{found.percent:.1f}", "" if found.enough else "not comparable by this task"]
        for task, found in own.items()
    ]
    note = f"the longest length measured inside the trained context; {MIN_ABILITY:.0f} % right is enough"
    yield Grid(f"Full attention, {model}", note, ["Task", "tokens", "percent right", "methods"], rows)


def _of_lengths(by_task: dict[str, list[Record]], own: dict[str, Own], model: str) -> Iterator[Grid]:
    """Yield retrieval by length: pass keys, needles, facts, each of RULER's tasks, and their mean."""
    for task, found in by_task.items():
        if is_retrieval(task):
            note = _samples(found) + remark(own, task)
            yield length_grid(f"{task}, percent right, {model}", note, found, score_text)
    ruled = {task: found for task, found in by_task.items() if task in RULER}
    able = {task: found for task, found in ruled.items() if task not in own or own[task].enough}
    for what, tasks in ((f"{len(ruled)} tasks", ruled), (f"the {len(able)} tasks that the model can do", able)):
        if len(tasks) > 1 and (tasks is ruled or len(able) < len(ruled)):
            every = [record for found in tasks.values() for record in found]
            title = f"RULER, mean of {what}, {model}"
            yield length_grid(title, ", ".join(tasks), every, lambda part: f"{_mean_of_tasks(part):.1f}")


def _mean_of_tasks(records: list[Record]) -> float:
    return mean(mean_score(part) for part in grouped(records, "task").values())


def _of_tasks(by_task: dict[str, list[Record]], model: str) -> Iterator[Grid]:
    """Yield LongHeads' table 2 (LongBench) and one of the other tasks (L-Eval and more), for each length."""
    known = longbench_tasks()
    long = {task: by_task[task] for task in [*LONGBENCH, *known] if task in by_task}
    choices = {task: found for task, found in by_task.items() if task not in long and not is_retrieval(task)}
    for name, tasks in (("LongBench", long), ("Other tasks", choices)):
        every = [record for found in tasks.values() for record in found]
        for length, found in sorted(grouped(every, "length").items()):
            yield _task_grid(f"{name}, {length} tokens, {model}", list(tasks), found)


def _task_grid(title: str, tasks: list[str], records: list[Record]) -> Grid:
    found = grouped(records, label, "task")

    def cell(name: str, task: str | None) -> str:
        if task is not None:
            return score_text(found[name, task]) if (name, task) in found else ""
        every = [record for part in tasks for record in found.get((name, part), [])]
        return f"{_mean_of_tasks(every):.2f}" if all((name, part) in found for part in tasks) else ""

    heads = [LONGBENCH.get(task, task) for task in tasks]
    columns: list[str | None] = [*tasks, None]
    return Grid(title, _samples(records), ["Method", *heads, "Avg."], _sections(records, columns, cell))


def _chunks(records: Sequence[Record], model: str) -> Iterator[Grid]:
    """Yield LongHeads' table 3 for each length: the chunks that are read, by groups of queries."""
    shown = [record for record in records if record["task"] == "chunks"]
    for length, found in sorted(grouped(shown, "length").items()):
        rows: list[list[str]] = []
        for part, head in CHUNK_PARTS.items():
            by_label = grouped(found, label).items()
            rows += [[head], *([name, *chunk_cells(means(r[part] for r in of))] for name, of in by_label)]
        columns = ["Method", *(text for text, _ in CHUNKS.values())]
        yield Grid(f"Chunks that are read, {length} tokens, {model}", f"{_samples(found)}; {CHUNK_NOTE}", columns, rows)


def chunk_cells(numbers: Mapping[str, float | None]) -> list[str]:
    """Return the texts of the columns ``CHUNKS``."""
    found = [(numbers.get(name), write) for name, (_, write) in CHUNKS.items()]
    return ["-" if value is None else write(value) for value, write in found]


def _costs(records: Sequence[Record], model: str) -> Iterator[Grid]:
    """Yield LongHeads' table 5: time per token, and memory."""
    timed = [record for record in records if "token_seconds" in record]
    held = [record for record in records if "kv_bytes" in record]
    note = "mean of all samples"
    for title, found, key, text in (
        ("Time per token, ms", timed, "token_seconds", lambda value: f"{1000 * value:.2f}"),
        ("Prompt, tokens per second", timed, "prompt_per_second", lambda value: f"{value:.0f}"),
        ("KV memory", held, "kv_bytes", bytes_text),
    ):
        if found:
            yield length_grid(f"{title}, {model}", note, found, _mean_text(key, text))
    peaks = [record for record in records if "peak_rss" in record]
    if peaks:
        title = f"Peak memory of the process, {model}"
        yield length_grid(title, "weights included", peaks, lambda part: bytes_text(max(r["peak_rss"] for r in part)))


def _mean_text(key: str, text: Callable[[float], str]) -> Callable[[list[Record]], str]:
    return lambda records: text(mean(record[key] for record in records))


def _samples(records: Sequence[Record]) -> str:
    counts = sorted({len(part) for part in grouped(records, label, "length", "task").values()})
    return f"samples per method and length: {' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))}"


def choices_grid(evidence: Evidence) -> Grid:
    """Return the automatic choices of every method."""
    found = grouped(evidence.records, label, "method")
    lengths = {key: sorted({record["length"] for record in part}) for key, part in found.items()}
    rows = [
        [name, chosen, ", ".join(map(str, lengths[name, chosen])), _options(part)]
        for (name, chosen), part in found.items()
    ]
    return Grid(
        "Methods as chosen",
        "options: arguments of Llama in addition to the method",
        ["Method", "chosen", "lengths", "options"],
        rows,
    )


def _options(records: list[Record]) -> str:
    found = dict.fromkeys(_named(record.get("options", {})) for record in records)
    return "; ".join(text for text in found if text)


def _named(options: dict[str, Any]) -> str:
    return ", ".join(
        f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in options.items()
    )
