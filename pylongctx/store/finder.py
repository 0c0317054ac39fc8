"""What is stored of a text, and how a session comes to hold it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pylongctx.errors import LctxError
from pylongctx.state import LlamaState, read_tokens
from pylongctx.store.folder import Folder
from pylongctx.store.keys import DIGEST, chain
from pylongctx.store.layout import BLOCK, POINT, ROWS, TAIL, Layout

if TYPE_CHECKING:
    from pylongctx.engine.session import Session
    from pylongctx.store.store import KVStore

HEAD = 16  # bytes of a tail before its rows
NO_LOGITS = np.empty(0, np.float32)


@dataclass(frozen=True)
class Place:
    """Where a session can go on: after some whole blocks, and what a file holds at their end or behind it.

    Attributes
    ----------
    n_block : int
        Whole blocks.
    end : int
        Tokens.
    kind, name : str
        The file that completes it; for ROWS that of the last block.
    """

    n_block: int
    end: int
    kind: str
    name: str


class Finder:
    """The stored beginning of a text.

    Parameters
    ----------
    session : Session
        What shall hold it.
    store : KVStore
        Where it is.
    layout : Layout
        What its files hold.
    identity : mapping
        What they depend on.
    tokens : numpy.ndarray
        int32 [n], the text.

    Attributes
    ----------
    changed : bool
        Whether the session was changed.
    """

    def __init__(
        self,
        session: Session,
        store: KVStore,
        layout: Layout,
        identity: Mapping[str, Any],
        tokens: NDArray[np.int32],
    ) -> None:
        self._session, self._store, self._layout = session, store, layout
        self._identity, self._tokens = identity, tokens
        self._names = chain(identity, tokens, BLOCK)
        self._prefix = 0  # tokens that the session holds of the text
        self._seconds = 0.0  # that its blocks took when they were evaluated
        self.changed = False

    def load(self, prefix: int) -> int:
        """Let the session hold more than ``prefix`` tokens of the text; returns how many more."""
        usage, started, self._prefix = self._store.usage, time.monotonic(), prefix
        used = list(self._names)
        for place in self._places(prefix):
            self.changed = True
            if self._go_to(place):
                used += [place.name] if place.kind == TAIL else []
                break
        n = self._session.n_tokens - prefix if self.changed else 0
        if n > 0:
            usage.hits += 1
            usage.tokens += n
            usage.seconds_saved += self._seconds - (time.monotonic() - started)
            self._session.say(f"{n} tokens come from the KV store")
        elif len(self._tokens) // BLOCK * BLOCK > prefix:
            usage.misses += 1
        self._store.use(used)
        return max(n, 0)

    def _places(self, prefix: int) -> Iterator[Place]:
        """Yield where the session can go on, the most tokens first."""
        has, n = self._store.folder.has, len(self._tokens)
        n_block = len(self._names)
        if self._layout.has_rows:
            n_block = next((i for i in range(prefix // BLOCK, n_block) if not has(self._names[i], ROWS)), n_block)
        for i in range(n_block, 0, -1):
            rest = self._tokens[i * BLOCK :]
            for n_tail, path in sorted(tails(self._store.folder, self._names[i - 1], rest), reverse=True):
                if i * BLOCK + n_tail > prefix:
                    yield Place(i, i * BLOCK + n_tail, TAIL, path.stem)
            if i * BLOCK <= prefix:
                return
            if i * BLOCK == n:
                continue  # one token is evaluated to get its logits
            if not self._layout.has_points:
                yield Place(i, i * BLOCK, ROWS, self._names[i - 1])
                return
            if has(self._names[i - 1], POINT):
                yield Place(i, i * BLOCK, POINT, self._names[i - 1])

    def _go_to(self, place: Place) -> bool:
        """Load a place; False: a file is damaged or does not fit, and there may be another one."""
        session = self._session
        try:
            if not (self._load_blocks(place) and self._complete(place)):
                if not self._layout.has_points:
                    return session.n_tokens > 0  # the rows of what is sound
                session.clear()
                return False
        except (LctxError, MemoryError) as reason:  # of another version, or with a context that is too small
            session.say(f"the KV store has no use: {reason}")
            session.clear()
            return False
        return True

    def _load_blocks(self, place: Place) -> bool:
        """Let the session hold the rows of the whole blocks."""
        if not self._layout.has_rows:
            return True
        session, start = self._session, 0 if self._layout.has_points else self._prefix // BLOCK * BLOCK
        first = session.rewind(start)  # less, where the cache cannot be cut there
        first = session.rewind(0) if first % BLOCK else first
        for i in range(first // BLOCK, place.n_block):
            state = self._sound(self._names[i], ROWS, i * BLOCK, (i + 1) * BLOCK)
            if state is None:
                return False
            session.append(state.input_ids, state.llama_state)
            self._seconds += _seconds(state)
        return True

    def _complete(self, place: Place) -> bool:
        """Load what is known beside the rows of whole blocks."""
        border = place.n_block * BLOCK
        if place.kind == ROWS:
            return True
        state = self._sound(place.name, place.kind, border if place.kind == TAIL else border - BLOCK, place.end)
        if state is None:
            return False
        rows, point = _split(state.llama_state) if place.kind == TAIL else (None, state.llama_state)
        session, layout = self._session, self._layout
        if not layout.has_rows:
            session.load(self._tokens[: place.end], NO_LOGITS, point)
            self._seconds = _seconds(state) / len(state.input_ids) * place.end
        elif rows is not None:
            session.append(state.input_ids, rows)
            self._seconds += _seconds(state)
        if layout.has_rows and layout.has_points:
            session.context.set_rest(point, session.seq)
        if len(state.logits) == session.model.info.n_vocab:
            session.settle(place.end, state.logits)
        return True

    def _sound(self, name: str, kind: str, first: int, end: int) -> LlamaState | None:
        """Return the file of a part of the text, when it holds just that."""
        state = self._store.read(name, kind)
        if state is None or not np.array_equal(state.input_ids, self._tokens[first:end]):
            return None
        return state if all(state.identity.get(key) == value for key, value in self._identity.items()) else None


def tail_name(block: str, tokens: NDArray[np.int32]) -> str:
    """Return the name of a tail behind a block."""
    digest = hashlib.blake2b(np.ascontiguousarray(tokens, "<i4").tobytes(), digest_size=DIGEST)
    return f"{block}-{digest.hexdigest()}"


def tails(folder: Folder, block: str, rest: NDArray[np.int32]) -> list[tuple[int, Path]]:
    """Return lengths and files of the tails behind a block with which a text goes on."""
    found = [(_tokens_of(path), path) for path in folder.tails(block)]
    return [(len(tail), path) for tail, path in found if len(tail) and np.array_equal(tail, rest[: len(tail)])]


def _split(data: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the rows of a tail, and its point."""
    n_rows = int(data[:8].view(np.uint64)[0]) if len(data) >= HEAD else len(data)
    return data[HEAD : HEAD + n_rows], data[HEAD + n_rows :]


def joined(rows: NDArray[np.uint8], point: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return what a tail holds: the length of its rows, the rows, and its point."""
    return np.concatenate([np.array([len(rows), 0], np.uint64).view(np.uint8), rows, point])


def _tokens_of(path: Path) -> NDArray[np.int32]:
    """Return the tokens of a tail; none when it is damaged, gone or cannot be read."""
    try:
        return read_tokens(path)
    except (LctxError, ValueError, OSError, MemoryError):
        return np.empty(0, np.int32)


def _seconds(state: LlamaState) -> float:
    """Return how long the tokens of a file took to be evaluated."""
    seconds = state.identity.get("seconds")
    return float(seconds) if isinstance(seconds, int | float) else 0.0
