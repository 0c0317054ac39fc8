"""Comparison of methods with full attention on the same samples: scores with intervals, differences, costs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pylongctx._units import bytes_text
from pylongctx.eval.intervals import LEVEL, mean_interval, paired_difference
from pylongctx.eval.report.grid import Grid
from pylongctx.eval.report.records import grouped, has_score, label, labels, score
from pylongctx.eval.scorers import mean
from pylongctx.eval.task import Record
from pylongctx.methods import Full

COLUMNS = (
    *("Method", "samples", "score", "difference from full", "ratio"),
    *("tokens per sample", "seconds per sample", "KV memory"),
)
NOTE = f"scores in percent, {LEVEL:.0%} bootstrap intervals; differences are over the same samples"
ALL = "all tasks"


def compared(records: Sequence[Record], model: str) -> Iterator[Grid]:
    """Yield a table for each task and length with results of full attention and another method."""
    answered = [record for record in records if has_score(record)]
    tables = {key: found for key, found in grouped(answered, "task", "length").items() if _comparable(found)}
    for (task, length), found in tables.items():
        yield Grid(f"{task} at {length} tokens, {model}", NOTE, COLUMNS, _rows(found))
    if len(tables) > 1:
        every = [record for found in tables.values() for record in found]
        note = f"{NOTE}; each method has the samples of its measured tasks and lengths"
        yield Grid(f"{ALL} and lengths, {model}", note, COLUMNS, _rows(every))


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
    return [*cells, *_against(scores, base), *_costs(records)]


def _against(scores: dict[str, float], base: dict[str, float]) -> list[str]:
    """Return the difference and ratio to full attention on common samples."""
    common = scores.keys() & base.keys()
    if not common:
        return ["", ""]
    found = paired_difference({name: base[name] for name in common}, {name: scores[name] for name in common})
    gap = found.difference
    ratio = "" if math.isnan(found.ratio) else f"{found.ratio:.2f}"
    return [f"{100 * gap.mean:+.1f} [{100 * gap.low:+.1f}, {100 * gap.high:+.1f}]", ratio]


def _costs(records: Sequence[Record]) -> list[str]:
    seconds = [record["seconds"] for record in records if "seconds" in record]
    read = [record.get("tokens_read", record.get("n_tokens")) for record in records]
    held = [record["kv_bytes"] for record in records if "kv_bytes" in record]
    known = [n for n in read if n is not None]
    return [
        f"{mean(known):.0f}" if known else "",
        f"{mean(seconds):.1f}" if seconds else "",
        bytes_text(mean(held)) if held else "",
    ]


def _scores(records: Sequence[Record]) -> dict[str, float]:
    """Return scores by sample, independent of the method."""
    return {" ".join(str(r[key]) for key in ("task", "length", "seed", "id")): score(r) for r in records}
