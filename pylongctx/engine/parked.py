"""Sequences that lost their slots, kept in memory: a conversation goes on after a request in between."""

from collections import OrderedDict
from collections.abc import Iterator

from pylongctx._log import LOG
from pylongctx.engine.prefix import longest_prefix
from pylongctx.engine.reuse import Load, Piece, Source, Tokens
from pylongctx.engine.saved_state import LlamaRAMCache, LlamaState
from pylongctx.engine.session import Session
from pylongctx.engine.states import States
from pylongctx.errors import LctxError

WORTH = 0.25  # fraction of a state's tokens that it must save to be loaded, since all of them are copied


class ParkedStates(States):
    """The parked sequences of one owner as a ``Source``."""

    name = "memory"

    def __init__(self, session: Session, cache: LlamaRAMCache) -> None:
        super().__init__(session, dict)  # the states of one process have the same identity
        self.cache = cache
        self._kept = cache.cache_state

    def covers(self, tokens: Tokens, held: int) -> Piece | None:
        """Return the state with the longest prefix of a prompt, if loading it takes less than it saves."""
        piece = super().covers(tokens, held)
        if piece is None or piece.end - held < WORTH * piece.key.n_tokens:
            return None
        rewinds = piece.end < piece.key.n_tokens and self.context.rollback  # a state has no checkpoints
        return None if rewinds else piece

    def fetch(self, piece: Piece) -> Iterator[Load]:
        """Yield the state."""
        if (name := piece.key.input_ids.tobytes()) in self._kept:
            self._kept.move_to_end(name)
        return super().fetch(piece)

    def _cached(self, tokens: Tokens) -> LlamaState | None:
        """Return the state with the longest prefix; only ``fetch`` counts as its use."""
        states = self._kept.values()
        return max(states, key=lambda state: longest_prefix(state.input_ids, tokens), default=None)


class Parked:
    """States of sequences that lost their slots, at most ``capacity`` bytes of all owners together.

    The least recently used state goes first, of the owner who was not active for the longest time.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._caches: OrderedDict[str | None, LlamaRAMCache] = OrderedDict()  # by owner, the last active one last
        self.n_bytes = 0  # held now; a number, since other threads read it

    def sources(self, session: Session, owner: str | None) -> list[Source]:
        """Return the source of an owner's prompts on a sequence, or none if nothing is parked."""
        return [ParkedStates(session, self._cache(owner))] if self.capacity > 0 else []

    def park(self, session: Session) -> None:
        """Keep a sequence, unless it has rows that are only valid in it, such as those of documents."""
        if self.capacity <= 0 or not session.n_tokens or session.placed:
            return
        cache = self._cache(session.owner)
        try:
            if self._has_room(session, cache.cache_state):
                ParkedStates(session, cache).remember()
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
        if not session.context.rollback:  # the longer state can be cut
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
