"""Needle heat maps in the common form: length to the right, depth downward, red to green."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pylongctx.attention.canvas import new_figure
from pylongctx.eval.needle import COLORS
from pylongctx.eval.report.records import grouped, label, labels, score
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
