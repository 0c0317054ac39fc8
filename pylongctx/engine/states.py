"""Saved states of a session: snapshots, a checkpoint, and a cache that completions start from."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pylongctx._lib import error, lib
from pylongctx._log import LOG
from pylongctx.cache import BaseLlamaCache
from pylongctx.engine.identity import difference
from pylongctx.engine.prefix import longest_prefix
from pylongctx.engine.session import Session
from pylongctx.errors import LctxError
from pylongctx.state import LlamaState

Identity = Mapping[str, Any]


class States:
    """What a session can continue from beside its own tokens.

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

    def __init__(self, session: Session, identity: Callable[[], Identity]) -> None:
        self._session = session
        self._identity = identity
        self.cache: BaseLlamaCache | None = None
        self.checkpoint: LlamaState | None = None
        self._told: BaseLlamaCache | None = None  # what the log says of it: it fails

    @property
    def identity(self) -> Identity:
        """What a state depends on."""
        return self._identity()

    def save(self) -> LlamaState:
        """Return tokens, last logits and KV rows."""
        with self._session.lock:
            return LlamaState(*self._session.save(), self.identity)

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

    def recall(self, tokens: Sequence[int]) -> None:
        """Load the checkpoint, or the state in the cache, that saves more tokens of a prompt than the current state."""
        state = self.checkpoint
        if state is not None and longest_prefix(state.input_ids, tokens) == state.n_tokens:
            self._recall(tokens, state, "the checkpoint")
        if self.cache is None:
            return
        try:
            state = self.cache[tokens]
        except KeyError:
            return
        except OSError as reason:
            self._lose(self.cache, f"cannot be read, answers are made without it: {reason}")
            return
        self._recall(tokens, state, "the cache")

    def remember(self) -> None:
        """Add the current state to the cache, unless its rows have read more than its tokens."""
        if self.cache is not None and self._session.n_tokens and self._session.seam is None:
            state = self.save()
            try:
                self.cache[state.input_ids.tolist()] = state
            except OSError as reason:
                self._lose(self.cache, f"cannot be written, answers are made without it: {reason}")

    def _lose(self, cache: BaseLlamaCache, why: str) -> None:
        if self._told is not cache:  # once for each cache: a full disk stays full
            self._told = cache
            LOG.warning("the cache %s %s", type(cache).__name__, why)

    def _recall(self, tokens: Sequence[int], state: LlamaState, source: str) -> None:
        session = self._session
        usable = session.reachable(longest_prefix(session.tokens, tokens))
        fits = not difference(state.identity, self.identity)
        offered = longest_prefix(state.input_ids, tokens)
        if session.context.rollback and usable and offered < state.n_tokens:
            return  # it may not come back to what the prompt shares with it
        if fits and offered > usable:
            try:
                self.load(state)
                session.say(f"{state.n_tokens} tokens come from {source}")
            except LctxError as reason:  # made with a larger n_ctx, or other batches
                session.say(f"{source} has no use: {reason}")
