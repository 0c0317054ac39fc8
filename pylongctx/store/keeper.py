"""A session and the store: what it evaluates is stored, and what is stored is not evaluated."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pylongctx.errors import LctxError
from pylongctx.state import LlamaState
from pylongctx.store.finder import NO_LOGITS, Finder, joined, tail_name, tails
from pylongctx.store.keys import chain
from pylongctx.store.layout import BLOCK, DOCUMENT, LEAST, POINT, ROWS, TAIL, Layout
from pylongctx.store.words import LOOK, first_words, shown

if TYPE_CHECKING:
    from pylongctx.engine.documents import Document
    from pylongctx.engine.session import Session
    from pylongctx.store.store import KVStore


class Keeper:
    """What of one session goes to the store, and comes from there, see ``Layout``.

    Parameters
    ----------
    session : Session
        The sequence.
    store : KVStore
        Where to.

    Attributes
    ----------
    owner : str or None
        For whom the session reads: nobody goes on from what was evaluated for somebody else.
    finds : bool
        Whether prompts may come from the store.
    n_found : int
        Tokens of the last prompt that came from there.
    """

    def __init__(self, session: Session, store: KVStore) -> None:
        self.owner: str | None = None
        self.finds = True
        self.n_found = 0
        self._session, self._store = session, store
        self._layout = Layout.of(session.context)
        self._end = 0  # of the text that is being evaluated

    def begin(self, pos: int, n: int) -> None:
        """Take note that a text of ``n`` tokens follows position ``pos``."""
        self._end = pos + n

    def cut(self, pos: int, n: int) -> int:
        """Return how many of ``n`` tokens from ``pos`` on a step may take: it ends where a point is stored."""
        borders = range((pos // BLOCK + 1) * BLOCK, pos + n, BLOCK)
        return next((border - pos for border in borders if self._layout.is_point(border, self._end)), n)

    def reach(self, start: int, end: int) -> None:
        """Store the blocks that the session has evaluated between two lengths."""
        if start // BLOCK != end // BLOCK and not self._session.placed:
            self._try(lambda: self._keep_blocks(start, end))

    def finish(self) -> None:
        """Store the tail of the text when its end is reached, whose logits are known."""
        n = self._session.n_tokens
        border = n // BLOCK * BLOCK
        if n != self._end or not 0 < border <= n - LEAST or self._session.placed:
            return
        if not self._layout.has_rows or self._session.context.place(n) == n:  # a part may end there
            self._try(lambda: self._keep_tail(border, n))

    def restore(self, tokens: NDArray[np.int32], prefix: int) -> bool:
        """Let the session begin with as many tokens of a text as are stored, if those are more than ``prefix``.

        Returns whether the session was changed; what it holds begins the text then.
        """
        self.n_found = 0
        if not self.finds:
            return False
        finder = Finder(self._session, self._store, self._layout, self._identity(), tokens)
        self.n_found = finder.load(prefix)
        return finder.changed

    def keep(self, document: Document) -> None:
        """Store the rows of a document that was compressed."""
        rows, tokens = document.rows, document.prompt
        assert rows is not None
        identity = self._identity_of(document)
        about = {"first": 0, "end": len(tokens), "before": "", "seconds": 0.0} | self._title(document) | identity
        name = chain(identity, tokens, len(tokens))[0]
        self._try(lambda: self._store.write([name], DOCUMENT, LlamaState(tokens, NO_LOGITS, rows, about)))

    def find(self, document: Document) -> NDArray[np.uint8] | None:
        """Return what ``keep`` stored of a document."""
        tokens, identity = document.prompt, self._identity_of(document)
        name = chain(identity, tokens, len(tokens))[0]
        state = self._store.read(name, DOCUMENT)
        if (
            state is None
            or not np.array_equal(state.input_ids, tokens)
            or not identity.items() <= state.identity.items()
        ):
            return None
        self._store.usage.hits += 1
        self._store.usage.tokens += len(tokens)
        self._store.use([name])
        self._session.say(f"{len(tokens)} tokens of {document.name[:40]!r}, compressed, come from the KV store")
        return state.llama_state

    def _identity_of(self, document: Document) -> dict[str, object]:
        return self._identity() | {"ratio": document.ratio}

    def _identity(self) -> dict[str, object]:
        return dict(self._store.identity()) | ({"owner": self.owner} if self.owner else {})

    def _title(self, document: Document | None = None) -> dict[str, object]:
        """Return what ``pylongctx kv ls`` shows of the session's text or of a document."""
        title: dict[str, object] = {"written": int(time.time()), "source": "document" if document else "prompt"}
        if not self._store.words:
            return title
        if document is None:
            return title | {"words": first_words(self._session.model, self._session.tokens[:LOOK])}
        named = {"source": f"document {shown(document.name)}"} if document.name != document.text else {}
        return title | named | {"words": shown(document.text)}

    def _try(self, keep: Callable[[], None]) -> None:
        """Store something; nothing of that may fail the evaluation."""
        try:
            keep()
        except (LctxError, MemoryError, OSError) as reason:
            self._session.say(f"not stored: {reason}")

    def _keep_blocks(self, start: int, end: int) -> None:
        context, seq = self._session.context, self._session.seq
        names = chain(self._identity(), self._session.tokens[:end], BLOCK)
        for i in range(start // BLOCK if self._layout.has_rows else len(names), len(names)):
            if not self._store.has(names[i], ROWS):
                data = context.part(i * BLOCK, (i + 1) * BLOCK, seq)
                self._write(names[: i + 1], ROWS, i * BLOCK, (i + 1) * BLOCK, data, NO_LOGITS)
        if self._layout.is_point(end, self._end) and not self._store.has(names[-1], POINT):
            self._write(names, POINT, end - BLOCK, end, self._point(), NO_LOGITS)

    def _keep_tail(self, border: int, n: int) -> None:
        tail = self._session.tokens[border:n]
        names = chain(self._identity(), self._session.tokens[:border], BLOCK)
        name = tail_name(names[-1], tail)
        if self._store.has(name, TAIL):
            return
        layout, context = self._layout, self._session.context
        rows = context.part(border, n, self._session.seq) if layout.has_rows else np.empty(0, np.uint8)
        point = self._point() if layout.has_points else np.empty(0, np.uint8)
        for n_tail, path in tails(self._store.folder, names[-1], tail):
            if n_tail < len(tail):
                path.unlink(missing_ok=True)  # a text that grows has one
        self._write([*names, name], TAIL, border, n, joined(rows, point), self._session.last_logits)

    def _point(self) -> NDArray[np.uint8]:
        context, seq = self._session.context, self._session.seq
        return context.rest(seq) if self._layout.has_rows else context.state(seq)

    def _write(
        self, names: list[str], kind: str, first: int, end: int, data: NDArray[np.uint8], logits: NDArray[np.float32]
    ) -> None:
        context = self._session.context
        seconds = (end - first) * context.step_seconds / max(1, context.step_tokens)
        before = names[-2] if len(names) > 1 else ""
        about = {"first": first, "end": end, "before": before, "seconds": round(seconds, 6)} | self._title()
        tokens = self._session.tokens[first:end].copy()
        self._store.write(names, kind, LlamaState(tokens, logits.copy(), data, about | self._identity()))
