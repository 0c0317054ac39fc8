"""The engine's interface to the store: a source of prompts, a writer per sequence, and compressed documents."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pylongctx.engine.context import Context
from pylongctx.engine.documents import Document
from pylongctx.engine.reuse import NO_BYTES, NO_LOGITS
from pylongctx.engine.saved_state import LlamaState
from pylongctx.engine.session import Session
from pylongctx.errors import LctxError
from pylongctx.store.finder import Finder, joined, tail_name, tails
from pylongctx.store.layout import (
    BLOCK,
    DECODED_TOKENS,
    DOCUMENT,
    MIN_TAIL,
    POINT,
    ROWS,
    TAIL,
    Layout,
    chain,
    first_words,
    shown,
)
from pylongctx.store.store import KVStore


class Keeper:
    """Writes the blocks and tails of one session, a ``Watcher``; see ``Layout``."""

    def __init__(self, session: Session, store: KVStore, layout: Layout) -> None:
        self._session, self._store, self._layout = session, store, layout
        self._end = 0  # end of the current text

    def begin(self, pos: int, n: int) -> None:
        """Record that a text of ``n`` tokens follows position ``pos``."""
        self._end = pos + n

    def limit_step(self, pos: int, n: int) -> int:
        """Return how many of ``n`` tokens from ``pos`` a step may evaluate: it ends where a point is stored."""
        borders = range((pos // BLOCK + 1) * BLOCK, pos + n, BLOCK)
        return next((border - pos for border in borders if self._layout.is_point(border, self._end)), n)

    def reach(self, start: int, end: int) -> None:
        """Store the blocks that end between two lengths, and the tail of the text at its end."""
        if self._session.placed:
            return
        try:
            if start // BLOCK != end // BLOCK:
                self._keep_blocks(start, end)
            if self._is_end(end):
                self._keep_tail(end // BLOCK * BLOCK, end)
        except (LctxError, MemoryError, OSError) as reason:  # the store must never fail an evaluation
            self._session.log(f"not stored: {reason}")

    def _is_end(self, n: int) -> bool:
        """Return True if a text ends after ``n`` tokens with known logits and a tail that is worth a file."""
        session, border = self._session, n // BLOCK * BLOCK
        if n != self._end or not session.has_logits or not 0 < border <= n - MIN_TAIL:
            return False
        return not self._layout.has_rows or session.context.cut_before(n) == n  # a slice can end there

    def _keep_blocks(self, start: int, end: int) -> None:
        context, seq = self._session.context, self._session.seq
        names = self._names(end)
        for i in range(start // BLOCK if self._layout.has_rows else len(names), len(names)):
            if not self._store.has(names[i], ROWS):
                data = context.slice(i * BLOCK, (i + 1) * BLOCK, seq)
                self._write(names[: i + 1], ROWS, i * BLOCK, (i + 1) * BLOCK, data, NO_LOGITS)
        if self._layout.is_point(end, self._end) and not self._store.has(names[-1], POINT):
            self._write(names, POINT, end - BLOCK, end, self._point(), NO_LOGITS)

    def _keep_tail(self, border: int, n: int) -> None:
        tail, names = self._session.tokens[border:n], self._names(border)
        name = tail_name(names[-1], tail)
        if self._store.has(name, TAIL):
            return
        layout, context = self._layout, self._session.context
        rows = context.slice(border, n, self._session.seq) if layout.has_rows else NO_BYTES
        point = self._point() if layout.has_points else NO_BYTES
        shorter = sorted(one for one in tails(self._store.folder, names[-1], tail) if one[0] < len(tail))
        for _, path in shorter[1:]:  # keep two tails of a growing text: the first may be a prefix of other texts
            path.unlink(missing_ok=True)
        self._write([*names, name], TAIL, border, n, joined(rows, point), self._session.last_logits)

    def _names(self, end: int) -> list[str]:
        return chain(self._store.identity_of(self._session.owner), self._session.tokens[:end], BLOCK)

    def _point(self) -> NDArray[np.uint8]:
        context, seq = self._session.context, self._session.seq
        return context.foreign(seq) if self._layout.has_rows else context.state(seq)

    def _write(
        self, names: list[str], kind: str, first: int, end: int, data: NDArray[np.uint8], logits: NDArray[np.float32]
    ) -> None:
        session, context = self._session, self._session.context
        about = {
            "first": first,
            "end": end,
            "before": names[-2] if len(names) > 1 else "",
            "seconds": round((end - first) * context.step_seconds / max(1, context.step_tokens), 6),
            "written": int(time.time()),
            "source": "prompt",
        }
        if self._store.words:
            about["words"] = first_words(session.model, session.tokens[:DECODED_TOKENS])
        identity = about | self._store.identity_of(session.owner)
        self._store.write(names, kind, LlamaState(session.tokens[first:end].copy(), logits.copy(), data, identity))


class StoredTexts:
    """The texts of one model and context in a store."""

    def __init__(self, store: KVStore, context: Context) -> None:
        self._store = store
        self._layout = Layout.of(context)

    def finder(self, owner: str | None) -> Finder:
        """Return the source of an owner's prompts."""
        return Finder(self._store, self._layout, self._store.identity_of(owner))

    def keeper(self, session: Session) -> Keeper:
        """Return the writer of a session's texts."""
        return Keeper(session, self._store, self._layout)

    def keep(self, document: Document) -> None:
        """Store the rows of a document that was compressed."""
        assert document.rows is not None
        tokens, identity = document.prompt, self._identity(document)
        about = {"first": 0, "end": len(tokens), "before": "", "seconds": 0.0, "written": int(time.time())}
        words = {"words": shown(document.text)} if self._store.words else {}
        named = self._store.words and document.name != document.text
        source = {"source": f"document {shown(document.name)}" if named else "document"}
        state = LlamaState(tokens, NO_LOGITS, document.rows, about | source | words | identity)
        self._store.write(chain(identity, tokens, len(tokens)), DOCUMENT, state)

    def find(self, document: Document) -> Iterator[NDArray[np.uint8]]:
        """Yield the rows of a document that ``keep`` stored, if any; reads a file."""
        tokens, identity = document.prompt, self._identity(document)
        (name,) = chain(identity, tokens, len(tokens))
        state = self._store.read(name, DOCUMENT)
        sound = state is not None and np.array_equal(state.input_ids, tokens)
        if state is not None and sound and identity.items() <= state.identity.items():
            self._store.usage.hits += 1
            self._store.usage.tokens += len(tokens)
            self._store.use([name])
            yield state.llama_state

    def _identity(self, document: Document) -> dict[str, Any]:
        return self._store.identity_of(document.owner) | {"ratio": document.ratio}
