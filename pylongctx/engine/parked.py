"""Sequences kept in memory: those that lost their slots, and ends of prompts to which a method cannot go back."""

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from pylongctx._log import LOG
from pylongctx.engine.prefix import find_gaps, longest_prefix
from pylongctx.engine.reuse import NO_LOGITS, Load, Piece, Source, Tokens
from pylongctx.engine.saved_state import LlamaRAMCache, LlamaState
from pylongctx.engine.session import TAIL, Session
from pylongctx.engine.states import States
from pylongctx.errors import LctxError

WORTH = 0.25  # fraction of a state's tokens that it must save to be loaded, since all of them are copied


def evicts(session: Session) -> bool:
    """Return True if the method of a sequence evicts while it reads or answers."""
    rule = session.method.eviction if session.method else None
    return rule is not None and not rule.waits


def can_cut(session: Session) -> bool:
    """Return True if a sequence can be cut anywhere after its state was loaded."""
    return not (session.context.rollback or evicts(session))


class ParkedStates(States):
    """The parked sequences of one owner as a ``Source``; ``min_chunk`` as for ``Held``."""

    name = "memory"

    def __init__(self, session: Session, cache: LlamaRAMCache, min_chunk: int = 0) -> None:
        super().__init__(session, dict)  # the states of one process have the same identity
        self.cache = cache
        self._kept = cache.cache_state
        self._cuts = can_cut(session)
        self._min_chunk = min_chunk

    def covers(self, tokens: Tokens, held: int) -> Piece | None:
        """Return the state with the longest prefix of a prompt, if loading it takes less than it saves."""
        piece = super().covers(tokens, held)
        if self._min_chunk:
            piece = self._with_gaps(tokens, held if piece is None else piece.end) or piece
        pays = piece is not None and piece.end - held >= WORTH * piece.key.n_tokens
        return piece if pays else None

    def fetch(self, piece: Piece) -> Iterator[Load]:
        """Yield the state."""
        if (name := piece.key.input_ids.tobytes()) in self._kept:
            self._kept.move_to_end(name)
        return super().fetch(piece)

    def _with_gaps(self, tokens: Tokens, held: int) -> Piece | None:
        """Return the state that ends last after gaps have left it, if that is after ``held`` tokens."""
        best = None
        for state in self._kept.values():
            gaps, n = find_gaps(state.input_ids, tokens, self._min_chunk, self._session.spans)
            if gaps and n > held and state.input_ids.tobytes() not in self._failed:
                best, held = Piece(self, 0, n, state, exact=False, gaps=tuple(gaps)), n
        return best

    def _cached(self, tokens: Tokens) -> LlamaState | None:
        """Return the state with the longest usable prefix; only ``fetch`` counts as its use."""
        return max(self._kept.values(), key=lambda state: self._offered(state, tokens, 0), default=None)

    def _offered(self, state: LlamaState, tokens: Tokens, held: int) -> int:
        """Return how many tokens of a prompt a state covers."""
        if state.input_ids.tobytes() in self._failed:
            return 0
        n = longest_prefix(state.input_ids, tokens)
        return n if self._cuts else state.end_within(n)


class Parked:
    """States of sequences that lost their slots, at most ``capacity`` bytes of all owners together.

    The least recently used state goes first, of the owner who was not active for the longest time.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._caches: OrderedDict[str | None, LlamaRAMCache] = OrderedDict()  # by owner, the last active one last
        self.n_bytes = 0  # held now; a number, since other threads read it

    def sources(self, session: Session, owner: str | None, min_chunk: int = 0) -> list[Source]:
        """Return the source of an owner's prompts on a sequence, or none if nothing is parked."""
        return [ParkedStates(session, self._cache(owner), min_chunk)] if self.capacity > 0 else []

    def park(self, session: Session, as_it_is: bool = False) -> None:
        """Keep a sequence, unless it has rows that are only valid in it, such as those of documents.

        ``as_it_is``: it is in a step, and its cache is that of its tokens.
        """
        if self.capacity <= 0 or not session.n_tokens or not _is_of_its_tokens(session):
            return
        cache = self._cache(session.owner)
        try:
            if self._has_room(session, cache.cache_state):
                saved = _as_it_is(session) if as_it_is else session.save()
                ends = tuple(session.context.checkpoints(session.seq))
                cache[saved[0].tolist()] = LlamaState(*saved, {}, ends)
        except (LctxError, MemoryError) as reason:  # it is lost, as it would be without this
            LOG.warning("a sequence is not kept: %s", reason)
        self.n_bytes = self._held()

    def _has_room(self, session: Session, kept: OrderedDict[bytes, LlamaState]) -> bool:
        """Drop states until a sequence fits; False if it does not, or its state is kept already."""
        tokens = session.tokens.tobytes()
        if tokens in kept:
            kept.move_to_end(tokens)
            return False
        size = session.context.state_size(session.seq) + session.scores[-1:].nbytes + 2 * len(tokens)
        if size > self.capacity:
            LOG.info("a sequence of %d bytes is not kept: --cache-ram allows %d", size, self.capacity)
            return False
        if can_cut(session):  # the longer state is enough
            for shorter in [name for name in kept if tokens.startswith(name)]:
                del kept[shorter]
        while (held := self._held()) and held + size > self.capacity:
            idle = next(cache for cache in self._caches.values() if cache.cache_state)
            idle.cache_state.popitem(last=False)
        return True

    def _held(self) -> int:
        return sum(cache.cache_size for cache in self._caches.values())

    def _cache(self, owner: str | None) -> LlamaRAMCache:
        cache = self._caches.setdefault(owner, LlamaRAMCache(self.capacity))
        self._caches.move_to_end(owner)
        return cache


def _is_of_its_tokens(session: Session) -> bool:
    """Return True if prompts can continue a sequence that know nothing but its tokens."""
    return all(place.document is None and session.cache_reuse for place in session.placed)


def _as_it_is(session: Session) -> tuple[Tokens, NDArray[np.float32], NDArray[np.uint8]]:
    return session.tokens.copy(), NO_LOGITS, session.context.state(session.seq)


class PromptEnd:
    """A ``Watcher`` that parks a sequence shortly before the end of each prompt.

    It is for methods that evict: they cannot go back there when the next prompt lacks the reasoning of the answer.
    """

    def __init__(self, session: Session, parked: Parked) -> None:
        self._session, self._parked = session, parked
        self._at = 0

    def begin(self, pos: int, n: int) -> None:
        """Record where a text of ``n`` tokens ends."""
        self._at = self._session.context.cut_before(pos + n - TAIL) if n > TAIL else 0

    def limit_step(self, pos: int, n: int) -> int:
        """Return how many of ``n`` tokens a step may evaluate: it ends where the sequence is parked."""
        return min(n, self._at - pos) if self._at > pos else n

    def reach(self, start: int, end: int) -> None:
        """Park the sequence at that place."""
        if end == self._at:
            self._parked.park(self._session, as_it_is=True)
