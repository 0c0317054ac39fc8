"""Draft models, which guess the next tokens of a text, see ``Llama(draft_model=...)``."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from pylongctx.engine.drafting import check_model, is_adaptive
from pylongctx.engine.model import Model
from pylongctx.engine.prefix import longest_prefix
from pylongctx.engine.session import Session
from pylongctx.errors import ContextFull

CATCH_UP = 256  # tokens of a text that a draft model evaluates at most before it returns to the other requests
SIZE_DIFFERENCE = 128  # tokens by which llama.cpp lets two vocabularies differ in size
FIRST_COMPARED = 5  # the tokens before it are special in many vocabularies, and may differ
PAYS = 2  # windows of text from which reading less is worth a draft
Tokens = NDArray[np.int32]


class LlamaDraftModel(ABC):
    """The base class of draft models.

    Attributes
    ----------
    adaptive : bool
        Whether the length of drafts follows the measured acceptance and times, so that drafts that do not pay are
        turned off. Then it is called with ``n_max``, the number of tokens wanted, and ``session``, the sequence that
        holds all but the last of the tokens.

    Examples
    --------
    >>> class Repeat(LlamaDraftModel):
    ...     def __call__(self, input_ids, /, **kwargs):
    ...         return input_ids[-1:]
    >>> Repeat()(np.array([4, 5, 6], np.int32))
    array([6], dtype=int32)
    """

    adaptive: ClassVar[bool] = False

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


class NgramDraft(LlamaDraftModel):
    """Drafts the tokens that followed an earlier occurrence of the last ``size_n`` tokens, as llama.cpp's ngram kinds.

    The length of drafts is adaptive, up to ``size_m`` tokens.

    Parameters
    ----------
    size_n : int
        Tokens that must be equal.
    size_m : int
        Maximum number of draft tokens.
    min_hits : int
        Minimum number of earlier occurrences.
    most_common : bool
        Draft the continuation that followed most often, and the latest of several; else the latest one.

    Raises
    ------
    ValueError
        When a size is less than 1.

    Examples
    --------
    >>> guess = NgramDraft(size_n=2, size_m=3)
    >>> guess(np.array([7, 8, 9, 1, 2, 7, 8], np.int32))
    array([9, 1, 2], dtype=int32)
    >>> guess(np.array([7, 8, 9, 1, 2, 7, 8], np.int32), n_max=1)
    array([9], dtype=int32)
    """

    adaptive = True

    def __init__(self, size_n: int = 12, size_m: int = 48, min_hits: int = 1, most_common: bool = False) -> None:
        for name, value in (("size_n", size_n), ("size_m", size_m), ("min_hits", min_hits)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        self.size_n, self.size_m, self.min_hits, self.most_common = size_n, size_m, min_hits, most_common

    def __call__(self, input_ids: Tokens, /, n_max: int | None = None, **kwargs: Any) -> Tokens:
        """Return at most ``n_max`` tokens that followed the last ones before."""
        n, most = len(input_ids), min(self.size_m, n_max if n_max is not None else self.size_m)
        if n <= self.size_n:
            return input_ids[:0]
        ends = np.flatnonzero(input_ids[self.size_n - 1 : -1] == input_ids[-1]) + self.size_n  # of earlier occurrences
        for back in range(1, self.size_n):
            ends = ends[input_ids[ends - 1 - back] == input_ids[-1 - back]]
        if len(ends) < self.min_hits:
            return input_ids[:0]
        parts = [input_ids[end : end + most] for end in ends]
        if not self.most_common:
            return parts[-1]
        counts = Counter(part.tobytes() for part in parts)
        return max(reversed(parts), key=lambda part: counts[part.tobytes()])


class HasSessions(Protocol):
    """A model with sequences: a Llama."""

    @property
    def sessions(self) -> Sequence[Session]:
        """The sequences."""

    def close(self) -> None:
        """Free the model."""


class ModelDraft(LlamaDraftModel):
    """Drafts the most probable tokens of a smaller model with the same vocabulary.

    Each text uses the sequence with the longest common prefix; a text that the draft model has not evaluated yet is
    evaluated in parts, and has no drafts until then. The length of drafts is adaptive, up to ``n_max`` tokens.

    Parameters
    ----------
    llm : Llama
        The draft model; nothing else may use it. Its context must be as long as the texts; beyond it, nothing is
        drafted.
    n_max : int
        Maximum number of draft tokens.
    n_min : int
        Shorter drafts are not used.
    p_min : float
        Probability below which a draft ends.

    Raises
    ------
    ValueError
        When a number is out of range.

    Examples
    --------
    >>> from pylongctx import Llama
    >>> draft = ModelDraft(Llama("model.gguf", verbose=False), n_max=2)
    >>> with Llama("model.gguf", draft_model=draft, verbose=False) as llm:
    ...     len(llm("It was the best", max_tokens=4)["choices"])
    1
    """

    adaptive = True

    def __init__(self, llm: HasSessions, n_max: int = 3, n_min: int = 0, p_min: float = 0.0) -> None:
        if n_max < 1 or not 0 <= n_min <= n_max or not 0 <= p_min <= 1:
            raise ValueError(
                f"a draft has n_max >= 1, n_min from 0 to n_max, p_min from 0 to 1, not {n_max}, {n_min}, {p_min}"
            )
        self._llm, self.n_max, self.n_min, self.p_min = llm, n_max, n_min, p_min
        self._used = [0] * len(llm.sessions)  # when each sequence was used last
        self._clock = 0

    def check(self, model: Model) -> None:
        """Raise ValueError if the model has another vocabulary, by llama.cpp's rules."""
        check_vocabularies(model, self._llm.sessions[0].model)

    def close(self) -> None:
        """Free the draft model."""
        self._llm.close()

    def __call__(self, input_ids: Tokens, /, n_max: int | None = None, **kwargs: Any) -> Tokens:
        """Return at most ``n_max`` of the most probable tokens."""
        session, most = self._session(input_ids), min(self.n_max, n_max if n_max is not None else self.n_max)
        n_vocab = session.model.info.n_vocab
        if len(input_ids) + most > session.n_ctx or input_ids.max(initial=0) >= n_vocab:
            return input_ids[:0]
        kept = session.rewind(min(longest_prefix(session.tokens, input_ids), len(input_ids) - 1))
        session.eval(input_ids[kept : kept + CATCH_UP])
        if session.n_tokens < len(input_ids):
            return input_ids[:0]
        found: list[int] = []
        while len(found) < most:
            row = session.last_logits
            token = int(row.argmax())
            if self.p_min and 1 / float(np.exp(row - row[token]).sum()) < self.p_min:
                break
            found.append(token)
            if len(found) < most:
                session.eval(np.array([token], np.int32))
        return np.array(found if len(found) >= self.n_min else [], np.int32)

    def _session(self, tokens: Tokens) -> Session:
        """Return the sequence with the longest common prefix, or the one that was not used for the longest time."""
        shared = [longest_prefix(session.tokens, tokens) for session in self._llm.sessions]
        order = range(len(shared))
        best = max(order, key=lambda i: shared[i])
        if 2 * shared[best] < len(self._llm.sessions[best].tokens):  # another text that begins alike
            best = min(order, key=lambda i: self._used[i])
        self._clock += 1
        self._used[best] = self._clock
        return self._llm.sessions[best]


