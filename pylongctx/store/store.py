"""The store of one model, with its writer thread."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from pylongctx._log import LOG
from pylongctx.engine.identity import WEIGHTS
from pylongctx.engine.saved_state import LlamaState
from pylongctx.errors import LctxError
from pylongctx.store import trust
from pylongctx.store.folder import Folder

DEFAULT_LIMIT = 20 << 30
PENDING = 512 << 20  # maximum bytes waiting to be written; further blocks are dropped

Key = tuple[str, str]  # name and kind of a block
Item = tuple[list[str], LlamaState | None]  # names of the blocks up to this one, and its data; None: a use
USE = "use"  # instead of a kind: records a use


@dataclass
class StoreUsage:
    """Counters of a store since it was opened.

    Attributes
    ----------
    hits, misses : int
        Prompts with a stored prefix beyond the KV cache, and prompts without one.
    tokens : int
        Tokens loaded.
    bytes_read, bytes_written : int
        Bytes of blocks.
    seconds_saved : float
        Time that the evaluation of these tokens took originally, minus the time to load them.
    lost : int
        Blocks that could not be written or read, or were found damaged.
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

    ``identity`` returns the part of the identity that is known at once, ``weights`` the digest of the whole model: it
    waits until that is computed, or raises InvalidInput when it cannot be. With ``words`` the first words of texts are
    stored, for ``pylongctx kv ls``. Raises OSError when the folder cannot be created, PermissionError when another user
    owns it or may write to it, see ``trust``.
    """

    def __init__(
        self,
        path: str,
        limit: int,
        identity: Callable[[], Mapping[str, Any]],
        weights: Callable[[], str],
        words: bool = True,
    ) -> None:
        self.folder = Folder(path, limit)
        trust.check(self.folder.path)
        self.identity = identity
        self.words = words
        self._weights = weights
        self.usage = StoreUsage()
        self._pending: dict[Key, Item] = {}  # pending writes in order; the first one is in progress
        self._changed = threading.Condition()  # guards the pending writes and the two attributes below
        self._closing = False
        self._thread: threading.Thread | None = None
        self._warned: set[str] = set()  # kinds of trouble that were logged

    def identity_of(self, owner: str | None) -> dict[str, Any]:
        """Return the identity of an owner's KV entries, which differs from those of other owners."""
        return dict(self.identity()) | ({"owner": owner} if owner else {})

    def facts(self) -> dict[str, Any]:
        """Return the counters and the content of the folder, or why it cannot be listed."""
        try:
            entries = self.folder.entries()
        except OSError as reason:
            return asdict(self.usage) | {"limit": self.folder.limit, "error": str(reason)}
        held = {"files": len(entries), "bytes": sum(entry.n_bytes for entry in entries), "limit": self.folder.limit}
        return asdict(self.usage) | held

    def has(self, name: str, kind: str) -> bool:
        """Return True if a block exists or is pending."""
        with self._changed:
            return (name, kind) in self._pending or self.folder.has(name, kind)

    def write(self, names: list[str], kind: str, state: LlamaState) -> None:
        """Queue the last of these blocks for writing; dropped blocks are logged once."""
        with self._changed:
            if sum(waiting.nbytes for _, waiting in self._pending.values() if waiting) > PENDING:
                self._lose("busy", "tokens are evaluated faster than they are written")
            elif not self._has_thread():
                self.usage.lost += 1
            else:
                self._pending.setdefault((names[-1], kind), (names, state))  # the name identifies the content
                self._changed.notify_all()

    def use(self, names: list[str]) -> None:
        """Queue the record that a text uses these blocks, even if its rows come from memory."""
        with self._changed:
            if names and self._has_thread():
                self._pending[names[-1], USE] = names, None
                self._changed.notify_all()

    def read(self, name: str, kind: str) -> LlamaState | None:
        """Return a block of this model; None when it is missing or unreadable."""
        try:
            there = self.folder.has(name, kind)
            state = self.folder.read(name, kind)
            if state is None:
                self.usage.lost += there
                return None
            self.usage.bytes_read += state.nbytes
            return state if state.identity.get(WEIGHTS) == self._weights() else None
        except LctxError as reason:  # the files changed, so the model is unknown
            self._lose("model", str(reason))
        except (OSError, MemoryError) as reason:
            self._lose("read", f"blocks cannot be read, and are kept: {_text(reason)}")
        return None

    def flush(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds until everything is written; returns whether nothing is pending.

        It does not wait for a thread that does not exist, such as in the child of a fork.
        """
        with self._changed:
            self._changed.wait_for(lambda: not (self._pending and self._is_writing()), timeout)
            return not self._pending

    def close(self) -> None:
        """Write pending blocks, and end the thread."""
        with self._changed:
            thread, self._closing = self._thread, True
            self._changed.notify_all()
        if thread is not None:
            thread.join()
        self._closing = False

    def _is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _has_thread(self) -> bool:
        """Start the writer thread if needed; returns whether it runs."""
        if self._is_writing():
            return True
        thread = threading.Thread(target=self._run, name="pylongctx-store", daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as reason:  # no more threads are available
            self._warn("thread", f"blocks cannot be written: {_text(reason)}")
            return False
        self._thread = thread
        return True

    def _run(self) -> None:
        try:
            while (first := self._next()) is not None:
                key, (names, state) = first
                try:
                    self._keep(names, key[1], state)
                finally:
                    with self._changed:
                        del self._pending[key]
                        self._changed.notify_all()
        finally:
            with self._changed:
                self._thread = None
                self._changed.notify_all()

    def _next(self) -> tuple[Key, Item] | None:
        """Wait for the next pending write and return it; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._closing)
            return next(iter(self._pending.items()), None)

    def _keep(self, names: list[str], kind: str, state: LlamaState | None) -> None:
        """Write a block, if there is one, and record its use; no error may end the thread."""
        try:
            if state is None:
                self.folder.touch(names)
                return
            state = replace(state, identity={**state.identity, WEIGHTS: self._weights()})
            self.usage.bytes_written += self.folder.write(names[-1], kind, state)
            self.folder.touch(names)
        except (OSError, MemoryError, LctxError) as reason:
            self._lose("write", f"some blocks were not stored: {_text(reason)}")
        except Exception as reason:
            self._lose("bug", f"some blocks were not stored, a bug in pylongctx: {_text(reason)}", exc_info=True)

    def _lose(self, kind: str, why: str, exc_info: bool = False) -> None:
        """Count a block that was not stored or not loaded, and log the reason."""
        self.usage.lost += 1
        self._warn(kind, why, exc_info)

    def _warn(self, kind: str, why: str, exc_info: bool = False) -> None:
        """Log a warning, once per kind of trouble."""
        if kind not in self._warned:
            self._warned.add(kind)
            LOG.warning("the KV store %s: %s", self.folder.path, why, exc_info=exc_info)


def _text(reason: BaseException) -> str:
    return str(reason) or type(reason).__name__  # a MemoryError may have no text
