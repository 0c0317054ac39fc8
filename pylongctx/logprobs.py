"""Log-probabilities of tokens: token i's come from the logits after token i - 1."""

import codecs
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from pylongctx._model import Model
from pylongctx._session import Session


class CompletionLogprobs(TypedDict):
    """Four lists with one entry per token."""

    tokens: list[str]
    text_offset: list[int]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


class Entry(NamedTuple):
    """One token: its text, where it starts in the returned text, its log-probability, the likeliest tokens."""

    text: str
    offset: int
    logprob: float | None
    top: dict[str, float] | None


def as_dict(entries: Iterable[Entry]) -> CompletionLogprobs:
    """Return OpenAI's dict of lists."""
    entries = list(entries)
    return {
        "tokens": [entry.text for entry in entries],
        "text_offset": [entry.offset for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [entry.top for entry in entries],
    }


def merge(parts: Iterable[CompletionLogprobs | None]) -> CompletionLogprobs:
    """Return the lists of several chunks one after the other."""
    whole = as_dict([])
    for part in parts:
        for name, values in (part or {}).items():
            whole[name] += values  # type: ignore[literal-required]
    return whole


class Scorer:
    """Make entries from tokens and logits; of two tokens with the same text the likelier one is kept."""

    def __init__(self, model: Model, n_top: int) -> None:
        self._model = model
        self._n_top = min(n_top, int(model.info.n_vocab))

    def entry(self, token: int, row: NDArray[np.float32], offset: int) -> Entry:
        """Return the entry of a token that follows the logits float32 [n_vocab]."""
        return Entry(self._text(token), offset, *self._score(token, row))

    def prompt(self, session: Session, tokens: NDArray[np.int32], text: str, special: bool) -> list[Entry]:
        """Evaluate a whole prompt and return the entries of its tokens but a leading BOS.

        Memory does not grow with vocabulary times tokens: of every row of logits only the entry is kept.
        """
        session.clear()
        scores: list[tuple[float | None, dict[str, float] | None]] = [(None, None)]  # nothing precedes the first
        for rows in session.eval_rows(tokens):
            following = tokens[len(scores) : len(scores) + len(rows)].tolist()
            scores += [self._score(token, row) for token, row in zip(following, rows, strict=False)]
        first = int(tokens[0] == self._model.info.token_bos)
        pieces = [self._model.piece(token, special) for token in tokens[first:].tolist()]
        texts = [piece.decode("utf-8", "ignore") for piece in pieces]
        places = zip(texts, _offsets(pieces, text), scores[first:], strict=True)
        return [Entry(piece, offset, *score) for piece, offset, score in places]

    def _score(self, token: int, row: NDArray[np.float32]) -> tuple[float, dict[str, float]]:
        top = row.max()
        norm = float(top) + np.log(np.exp(row - top).sum(dtype=np.float64))
        found: dict[str, float] = {}
        for i in _largest(row, self._n_top):
            found.setdefault(self._text(i), float(row[i] - norm))
        own = float(row[token] - norm)
        return own, found | {self._text(token): own}

    def _text(self, token: int) -> str:
        return self._model.piece(token).decode("utf-8", "ignore")


def _largest(row: NDArray[np.float32], n: int) -> list[int]:
    """Return the indices of the ``n`` largest numbers, the largest first."""
    if n == 0:
        return []
    found = np.argpartition(row, -n)[-n:]
    indices: list[int] = found[np.argsort(-row[found], kind="stable")].tolist()
    return indices


def _offsets(pieces: Sequence[bytes], text: str) -> Iterator[int]:
    """Yield where each piece starts in ``text``, which may lack the space that a tokenizer adds in front."""
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    lengths = [len(decoder.decode(piece)) for piece in pieces]
    offset = min(0, len(text) - sum(lengths))
    for length in lengths:
        yield max(0, offset)
        offset += length
