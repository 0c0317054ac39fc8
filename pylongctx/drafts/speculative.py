"""Draft models, which guess the next tokens of a text, see ``Llama(draft_model=...)``."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pylongctx.engine.drafting import DraftRequest, check_model, draft_all, is_adaptive, save_state
from pylongctx.engine.model import Model
from pylongctx.engine.session import Session
from pylongctx.errors import ContextFull
from pylongctx.methods.base import check_int

PAYS = 2  # windows of text from which reading less is worth a draft
Tokens = NDArray[np.int32]


def check_sizes(n_max: int, n_min: int, p_min: float) -> None:
    """Raise ValueError if the sizes of drafts, or the probability below which they end, are out of range."""
    check_int("n_max", n_max, 1)
    check_int("n_min", n_min, 0, n_max)
    if not 0 <= p_min <= 1:
        raise ValueError(f"p_min must be from 0 to 1, not {p_min}")


def is_likely(row: NDArray[np.float32], p_min: float) -> bool:
    """Return True if the probability of the most probable token, by logits float32 [n_vocab], is at least ``p_min``."""
    return not p_min or 1 / float(np.exp(row - row.max()).sum()) >= p_min


class LlamaDraftModel(ABC):
    """The base class of draft models.

    Attributes
    ----------
    adaptive : bool
        Whether the length of drafts follows the measured acceptance and times, so that drafts that do not pay are
        turned off. Then it is called with ``n_max``, the number of tokens wanted, and ``session``, the sequence that
        holds all but the last of the tokens.
    least : int
        Texts with fewer tokens are not drafted.

    Raises
    ------
    ValueError
        When a number of a draft model is out of range.

    Examples
    --------
    >>> class Repeat(LlamaDraftModel):
    ...     def __call__(self, input_ids, /, **kwargs):
    ...         return input_ids[-1:]
    >>> Repeat()(np.array([4, 5, 6], np.int32))
    array([6], dtype=int32)
    """

    adaptive: ClassVar[bool] = False
    least: int = 0

    @abstractmethod
    def __call__(self, input_ids: NDArray[np.int32], /, **kwargs: Any) -> NDArray[np.int32]:
        """Return the draft tokens after int32 [n], empty for no draft."""

    def check(self, model: Model) -> None:  # noqa: B027 - most draft models serve every model
        """Raise ValueError if it cannot draft for a model; called when the model is opened."""

    def close(self) -> None:  # noqa: B027 - most draft models hold nothing
        """Free what it holds."""


class LlamaPromptLookupDecoding(LlamaDraftModel):
    """Drafts the tokens that followed the most recent earlier occurrence of the last tokens.

    Parameters
    ----------
    max_ngram_size : int
        Maximum number of last tokens to search for; fewer if they are not found.
    num_pred_tokens : int
        Maximum number of draft tokens.

    Examples
    --------
    >>> guess = LlamaPromptLookupDecoding(max_ngram_size=2, num_pred_tokens=3)
    >>> guess(np.array([7, 8, 9, 1, 2, 7, 8], np.int32))
    array([9, 1, 2], dtype=int32)
    """

    def __init__(self, max_ngram_size: int = 2, num_pred_tokens: int = 10) -> None:
        self.max_ngram_size = max_ngram_size
        self.num_pred_tokens = num_pred_tokens

    def __call__(self, input_ids: NDArray[np.int32], /, **kwargs: Any) -> NDArray[np.int32]:
        """Return the tokens that followed the last tokens before."""
        return self.find_candidate_pred_tokens(input_ids, self.max_ngram_size, self.num_pred_tokens)

    @staticmethod
    def find_candidate_pred_tokens(
        input_ids: NDArray[np.int32], max_ngram_size: int, num_pred_tokens: int
    ) -> NDArray[np.int32]:
        """Return the tokens that followed the last tokens before; takes the parameters of the class."""
        for size in range(min(max_ngram_size, len(input_ids) - 1), 0, -1):
            windows = np.lib.stride_tricks.sliding_window_view(input_ids[:-1], size)
            places = np.flatnonzero((windows == input_ids[-size:]).all(axis=1))
            if len(places):
                start = places[-1] + size
                return input_ids[start : start + num_pred_tokens]
        return input_ids[:0]


class BatchDraft(LlamaDraftModel):
    """The base class of draft models that draft several texts in common batches, with adaptive lengths.

    Attributes
    ----------
    n_max : int
        Maximum number of draft tokens.

    Examples
    --------
    >>> class Repeat(BatchDraft):
    ...     n_max = 2
    ...
    ...     def draft_all(self, requests):
    ...         return [request.tokens[-1:].repeat(request.n_max) for request in requests]
    >>> Repeat()(np.array([4, 5, 6], np.int32))
    array([6, 6], dtype=int32)
    """

    adaptive = True
    n_max: int

    def __call__(
        self, input_ids: Tokens, /, n_max: int | None = None, session: Session | None = None, **kwargs: Any
    ) -> Tokens:
        """Return at most ``n_max`` of the most probable tokens; ``session`` holds all tokens but the last."""
        return self.draft_all([DraftRequest(input_ids, self.n_max if n_max is None else n_max, session)])[0]

    @abstractmethod
    def draft_all(self, requests: Sequence[DraftRequest]) -> list[Tokens]:
        """Return the draft of each text, int32 [n], empty for no draft."""


class SelfDraft(BatchDraft):
    """Drafts with the model itself, whose queries read only the chunks that they select.

    The KV cache and its index are those of the model: nothing is stored twice, and the rows of draft tokens are
    evaluated again when they are verified. Texts that are not much longer than the window are not drafted.
    TriForce, arXiv 2404.11912, section 4.1. ``Llama(draft="longheads")`` uses it.

    Parameters
    ----------
    window : int
        Tokens that a query reads, as of the method ``longheads`` of the context.
    n_max : int
        Maximum number of draft tokens.

    Examples
    --------
    >>> from pylongctx import Llama
    >>> with Llama("model.gguf", draft="longheads,window=64", n_ctx=1024, verbose=False) as chosen:
    ...     chosen.draft_model.window
    64
    """

    def __init__(self, window: int, n_max: int = 8) -> None:
        check_int("n_max", n_max, 1)
        self.window, self.n_max, self.least = window, n_max, PAYS * window

    def draft_all(self, requests: Sequence[DraftRequest]) -> list[Tokens]:
        """Return the drafts of several sequences of one context; each batch has a token of each of them."""
        sessions = [request.session for request in requests if request.session is not None]
        lengths = [self._length(request) for request in requests]
        found = [request.tokens[-1:].tolist() for request in requests]
        if not any(lengths):
            return [np.array(draft[1:], np.int32) for draft in found]
        context = sessions[0].context
        rows = np.empty((len(requests), context.n_vocab), np.float32)
        context.select_from(self.window)
        try:
            while live := [i for i, draft in enumerate(found) if len(draft) <= lengths[i]]:
                tokens, seqs = [found[i][-1] for i in live], [sessions[i].seq for i in live]
                at = [sessions[i].n_tokens + len(found[i]) - 1 for i in live]
                ids, positions, places = (np.array(numbers, np.int32) for numbers in (tokens, at, seqs))
                context.decode(ids, positions, places, np.ones(len(live), np.int8), rows[: len(live)])
                for i, row in zip(live, rows, strict=False):
                    found[i].append(requests[i].next_token(row))
        except ContextFull:  # room for the answer, but not for drafts
            pass
        finally:
            context.select_from()
            for session, length in zip(sessions, lengths, strict=True):
                if length:
                    context.truncate(session.n_tokens, session.seq)
        return [np.array(draft[1:], np.int32) for draft in found]

    def _length(self, request: DraftRequest) -> int:
        """Return the maximum number of draft tokens."""
        session, n = request.session, len(request.tokens) - 1
        assert session is not None
        if n < self.least or session.n_past != n:
            return 0
        most = min(self.n_max, request.n_max)
        return min(most, session.context.step(n, most)) if most > 0 and save_state(session) else 0


class DraftChain(LlamaDraftModel):
    """Drafts with the first of several draft models that has a draft.

    Examples
    --------
    >>> from pylongctx import NgramDraft
    >>> guess = DraftChain([NgramDraft(4), NgramDraft(2)])
    >>> guess(np.array([7, 8, 9, 1, 2, 7, 8], np.int32), n_max=1)
    array([9], dtype=int32)
    """

    adaptive = True

    def __init__(self, models: Sequence[Callable[..., Tokens]]) -> None:
        self._models = models
        self.least = min((getattr(model, "least", 0) for model in models), default=0)

    def __call__(self, input_ids: Tokens, /, **kwargs: Any) -> Tokens:
        """Return the first draft that is not empty."""
        drafts = (model(input_ids, **kwargs if is_adaptive(model) else {}) for model in self._models)
        return next((draft for draft in drafts if len(draft)), input_ids[:0])

    def draft_all(self, requests: Sequence[DraftRequest]) -> list[Tokens]:
        """Return the first draft of each text that is not empty; the texts of each draft model are drafted together."""
        found = [request.tokens[:0] for request in requests]
        for model in self._models:
            left = [i for i, draft in enumerate(found) if not len(draft)]
            for i, draft in zip(left, draft_all(model, [requests[i] for i in left]), strict=True):
                if isinstance(draft, Exception):
                    raise draft
                found[i] = draft
        return found

    def check(self, model: Model) -> None:
        """Raise ValueError if one of them cannot draft for the model."""
        for one in self._models:
            check_model(one, model)

    def close(self) -> None:
        """Free all of them."""
        for one in self._models:
            if isinstance(one, LlamaDraftModel):
                one.close()
