"""The keys that KV heads keep, their memory, and attention sparsity: CORM, arXiv 2404.15949, figures 1 and 4.

The functions take a ``Llama``, evaluate with it, and return numpy arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pylongctx.methods import Corm, Full, Method
from pylongctx.methods.base import names

if TYPE_CHECKING:
    from pylongctx.llama import Llama


def evicts(method: Method | None) -> bool:
    """Return True if a method has a rule that evicts keys per head."""
    return method is not None and method.eviction is not None


def check_evicts(method: Method | None) -> None:
    """Raise ValueError with the available rules unless ``method`` has one."""
    if not evicts(method):
        raise ValueError(
            f"with method {str(method or 'None')!r} every head keeps the same keys, so there is nothing to show; "
            f"use {names('rule')}, alone or as in 'longheads+corm'"
        )


def held_map(llm: Llama) -> NDArray[np.bool_]:
    """Return the tokens that each KV head holds now: bool [n_layer, n_head_kv, n_tokens].

    Layers with fewer KV heads than others have rows without tokens; an existing head holds at least one.

    Raises
    ------
    ValueError
        When the method does not evict.

    Examples
    --------
    >>> from pylongctx import Llama
    >>> with Llama("model.gguf", method="h2o,budget=64", n_ctx=512, verbose=False) as evicting:
    ...     evicting.eval(tokens[:256])
    ...     held = held_map(evicting)
    >>> held.shape, int(held.sum(axis=-1).max())
    ((4, 4, 256), 80)
    """
    check_evicts(llm.method)
    counts = llm.kv_usage().rows
    held = np.zeros((*counts.shape, llm.n_tokens), np.bool_)
    for layer, head in np.argwhere(counts):
        held[layer, head, llm.held_rows(int(layer), int(head))[0]] = True
    return held


def column_shares(held: NDArray[np.bool_], width: int) -> NDArray[np.float64]:
    """Return the fraction of every ``width`` neighboring tokens that is held.

    Parameters
    ----------
    held : numpy.ndarray
        bool [..., n_tokens].
    width : int
        Tokens per column, at least 1; the last column has the rest.

    Returns
    -------
    numpy.ndarray
        float64 [..., ceil(n_tokens / width)], 0 to 1.

    Examples
    --------
    >>> column_shares(np.array([True, False, True, True, False]), width=2)
    array([0.5, 1. , 0. ])
    """
    starts = np.arange(0, held.shape[-1], width)
    sizes = np.diff(np.append(starts, held.shape[-1]))
    return np.asarray(np.add.reduceat(held, starts, axis=-1, dtype=np.int64) / sizes, np.float64)


@dataclass(frozen=True, eq=False)
class Compression:
    """KV memory against the length of the text, from one run.

    Attributes
    ----------
    lengths : numpy.ndarray
        int64 [n], tokens evaluated.
    bytes, peak_bytes, full_bytes : numpy.ndarray
        int64 [n], see ``KVUsage``: held, peak so far, full cache.
    rows : numpy.ndarray
        int32 [n, n_layer, n_head_kv], KV entries held.

    Examples
    --------
    >>> from pylongctx import Llama
    >>> with Llama("model.gguf", method="h2o,budget=64", n_ctx=512, verbose=False) as evicting:
    ...     found = compression(evicting, tokens, lengths=[128, 256, 512])
    >>> found.row_share.round(2)
    array([0.62, 0.31, 0.16])
    """

    lengths: NDArray[np.int64]
    bytes: NDArray[np.int64]
    peak_bytes: NDArray[np.int64]
    full_bytes: NDArray[np.int64]
    rows: NDArray[np.int32]

    @property
    def ratio(self) -> NDArray[np.float64]:
        """Bytes held / full bytes, float64 [n]."""
        return self.bytes / self.full_bytes

    @property
    def peak_ratio(self) -> NDArray[np.float64]:
        """Peak bytes so far / full bytes, float64 [n]."""
        return self.peak_bytes / self.full_bytes

    @property
    def row_share(self) -> NDArray[np.float64]:
        """KV entries held / seen, over all layers and heads, float64 [n]: the ratio without pages and bookkeeping."""
        n_heads = np.count_nonzero(self.rows, axis=(1, 2))
        return np.asarray(self.rows.sum(axis=(1, 2)) / (n_heads * self.lengths), np.float64)


def compression(llm: Llama, tokens: Sequence[int], lengths: ArrayLike) -> Compression:
    """Evaluate a text once from an empty cache, and record the KV memory at several lengths (CORM, figure 4).

    Parameters
    ----------
    llm : Llama
        A new object with any method, since ``peak_bytes`` counts from its creation.
    lengths : array_like
        int [n], ascending, from 1 to ``len(tokens)``.

    Raises
    ------
    ValueError
        When a length is out of range or not above the one before it.

    Examples
    --------
    >>> found = compression(llm, tokens, lengths=[128, 256])
    >>> found.lengths, bool((found.bytes <= found.peak_bytes).all())
    (array([128, 256]), True)
    """
    stops = _ascending("lengths", lengths, 1, len(tokens))
    llm.reset()
    usages = []
    for stop in stops.tolist():
        llm.eval(tokens[llm.n_tokens : stop])
        usages.append(llm.kv_usage())
    sizes = np.array([(usage.bytes, usage.peak_bytes, usage.full_bytes) for usage in usages], np.int64)
    return Compression(stops, sizes[:, 0], sizes[:, 1], sizes[:, 2], np.array([usage.rows for usage in usages]))


def observer(base: Method, n_ctx: int) -> Method:
    """Return ``base`` with a rule that evicts nothing within ``n_ctx`` tokens: every query votes, every key stays.

    The window is longer than the interval between evictions; otherwise only one vote would count.

    Examples
    --------
    >>> str(observer(Full(), n_ctx=512))
    'corm,window=513,recent=512,evict_every=512'
    """
    return base + Corm(window=n_ctx + 1, recent=n_ctx, evict_every=n_ctx)


def sparsity(llm: Llama, tokens: Sequence[int], positions: ArrayLike) -> NDArray[np.float64]:
    """Return the fraction of keys important to a query, per layer and KV head (CORM, definition 3.1, figure 1).

    With t keys read, a key counts if its weight is at least 1/t for any of the query heads that share the KV head; so
    the fraction of a KV head is at least that of each of its query heads. Nothing is evicted.

    Parameters
    ----------
    llm : Llama
        A model with ``method=observer(Full(), n_ctx)``, or another base that reads every key.
    positions : array_like
        int [n_query], ascending, from 0 to ``len(tokens) - 1``: the queries.

    Returns
    -------
    numpy.ndarray
        float64 [n_query, n_layer, n_head_kv], 0 to 1; NaN for heads that a layer does not have.

    Raises
    ------
    ValueError
        When the method does not read all keys or may evict some, or a position is out of range.

    Examples
    --------
    >>> from pylongctx import Llama
    >>> with Llama("model.gguf", method=observer(Full(), 256), n_ctx=256, verbose=False) as watching:
    ...     shares = sparsity(watching, tokens, positions=[127, 255])
    >>> shares.shape, bool((shares < 0.5).all())
    ((2, 4, 4), True)
    """
    queries = _ascending("positions", positions, 0, len(tokens) - 1)
    _check_observes(llm.method, int(queries[-1]) + 1)
    llm.reset()
    shares = []
    for position in queries.tolist():
        llm.eval(tokens[llm.n_tokens : position + 1])
        shares.append(_important(llm, position) / (position + 1))
    return np.array(shares)


def _important(llm: Llama, position: int) -> NDArray[np.float64]:
    """Return the number of keys important to the last query, float64 [n_layer, n_head_kv], NaN for missing heads."""
    counts = llm.kv_usage().rows
    important = np.full(counts.shape, np.nan)
    for layer, head in np.argwhere(counts):
        scores = llm.held_rows(int(layer), int(head))[1]
        important[layer, head] = np.count_nonzero(scores == position)
    return important


def check_reads_all(method: Method) -> None:
    """Raise ValueError unless ``method`` reads every key and evicts none."""
    if not method.reads_all:
        known = names("base", reads_all=True)
        raise ValueError(f"sparsity needs a method that reads every key: {known}, not {str(method)!r}")


def _check_observes(method: Method | None, n_tokens: int) -> None:
    rule = method.parts[-1] if method else None
    if not isinstance(rule, Corm) or rule.recent < n_tokens or rule.window <= (rule.evict_every or rule.window):
        raise ValueError(
            f"method {str(method or 'None')!r} may evict keys or drop votes within {n_tokens} tokens; "
            f"use method=observer(Full(), n_ctx), which is {str(observer(Full(), n_tokens))!r}"
        )
    if method is not None and method is not rule:
        check_reads_all(method.parts[0])


def _ascending(name: str, values: ArrayLike, least: int, most: int) -> NDArray[np.int64]:
    array = np.asarray(values, np.int64)
    if array.ndim != 1 or not len(array) or array[0] < least or array[-1] > most or (np.diff(array) < 1).any():
        raise ValueError(f"{name} must ascend from {least} at least to {most} at most, not {array.tolist()}")
    return array
