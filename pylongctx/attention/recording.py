"""Recording the chunks that queries of a Llama read."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from pylongctx._arguments import check_count
from pylongctx._units import bytes_text
from pylongctx.attention.trace import Arrays, Trace
from pylongctx.engine.session import Session
from pylongctx.engine.tracer import chunked
from pylongctx.methods import LongHeads

FEWER = "record fewer queries: llm.trace(start, stop)"


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
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > ram:
        raise MemoryError(
            f"a trace of {n_query} queries takes {bytes_text(size)}, but this machine has {bytes_text(ram)}; {FEWER}"
        )
