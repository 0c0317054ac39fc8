"""The map of LongHeads' figure 5 (arXiv 2402.10685): which chunks the heads of every layer read."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pylongctx.inspect.canvas import FRAME, explain, font_size, frame, new_map, runs, save, scale
from pylongctx.inspect.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["CHOSEN", "FORCED", "UNREAD", "chunk_map", "draw", "save"]

UNREAD, FORCED, CHOSEN = range(3)
COLORS = ("#ffffff", "#c3d3ea", "#1d4f9c")
LABELS = {FORCED: "read by every head", CHOSEN: "chosen"}


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
    figure, axes = new_map(*cells.shape)
    _paint(axes, cells)
    _, n_layer, n_head, _ = trace.chunks.shape
    scale(axes, n_layer, n_head, "heads", f"chunk of {trace.chunk_size} tokens", font_size(figure))
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
