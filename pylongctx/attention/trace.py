"""A record of the chunks that queries of a Llama read."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from zipfile import BadZipFile

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pylongctx._arguments import check_count
from pylongctx._platform import ram_bytes
from pylongctx._units import bytes_text
from pylongctx.engine.session import Session
from pylongctx.engine.tracer import chunked
from pylongctx.methods import LongHeads

Arrays = tuple[NDArray[np.int32], NDArray[np.int32]]
FEWER = "record fewer queries: llm.trace(start, stop)"


class Trace:
    """The chunks that every layer and head read, for some queries.

    Parameters
    ----------
    positions : array_like
        int32 [n_query], ascending: positions of the queries in the text, in tokens.
    chunks : array_like
        int32 [n_query, n_layer, n_head, n_read]: the chunks that they read, ascending, padded with -1.
    chunk_size : int
        Tokens per chunk.
    n_recent : int
        Chunks before a query's own chunk that every head is forced to read.

    Raises
    ------
    ValueError
        When the shapes do not match, or a query reads a chunk that begins after it.

    Examples
    --------
    >>> trace = Trace(positions=[40], chunks=[[[[0, 1, 2], [0, 2, -1]]]], chunk_size=16)
    >>> trace.n_chunks
    3
    >>> trace.counts()
    array([[2, 1, 2]])
    """

    def __init__(self, positions: ArrayLike, chunks: ArrayLike, chunk_size: int, n_recent: int = 1) -> None:
        arrays = np.asarray(positions, np.int32), np.asarray(chunks, np.int32)
        self.chunk_size = chunk_size
        self.n_recent = n_recent
        self._read: Callable[[], Arrays] = lambda: arrays
        self._check(*arrays)

    def _check(self, positions: NDArray[np.int32], chunks: NDArray[np.int32]) -> None:
        if self.chunk_size < 1 or self.n_recent < 0:
            raise ValueError(f"chunk_size={self.chunk_size} and n_recent={self.n_recent} must be at least 1 and 0")
        if positions.ndim != 1 or chunks.ndim != 4 or len(positions) != len(chunks):
            raise ValueError(
                "a trace needs positions [n_query] and chunks [n_query, n_layer, n_head, n_read], "
                f"not {list(positions.shape)} and {list(chunks.shape)}"
            )
        if (chunks > (positions // self.chunk_size)[:, None, None, None]).any():
            raise ValueError(f"a query of this trace reads a chunk of {self.chunk_size} tokens that begins after it")

    @classmethod
    def recording(cls, read: Callable[[], Arrays], chunk_size: int, n_recent: int) -> "Trace":
        """Return a trace that calls ``read`` for its arrays on every access until ``keep``."""
        trace = cls([], np.empty((0, 0, 0, 0)), chunk_size, n_recent)
        trace._read = read
        return trace

    def keep(self) -> None:
        """End the recording and keep the current arrays."""
        arrays = self._read()
        self._read = lambda: arrays

    @property
    def positions(self) -> NDArray[np.int32]:
        """int32 [n_query], the positions of the queries, ascending; inside the block of ``Llama.trace`` a new copy."""
        return self._read()[0]

    @property
    def chunks(self) -> NDArray[np.int32]:
        """int32 [n_query, n_layer, n_head, n_read], ascending, padded with -1; inside ``Llama.trace`` a new copy."""
        return self._read()[1]

    @property
    def n_chunks(self) -> int:
        """The number of chunks up to and including that of the last query."""
        positions = self.positions
        return int(positions[-1]) // self.chunk_size + 1 if len(positions) else 0

    def query(self, index: int) -> "Trace":
        """Return the trace of one query."""
        positions, chunks = self._read()
        return Trace(positions[[index]], chunks[[index]], self.chunk_size, self.n_recent)

    def counts(self) -> NDArray[np.int64]:
        """Return how many heads of all layers read a chunk, int64 [n_query, n_chunks]."""
        chunks, n_chunks = self.chunks, self.n_chunks
        rows = [np.bincount(read[read >= 0].ravel(), minlength=n_chunks) for read in chunks]
        return np.array(rows, np.int64).reshape(len(chunks), n_chunks)

    def reads(self) -> NDArray[np.int64]:
        """Return for how many queries each head read each chunk, int64 [n_layer, n_head, n_chunks]."""
        chunks = self.chunks
        found = np.zeros((*chunks.shape[1:3], self.n_chunks), np.int64)
        _, layers, heads, _ = np.nonzero(chunks >= 0)
        np.add.at(found, (layers, heads, chunks[chunks >= 0]), 1)
        return found

    def forced(self) -> NDArray[np.bool_]:
        """Return the chunks that every head is forced to read, bool [n_query, n_chunks]: 0, the own, recent ones."""
        own = self.positions[:, None] // self.chunk_size
        chunk = np.arange(self.n_chunks)[None]
        forced: NDArray[np.bool_] = (chunk == 0) | ((chunk <= own) & (chunk >= own - self.n_recent))
        return forced

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a compressed .npz file with the arrays and settings; ``Trace.load`` reads it."""
        positions, chunks = self._read()
        settings = np.array([self.chunk_size, self.n_recent])
        with open(path, "wb") as file:  # numpy would add .npz to another name
            np.savez_compressed(file, positions=positions, chunks=chunks, settings=settings)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Trace":
        """Load a file written by ``save``; ValueError for other files."""
        try:
            with np.load(path, allow_pickle=False) as file:
                chunk_size, n_recent = map(int, file["settings"])
                return cls(file["positions"], file["chunks"], chunk_size, n_recent)
        except (AttributeError, TypeError, KeyError, EOFError, ValueError, BadZipFile) as reason:
            raise ValueError(f"{os.fspath(path)} is not a trace: {reason}") from None


@contextmanager
def record(session: Session, start: int | None, stop: int | None) -> Iterator[Trace]:
    """Record the queries at positions ``start <= p < stop`` while the block runs; see ``Llama.trace``."""
    method = chunked(session.method)
    if method is None or method.chunk_size is None:
        raise ValueError(
            f"method {str(session.method)!r} does not read chunks, so there is nothing to trace; use method='longheads'"
        )
    first, last = _range(session, start, stop)
    _check_size(session, method, last - first)
    context = session.context
    if context.tracing:
        raise RuntimeError("this Llama is already being traced; end that block first, or give it a larger range")

    def read() -> Arrays:
        try:
            return context.read_trace()
        except MemoryError as reason:
            raise MemoryError(f"the trace does not fit into memory; {FEWER}") from reason

    trace = Trace.recording(read, method.chunk_size, method.n_recent or 0)
    context.start_trace(first, last)
    try:
        yield trace
    finally:
        try:
            trace.keep()
        finally:
            context.start_trace(0, 0)


def _range(session: Session, start: int | None, stop: int | None) -> tuple[int, int]:
    n_ctx = session.context.n_ctx
    first = session.n_tokens if start is None else check_count("start", start, 0)
    last = n_ctx if stop is None else check_count("stop", stop, 0)
    if not first < last <= n_ctx:
        raise ValueError(f"a trace needs 0 <= start < stop <= n_ctx ({n_ctx}), not start={first}, stop={last}")
    return first, last


def _check_size(session: Session, method: LongHeads, n_query: int) -> None:
    n_read = (method.window or 0) // (method.chunk_size or 1)
    size = 4 * n_query * session.model.info.n_layer * session.model.info.n_head * n_read
    ram = ram_bytes()
    if size > ram:
        raise MemoryError(
            f"a trace of {n_query} queries takes {bytes_text(size)}, but this machine has {bytes_text(ram)}; {FEWER}"
        )
