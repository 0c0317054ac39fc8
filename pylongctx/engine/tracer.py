"""Records of the chunks that were read for an answer."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pylongctx.engine.job import Job
from pylongctx.engine.session import Session
from pylongctx.methods import LongHeads, Method

N_SHOWN = 80  # characters of a chunk's text


@dataclass(frozen=True, eq=False)
class Record:
    """The record of one job: the completion's id, the arrays of ``lctx_trace_get``, and the tokens of the text."""

    id: str | None
    positions: NDArray[np.int32]
    chunks: NDArray[np.int32]
    tokens: NDArray[np.int32]
    n_prompt: int


def chunked(method: Method | None) -> LongHeads | None:
    """Return the part of a method that reads chunks; None when there is none."""
    parts = method.parts if method is not None else ()
    return next((part for part in parts if isinstance(part, LongHeads)), None)


class Tracer:
    """Records the chunks of one job at a time; keeps the last record."""

    def __init__(self, session: Session) -> None:
        self._model = session.model
        self._n_ctx = session.n_ctx
        self._chunked = chunked(session.method)
        self.record: Record | None = None
        self.busy = False

    def start(self, job: Job, session: Session) -> None:
        """Start at the last token of the prompt, which predicts the first one of the answer."""
        first = len(job.tokens) - 1
        last = min(first + max(job.limit or 1, 1), self._n_ctx)
        session.context.start_trace(first, last, session.seq)
        self.busy = True

    def end(self, job: Job, session: Session) -> None:
        """Store the record."""
        self.busy = False
        try:
            read = session.context.read_trace()
            self.record = Record(job.id, *read, session.tokens.copy(), len(job.tokens))
        except MemoryError as reason:
            self.record = None
            session.log(str(reason))
        finally:
            session.context.start_trace(0, 0)

    def chunk_map(self, id: str | None) -> dict[str, Any] | None:
        """Return how often each head read each chunk, and the chunks' beginnings; None if the last record is another's.

        The text of a chunk is part of a prompt, so the answer's id is required.
        """
        record, method = self.record, self._chunked
        if record is None or method is None or id is None or record.id != id or not len(record.positions):
            return None
        size = method.chunk_size or 1
        _, n_layer, n_head, _ = record.chunks.shape
        n_chunk = int(record.positions[-1]) // size + 1
        heads = record.chunks.transpose(1, 2, 0, 3).reshape(n_layer * n_head, -1)
        counts = [np.bincount(read[read >= 0], minlength=n_chunk).tolist() for read in heads]
        return {
            "id": record.id,
            "n_layer": n_layer,
            "n_head": n_head,
            "chunk_size": size,
            "n_recent": method.n_recent,
            "n_chunk": n_chunk,
            "n_prompt": record.n_prompt,
            "positions": record.positions.tolist(),
            "counts": counts,
            "texts": [self._text(record.tokens[i * size : (i + 1) * size]) for i in range(n_chunk)],
        }

    def _text(self, tokens: NDArray[np.int32]) -> str:
        text = self._model.detokenize(tokens.tolist()).decode("utf-8", "replace")
        return text if len(text) <= N_SHOWN else text[:N_SHOWN] + "..."
