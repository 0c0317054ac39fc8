"""The interface between the engine and a store of evaluated tokens."""

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pylongctx.engine.documents import Document
from pylongctx.engine.reuse import Source
from pylongctx.engine.session import Session, Watcher


class Library(Protocol):
    """The texts of one model and context that are stored."""

    def finder(self, owner: str | None) -> Source:
        """Return the source of an owner's prompts."""

    def keeper(self, session: Session) -> Watcher:
        """Return the writer of a session's texts."""

    def keep(self, document: Document) -> None:
        """Store the rows of a document that was compressed."""

    def find(self, document: Document) -> Iterator[NDArray[np.uint8]]:
        """Yield the rows of a document that ``keep`` stored, if any; reads a file."""
