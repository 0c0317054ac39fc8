"""Embeddings: one vector for a text, or for each of its tokens."""

from collections.abc import Iterator, Sequence
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from pylongctx._arguments import MAX_TEXTS
from pylongctx._saving import Saving

NO_POOLING = 0


class EmbeddingUsage(TypedDict):
    """Token counts of a call."""

    prompt_tokens: int
    total_tokens: int


class Embedding(TypedDict):
    """The embedding of one text; without pooling one vector per token."""

    index: int
    object: str
    embedding: list[float] | list[list[float]]


class CreateEmbeddingResponse(TypedDict):
    """OpenAI's answer."""

    object: str
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Embeddings(Saving):
    """What Llama does with embeddings, when it was opened with ``embedding=True``."""

    n_batch: int

    def create_embedding(self, input: str | list[str], model: str | None = None) -> CreateEmbeddingResponse:
        """Embed texts; returns OpenAI's response dict."""
        found, n_tokens = self.embed([input] if isinstance(input, str) else input, return_count=True)
        return {
            "object": "list",
            "data": [{"object": "embedding", "embedding": one, "index": i} for i, one in enumerate(found)],
            "model": self.model_path if model is None else model,
            "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
        }

    def embed(
        self, input: str | list[str], normalize: bool = False, truncate: bool = True, return_count: bool = False
    ) -> Any:
        """Embed a text or several.

        Parameters
        ----------
        normalize : bool
            Scale every vector to length 1.
        truncate : bool
            Leave out what is behind the first ``n_batch`` tokens of a text, instead of refusing it.
        return_count : bool
            Return the number of tokens too.

        Returns
        -------
        list
            One list of floats per text, or per token of a text without pooling; for a str, that of the text.

        Raises
        ------
        RuntimeError
            When the object was not opened with ``embedding=True``.
        ValueError
            When a text has no tokens, or too many.
        """
        session = self._session
        if not self._arguments["embedding"]:
            raise RuntimeError("Llama model must be created with embedding=True to call this method")
        texts = [self._text_tokens(text, truncate) for text in ([input] if isinstance(input, str) else input)]
        found: list[Any] = []
        with session.lock:
            session.context.abort = False
            session.clear()
            for group in _groups(texts, self.n_batch):
                rows = session.context.embed(group)
                found += self._vectors(rows, group, normalize)
        result = found[0] if isinstance(input, str) else found
        return (result, sum(map(len, texts))) if return_count else result

    def pooling_type(self) -> int:
        """Return how vectors of tokens become one: 0 not, 1 mean, 2 cls, 3 last, 4 rank."""
        return self._session.context.pooling_type()

    def _text_tokens(self, text: str, truncate: bool) -> list[int]:
        if not isinstance(text, str):
            raise TypeError(f"a text must be a str, not {type(text).__name__}")
        tokens = self._model.tokenize(text.encode(), True, False)
        if truncate:
            tokens = tokens[: self.n_batch]
        if not tokens:
            raise ValueError("a text without tokens cannot be embedded")
        if len(tokens) > self.n_batch:
            raise ValueError(f"Requested tokens ({len(tokens)}) exceed batch size of {self.n_batch}; pass n_batch")
        return tokens

    def _vectors(self, rows: NDArray[np.float32], group: list[list[int]], normalize: bool) -> list[Any]:
        if normalize:
            length = np.linalg.norm(rows, axis=1, keepdims=True)
            rows = np.asarray(rows / np.where(length > 0, length, 1), np.float32)
        if self.pooling_type() != NO_POOLING:
            vectors: list[Any] = rows.tolist()
            return vectors
        ends = np.cumsum([len(tokens) for tokens in group])[:-1]
        return [part.tolist() for part in np.split(rows, ends)]


def _groups(texts: Sequence[list[int]], n_batch: int) -> Iterator[list[list[int]]]:
    """Yield neighbours that fit into one batch."""
    group: list[list[int]] = []
    for tokens in texts:
        if group and (len(group) == min(n_batch, MAX_TEXTS) or sum(map(len, group)) + len(tokens) > n_batch):
            yield group
            group = []
        group.append(tokens)
    if group:
        yield group
