"""The map of LongHeads' figure 5 (arXiv 2402.10685): which chunks the heads of every layer read."""

import os
from collections.abc import Iterable
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pylongctx.inspect.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HOW_TO_INSTALL = "drawing needs matplotlib: pip install 'pylongctx[plot]'"
FORMATS = ("png", "svg")

UNREAD, FORCED, CHOSEN = range(3)
COLORS = ("#ffffff", "#c3d3ea", "#1d4f9c")
LABELS = {FORCED: "read by every head", CHOSEN: "chosen"}
FRAME = "#d62728"
FRAME_PIXELS = 2

DPI = 100
CELL_PIXELS = 2, 14  # the least and the most of a chunk's width and a head's height
MAP_PIXELS = 640  # a map is not smaller where cells may be larger
MARGIN_LINES = 6  # of text, above and below
WIDTH_INCHES = 7.0


def chunk_map(trace: Trace) -> NDArray[np.uint8]:
    """Return what each head did with each chunk: uint8 [n_layer * n_head, n_chunks] of UNREAD, FORCED, CHOSEN.

    Chosen: read for one of the traced queries at least, without being made to.

    Raises
    ------
    ValueError
        When the trace holds no query.
    """
    if not trace.n_chunks:
        raise ValueError("the trace holds no query: there is nothing to draw")
    chunks, forced = trace.chunks, trace.forced()
    cells = np.zeros((chunks.shape[1] * chunks.shape[2], trace.n_chunks), np.uint8)
    for read, made in zip(chunks, forced, strict=True):
        heads, slots = np.nonzero(read.reshape(len(cells), -1) >= 0)
        chunk = read.reshape(len(cells), -1)[heads, slots]
        np.maximum.at(cells, (heads, chunk), np.where(made[chunk], FORCED, CHOSEN).astype(np.uint8))
    return cells


def draw(trace: Trace, answer_chunks: Iterable[int] = (), title: str = "") -> "Figure":
    """Return the map as a matplotlib figure: layers and heads upward, chunks to the right.

    Parameters
    ----------
    trace : Trace
        The queries to draw into one map; ``trace.query(0)`` is the first one alone.
    answer_chunks : iterable of int
        Chunks that are framed in red, neighbors in one frame.
    title : str
        Written above.

    Raises
    ------
    ImportError
        When matplotlib is missing.
    ValueError
        When the trace holds no query.
    """
    cells = chunk_map(trace)
    figure, axes = _canvas(*cells.shape)
    _paint(axes, cells)
    _scales(axes, trace, _font_size(figure))
    frames = _runs(answer_chunks)
    for first, n in frames:
        _frame(axes, first, n, cells.shape)
    _explain(figure, title, bool(frames))
    return figure


def save(figure: "Figure", stem: str | os.PathLike[str]) -> list[Path]:
    """Write a figure as PNG and SVG; returns the paths, ``stem`` with a suffix each. Folders are made."""
    paths = [Path(f"{os.fspath(stem)}.{suffix}") for suffix in FORMATS]
    paths[0].parent.mkdir(parents=True, exist_ok=True)
    for path in paths:
        figure.savefig(path)
    return paths


def _cell_pixels(n: int) -> int:
    least, most = CELL_PIXELS
    return min(max(MAP_PIXELS // n, least), most)


def _canvas(n_rows: int, n_columns: int) -> tuple["Figure", "Axes"]:
    """Return an empty figure whose axes have a whole number of pixels for each cell, else some of them vanish."""
    try:
        from matplotlib.figure import Figure
    except ImportError as reason:
        raise ImportError(HOW_TO_INSTALL) from reason
    figure = Figure(dpi=DPI)
    width, height = (_cell_pixels(n) * n for n in (n_columns, n_rows))
    figure.set_figwidth(max(width / DPI + 2, WIDTH_INCHES))
    margin = round(_font_size(figure) * MARGIN_LINES / 72 * DPI)
    figure.set_figheight((height + 2 * margin) / DPI)
    total, tall = figure.get_size_inches() * DPI
    left = (total - width) // 2
    return figure, figure.add_axes((left / total, margin / tall, width / total, height / tall))


def _paint(axes: "Axes", cells: NDArray[np.uint8]) -> None:
    from matplotlib.colors import ListedColormap

    colors: Any = ListedColormap(list(COLORS))
    axes.imshow(cells, colors, vmin=UNREAD, vmax=CHOSEN, aspect="auto", interpolation="none", origin="lower")


def _scales(axes: "Axes", trace: Trace, size: float) -> None:
    from matplotlib.ticker import MaxNLocator

    _, n_layer, n_head, _ = trace.chunks.shape
    step = max(n_layer // 16, 1)
    layers = range(0, n_layer, step)
    axes.set_yticks([layer * n_head + (n_head - 1) / 2 for layer in layers], [str(layer) for layer in layers])
    axes.tick_params(labelsize=size)
    axes.tick_params(axis="y", length=0)
    for layer in range(1, n_layer):
        axes.axhline(layer * n_head - 0.5, color="#999999", linewidth=0.5)
    axes.set_ylabel(f"layer, {n_head} heads each", fontsize=size)
    axes.set_xlabel(f"chunk of {trace.chunk_size} tokens", fontsize=size)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _runs(chunks: Iterable[int]) -> list[tuple[int, int]]:
    """Return (first, number) of the neighbors among ``chunks``."""
    runs: list[tuple[int, int]] = []
    for chunk in sorted(set(chunks)):
        if runs and chunk == sum(runs[-1]):
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((chunk, 1))
    return runs


def _frame(axes: "Axes", first: int, n: int, shape: tuple[int, ...]) -> None:
    """Frame ``n`` chunks, the line outside of them."""
    from matplotlib.patches import Rectangle

    y, x = (FRAME_PIXELS / 2 / _cell_pixels(size) for size in shape)
    corner, width, height = (first - 0.5 - x, -0.5 - y), n + 2 * x, shape[0] + 2 * y
    style: Any = {
        "edgecolor": FRAME,
        "linewidth": FRAME_PIXELS * 72 / DPI,
        "zorder": 3,
    }  # over the lines between layers
    axes.add_patch(Rectangle(corner, width, height, fill=False, clip_on=False, **style))


def _explain(figure: "Figure", title: str, framed: bool) -> None:
    from matplotlib.patches import Patch

    entries = [Patch(facecolor=COLORS[kind], label=label) for kind, label in LABELS.items()]
    if framed:
        entries.append(Patch(facecolor=COLORS[UNREAD], edgecolor=FRAME, label="holds the answer"))
    size = _font_size(figure)
    figure.legend(handles=entries, loc="lower center", ncols=len(entries), fontsize=size, frameon=False)
    columns = int(figure.get_figwidth() * 120 / size)
    wrapped = "\n".join(fill(line.replace(",", ", "), columns) for line in title.replace(", ", ",").splitlines())
    figure.suptitle(wrapped, fontsize=size, va="top", y=0.99)


def _font_size(figure: "Figure") -> float:
    """Return the points of all text: larger on a large map, which is looked at from farther away."""
    return min(max(figure.get_figwidth(), 9), 16)
