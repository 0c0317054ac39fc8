"""Plots of the keys that KV heads keep: a map, and CORM's figures 1 and 4 (arXiv 2404.15949).

They need matplotlib, and raise ImportError without it.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pylongctx.attention.canvas import FRAME, explain, font_size, frame, new_figure, new_map, scale, wrap
from pylongctx.attention.kept import Compression, column_shares

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EVICTED, KEPT = "#dde7f4", "#1d4f9c"
MAX_COLUMNS = 512
MAX_NUMBERS = 64  # maximum cells of a map that show numbers
LINE_INCHES = 0.2
TITLE_COLUMNS = 90


def draw_kept(held: NDArray[np.bool_], needle: tuple[int, int] | None = None, title: str = "") -> "Figure":
    """Return the map of kept keys: layers and KV heads upward, positions to the right; kept keys are dark.

    A text of more than 512 tokens has several tokens per column, shaded by the fraction that is kept.

    Parameters
    ----------
    held : numpy.ndarray
        bool [n_layer, n_head_kv, n_tokens], see ``held_map``.
    needle : tuple of int or None
        Start and stop of the tokens to frame in red.
    title : str
        The title above the map.

    Raises
    ------
    ValueError
        When no token is held.

    Examples
    --------
    >>> figure = draw_kept(np.ones((2, 4, 100), bool), needle=(20, 30))
    """
    if not held.any():
        raise ValueError("no head holds a token: there is nothing to draw")
    n_layer, n_head, n_tokens = held.shape
    width = -(-n_tokens // MAX_COLUMNS)
    cells = column_shares(held, width).reshape(n_layer * n_head, -1)
    cells[~held.reshape(n_layer * n_head, -1).any(axis=1)] = np.nan  # no such head
    figure, axes = new_map(*cells.shape)
    _paint(axes, cells, width)
    scale(axes, n_layer, n_head, "KV heads", _position_label(width), font_size(figure))
    if needle:
        frame(axes, needle[0], needle[1] - needle[0], len(cells))
    explain(figure, title, _legend(width, needle is not None))
    return figure


def _paint(axes: "Axes", cells: NDArray[np.float64], width: int) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    colors = LinearSegmentedColormap.from_list("kept", [EVICTED, KEPT]).with_extremes(bad="white")
    extent = (-0.5, cells.shape[1] * width - 0.5, -0.5, len(cells) - 0.5)
    axes.imshow(cells, colors, vmin=0, vmax=1, aspect="auto", interpolation="none", origin="lower", extent=extent)


def _position_label(width: int) -> str:
    return "position in tokens" if width == 1 else f"position in tokens, {width} in a column"


def _legend(width: int, framed: bool) -> list[Any]:
    from matplotlib.patches import Patch

    of = "" if width == 1 else f" all {width}"
    entries = [Patch(facecolor=KEPT, label=f"kept{of}"), Patch(facecolor=EVICTED, label=f"evicted{of}")]
    if framed:
        entries.append(Patch(facecolor="white", edgecolor=FRAME, label="the pass key"))
    return entries


def draw_compression(runs: Mapping[str, Compression], title: str = "") -> "Figure":
    """Return the plot of bytes held / full bytes by length, with one color per method (CORM, figure 4).

    Parameters
    ----------
    runs : mapping
        Measurements by the name shown in the legend.

    Examples
    --------
    >>> from pylongctx.attention import compression
    >>> figure = draw_compression({"longheads": compression(llm, tokens, [128, 256])})
    """
    figure = new_figure(layout="constrained")
    axes = figure.add_subplot()
    lines = []
    for index, (name, run) in enumerate(runs.items()):
        color = f"C{index}"
        lines += axes.plot(run.lengths, run.ratio, "o-", color=color, markersize=3, label=wrap(name, TITLE_COLUMNS))
        axes.plot(run.lengths, run.peak_ratio, ":", color=color)
    lines += axes.plot([], [], ":", color="#555555", label="dotted: peak so far, including between evictions")
    lines.append(axes.axhline(1, color="#999999", linestyle="--", linewidth=1, label="full cache"))
    axes.set_xlabel("tokens")
    axes.set_ylabel("bytes held / full bytes")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.suptitle(wrap(title, TITLE_COLUMNS), fontsize=10)
    figure.legend(handles=lines, loc="outside lower left", fontsize=9, frameon=False)
    figure.set_size_inches(7.5, 4.2 + LINE_INCHES * sum(str(line.get_label()).count("\n") + 1 for line in lines))
    return figure


def draw_sparsity(shares: NDArray[np.float64], title: str = "") -> "Figure":
    """Return CORM's figure 1: the fraction of important keys by layer (left), and by layer and KV head (right).

    Parameters
    ----------
    shares : numpy.ndarray
        float64 [n_layer, n_head_kv], 0 to 1, NaN for heads that a layer does not have.

    Examples
    --------
    >>> figure = draw_sparsity(np.full((2, 4), 0.1))
    """
    figure = new_figure(layout="constrained", figsize=(10, 4.5))
    by_layer, by_head = figure.subplots(1, 2)
    _plot_layers(by_layer, 100 * shares)
    _plot_heads(by_head, 100 * shares)
    figure.suptitle(wrap(title, TITLE_COLUMNS + 30), fontsize=10)
    return figure


def _plot_layers(axes: "Axes", percent: NDArray[np.float64]) -> None:
    from matplotlib.ticker import MaxNLocator

    layers = np.arange(len(percent))
    heads = np.repeat(layers, percent.shape[1])
    axes.plot(heads, percent.ravel(), "o", color=KEPT, alpha=0.4, markersize=5, label="a KV head")
    axes.plot(layers, np.nanmean(percent, axis=1), "-", color=FRAME, label="mean of the layer")
    axes.set_xlabel("layer")
    axes.set_ylabel("important keys, %")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)


def _plot_heads(axes: "Axes", percent: NDArray[np.float64]) -> None:
    from matplotlib.ticker import MaxNLocator

    image = axes.imshow(percent, "Blues", vmin=0, aspect="auto", interpolation="none", origin="lower")
    if percent.size <= MAX_NUMBERS:
        for layer, head in np.argwhere(np.isfinite(percent)):
            value = percent[layer, head]
            color = "white" if value > np.nanmax(percent) / 2 else "black"
            axes.text(head, layer, f"{value:.1f}", ha="center", va="center", color=color, fontsize=9)
    axes.set_xlabel("KV head")
    axes.set_ylabel("layer")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    axes.figure.colorbar(image, ax=axes, label="important keys, %")
