"""The store of one model, with the thread that writes to it."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from pylongctx._log import LOG
from pylongctx.engine.identity import WEIGHTS
from pylongctx.errors import LctxError
from pylongctx.state import LlamaState
from pylongctx.store import trust
from pylongctx.store.folder import Folder

DEFAULT_LIMIT = 20 << 30
PENDING = 512 << 20  # bytes that wait to be written; what comes then is not kept

Key = tuple[str, str]  # name and kind of a block
Item = tuple[list[str], LlamaState | None]  # the names of the blocks up to this one, and what it holds; None: a use
USE = "use"  # in the place of a kind: blocks are not written but used


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
    words : bool
        Whether blocks have the first words of their text, for ``pylongctx kv ls``.

    Attributes
    ----------
    usage : StoreUsage
        What it has done.

    Raises
    ------
    OSError
        When the folder cannot be made.
    PermissionError
        When another user owns it or may write to it, see ``trust``.
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
        self._pending: dict[Key, Item] = {}  # what waits, in this order; the first is being written
        self._changed = threading.Condition()  # guards the pending, and the two below
        self._closing = False
        self._thread: threading.Thread | None = None
        self._warned: set[str] = set()  # kinds of trouble that the log has

    def identity_of(self, owner: str | None) -> dict[str, Any]:
        """Return what rows of an owner's text depend on; rows of other owners have another identity."""
        return dict(self.identity()) | ({"owner": owner} if owner else {})

    def facts(self) -> dict[str, Any]:
        """Return the counters and what the folder holds, or why it cannot be listed."""
        try:
            entries = self.folder.entries()
        except OSError as reason:
            return asdict(self.usage) | {"limit": self.folder.limit, "error": str(reason)}
        held = {"files": len(entries), "bytes": sum(entry.n_bytes for entry in entries), "limit": self.folder.limit}
        return asdict(self.usage) | held

    def has(self, name: str, kind: str) -> bool:
        """Return whether a block is there, or will be."""
        with self._changed:
            return (name, kind) in self._pending or self.folder.has(name, kind)

    def write(self, names: list[str], kind: str, state: LlamaState) -> None:
        """Write the last of these blocks later; what cannot be kept is not, and the log says so once."""
        with self._changed:
            if sum(waiting.nbytes for _, waiting in self._pending.values() if waiting) > PENDING:
                self._lose("busy", "tokens are evaluated faster than they are written")
            elif not self._has_thread():
                self.usage.lost += 1
            else:
                self._pending.setdefault((names[-1], kind), (names, state))  # names say what is in a block
                self._changed.notify_all()

    def use(self, names: list[str]) -> None:
        """Record later that a text goes through these blocks, whether its rows come from here or from memory."""
        with self._changed:
            if names and self._has_thread():
                self._pending[names[-1], USE] = names, None
                self._changed.notify_all()

    def read(self, name: str, kind: str) -> LlamaState | None:
        """Return a block of this model; None when there is none, or it cannot be read."""
        try:
            there = self.folder.has(name, kind)
            state = self.folder.read(name, kind)
            if state is None:
                self.usage.lost += there
                return None
            self.usage.bytes_read += state.nbytes
            return state if state.identity.get(WEIGHTS) == self._weights() else None
        except LctxError as reason:  # the files changed: nothing says which model this is
            self._lose("model", str(reason))
        except (OSError, MemoryError) as reason:
            self._lose("read", f"blocks cannot be read, and stay: {_text(reason)}")
        return None

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all is written, at most ``timeout`` seconds; returns whether nothing waits any more.

        It does not wait for a thread that has ended, as in the child of a fork.
        """
        with self._changed:
            self._changed.wait_for(lambda: not (self._pending and self._is_writing()), timeout)
            return not self._pending

    def close(self) -> None:
        """Write what waits, and end the thread."""
        with self._changed:
            thread, self._closing = self._thread, True
            self._changed.notify_all()
        if thread is not None:
            thread.join()
        self._closing = False

    def _is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _has_thread(self) -> bool:
        """Return whether there is a thread that writes; starts it."""
        if self._is_writing():
            return True
        thread = threading.Thread(target=self._run, name="pylongctx-store", daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as reason:  # the system has no more threads
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
        """Return what is to be written next, when there is something; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._closing)
            return next(iter(self._pending.items()), None)

    def _keep(self, names: list[str], kind: str, state: LlamaState | None) -> None:
        """Write a block, if there is one, and record its use; nothing that goes wrong may end the thread."""
        try:
            if state is None:
                self.folder.touch(names)
                return
            state = replace(state, identity={**state.identity, WEIGHTS: self._weights()})
            self.usage.bytes_written += self.folder.write(names[-1], kind, state)
            self.folder.touch(names)
        except (OSError, MemoryError, LctxError) as reason:
            self._lose("write", f"not everything is kept: {_text(reason)}")
        except Exception as reason:
            self._lose("bug", f"not everything is kept, by an error in pylongctx: {_text(reason)}", exc_info=True)

    def _lose(self, kind: str, why: str, exc_info: bool = False) -> None:
        """Count a block that is not kept or not found, and say why."""
        self.usage.lost += 1
        self._warn(kind, why, exc_info)

    def _warn(self, kind: str, why: str, exc_info: bool = False) -> None:
        """Write a warning, the first one of each kind of trouble."""
        if kind not in self._warned:
            self._warned.add(kind)
            LOG.warning("the KV store %s: %s", self.folder.path, why, exc_info=exc_info)


def _text(reason: BaseException) -> str:
    return str(reason) or type(reason).__name__  # a MemoryError has no text
