"""The numbers of LongHeads' table 3 (arXiv 2402.10685), from the trace of one text.

The paper defines them only in a caption. Where it is ambiguous, the choice here matches the reported values.
"""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pylongctx.attention.trace import Trace

TOPS = (1, 5)  # numbers of most often chosen chunks for hit rates


def chunks_of(start: int, stop: int, chunk_size: int) -> range:
    """Return the chunks with the tokens ``start <= p < stop``; several if they cross a border.

    Raises
    ------
    ValueError
        When there is no such token.

    Examples
    --------
    >>> list(chunks_of(30, 50, chunk_size=16))
    [1, 2, 3]
    """
    if not 0 <= start < stop:
        raise ValueError(f"no tokens from {start} to {stop}")
    return range(start // chunk_size, (stop - 1) // chunk_size + 1)


def cover_rate(trace: Trace) -> float:
    """Return the fraction of the text's chunks that any layer and head read for any traced query, 0 to 1.

    The text ends with the last traced query; its chunk counts, even if incomplete. Chunks that every head is forced to
    read count as read.

    Raises
    ------
    ValueError
        When the trace has no query.

    Examples
    --------
    >>> trace = Trace(positions=[63], chunks=[[[[0, 2, 3], [0, 2, 3]]]], chunk_size=16)
    >>> cover_rate(trace)
    0.75
    """
    return float((_counts(trace).sum(axis=0) > 0).mean())


def uniformity(trace: Trace, forced: bool = False) -> float:
    """Return the Gini coefficient of how often each chunk was read, 0 (all equal) to 1 (only one chunk is read).

    A read is one layer and head reading a chunk for one query; the Gini coefficient of the reads x_1 .. x_n is
    sum_ij |x_i - x_j| / (2 n sum_i x_i). Reads that are forced do not count; chunks that are forced
    for all queries are not among the n: with them, 8 of 16 chunks could never exceed 0.5, but the paper reports 0.52
    for this case. 0 if no head had a choice.

    Parameters
    ----------
    forced : bool
        Count the chunks that every head is forced to read like all others.

    Raises
    ------
    ValueError
        When the trace has no query.

    Examples
    --------
    >>> trace = Trace([95], [[[[0, 2, 4, 5], [0, 2, 4, 5]], [[0, 1, 4, 5], [0, 3, 4, 5]]]], chunk_size=16)
    >>> round(uniformity(trace), 3)
    0.167
    """
    counts, free = _counts(trace), np.ones_like(trace.forced()) if forced else _free(trace)
    reads = np.sort(np.where(free, counts, 0).sum(axis=0)[free.any(axis=0)])
    n, total = len(reads), reads.sum()
    if not total:
        return 0.0
    # sum_ij |x_i - x_j| = 2 sum_i (2 i - n - 1) x_i for ascending x_i, i = 1 .. n
    return float((2 * np.arange(1, n + 1) - n - 1) @ reads / (n * total))


def hit_rate(trace: Trace, answer_chunks: Iterable[int], top: int) -> float:
    """Return the fraction of queries for which one of the ``top`` most often chosen chunks has the answer.

    Chunks are ranked by how many layers and heads chose them; ties go to the lower index, unread chunks never hit.
    Chunks that every head is forced to read are left out, and so are queries for which no other chunk has a part of
    the answer.

    Parameters
    ----------
    answer_chunks : iterable of int
        The chunks with the answer, see ``chunks_of``.
    top : int
        Number of chunks, at least 1.

    Returns
    -------
    float
        0 to 1; NaN if all queries were left out.

    Raises
    ------
    ValueError
        When the trace has no query, ``top`` is not positive, or the answer is not in the text.

    Examples
    --------
    >>> trace = Trace([95], [[[[0, 2, 4, 5], [0, 2, 4, 5]], [[0, 1, 4, 5], [0, 3, 4, 5]]]], chunk_size=16)
    >>> hit_rate(trace, answer_chunks=[2], top=1)
    1.0
    """
    answer = sorted(set(answer_chunks))
    if top < 1:
        raise ValueError(f"top must be at least 1, not {top}")
    counts, free = _counts(trace), _free(trace)
    if not answer or answer[0] < 0 or answer[-1] >= trace.n_chunks:
        raise ValueError(f"answer_chunks must be some of 0 to {trace.n_chunks - 1}, not {answer}")
    reads = np.where(free, counts, 0)
    best = np.argsort(-reads, axis=1, kind="stable")[:, :top]
    hits = np.isin(best, answer) & (np.take_along_axis(reads, best, axis=1) > 0)
    asked = np.any(free[:, answer], axis=1)
    return float(np.any(hits, axis=1)[asked].mean()) if asked.any() else float("nan")


def numbers(trace: Trace, answer_chunks: Iterable[int]) -> dict[str, float | None]:
    """Return the numbers of table 3 by name; None for an undefined hit rate.

    Examples
    --------
    >>> trace = Trace([95], [[[[0, 2, 4, 5], [0, 2, 4, 5]], [[0, 1, 4, 5], [0, 3, 4, 5]]]], chunk_size=16)
    >>> numbers(trace, answer_chunks=[2])
    {'cover_rate': 1.0, 'gini': 0.16666666666666666, 'hit_rate_top1': 1.0, 'hit_rate_top5': 1.0}
    """
    answer = list(answer_chunks)
    hits = {f"hit_rate_top{top}": hit_rate(trace, answer, top) for top in TOPS}
    return {"cover_rate": cover_rate(trace), "gini": uniformity(trace)} | {
        name: None if math.isnan(value) else value for name, value in hits.items()
    }


def findings(trace: Trace, answer_chunks: Iterable[int]) -> dict[str, Any]:
    """Return a trace's data for JSON: chunks, queries, the numbers of its first query and of all queries.

    Examples
    --------
    >>> trace = Trace([95], [[[[0, 2, 4, 5], [0, 2, 4, 5]], [[0, 1, 4, 5], [0, 3, 4, 5]]]], chunk_size=16)
    >>> findings(trace, answer_chunks=[2])["n_chunks"]
    6
    """
    answer = list(answer_chunks)
    return {
        "chunk_size": trace.chunk_size,
        "n_chunks": trace.n_chunks,
        "answer_chunks": answer,
        "positions": trace.positions.tolist(),
        "first": numbers(trace.query(0), answer),
        "all": numbers(trace, answer),
    }


def _free(trace: Trace) -> NDArray[np.bool_]:
    """Return the chunks that a query may choose, bool [n_query, n_chunks]: those before its recent ones."""
    own = trace.positions[:, None] // trace.chunk_size
    before: NDArray[np.bool_] = np.arange(trace.n_chunks)[None] <= own
    return before & ~trace.forced()


def _counts(trace: Trace) -> NDArray[np.int64]:
    if not len(trace.positions):
        raise ValueError("the trace has no query: evaluate tokens at its positions inside the block of llm.trace()")
    return trace.counts()
