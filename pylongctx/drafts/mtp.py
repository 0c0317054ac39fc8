"""Drafts of the block of a model that predicts the token after the next one."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pylongctx.drafts.speculative import BatchDraft, check_sizes, likeliest
from pylongctx.engine.drafting import DraftRequest
from pylongctx.engine.model import Model
from pylongctx.errors import ContextFull

NAME = "mtp"
Tokens = NDArray[np.int32]


class MtpDraft(BatchDraft):
    """Drafts with the MTP block of the model (multi-token prediction, NextN).

    The block is a layer after the last one, trained to predict the token after the next one from a token and the hidden
    state before it. It evaluates each token too, with a KV cache of its own; its hidden state is the input for the next
    draft token. Gloeckle et al., arXiv 2404.19737; DeepSeek-V3, arXiv 2412.19437, section 2.2. ``Llama(draft="mtp")``
    uses it with the default sizes.

    Parameters
    ----------
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
        found = [request.tokens[-1:].tolist() for request in requests]
        left = {i: n for i, request in enumerate(requests) if (n := self._length(request)) > 0}
        try:
            while left:
                rows = self._step([requests[i] for i in left], [found[i] for i in left])
                for i, row in zip(list(left), rows, strict=True):
                    token = likeliest(row, self.p_min)
                    found[i] += [] if token is None else [token]
                    left[i] = 0 if token is None else left[i] - 1
                left = {i: n for i, n in left.items() if n}
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
