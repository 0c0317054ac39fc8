"""Saved states of a sequence: snapshots, a checkpoint, and a cache of states for completions."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pylongctx._lib import error, lib
from pylongctx._log import LOG
from pylongctx.engine.context import Context
from pylongctx.engine.identity import difference
from pylongctx.engine.prefix import longest_prefix
from pylongctx.engine.reuse import Load, Piece, Source, Tokens
from pylongctx.engine.saved_state import BaseLlamaCache, LlamaState
from pylongctx.engine.session import Session

Identity = Mapping[str, Any]


class States(Source):
    """A ``Source`` of saved states from which a sequence can continue.

    Completions start from the states of ``cache`` and add to it; a prompt with the tokens of ``checkpoint`` as prefix
    continues from it.
    """

    name, whole = "a saved state", True

    def __init__(self, session: Session, identity: Callable[[], Identity]) -> None:
        self._session = session
        self._identity = identity
        self.cache: BaseLlamaCache | None = None
        self.checkpoint: LlamaState | None = None
        self._warned: BaseLlamaCache | None = None  # a cache whose failure was logged
        self._failed: set[bytes] = set()  # tokens of states that could not be loaded

    @property
    def context(self) -> Context:
        """The context of the sequence."""
        return self._session.context

    @property
    def identity(self) -> Identity:
        """The identity of states."""
        return self._identity()

    def save(self) -> LlamaState:
        """Return the tokens, the last logits and the KV cache."""
        with self._session.lock:
            saved = self._session.save()
            state = LlamaState(*saved, self.identity, tuple(self.context.checkpoints(self._session.seq)))
        self._failed.discard(state.input_ids.tobytes())
        return state

    def load(self, state: LlamaState) -> None:
        """Continue from a saved state; InvalidInput when it does not fit, which leaves the session empty."""
        with self._session.lock:
            self._session.clear()
            if reason := difference(state.identity, self.identity):
                raise error(lib.LCTX_INVALID, f"the saved state does not fit: {reason}")
            self._session.load(state.input_ids, state.logits, state.llama_state)

    def take_checkpoint(self) -> LlamaState:
        """Return a snapshot and keep it, replacing the last one."""
        self.checkpoint = None  # frees the old one before the new one is created
        self.checkpoint = self.save()
        return self.checkpoint

    def remember(self) -> None:
        """Add the current state to the cache, unless its rows were computed with evicted tokens."""
        if self.cache is not None and self._session.n_tokens and self._session.seam is None:
            state = self.save()
            try:
                self.cache[state.input_ids.tolist()] = state
            except OSError as reason:
                self._lose(self.cache, f"cannot be written and is not used: {reason}")

    # ---- Source ----

    def covers(self, tokens: Tokens, held: int) -> Piece | None:
        """Return the state with the longest prefix of a prompt: the checkpoint, or one from the cache."""
        states = [state for state in (self.checkpoint, self._cached(tokens)) if state is not None]
        offers = [(self._offered(state, tokens, held), state) for state in states]
        n, state = max(offers, key=lambda offer: offer[0], default=(0, None))
        if state is None or n <= held or difference(state.identity, self.identity):
            return None
        return Piece(self, 0, n, state, logits=n == state.n_tokens and len(state.logits) > 0)

    def fetch(self, piece: Piece) -> Iterator[Load]:
        """Yield the state."""
        state = piece.key
        yield Load(state.input_ids, state=state.llama_state, logits=state.logits)

    def fail(self, piece: Piece, reason: Exception) -> bool:
        """Drop the state, which may be from a larger n_ctx or other batch sizes."""
        self._failed.add(piece.key.input_ids.tobytes())
        self._session.log(f"a saved state cannot be used: {reason}")
        return True

    def _offered(self, state: LlamaState, tokens: Tokens, held: int) -> int:
        """Return how many tokens of a prompt a state covers."""
        if state.input_ids.tobytes() in self._failed:
            return 0
        n = longest_prefix(state.input_ids, tokens)
        if n == state.n_tokens or not (state is self.checkpoint or (self.context.rollback and held)):
            return n
        return state.end_within(n)  # it may not be possible to rewind to the common prefix

    def _cached(self, tokens: Tokens) -> LlamaState | None:
        if self.cache is None:
            return None
        try:
            return self.cache[tokens.tolist()]
        except KeyError:
            return None
        except OSError as reason:
            self._lose(self.cache, f"cannot be read and is not used: {reason}")
            return None

    def _lose(self, cache: BaseLlamaCache, why: str) -> None:
        if self._warned is not cache:  # once per cache: a full disk stays full
            self._warned = cache
            LOG.warning("the cache %s %s", type(cache).__name__, why)
