"""Plots of records, each with a caption, if there is data for it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pylongctx.attention import chunkmap
from pylongctx.attention.canvas import new_figure
from pylongctx.eval import perplexity as ppl
from pylongctx.eval.chunks import unpack
from pylongctx.eval.needle import COLORS
from pylongctx.eval.report.grids import Setting, settings
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
    method_name,
    perplexity,
    score,
)
from pylongctx.eval.scorers import mean
from pylongctx.eval.task import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


COLUMNS = 4  # maximum panels in a row
PANEL = (3.6, 2.7)  # inches
STEP = 10  # percent: bins of random depths
SMALL_FONT = 8  # points
MISSING = "#eeeeee"


def depth_of(record: Record) -> float:
    """Return the depth of a needle or a pass key in percent, rounded for a pass key."""
    if "depth_percent" in record:
        return float(record["depth_percent"])
    return float(STEP * round(100 * record["depth"] / STEP))


def is_grid(records: Sequence[Record]) -> bool:
    """Return True if most depths exist at most lengths, so that a map is not mostly gaps."""
    if not any(name in records[0] for name in ("depth", "depth_percent")):
        return False
    filled = grouped(records, depth_of, "length")
    return 2 * len(filled) >= len(depths_of(records)) * len(grouped(records, "length"))


def depths_of(records: Sequence[Record]) -> list[float]:
    """Return the depths of the rows: those of the needles, or equal steps through the text."""
    if "depth_percent" in records[0]:
        return sorted({depth_of(record) for record in records})
    return [float(depth) for depth in range(0, 101, STEP)]


def cells(records: Sequence[Record], depths: Sequence[float], lengths: Sequence[int]) -> NDArray[np.float64]:
    """Return the mean scores, float64 [depth, length], NaN if there is none."""
    found = grouped(records, depth_of, "length")
    rows = [[mean(map(score, found[d, n])) if (d, n) in found else np.nan for n in lengths] for d in depths]
    return np.array(rows)


def heat_map(records: Sequence[Record], trained: int | None) -> Figure:
    """Return a map per method; a dashed line marks the trained length."""
    from matplotlib.colors import LinearSegmentedColormap

    depths = depths_of(records)
    lengths = sorted({record["length"] for record in records})
    parts, names = grouped(records, label), labels(records)
    n_rows = -(-len(names) // COLUMNS)
    n_columns = -(-len(names) // n_rows)
    figure = new_figure(figsize=(PANEL[0] * n_columns + 0.8, PANEL[1] * n_rows), layout="constrained")
    panels = figure.subplots(n_rows, n_columns, squeeze=False, sharex=True, sharey=True)
    colors = LinearSegmentedColormap.from_list("needle", COLORS).with_extremes(bad=MISSING)
    image: Any = None
    for axes, name in zip(panels.flat, names, strict=False):
        image = axes.imshow(cells(parts[name], depths, lengths), cmap=colors, vmin=0, vmax=1, aspect="auto")
        _label(axes, name, depths, lengths)
        if trained:
            _mark(axes, trained, lengths)
    for axes in panels.flat[len(names) :]:
        axes.set_visible(False)
    figure.supxlabel("Token Limit", fontsize=SMALL_FONT + 2)
    figure.supylabel("Depth Percent", fontsize=SMALL_FONT + 2)
    figure.colorbar(image, ax=panels, label="score", fraction=0.03, shrink=0.6)
    return figure


def _label(axes: Axes, name: str, depths: Sequence[float], lengths: Sequence[int]) -> None:
    step = max(1, len(depths) // 6)
    axes.set_xticks(range(len(lengths)), [str(n) for n in lengths], fontsize=SMALL_FONT, rotation=45)
    axes.set_yticks(range(0, len(depths), step), [f"{d:g}" for d in depths[::step]], fontsize=SMALL_FONT)
    axes.tick_params(labelbottom=True)
    axes.set_title(name, fontsize=SMALL_FONT + 1)
    axes.set_xticks(np.arange(len(lengths) - 1) + 0.5, minor=True)
    axes.set_yticks(np.arange(len(depths) - 1) + 0.5, minor=True)
    axes.grid(which="minor", color="grey", linestyle="--", linewidth=0.4)
    axes.tick_params(which="minor", length=0)


def _mark(axes: Axes, trained: int, lengths: Sequence[int]) -> None:
    """Draw the line after the last length within the trained one."""
    at = sum(length <= trained for length in lengths) - 0.5
    if -0.5 < at < len(lengths) - 0.5:
        axes.axvline(at, color="black", linewidth=2.6)
        axes.axvline(at, color="white", linestyle="--", linewidth=1.6)


# ---- lines and bars ----

WIDTH, HEIGHT, LEGEND = 5.6, 4.2, 2.6  # inches of a panel and of the legend
ENTRY = 0.18  # inches of a line of the legend
MARKERS = "os^Dv<>pP*Xhd"
MAX_MARKER, MIN_MARKER = 10.0, 4.0  # marker sizes of the first and last method in points, so that none hides another
MAX_MARKERS = 12  # maximum markers of a line
DODGE = 0.006  # offset of methods with equal values, as a fraction of the length
MIB = 2**20
Line = tuple[Sequence[float], Sequence[float]]
Drawn = tuple[str, str, list[Record], "Figure"]  # name, description, records, figure


@dataclass(frozen=True)
class Picture:
    """A figure, the stem of its files, and its caption."""

    name: str
    caption: str
    figure: Figure


def pictures(evidence: Evidence) -> Iterator[Picture]:
    """Yield the plots for the records of one model."""
    for name, what, records, figure in _figures(evidence):
        yield Picture(_stem(evidence, name), caption(what, Evidence(records, evidence.about)), figure)
    for record in _mapped(evidence.records):
        shown = Evidence([record], evidence.about)
        yield Picture(_stem(evidence, f"chunks-{label(record)}"), caption(_map_text(record), shown), chunk_map(record))


def _stem(evidence: Evidence, name: str) -> str:
    """Return a file name without the spaces and slashes of method labels."""
    return f"{evidence.models[0].removesuffix('.gguf')}-{re.sub('[ /]', '-', name)}"


def caption(what: str, evidence: Evidence) -> str:
    """Return the caption of a plot: content, model, methods, and the command of the records."""
    model, trained = evidence.models[0], evidence.trained(evidence.models[0])
    known = f", trained on {trained} tokens" if trained else ""
    command = evidence.about.get("command")
    made = f" Made by: {command}" if command else ""
    return f"{what}. Model: {model}{known}. Methods: {', '.join(labels(evidence.records))}.{made}"


def _figures(evidence: Evidence) -> Iterator[Drawn]:
    records, trained = evidence.records, evidence.trained(evidence.models[0])
    answered = [record for record in records if has_score(record)]
    by_task = grouped(answered, "task")
    for task, found in by_task.items():
        if _several(found, "length"):
            figure = curves(found, mean_score, f"{task}: right, %", trained, limits=(-4, 104))
            yield f"accuracy-{task}", f"Accuracy of {task} by length", found, figure
        if is_grid(found):
            what = f"Score of {task} by depth and length; the dashed line is the trained length"
            yield f"depths-{task}", what, found, heat_map(found, trained)
    yield from _perplexities(records, trained)
    yield from _costs(records, trained)
    compared = [one for one in settings(answered) if math.isfinite(one.memory) and math.isfinite(one.share.mean)]
    if len(compared) > 1:
        what = "Mean score of the tasks that full attention answered too, by KV memory; the line is the Pareto frontier"
        yield "frontier", what, answered, frontier(compared, answered)


def _several(records: Sequence[Record], key: str) -> bool:
    return len({record[key] for record in records}) > 1


def _longest(records: Sequence[Record]) -> tuple[int, list[Record]]:
    """Return the longest length and its records."""
    longest = max(record["length"] for record in records)
    return longest, [record for record in records if record["length"] == longest]


def _perplexities(records: Sequence[Record], trained: int | None) -> Iterator[Drawn]:
    measured = [record for record in records if "n_scored" in record]
    for way, found in grouped(measured, measure).items():
        name = way.replace(", stride ", "-")
        if _several(found, "length"):
            figure = curves(found, perplexity, f"perplexity ({way})", trained, log=True)
            yield f"perplexity-{name}", f"Perplexity ({way}) by length", found, figure
        if "curve" in found[0]:
            longest, last = _longest(found)
            what = f"Perplexity by position in texts of {longest} tokens"
            yield f"position-{name}", what, last, by_position(last, trained)


def _costs(records: Sequence[Record], trained: int | None) -> Iterator[Drawn]:
    timed = [record for record in records if "token_seconds" in record]
    if _several(timed, "length"):
        figure = curves(timed, lambda part: 1000 * mean_of("token_seconds")(part), "ms per token", trained, zero=True)
        yield "time", "Time per generated token by length", timed, figure
        figure = curves(timed, mean_of("prompt_per_second"), "prompt, tokens per second", trained, zero=True)
        yield "prompt", "Prefill speed by length", timed, figure
    held = [record for record in records if "kv_bytes" in record]
    if _several(held, "length"):
        figure = curves(held, lambda part: mean_of("kv_bytes")(part) / MIB, "KV memory, MiB", trained, zero=True)
        yield "memory", "KV memory by length", held, figure


# ---- lines ----


def curves(
    records: Sequence[Record],
    value: Callable[[list[Record]], float],
    name: str,
    trained: int | None,
    *,
    log: bool = False,
    zero: bool = False,
    limits: tuple[float, float] | None = None,
) -> Figure:
    """Return a plot of a value by length, with a line per method and a panel per KV type."""

    def line(found: list[Record]) -> Line:
        parts = grouped(found, "length")
        lengths = sorted(parts)
        return lengths, [value(parts[n]) for n in lengths]

    figure, panels = _drawn(records, line, trained, dodge=True)
    for axes in panels:
        axes.set_xscale("log", base=2)
        lengths = sorted({record["length"] for record in records})
        axes.set_xticks(lengths, [str(n) for n in lengths])
        axes.minorticks_off()
        axes.set_xlabel("length, tokens")
        if log:
            axes.set_yscale("log")
        if zero:
            axes.set_ylim(bottom=0)
        if limits:
            axes.set_ylim(*limits)
    panels[0].set_ylabel(name)
    return figure


def by_position(records: Sequence[Record], trained: int | None) -> Figure:
    """Return the perplexity by position, a line per method."""

    def line(found: list[Record]) -> Line:
        return ppl.curve(found, found[0]["curve"][0][1])

    figure, panels = _drawn(records, line, trained, dodge=False)
    for axes in panels:
        axes.set_yscale("log")
        axes.set_xlabel("position, tokens")
    panels[0].set_ylabel("perplexity")
    return figure


def _drawn(
    records: Sequence[Record], line: Callable[[list[Record]], Line], trained: int | None, dodge: bool
) -> tuple[Figure, list[Axes]]:
    """Return a figure with a panel per KV type, and the panels."""
    panels, styles = grouped(records, kv_types), styles_of(records)
    figure = new_figure(figsize=_size(len(panels), len(styles)), layout="constrained")
    every = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (types, found) in zip(every, panels.items(), strict=True):
        for i, (name, part) in enumerate(grouped(found, method_name).items()):
            x, y = line(part)
            shift = 1 + DODGE * (i - len(styles) / 2) if dodge else 1
            style = styles[name] if len(x) <= MAX_MARKERS else styles[name] | {"marker": ""}
            axes.plot([n * shift for n in x], _finite(y), label=name, **style)
        if trained:
            axes.axvline(trained, color="#555555", linestyle=":", linewidth=1, label=f"trained: {trained}")
        axes.set_title(f"KV {types}" if len(panels) > 1 else "", fontsize=SMALL_FONT + 2)
        axes.grid(color="#dddddd", linewidth=0.5)
    _legend(figure, list(every))
    return figure, list(every)


def _size(n_panels: int, n_entries: int) -> tuple[float, float]:
    return WIDTH * n_panels + LEGEND, max(HEIGHT, ENTRY * (n_entries + 2))


def _finite(values: Sequence[float]) -> list[float]:
    return [value if math.isfinite(value) else math.nan for value in values]


def _legend(figure: Figure, panels: list[Axes]) -> None:
    """Add a legend with the names of all panels, once each."""
    entries: dict[str, Any] = {}
    for axes in panels:
        handles, names = axes.get_legend_handles_labels()
        entries |= dict(zip(names, handles, strict=True))
    names = sorted(entries, key=lambda name: name.startswith("trained"))
    handles = [entries[name] for name in names]
    figure.legend(handles, names, loc="outside right upper", fontsize=SMALL_FONT, frameon=False)


def styles_of(records: Sequence[Record], name_of: Callable[[Record], str] = method_name) -> dict[str, dict[str, Any]]:
    """Return the line styles of methods: a color and a marker each, dashed if every token is read."""
    from matplotlib import colormaps

    palette: Any = colormaps["tab10"]
    colors = palette.colors
    full = {name_of(record): is_full(record) for record in records}
    return {
        name: {
            "color": colors[i % len(colors)],
            "marker": MARKERS[i % len(MARKERS)],
            "markersize": MAX_MARKER - (MAX_MARKER - MIN_MARKER) * i / len(full),
            "markerfacecolor": "none",
            "linewidth": 1.4,
            "linestyle": "--" if full[name] else "-",
        }
        for i, name in enumerate(full)
    }


# ---- the frontier ----


def frontier(found: Sequence[Setting], records: Sequence[Record]) -> Figure:
    """Return what settings keep of full attention's scores by their KV memory, and a line for the Pareto frontier."""
    styles = styles_of(records, label)
    figure = new_figure(figsize=_size(1, len(found)), layout="constrained")
    axes, points = figure.subplots(), []
    for setting in found:
        kept, memory = setting.share, 100 * setting.memory
        points.append((memory, kept.mean))
        errors = [[kept.mean - kept.low], [kept.high - kept.mean]]
        style = styles[setting.name] | {"linestyle": "none", "elinewidth": 0.8, "capsize": 2}
        axes.errorbar([memory], [kept.mean], errors, label=setting.name, **style)
    best = unbeaten(points)
    axes.step([x for x, _ in best], [y for _, y in best], where="post", color="#999999", linewidth=1, zorder=0)
    axes.set_xlabel("KV memory, % of that of full attention in f16")
    axes.set_ylabel("mean score, of that of full attention in f16")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(color="#dddddd", linewidth=0.5)
    _legend(figure, [axes])
    return figure


