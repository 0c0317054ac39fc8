"""A session and the store: what it evaluates is stored in blocks, and what is stored is not evaluated."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pylongctx._lib import lib
from pylongctx._log import LOG
from pylongctx.errors import LctxError
from pylongctx.state import LlamaState
from pylongctx.store.folder import KINDS
from pylongctx.store.keys import chain

if TYPE_CHECKING:
    from pylongctx.engine.session import Session
    from pylongctx.store.store import KVStore

BLOCK = 512  # tokens: a step of a prompt, so that what follows a stored block is evaluated in the steps that it was
SPACING = 2048  # tokens between two points, where points are large
ROWS, POINT = KINDS


class StoreReader:
    """What of one session goes to the store, and comes from there.

    Where rows stay as they were stored, a block is a file of *rows*. Sliding windows and recurrent states are kept at
    some *points*, beside the rows. Where heads evict, and with llama.cpp's own cache, a point is the whole state.

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
        whole = session.context.place(BLOCK) != BLOCK  # blocks end within chunks
        kind = lib.LCTX_PARTS_NONE if whole else session.context.part_kind
        self.owner: str | None = None
        self.finds = True
        self.n_found = 0
        self._session, self._store = session, store
        self._has_rows = kind != lib.LCTX_PARTS_NONE
        self._has_points = kind != lib.LCTX_PARTS_ROWS
        self._last = 0  # the last border of the text that is being evaluated

    # ---- what is stored ----

    def begin(self, pos: int, n: int) -> None:
        """Take note that a text of ``n`` tokens follows position ``pos``."""
        self._last = (pos + n) // BLOCK * BLOCK

    def cut(self, pos: int, n: int) -> int:
        """Return how many of ``n`` tokens from ``pos`` on a step may take: it ends where a point is stored."""
        if self._has_points:
            for end in range((pos // BLOCK + 1) * BLOCK, pos + n, BLOCK):
                if self._is_point(end):
                    return end - pos
        return n

    def reach(self, start: int, end: int) -> None:
        """Store what the session has evaluated between two lengths; nothing of that may fail the evaluation."""
        if start // BLOCK == end // BLOCK:
            return
        try:
            self._keep(start, end)
        except (LctxError, MemoryError) as reason:
            LOG.warning("not stored: %s", reason)

    def _keep(self, start: int, end: int) -> None:
        context, seq = self._session.context, self._session.seq
        names = self._names(self._session.tokens[:end])
        for i in range(start // BLOCK if self._has_rows else len(names), len(names)):
            if not self._store.has(names[i], ROWS):
                self._put(names, i, ROWS, context.part(i * BLOCK, (i + 1) * BLOCK, seq))
        if self._has_points and self._is_point(end) and not self._store.has(names[-1], POINT):
            self._put(names, len(names) - 1, POINT, context.rest(seq) if self._has_rows else context.state(seq))

    def _put(self, names: list[str], i: int, kind: str, data: NDArray[np.uint8]) -> None:
        tokens = self._session.tokens[i * BLOCK : (i + 1) * BLOCK].copy()
        seconds = BLOCK * self._session.context.seconds_per_token
        about = {"first": i * BLOCK, "before": names[i - 1] if i else "", "seconds": round(seconds, 6)}
        state = LlamaState(tokens, np.empty(0, np.float32), data, about | self._identity())
        self._store.write(names[: i + 1], kind, state)

    def _is_point(self, end: int) -> bool:
        if end % BLOCK:
            return False
        number, rest = divmod(end, SPACING)
        regular = rest == 0 and (self._has_rows or number & (number - 1) == 0)  # whole states: at doubled lengths
        return end == self._last or regular

    # ---- what is found ----

    def restore(self, tokens: NDArray[np.int32], prefix: int) -> bool:
        """Let the session begin with as many tokens of a text as are stored, if those are more than ``prefix``.

        Returns whether the session was changed; what it holds begins the text then.
        """
        self.n_found = 0
        if not self.finds:
            return False
        names = self._names(tokens[: len(tokens) - 1])  # one is evaluated to get its logits
        first, end = self._found(names, prefix)
        if end <= prefix:
            self._store.usage.misses += len(names) * BLOCK > prefix
            return False
        started = time.monotonic()
        n, seconds = self._load(names, first, end, tokens)
        usage = self._store.usage
        if n > prefix:
            self.n_found = n - prefix
            usage.hits += 1
            usage.tokens += n - prefix
            usage.seconds_saved += seconds - (time.monotonic() - started)
            self._store.folder.touch(names[: n // BLOCK])
            self._session.say(f"{n - prefix} tokens come from the KV store")
        return True

    def _found(self, names: list[str], prefix: int) -> tuple[int, int]:
        """Return from which token on rows are wanted, and up to which one they are stored."""
        has = self._store.folder.has
        first = prefix // BLOCK if self._has_rows and not self._has_points else 0
        end = len(names)
        if self._has_rows:
            end = next((i for i in range(first, end) if not has(names[i], ROWS)), end)
        if self._has_points:
            end = next((i for i in range(end, 0, -1) if has(names[i - 1], POINT)), 0)
        return first * BLOCK, end * BLOCK

    def _load(self, names: list[str], first: int, end: int, tokens: NDArray[np.int32]) -> tuple[int, float]:
        """Load blocks, as far as they are sound; returns the session's length, and how long that took when stored."""
        session, seconds = self._session, 0.0
        first = session.rewind(first)  # less, where the cache cannot be cut there
        first = session.rewind(0) if first % BLOCK else first
        try:
            for i in range(first // BLOCK if self._has_rows else end // BLOCK, end // BLOCK):
                state = self._sound(names[i], ROWS, tokens, i * BLOCK)
                if state is None:
                    break
                session.append(tokens[i * BLOCK : (i + 1) * BLOCK], state.llama_state)
                seconds += _seconds(state)
            if self._has_points:
                seconds = self._load_point(names, end, tokens)
        except LctxError as reason:  # of another version, or with a context that is too small
            session.say(f"the KV store has no use: {reason}")
            session.clear()
        return session.n_tokens, seconds

    def _load_point(self, names: list[str], end: int, tokens: NDArray[np.int32]) -> float:
        session = self._session
        point = self._sound(names[end // BLOCK - 1], POINT, tokens, end - BLOCK)
        if point is None or (self._has_rows and session.n_tokens != end):
            session.clear()
            return 0.0
        if self._has_rows:
            session.context.set_rest(point.llama_state, session.seq)
        else:
            session.load(tokens[:end], point.logits, point.llama_state)
        return _seconds(point) / BLOCK * end

    def _sound(self, name: str, kind: str, tokens: NDArray[np.int32], first: int) -> LlamaState | None:
        """Return a block that is what its name says."""
        state = self._store.read(name, kind)
        if state is None or not np.array_equal(state.input_ids, tokens[first : first + BLOCK]):
            return None
        own = self._identity()
        return state if all(state.identity.get(key) == value for key, value in own.items()) else None

    def _identity(self) -> dict[str, object]:
        return dict(self._store.identity()) | ({"owner": self.owner} if self.owner else {})

    def _names(self, tokens: NDArray[np.int32]) -> list[str]:
        return chain(self._identity(), tokens, BLOCK)


def _seconds(state: LlamaState) -> float:
    """Return how long a block took to be evaluated."""
    seconds = state.identity.get("seconds")
    return float(seconds) if isinstance(seconds, int | float) else 0.0
