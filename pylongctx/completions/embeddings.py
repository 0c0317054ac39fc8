"""Embeddings: one vector for a text, or for each of its tokens."""

from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from pylongctx._arguments import MAX_TEXTS
from pylongctx.engine.session import UNCHECKED_BYTES, Session

NO_POOLING, RANK = 0, 4  # llama.cpp's numbers

Texts = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
Vectors = list[Any]  # of floats; one per text, or without pooling one per token


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


class Embedder:
    """Computes vectors of texts with a context that was opened for embeddings.

    ``pooling`` is the pooling type, as llama.cpp's number.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._n_batch = session.context.n_batch
        self._n_text = min(self._n_batch, session.context.n_ctx)  # maximum tokens of a text
        self.pooling = session.context.pooling_type()

    def embed(self, texts: Texts, normalize: bool = False, truncate: bool = True) -> tuple[Vectors, int]:
        """Return the vectors of texts as lists (of a single text its only one), and the total number of tokens."""
        found, n_tokens = self._read(texts, truncate)
        vectors: Vectors = [(normalized(one) if normalize else one).tolist() for one in found]
        return (vectors[0] if is_single(texts) else vectors), n_tokens

    def response(
        self,
        texts: Texts,
        model_name: str,
        dimensions: int | None = None,
        normalize: bool = False,
        truncate: bool = True,
    ) -> CreateEmbeddingResponse:
        """Return OpenAI's response dict; ``dimensions``: shorten the vectors, see ``shortened``."""
        found, n_tokens = self._read(texts, truncate)
        if normalize:
            found = [normalized(one) for one in found]
        if dimensions is not None:
            found = [shortened(one, dimensions) for one in found]
        return {
            "object": "list",
            "data": [{"object": "embedding", "embedding": one.tolist(), "index": i} for i, one in enumerate(found)],
            "model": model_name,
            "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
        }

    def _read(self, texts: Texts, truncate: bool) -> tuple[list[NDArray[np.float32]], int]:
        """Return the vectors of one or several texts, see ``_vectors``, and the total number of tokens."""
        tokens = [self._tokens(text, truncate) for text in ([texts] if is_single(texts) else texts)]
        return self._vectors(tokens), sum(map(len, tokens))

    def _tokens(self, text: Any, truncate: bool) -> list[int]:
        """Return the tokens of a text, or checked token ids, up to the maximum of one text."""
        model = self._session.model
        if isinstance(text, str):
            data = text.encode()
            if truncate:
                data = self._beginning(data)
            else:
                self._session.check_size(len(data))
            tokens = model.tokenize(data, True, False)
        elif isinstance(text, Sequence) and not isinstance(text, bytes):
            tokens = model.check_tokens(text, allow_empty=True).tolist()
        else:
            raise TypeError(f"a text must be a str or a list of tokens, not {type(text).__name__}")
        if truncate:
            tokens = tokens[: self._n_text]
        if not tokens:
            raise ValueError("a text without tokens cannot be embedded")
        if len(tokens) > self._n_text:
            what = (
                "a larger n_batch (-b)"
                if self._n_text == self._n_batch
                else "a larger n_ctx (-c), if the model has it,"
            )
            raise ValueError(
                f"Requested tokens ({len(tokens)}) exceed batch size of {self._n_text}: the text is too large to "
                f"process, {what} allows more"
            )
        return tokens

    def _beginning(self, data: bytes) -> bytes:
        """Return the beginning of a UTF-8 text that is long enough for all tokens that are kept."""
        n_tokens = 2 * self._n_text  # enough that the cut does not change the tokens that are kept
        if len(data) <= n_tokens * UNCHECKED_BYTES:
            return data
        n = n_tokens * max(UNCHECKED_BYTES, self._session.model.longest_piece)
        return data[:n].decode("utf-8", "ignore").encode()

    def _vectors(self, texts: Sequence[list[int]]) -> list[NDArray[np.float32]]:
        """Return float32 [n_embd] for each text, or without pooling [n_tokens, n_embd]."""
        session = self._session
        found: list[NDArray[np.float32]] = []
        with session.lock:
            session.context.abort = False
            session.clear()
            for group in _groups(texts, self._n_batch):
                rows = session.context.embed(group)
                if session.context.pooling_type() != NO_POOLING:
                    found += list(rows)
                else:
                    found += np.split(rows, np.cumsum([len(tokens) for tokens in group])[:-1])
        return found


def is_single(texts: Texts) -> bool:
    """Return True for a single text: a string, or its tokens."""
    return isinstance(texts, str) or (len(texts) > 0 and all(isinstance(token, Integral) for token in texts))


def normalized(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return vectors float32 [..., n_embd] scaled to length 1."""
    length = np.linalg.norm(rows, axis=-1, keepdims=True)
    return np.asarray(rows / np.where(length > 0, length, 1), np.float32)


def shortened(rows: NDArray[np.float32], dimensions: int) -> NDArray[np.float32]:
    """Return the first ``dimensions`` numbers of vectors, scaled to length 1, as in OpenAI's API.

    Raises ValueError when the vectors have fewer.
    """
    if not 1 <= dimensions <= rows.shape[-1]:
        raise ValueError(f"dimensions must be from 1 to {rows.shape[-1]}, not {dimensions}")
    return normalized(rows[..., :dimensions])


def _groups(texts: Sequence[list[int]], n_batch: int) -> Iterator[list[list[int]]]:
    """Yield groups of consecutive texts that fit into one batch."""
    group: list[list[int]] = []
    for tokens in texts:
        if group and (len(group) == min(n_batch, MAX_TEXTS) or sum(map(len, group)) + len(tokens) > n_batch):
            yield group
            group = []
        group.append(tokens)
    if group:
        yield group
