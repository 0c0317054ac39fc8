"""A limit on the tokens of reasoning."""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from pylongctx.engine.model import Model

Tags = tuple[str, str]  # the texts that begin and end reasoning


class ReasoningBudget:
    """A logits processor that ends the reasoning of an answer after ``n`` tokens, with the tokens of its end tag.

    Blocks of reasoning are counted together. ``begun`` is what the template has written of the answer.
    """

    def __init__(self, model: Model, n: int, tags: Tags, begun: str) -> None:
        self._model, self._n = model, n
        self._start, self._end = tags
        self._said = begun.rpartition(self._end)[2]  # since the last tag
        self._n_thought = 0
        self._n_seen: int | None = None  # tokens of prompt and answer
        self._forced: deque[int] = deque()
        self._open = False
        self._look()

    def __call__(self, input_ids: NDArray[np.int32], scores: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the logits of the next token; only one is left while the end tag is written."""
        for token in input_ids[len(input_ids) if self._n_seen is None else self._n_seen :].tolist():
            self._take(token)
        self._n_seen = len(input_ids)
        if self._open and self._n_thought >= self._n and not self._forced:
            self._forced.extend(self._model.tokenize(self._end.encode(), False, True))
        if self._forced:
            scores[:] = -np.inf
            scores[self._forced.popleft()] = 0
        return scores

    def _take(self, token: int) -> None:
        self._n_thought += self._open
        self._said += self._model.piece(token, True).decode("utf-8", "replace")
        self._look()

    def _look(self) -> None:
        """Find the next tag in what was said since the last one."""
        tag = self._end if self._open else self._start
        if tag in self._said:
            self._open, self._said = not self._open, self._said.partition(tag)[2]
        else:
            self._said = self._said[-len(self._start + self._end) :]
