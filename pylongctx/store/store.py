"""The store of one model, with the thread that writes to it."""

import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pylongctx._log import LOG
from pylongctx.engine.identity import WEIGHTS
from pylongctx.errors import LctxError
from pylongctx.state import LlamaState
from pylongctx.store.folder import Folder

DEFAULT_LIMIT = 20 << 30
PENDING = 512 << 20  # bytes that wait to be written; what comes then is not kept


@dataclass
class StoreUsage:
    """What a store has done since it was opened.

    Attributes
    ----------
    hits, misses : int
        Prompts of which something was found that was not in the cache, and of which nothing was.
    tokens : int
        Tokens that were found.
    bytes_read, bytes_written : int
        Of blocks.
    seconds_saved : float
        How long these tokens took to be evaluated when they were stored, less the time to read them back.
    lost : int
        Blocks that could not be written, or were found damaged.
    """

    hits: int = 0
    misses: int = 0
    tokens: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    seconds_saved: float = 0.0
    lost: int = 0


class KVStore:
    """Blocks of evaluated tokens in a folder, see ``Folder``.

    Parameters
    ----------
    path : str
        The folder.
    limit : int
        Most bytes of its files.
    identity : callable
        Returns what rows depend on beside the tokens and is known at once.
    weights : callable
        Returns the digest of the whole model; waits until it is known, InvalidInput when it cannot be.

    Attributes
    ----------
    usage : StoreUsage
        What it has done.
    """

    def __init__(
        self, path: str, limit: int, identity: Callable[[], Mapping[str, Any]], weights: Callable[[], str]
    ) -> None:
        self.folder = Folder(path, limit)
        self.identity = identity
        self._weights = weights
        self.usage = StoreUsage()
        self._waiting: queue.Queue[tuple[list[str], str, LlamaState] | None] = queue.Queue()
        self._pending: dict[tuple[str, str], int] = {}  # bytes of what waits
        self._guard = threading.Lock()
        self._told = False  # of a failure: one line is enough
        self._thread: threading.Thread | None = None

    def facts(self) -> dict[str, Any]:
        """Return the counters, and what the folder holds."""
        entries = self.folder.entries()
        held = {"files": len(entries), "bytes": sum(entry.n_bytes for entry in entries), "limit": self.folder.limit}
        return asdict(self.usage) | held

    def has(self, name: str, kind: str) -> bool:
        """Return whether a block is there, or will be."""
        with self._guard:
            return (name, kind) in self._pending or self.folder.has(name, kind)

    def write(self, names: list[str], kind: str, state: LlamaState) -> None:
        """Write the last of these blocks later; what cannot be kept is not, and the log says so once."""
        with self._guard:
            if sum(self._pending.values()) > PENDING:
                self._lose("tokens are evaluated faster than they are written")
                return
            self._pending[names[-1], kind] = state.nbytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pylongctx-store", daemon=True)
                self._thread.start()
        self._waiting.put((names, kind, state))

    def read(self, name: str, kind: str) -> LlamaState | None:
        """Return a block of this model, or None."""
        there = self.folder.has(name, kind)
        state = self.folder.read(name, kind)
        if state is None:
            self.usage.lost += there
            return None
        self.usage.bytes_read += state.nbytes
        try:
            return state if state.identity.get(WEIGHTS) == self._weights() else None
        except LctxError as reason:  # the files changed: nothing says which model this is
            self._lose(str(reason))
            return None

    def flush(self) -> None:
        """Wait until all is written."""
        self._waiting.join()

    def close(self) -> None:
        """Write what waits, and end the thread."""
        with self._guard:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._waiting.put(None)
            thread.join()

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            names, kind, state = item
            try:
                state = replace(state, identity={**state.identity, WEIGHTS: self._weights()})
                self.usage.bytes_written += self.folder.write(names[-1], kind, state)
                self.folder.touch(names)
            except (OSError, LctxError) as reason:
                self._lose(str(reason))
            with self._guard:
                self._pending.pop((names[-1], kind), None)
            self._waiting.task_done()
        self._waiting.task_done()

    def _lose(self, why: str) -> None:
        self.usage.lost += 1
        if not self._told:
            self._told = True
            LOG.warning("the KV store %s does not keep everything: %s", Path(self.folder.path), why)
