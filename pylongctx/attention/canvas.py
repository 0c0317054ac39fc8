"""Shared parts of plots: figures with whole pixels per cell, layer axes, frames, legends, files."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HOW_TO_INSTALL = "drawing needs matplotlib: pip install 'pylongctx[plot]'"
FORMATS = ("png", "svg")

FRAME = "#d62728"
FRAME_PIXELS = 2

DPI = 100
CELL_PIXELS = 2, 14  # minimum and maximum width and height of a cell
MAP_PIXELS = 640  # minimum size of a map, if cells can be enlarged
MARGIN_LINES = 6  # lines of text above and below
WIDTH_INCHES = 7.0


def new_figure(**options: Any) -> "Figure":
    """Return an empty figure; ImportError with the way out when matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as reason:
        raise ImportError(HOW_TO_INSTALL) from reason
    return Figure(dpi=DPI, **options)


def new_map(n_rows: int, n_columns: int) -> tuple["Figure", "Axes"]:
    """Return an empty figure with a whole number of pixels per cell, so that no cell vanishes."""
    figure = new_figure()
    width, height = (_cell_pixels(n) * n for n in (n_columns, n_rows))
    figure.set_figwidth(max(width / DPI + 2, WIDTH_INCHES))
    margin = round(font_size(figure) * MARGIN_LINES / 72 * DPI)
    figure.set_figheight((height + 2 * margin) / DPI)
    total, tall = figure.get_size_inches() * DPI
    left = (total - width) // 2
    return figure, figure.add_axes((left / total, margin / tall, width / total, height / tall))


def _cell_pixels(n: int) -> int:
    least, most = CELL_PIXELS
    return min(max(MAP_PIXELS // n, least), most)


def font_size(figure: "Figure") -> float:
    """Return the font size of all text, which is larger on a large map."""
    return float(min(max(figure.get_figwidth(), 9), 16))


def scale(axes: "Axes", n_layer: int, n_head: int, rows: str, columns: str, size: float) -> None:
    """Label a map of n_layer * n_head rows: layers upward, ``columns`` to the right; ``rows`` is the name of heads."""
    from matplotlib.ticker import MaxNLocator

    step = max(n_layer // 16, 1)
    layers = range(0, n_layer, step)
    axes.set_yticks([layer * n_head + (n_head - 1) / 2 for layer in layers], [str(layer) for layer in layers])
    axes.tick_params(labelsize=size)
    axes.tick_params(axis="y", length=0)
    for layer in range(1, n_layer):
        axes.axhline(layer * n_head - 0.5, color="#999999", linewidth=0.5)
    axes.set_ylabel(f"layer, {n_head} {rows} each", fontsize=size)
    axes.set_xlabel(columns, fontsize=size)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def runs(items: Iterable[int]) -> list[tuple[int, int]]:
    """Return (first, number) of the runs of neighbors in ``items``."""
    found: list[tuple[int, int]] = []
    for item in sorted(set(items)):
        if found and item == sum(found[-1]):
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((item, 1))
    return found


def frame(axes: "Axes", first: float, n: float, n_rows: int) -> None:
    """Frame ``n`` units of the x axis of a map with ``n_rows`` rows, with the line outside them."""
    from matplotlib.patches import Rectangle

    unit = axes.transData.transform((1, 1)) - axes.transData.transform((0, 0))  # pixels
    x, y = (FRAME_PIXELS / 2 / pixels for pixels in unit)
    corner, width, height = (first - 0.5 - x, -0.5 - y), n + 2 * x, n_rows + 2 * y
    style: Any = {
        "edgecolor": FRAME,
        "linewidth": FRAME_PIXELS * 72 / DPI,
        "zorder": 3,
    }  # above the lines between layers
    axes.add_patch(Rectangle(corner, width, height, fill=False, clip_on=False, **style))


def explain(figure: "Figure", title: str, entries: Sequence["Artist"]) -> None:
    """Write a title above a map and a legend below."""
    size = font_size(figure)
    figure.legend(handles=entries, loc="lower center", ncols=len(entries), fontsize=size, frameon=False)
    figure.suptitle(wrap(title, int(figure.get_figwidth() * 120 / size)), fontsize=size, va="top", y=0.99)


def wrap(text: str, columns: int) -> str:
    """Wrap a text with spec strings, which have no spaces, at their commas."""
    return "\n".join(fill(line.replace(",", ", "), columns) for line in text.replace(", ", ",").splitlines())


def save(figure: "Figure", stem: str | os.PathLike[str]) -> list[Path]:
    """Write a figure as PNG and SVG; returns the paths, ``stem`` with a suffix each. Missing folders are created."""
    paths = [Path(f"{os.fspath(stem)}.{suffix}") for suffix in FORMATS]
    paths[0].parent.mkdir(parents=True, exist_ok=True)
    for path in paths:
        figure.savefig(path)
    return paths
