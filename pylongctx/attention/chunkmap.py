"""The map of LongHeads' figure 5 (arXiv 2402.10685): the chunks read by the heads of every layer."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pylongctx.attention.canvas import FRAME, explain, font_size, frame, new_map, runs, save, scale
from pylongctx.attention.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["CHOSEN", "FORCED", "UNREAD", "cells_of", "chunk_map", "draw", "draw_cells", "save"]

UNREAD, FORCED, CHOSEN = range(3)
COLORS = ("#ffffff", "#c3d3ea", "#1d4f9c")
LABELS = {FORCED: "read by every head", CHOSEN: "chosen"}


def chunk_map(trace: Trace) -> NDArray[np.uint8]:
    """Return how each head read each chunk: uint8 [n_layer * n_head, n_chunks] of UNREAD, FORCED, CHOSEN.

    CHOSEN: read for at least one traced query without being forced to.

    Raises
    ------
    ValueError
        When the trace has no query.

    Examples
    --------
    >>> trace = Trace(positions=[63], chunks=[[[[0, 1, 2, 3], [0, 2, 3, -1]]]], chunk_size=16)
    >>> chunk_map(trace)  # 0 unread, 1 read by every head, 2 chosen
    array([[1, 2, 1, 1],
           [1, 0, 1, 1]], dtype=uint8)
    """
    if not trace.n_chunks:
        raise ValueError("the trace has no query: there is nothing to draw")
    return cells_of(trace.reads(), trace.forced().sum(axis=0))


def cells_of(reads: NDArray[np.int64], forced: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return the same from counts of queries.

    Parameters
    ----------
    reads : numpy.ndarray
        int64 [n_layer, n_head, n_chunks], the queries for which a head read a chunk, see ``Trace.reads``.
    forced : numpy.ndarray
        int64 [n_chunks], the queries for which the chunk was forced.

    Examples
    --------
    >>> cells_of(np.array([[[1, 1, 0, 1]]]), forced=np.array([1, 0, 0, 1]))
    array([[1, 2, 0, 1]], dtype=uint8)
    """
    rows = reads.reshape(-1, len(forced))
    return np.where(rows > forced, CHOSEN, np.where(rows > 0, FORCED, UNREAD)).astype(np.uint8)


def draw(trace: Trace, answer_chunks: Iterable[int] = (), title: str = "") -> "Figure":
    """Return the map as a matplotlib figure: layers and heads upward, chunks to the right.

    Parameters
    ----------
    trace : Trace
        The queries to draw in one map; ``trace.query(0)`` has only the first one.
    answer_chunks : iterable of int
        Chunks to frame in red; neighbors share a frame.
    title : str
        The title above the map.

    Raises
    ------
    ImportError
        When matplotlib is missing.
    ValueError
        When the trace has no query.

    Examples
    --------
    >>> trace = Trace(positions=[63], chunks=[[[[0, 1, 2, 3], [0, 2, 3, -1]]]], chunk_size=16)
    >>> [path.name for path in save(draw(trace, answer_chunks=[1]), "map")]
    ['map.png', 'map.svg']
    """
    return draw_cells(chunk_map(trace), trace.chunks.shape[1], trace.chunk_size, answer_chunks, title)


def draw_cells(
    cells: NDArray[np.uint8], n_layer: int, chunk_size: int, answer_chunks: Iterable[int] = (), title: str = ""
) -> "Figure":
    """Return the map of cells from ``chunk_map``; see ``draw``.

    Examples
    --------
    >>> figure = draw_cells(np.array([[1, 2, 0, 1]], np.uint8), n_layer=1, chunk_size=16)
    """
    figure, axes = new_map(*cells.shape)
    _paint(axes, cells)
    scale(axes, n_layer, len(cells) // n_layer, "heads", f"chunk of {chunk_size} tokens", font_size(figure))
    frames = runs(answer_chunks)
    for first, n in frames:
        frame(axes, first, n, len(cells))
    explain(figure, title, _legend(bool(frames)))
    return figure


def _paint(axes: "Axes", cells: NDArray[np.uint8]) -> None:
    from matplotlib.colors import ListedColormap

    colors: Any = ListedColormap(list(COLORS))
    axes.imshow(cells, colors, vmin=UNREAD, vmax=CHOSEN, aspect="auto", interpolation="none", origin="lower")


def _legend(framed: bool) -> list[Any]:
    from matplotlib.patches import Patch

    entries = [Patch(facecolor=COLORS[kind], label=label) for kind, label in LABELS.items()]
    if framed:
        entries.append(Patch(facecolor=COLORS[UNREAD], edgecolor=FRAME, label="holds the answer"))
    return entries