class SelfDraft(LlamaDraftModel):
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

    Raises
    ------
    ValueError
        When ``n_max`` is less than 1.

    Examples
    --------
    >>> from pylongctx import Llama
    >>> with Llama("model.gguf", draft="longheads,window=64", n_ctx=1024, verbose=False) as chosen:
    ...     chosen.draft_model.window
    64
    """

    adaptive = True

    def __init__(self, window: int, n_max: int = 8) -> None:
        if n_max < 1:
            raise ValueError(f"n_max must be at least 1, not {n_max}")
        self.window, self.n_max = window, n_max

    def __call__(
        self, input_ids: Tokens, /, n_max: int | None = None, session: Session | None = None, **kwargs: Any
    ) -> Tokens:
        """Return at most ``n_max`` of the most probable tokens; ``session`` holds all tokens but the last."""
        assert session is not None
        n, most = len(input_ids) - 1, min(self.n_max, n_max if n_max is not None else self.n_max)
        if n < PAYS * self.window or session.n_past != n:
            return input_ids[:0]
        context, found, row = session.context, [int(input_ids[-1])], np.empty((1, session.context.n_vocab), np.float32)
        one, seq = np.ones(1, np.int8), np.array([session.seq], np.int32)
        most = min(most, context.step(n, most))
        context.select_from(self.window)
        try:
            while len(found) <= most:
                at = np.array([n + len(found) - 1], np.int32)
                context.decode(np.array(found[-1:], np.int32), at, seq, one, row)
                found.append(int(row.argmax()))
        except ContextFull:  # room for the answer, but not for drafts
            pass
        finally:
            context.select_from()
            context.truncate(n, session.seq)
        return np.array(found[1:], np.int32)


class DraftChain(LlamaDraftModel):
    """Drafts with the first of several draft models that has a draft.

    Examples
    --------
    >>> guess = DraftChain([NgramDraft(4), NgramDraft(2)])
    >>> guess(np.array([7, 8, 9, 1, 2, 7, 8], np.int32), n_max=1)
    array([9], dtype=int32)
    """

    adaptive = True

    def __init__(self, models: Sequence[Callable[..., Tokens]]) -> None:
        self._models = models

    def __call__(self, input_ids: Tokens, /, **kwargs: Any) -> Tokens:
        """Return the first draft that is not empty."""
        drafts = (model(input_ids, **kwargs if is_adaptive(model) else {}) for model in self._models)
        return next((draft for draft in drafts if len(draft)), input_ids[:0])

    def check(self, model: Model) -> None:
        """Raise ValueError if one of them cannot draft for the model."""
        for one in self._models:
            check_model(one, model)

    def close(self) -> None:
        """Free all of them."""
        for one in self._models:
            if isinstance(one, LlamaDraftModel):
                one.close()


def check_vocabularies(model: Model, draft: Model) -> None:
    """Raise ValueError if tokens of a draft model do not stand for the same texts as those of the model.

    As in llama.cpp, sizes may differ by 128 tokens, and the first five tokens are not compared.

    Examples
    --------
    >>> check_vocabularies(llm.session.model, llm.session.model)
    """
    sizes = [int(one.info.n_vocab) for one in (model, draft)]
    if abs(sizes[0] - sizes[1]) > SIZE_DIFFERENCE:
        raise ValueError(f"draft_model: it has {sizes[1]} tokens and the model {sizes[0]}; use one of the same family")
    if model.start != draft.start:
        raise ValueError(f"draft_model: its texts begin with tokens {draft.start}, the model's with {model.start}")
    for token in range(FIRST_COMPARED, min(sizes)):
        if model.piece(token, True) != draft.piece(token, True):
            raise ValueError(
                f"draft_model: its token {token} is {draft.piece(token, True)!r}, that of the model "
                f"{model.piece(token, True)!r}; use a draft model of the same family"
            )
