"""The engine's interface to the store: a source of prompts, a writer per sequence, and compressed documents."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pylongctx.engine.context import Context
from pylongctx.engine.documents import Document
from pylongctx.engine.reuse import NO_LOGITS
from pylongctx.engine.saved_state import LlamaState
from pylongctx.engine.session import Session
from pylongctx.store.finder import Finder
from pylongctx.store.keeper import Keeper
from pylongctx.store.keys import chain
from pylongctx.store.layout import DOCUMENT, Layout
from pylongctx.store.store import KVStore
from pylongctx.store.words import shown


class StoredTexts:
    """The texts of one model and context in a store.

    Parameters
    ----------
    store : KVStore
        The store.
    context : Context
        The context whose KV entries are stored.
    """

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
