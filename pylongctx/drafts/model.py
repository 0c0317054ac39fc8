"""Drafts of a smaller model, and of the block of a model that predicts the token after the next one."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pylongctx.drafts.speculative import BatchDraft, check_sizes, is_likely
from pylongctx.engine.drafting import DraftRequest, save_state
from pylongctx.engine.model import Model
from pylongctx.engine.prefix import longest_prefix
from pylongctx.engine.session import Part, Session, evaluate
from pylongctx.errors import ContextFull

CATCH_UP = 256  # tokens that a draft model evaluates at most before it returns to the other requests
SIZE_DIFFERENCE = 128  # tokens by which llama.cpp lets two vocabularies differ in size
FIRST_COMPARED = 5  # the tokens before it are special in many vocabularies, and may differ
Tokens = NDArray[np.int32]
MTP_NAME = "mtp"


def with_fixed_ends(requests: Sequence[DraftRequest], n_min: int, p_min: float) -> Sequence[DraftRequest]:
    """Return the requests of drafts that may be drawn: not if what is drawn decides whether a draft is used.

    Then the tokens that are evaluated would not have the probabilities that they were drawn from.
    """
    return [request._replace(proposals=None) for request in requests] if n_min and p_min else requests


class HasSessions(Protocol):
    """A model with sequences: a Llama."""

    @property
    def sessions(self) -> Sequence[Session]:
        """The sequences."""

    def close(self) -> None:
        """Free the model."""


class ModelDraft(BatchDraft):
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

    Examples
    --------
    >>> from pylongctx import Llama
    >>> draft = ModelDraft(Llama("model.gguf", verbose=False), n_max=2)
    >>> with Llama("model.gguf", draft_model=draft, verbose=False) as llm:
    ...     len(llm("It was the best", max_tokens=4)["choices"])
    1
    """

    def __init__(self, llm: HasSessions, n_max: int = 3, n_min: int = 0, p_min: float = 0.0) -> None:
        check_sizes(n_max, n_min, p_min)
        self._llm, self.n_max, self.n_min, self.p_min = llm, n_max, n_min, p_min
        self._used = [0] * len(llm.sessions)  # when each sequence was used last
        self._clock = 0

    def check(self, model: Model) -> None:
        """Raise ValueError if the model has another vocabulary, by llama.cpp's rules."""
        check_vocabularies(model, self._llm.sessions[0].model)

    def close(self) -> None:
        """Free the draft model."""
        self._llm.close()

    def draft_all(self, requests: Sequence[DraftRequest]) -> list[Tokens]:
        """Return the drafts of several texts, which are evaluated in common batches."""
        requests = with_fixed_ends(requests, self.n_min, self.p_min)
        found: list[list[int]] = [[] for _ in requests]
        lengths = [min(self.n_max, request.n_max) for request in requests]
        sessions = self._assign([self._serves(*pair) for pair in zip(requests, lengths, strict=True)])
        try:
            ready = self._catch_up({i: (session, requests[i].tokens) for i, session in sessions.items()})
            for i in ready:
                save_state(sessions[i])
            while ready:
                ready = [i for i in ready if self._extend(found[i], requests[i], sessions[i])]
                ready = [i for i in ready if len(found[i]) < lengths[i]]
                self._evaluate([Part(sessions[i], np.array(found[i][-1:], np.int32), 1) for i in ready])
        except ContextFull:  # texts that are not drafted now have taken the room
            for session in self._llm.sessions:
                if session not in sessions.values():
                    session.clear()
        return [np.array(draft if len(draft) >= self.n_min else [], np.int32) for draft in found]

    def _serves(self, request: DraftRequest, most: int) -> Tokens | None:
        """Return the tokens of a request that can be drafted, None for others."""
        tokens, session = request.tokens, self._llm.sessions[0]
        fits = len(tokens) + most <= session.n_ctx and tokens.max(initial=0) < session.model.info.n_vocab
        return tokens if fits and most > 0 else None

    def _extend(self, draft: list[int], request: DraftRequest, session: Session) -> bool:
        """Append the next token to a draft; False: the draft ends before it."""
        if not is_likely(session.last_logits, self.p_min):
            return False
        draft.append(request.next_token(session.last_logits))
        return True

    def _catch_up(self, texts: Mapping[int, tuple[Session, Tokens]]) -> list[int]:
        """Evaluate at most ``CATCH_UP`` tokens of the texts; returns those that are evaluated completely."""
        behind = {}
        for i, (session, tokens) in texts.items():
            shared = longest_prefix(session.tokens, tokens)
            behind[i] = len(tokens) - session.rewind(min(shared, len(tokens) - 1))
        left, ends = CATCH_UP, {}
        for n_before, i in enumerate(sorted(behind, key=lambda i: behind[i])):
            n = min(behind[i], max(1, left // (len(behind) - n_before)))
            texts[i][0].begin(n)
            ends[i] = texts[i][0].n_tokens + n
            left -= n
        while parts := self._parts([(*texts[i], end) for i, end in ends.items()]):
            self._evaluate(parts)
        return [i for i, (_, tokens) in texts.items() if ends[i] == len(tokens)]

    def _parts(self, texts: Sequence[tuple[Session, Tokens, int]]) -> list[Part]:
        """Return a batch of the tokens that are not evaluated, up to an end of each text."""
        left, parts = texts[0][0].context.n_step if texts else 0, []
        for session, tokens, end in texts:
            n = session.n_tokens
            if most := min(left, end - n):
                part = tokens[n : n + session.next_step(most)]
                parts.append(Part(session, part, int(n + len(part) == len(tokens))))
                left -= len(part)
        return parts

    def _evaluate(self, parts: list[Part]) -> None:
        if parts:
            evaluate(parts, np.empty((len(parts), parts[0].session.context.n_vocab), np.float32))

    def _assign(self, texts: Sequence[Tokens | None]) -> dict[int, Session]:
        """Return a sequence for each text: one that holds most of it, else one not used for the longest time."""
        sessions = self._llm.sessions
        shared = {
            (i, k): longest_prefix(session.tokens, tokens)
            for i, tokens in enumerate(texts)
            if tokens is not None
            for k, session in enumerate(sessions)
        }
        found: dict[int, int] = {}
        for i, k in sorted(shared, key=lambda pair: -shared[pair]):
            begins_alike = 2 * shared[i, k] < len(sessions[k].tokens)  # but is another text
            if i not in found and k not in found.values() and not begins_alike:
                found[i] = k
        for i in dict.fromkeys(i for i, _ in shared if i not in found):
            if free := [k for k in range(len(sessions)) if k not in found.values()]:
                found[i] = min(free, key=lambda k: self._used[k])
        for k in found.values():
            self._clock += 1
            self._used[k] = self._clock
        return {i: sessions[k] for i, k in found.items()}


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


class MtpDraft(BatchDraft):
    """Drafts with the MTP block of the model (multi-token prediction, NextN).

    The block is a layer after the last one, trained to predict the token after the next one from a token and the hidden
    state before it. It evaluates each token too, with a KV cache of its own; its hidden state is the input for the next
    draft token. Gloeckle et al., arXiv 2404.19737; DeepSeek-V3, arXiv 2412.19437, section 2.2. ``Llama(draft="mtp")``
    uses it with the default sizes.

    Parameters
    ----------
    n_max, n_min, p_min
        See ``ModelDraft``.

    Examples
    --------
    >>> from pylongctx import Llama
    >>> with Llama("glm-4.5-air.gguf", draft=MtpDraft(n_max=2), verbose=False) as llm:  # doctest: +SKIP
    ...     text = llm("It was the best", max_tokens=4)
    """

    def __init__(self, n_max: int = 3, n_min: int = 0, p_min: float = 0.0) -> None:
        check_sizes(n_max, n_min, p_min)
        self.n_max, self.n_min, self.p_min = n_max, n_min, p_min

    def check(self, model: Model) -> None:
        """Raise ValueError if the model was opened without its MTP block."""
        if not model.has_mtp:
            raise ValueError("the MTP block of the model was not loaded: open it with draft='mtp' or draft=MtpDraft()")

    def draft_all(self, requests: Sequence[DraftRequest]) -> list[Tokens]:
        """Return the drafts of several sequences of one context; each batch has a token of each of them."""
        requests = with_fixed_ends(requests, self.n_min, self.p_min)
        found = [request.tokens[-1:].tolist() for request in requests]
        left = {i: n for i, request in enumerate(requests) if (n := self._length(request)) > 0}
        try:
            while left:
                rows = self._step([requests[i] for i in left], [found[i] for i in left])
                for i, row in zip(list(left), rows, strict=True):
                    left[i] = left[i] - 1 if is_likely(row, self.p_min) else -1
                    found[i] += [requests[i].next_token(row)] if left[i] >= 0 else []
                left = {i: n for i, n in left.items() if n > 0}
        except ContextFull:  # room for the answer, but not for drafts
            pass
        return [np.array(draft[1:] if len(draft) > self.n_min else [], np.int32) for draft in found]

    def _step(self, requests: Sequence[DraftRequest], known: Sequence[list[int]]) -> NDArray[np.float32]:
        """Evaluate the last known token of each text; returns the logits after them, float32 [n, n_vocab]."""
        sessions = [request.session for request in requests if request.session is not None]
        at = [len(request.tokens) + len(tokens) - 2 for request, tokens in zip(requests, known, strict=True)]
        columns = [tokens[-1] for tokens in known], at, [session.seq for session in sessions]
        return sessions[0].context.draft_step(*(np.array(numbers, np.int32) for numbers in columns))

    def _length(self, request: DraftRequest) -> int:
        """Return the maximum number of draft tokens; 0 where the block does not know the hidden state of the end."""
        session = request.session
        assert session is not None
        ready = session.n_past == len(request.tokens) - 1 and session.context.can_draft(session.seq)
        return min(self.n_max, request.n_max) if ready else 0
