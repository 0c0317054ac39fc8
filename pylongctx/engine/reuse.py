"""Reuse of evaluated tokens: a plan of pieces for a prompt, each from one source, their reading and loading."""

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from pylongctx._log import LOG
from pylongctx._platform import lower_priority
from pylongctx.engine.documents import Document, Placed, common
from pylongctx.engine.prefix import Gap, find_gaps, longest_prefix
from pylongctx.engine.session import Session, Watcher

NICENESS = 10  # reading takes at most a tenth of a core from evaluation
Item = TypeVar("Item")
Tokens = NDArray[np.int32]
NO_BYTES = np.empty(0, np.uint8)
NO_LOGITS = np.empty(0, np.float32)


class Now(Generic[Item]):
    """The items of an iterator that never blocks, with the interface of ``Fetch``."""

    ready = True

    def __init__(self, items: Iterator[Item]) -> None:
        self._items = items

    def take(self) -> Item | None:
        """Return the next item; None after the last one."""
        return next(self._items, None)

    def go_on(self, rest: float = 0.0) -> None:
        """Do nothing: the next item is always available."""

    def cancel(self) -> None:
        """Do nothing: nothing is read ahead."""


class Fetch(Generic[Item]):
    """The items of an iterator, read one ahead by a separate thread, which calls ``wake`` when one is available."""

    def __init__(self, items: Iterator[Item], wake: Callable[[], None]) -> None:
        self._items, self._wake = items, wake
        self._queue: queue.SimpleQueue[Item | Exception | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(1)
        self._cancelled = threading.Event()
        self._rest = 0.0
        threading.Thread(target=self._run, name="pylongctx-fetch", daemon=True).start()

    @property
    def ready(self) -> bool:
        """True if ``take`` returns at once."""
        return not self._queue.empty()

    def take(self) -> Item | None:
        """Wait for the next item, None after the last one; raises the iterator's exceptions."""
        item = self._queue.get()
        if isinstance(item, Exception):
            raise item
        return item

    def go_on(self, rest: float = 0.0) -> None:
        """Request the next item, after a pause of ``rest`` seconds."""
        self._rest = rest
        self._room.release()

    def cancel(self) -> None:
        """Stop reading."""
        self._cancelled.set()
        self._room.release()

    def _run(self) -> None:
        with suppress(OSError):
            lower_priority(threading.get_native_id(), NICENESS)
        end: Exception | None = None
        try:
            for item in self._items:
                self._room.acquire()
                if self._cancelled.wait(self._rest):
                    return
                self._queue.put(item)
                self._wake()
        except Exception as reason:  # passed on to the engine
            end = reason
        self._queue.put(end)
        self._wake()


@dataclass(frozen=True, eq=False)
class Piece:
    """Tokens of a prompt, from ``first`` to before ``end``, whose KV entries a source has."""

    source: "Source"
    first: int  # a sequence must hold the tokens before it, and nothing after them
    end: int
    key: Any = None  # the source's key to fetch it
    logits: bool = False  # the logits after the last of them are known
    exact: bool = True  # the rows equal those of a full prefill; else no other source can continue them
    gaps: tuple[Gap, ...] = ()  # runs of tokens that leave the source's text first, in this order


@dataclass(frozen=True, eq=False)
class Load:
    """Data of a sequence from a source."""

    tokens: Tokens  # of the data
    # the rows of the tokens, to append to those of the sequence, see ``Context.slice``
    rows: NDArray[np.uint8] = field(default_factory=lambda: NO_BYTES)
    # a whole sequence, which replaces the current one, see ``Context.state``
    state: NDArray[np.uint8] = field(default_factory=lambda: NO_BYTES)
    # windows and recurrent states at the end, see ``Context.foreign``
    foreign: NDArray[np.uint8] = field(default_factory=lambda: NO_BYTES)
    # [n_vocab] after the last token, or empty
    logits: NDArray[np.float32] = field(default_factory=lambda: NO_LOGITS)
    placed: Placed | None = None  # the document that the rows come from


class Source(ABC):
    """A source of KV entries of evaluated texts."""

    name: str  # in the log
    slow = False  # ``fetch`` reads files
    whole = False  # a sequence is only usable after all loads of a piece

    @abstractmethod
    def covers(self, tokens: Tokens, held: int) -> Piece | None:
        """Return the piece that ends last, for a sequence that could hold ``held`` tokens of the prompt.

        It begins at a token up to ``held``; None: no piece ends after ``held``.
        """

    @abstractmethod
    def fetch(self, piece: Piece) -> Iterator[Load]:
        """Yield the loads of a piece; a slow source may be called in any thread."""

    def fail(self, piece: Piece, reason: Exception) -> bool:
        """Drop a piece whose loads raised ``reason``; returns whether to plan the prompt again."""
        LOG.info("%s cannot be used: %s", self.name, reason)
        return False

    def planned(self, tokens: Tokens, pieces: Sequence[Piece]) -> None:
        """Record the plan of a prompt, int32 [n] up to its first document."""
        return


class Held(Source):
    """A sequence as the source of a prompt that continues it.

    ``placed`` are the parts of the prompt that come from documents. With ``min_chunk``, rows computed with tokens that
    the prompt lacks are accepted, if at least so many follow such a gap; 0: none are.
    """

    name = "the sequence"

    def __init__(self, session: Session, placed: Sequence[Placed] = (), min_chunk: int = 0) -> None:
        self._session, self._placed, self._min_chunk = session, placed, min_chunk

    def shared(self, tokens: Tokens) -> int:
        """Return the length of the common prefix with a prompt whose rows are valid for it."""
        session = self._session
        if self._min_chunk:
            return longest_prefix(session.tokens, tokens)
        return common(session.tokens, session.placed, tokens, self._placed)

    def covers(self, tokens: Tokens, held: int = 0) -> Piece | None:
        """Return the piece to which the sequence can be cut."""
        session, gaps = self._session, list[Gap]()
        if self._min_chunk and not session.shared:
            gaps, n = find_gaps(session.tokens, tokens, self._min_chunk, session.spans)
        if not gaps:
            n = session.reachable(self.shared(tokens))
        known = not gaps and session.has_logits and n == session.n_tokens
        exact = not gaps and (session.seam is None or n <= session.seam)
        return Piece(self, 0, n, None, known, exact, tuple(gaps)) if n > held else None

    def fetch(self, piece: Piece) -> Iterator[Load]:
        """Yield nothing: the sequence already has the rows."""
        return iter(())


class Reading(Source):
    """Documents as a source: their rows were computed independently and can follow any others.

    A document that cannot be placed is evaluated normally.
    """

    name = "a document"

    def covers(self, tokens: Tokens, held: int) -> Piece | None:
        """Return None: ``Documents.find`` locates them in a prompt."""
        return None

    def fetch(self, piece: Piece) -> Iterator[Load]:
        """Yield the rows of the document."""
        yield Load(piece.key[0], placed=piece.key[1])


def plan(tokens: Tokens, sources: Sequence[Source], placed: Sequence[Placed] = ()) -> list[Piece]:
    """Plan the sources of a prompt's rows; tokens between the pieces are evaluated.

    A source of the prefix is used where it ends later than those before it; only the first one may be a sequence that
    holds documents of the prompt. ``placed`` are the parts that come from documents, ascending. The pieces are
    ascending, without overlap. After the last one at least one token is evaluated, unless its logits are known.
    """
    pieces: list[Piece] = []
    for i, source in enumerate(sources):
        text = tokens[: placed[0].first] if placed and i else tokens
        held = pieces[-1].end if pieces else 0
        piece = source.covers(text, held)
        if piece is not None and piece.end == len(tokens) and not piece.logits:
            piece = source.covers(text[: len(tokens) - 1], held)  # one token is evaluated for its logits
        if piece is None or piece.end <= held:
            continue
        before = _up_to(piece.first, tokens, sources[:i])
        pieces = [*before, piece if before else replace(piece, first=0)]
        if not piece.exact:
            break
    end = pieces[-1].end if pieces else 0
    documents = [Piece(Reading(), p.first, p.end, (tokens[p.first : p.end], p)) for p in placed if p.first >= end]
    return pieces + documents


def n_cached(pieces: Sequence[Piece]) -> int:
    """Return how many tokens a plan takes from sources."""
    return sum(piece.end - piece.first for piece in pieces)


def _up_to(first: int, tokens: Tokens, sources: Sequence[Source]) -> list[Piece]:
    """Return a piece for all tokens before ``first``, where another piece begins; empty if no source has it."""
    found = (source.covers(tokens[:first], first - 1) for source in sources if first)
    return next(([piece] for piece in found if piece is not None and piece.first == 0 and piece.exact), [])


def without_gaps(session: Session, piece: Piece) -> int:
    """Remove the gaps of a piece from a sequence; returns how many tokens of the prompt it then holds."""
    for gap in piece.gaps:
        if refusal := session.drop(*gap):
            session.log(f"tokens cannot be evicted, so the text after them is evaluated again: {refusal}")
            return gap[0]
    return piece.end


def hold(session: Session, piece: Piece | None) -> None:
    """Cut a sequence to a piece of its own tokens; None: clear it."""
    n = 0 if piece is None else without_gaps(session, piece)
    if n < session.n_tokens or session.shared or session.n_past != session.n_tokens:
        session.checkpoints.request(n)
        session.rewind(n)


def apply(session: Session, load: Load) -> None:
    """Load a piece into a sequence; no other function writes rows that were not evaluated in it.

    Raises LctxError or MemoryError when the data does not fit. The sequence is unchanged or empty.
    """
    if len(load.state):
        session.load(load.tokens, load.logits, load.state)
        return
    if load.placed is not None:
        session.place(load.placed, load.tokens)
    elif len(load.rows):
        session.append(load.tokens, load.rows)
    if len(load.foreign):
        session.context.set_foreign(load.foreign, session.seq)
    if len(load.logits) == session.model.info.n_vocab:
        session.settle(session.n_tokens, load.logits)


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
