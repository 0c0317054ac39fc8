"""Saved states and caches: the part of Llama's interface that keeps sequences for later."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from pylongctx._arguments import ROPE_FIELDS
from pylongctx._lib import error, lib
from pylongctx._model import Model
from pylongctx._session import Session, longest_prefix
from pylongctx.cache import BaseLlamaCache
from pylongctx.errors import LctxError
from pylongctx.state import LlamaState, difference, model_identity


class Saving:
    """What Llama does with states: ``save_state``, ``load_state``, ``checkpoint``, ``restore``, ``set_cache``."""

    cache: BaseLlamaCache | None = None
    _checkpoint: LlamaState | None = None
    model_path: str
    _arguments: dict[str, Any]
    _model: Model
    _loaded: Session | None

    @property
    def _session(self) -> Session:
        self._model.handle  # noqa: B018 - raises when closed
        if self._loaded is None:
            raise RuntimeError("this Llama was loaded with vocab_only=True: it has no context")
        return self._loaded

    def save_state(self) -> LlamaState:
        """Return tokens, last logits and KV rows; the sampler and the earlier ``scores`` are no part of it."""
        session = self._session
        with session.lock:
            tokens, logits, rows = session.save()
        return LlamaState(tokens, logits, rows, self._identity)

    def load_state(self, state: LlamaState) -> None:
        """Continue from a saved state; with logits_all the earlier rows of ``scores`` are NaN.

        Raises
        ------
        InvalidInput
            When another model, method or setting made it, or it is damaged. The object is empty then, and usable.
        """
        session = self._session
        with session.lock:
            session.clear()
            if reason := difference(state.identity, self._identity):
                raise error(lib.LCTX_INVALID, f"the saved state does not fit: {reason}")
            session.load(state.input_ids, state.logits, state.llama_state)

    def checkpoint(self) -> LlamaState:
        """Return a snapshot in memory and keep it: a prompt that begins with its tokens continues from there.

        It is for methods that cannot go back, such as corm, which evicts: take it where the next prompt may differ,
        as after the prompt of a chat turn. It takes as many bytes as the KV cache holds; the next one replaces it.
        """
        self._checkpoint = None  # frees the old one before the new one is made
        self._checkpoint = self.save_state()
        return self._checkpoint

    def restore(self, state: LlamaState | None = None) -> None:
        """Go back to ``state``, or to the last checkpoint.

        Raises
        ------
        RuntimeError
            When there is no checkpoint.
        InvalidInput
            When the state belongs to another model, method or setting, see ``load_state``.
        """
        state = state or self._checkpoint
        if state is None:
            raise RuntimeError("there is no checkpoint: call checkpoint() first")
        self.load_state(state)

    def set_cache(self, cache: BaseLlamaCache | None) -> None:
        """Let completions start from the states of a cache, and add theirs to it; None: no cache."""
        self.cache = cache

    @property
    def _identity(self) -> Mapping[str, Any]:
        return self._own_identity

    @cached_property
    def _own_identity(self) -> Mapping[str, Any]:
        own = model_identity(self._model, self.model_path)
        return own | self._session.identity | {name: self._arguments[name] for name in ROPE_FIELDS}

    def _recall(self, tokens: Sequence[int]) -> None:
        """Load the checkpoint, or the state in the cache, that saves more tokens of a prompt than the current state."""
        state = self._checkpoint
        if state is not None and longest_prefix(state.input_ids, tokens) == state.n_tokens:
            self._recall_state(tokens, state, "the checkpoint")
        if self.cache is None:
            return
        try:
            state = self.cache[tokens]
        except KeyError:
            return
        self._recall_state(tokens, state, "the cache")

    def _recall_state(self, tokens: Sequence[int], state: LlamaState, source: str) -> None:
        usable = self._session.reachable(longest_prefix(self._session.tokens, tokens))
        fits = not difference(state.identity, self._identity)
        if fits and longest_prefix(state.input_ids, tokens) > usable:
            try:
                self.load_state(state)
                self._session.say(f"{state.n_tokens} tokens come from {source}")
            except LctxError as reason:  # made with a larger n_ctx, or other batches
                self._session.say(f"{source} has no use: {reason}")

    def _remember(self) -> None:
        """Add the current state to the cache."""
        if self.cache is not None and self._session.n_tokens:
            state = self.save_state()
            self.cache[state.input_ids.tolist()] = state
