"""Saved states of a sequence: snapshots, a checkpoint, and a cache that completions start from."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pylongctx._lib import error, lib
from pylongctx._log import LOG
from pylongctx.cache import BaseLlamaCache
from pylongctx.engine.identity import difference
from pylongctx.engine.prefix import longest_prefix
from pylongctx.engine.reuse import Load, Piece, Source, Tokens
from pylongctx.engine.session import Session
from pylongctx.state import LlamaState

Identity = Mapping[str, Any]


class States(Source):
    """What a sequence can continue from in addition to its own tokens, a ``Source``.

    Parameters
    ----------
    session : Session
        The sequence.
    identity : callable
        Returns what a state depends on, see ``Opened.identity``.

    Attributes
    ----------
    cache : BaseLlamaCache or None
        Completions start from its states and add theirs.
    checkpoint : LlamaState or None
        A prompt that begins with its tokens continues from there.
    """

    name, whole = "a saved state", True

    def __init__(self, session: Session, identity: Callable[[], Identity]) -> None:
        self._session = session
        self._identity = identity
        self.cache: BaseLlamaCache | None = None
        self.checkpoint: LlamaState | None = None
        self._warned: BaseLlamaCache | None = None  # the log says that it fails
        self._failed: set[bytes] = set()  # tokens of states that could not be loaded

    @property
    def identity(self) -> Identity:
        """What a state depends on."""
        return self._identity()

    def save(self) -> LlamaState:
        """Return tokens, last logits and KV rows."""
        with self._session.lock:
            state = LlamaState(*self._session.save(), self.identity)
        self._failed.discard(state.input_ids.tobytes())
        return state

    def load(self, state: LlamaState) -> None:
        """Continue from a saved state; InvalidInput when it does not fit, and the session is empty then."""
        with self._session.lock:
            self._session.clear()
            if reason := difference(state.identity, self.identity):
                raise error(lib.LCTX_INVALID, f"the saved state does not fit: {reason}")
            self._session.load(state.input_ids, state.logits, state.llama_state)

    def take_checkpoint(self) -> LlamaState:
        """Return a snapshot and keep it in place of the last one."""
        self.checkpoint = None  # frees the old one before the new one is made
        self.checkpoint = self.save()
        return self.checkpoint

    def remember(self) -> None:
        """Add the current state to the cache, unless its rows have read more than its tokens."""
        if self.cache is not None and self._session.n_tokens and self._session.seam is None:
            state = self.save()
            try:
                self.cache[state.input_ids.tolist()] = state
            except OSError as reason:
                self._lose(self.cache, f"cannot be written, answers are made without it: {reason}")

    # ---- Source ----

    def covers(self, tokens: Tokens, held: int) -> Piece | None:
        """Return the state that saves the most tokens of a prompt: the checkpoint, or the one in the cache."""
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
        """Do without the state: it was made with a larger n_ctx, or other batches."""
        self._failed.add(piece.key.input_ids.tobytes())
        self._session.say(f"a saved state cannot be used: {reason}")
        return True

    def _offered(self, state: LlamaState, tokens: Tokens, held: int) -> int:
        """Return how many tokens of a prompt a state saves."""
        if state.input_ids.tobytes() in self._failed:
            return 0
        n = longest_prefix(state.input_ids, tokens)
        if n < state.n_tokens and (state is self.checkpoint or (self._session.context.rollback and held)):
            return 0  # it may not come back to what the prompt shares with it
        return n

    def _cached(self, tokens: Tokens) -> LlamaState | None:
        if self.cache is None:
            return None
        try:
            return self.cache[tokens.tolist()]
        except KeyError:
            return None
        except OSError as reason:
            self._lose(self.cache, f"cannot be read, answers are made without it: {reason}")
            return None

    def _lose(self, cache: BaseLlamaCache, why: str) -> None:
        if self._warned is not cache:  # once for each cache: a full disk stays full
            self._warned = cache
            LOG.warning("the cache %s %s", type(cache).__name__, why)