def unbeaten(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points of the Pareto frontier, ascending in memory."""
    found: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda point: (point[0], -point[1])):
        if not found or y > found[-1][1]:
            found.append((x, y))
    return found


# ---- chunk maps ----


def _mapped(records: Sequence[Record]) -> Iterator[Record]:
    """Yield the record to draw for each method and KV type: the first one at the longest length."""
    for found in grouped([record for record in records if record["task"] == "chunks"], label).values():
        yield min(found, key=lambda record: (-record["length"], record["seed"], record["trial"]))


def _map_text(record: Record) -> str:
    return (
        f"Chunks that {label(record)} reads at {record['length']} tokens while it answers with a pass key, as in "
        "LongHeads, figure 5. Each row is a head, layers upward; chosen chunks are read for at least one token of "
        "the answer without being forced; the red frame marks the pass key"
    )


def chunk_map(record: Record) -> Figure:
    """Return the chunks that the heads of every layer read for an answer."""
    reads, forced = unpack(record)
    said = "right" if record["right"] else "wrong"
    title = f"{label(record)} at {record['length']} tokens: {len(record['positions'])} tokens of a {said} answer"
    cells = chunkmap.cells_of(reads, forced)
    return chunkmap.draw_cells(cells, len(reads), record["chunk_size"], record["answer_chunks"], title)
