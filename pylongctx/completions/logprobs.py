"""Log-probabilities of tokens: those of token i come from the logits after token i - 1."""

import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from pylongctx._lib import error, in_buffer, lib, out_buffer
from pylongctx.engine.model import Model
from pylongctx.engine.sampling.sampler import check_logits


class CompletionLogprobs(TypedDict):
    """Four lists with one entry per token."""

    tokens: list[str]
    text_offset: list[int]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


class TokenEntry(NamedTuple):
    """One token: its bytes, its offset in the returned text, its log-probability, the most likely tokens; ids."""

    piece: bytes
    offset: int
    logprob: float | None
    top: list[tuple[bytes, float]] | None
    token: int = -1
    top_tokens: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """The token's text; for a part of a character its bytes in OpenAI's form: ``bytes:\\xe6``."""
        return next(_names(self.token, self.piece))

    @property
    def top_texts(self) -> dict[str, float] | None:
        """The most likely tokens and this one, each under a unique name."""
        if self.top is None or self.logprob is None:
            return None
        names, taken, values = {self.token: self.text}, {self.text}, dict[int, float]()
        for token, (piece, value) in zip(self.top_tokens, self.top, strict=True):
            values[token] = value
            if token not in names:
                names[token] = next(name for name in _names(token, piece) if name not in taken)
                taken.add(names[token])
        return {names[token]: value for token, value in (values | {self.token: self.logprob}).items()}


def _names(token: int, piece: bytes) -> Iterator[str]:
    """Yield candidate names of a token, since tokens may share a text, like a byte and a letter, or have none."""
    with suppress(UnicodeDecodeError):
        yield piece.decode()
    if piece:
        yield "bytes:" + "".join(chr(b) if 32 <= b < 127 and b != ord("\\") else f"\\x{b:02x}" for b in piece)
    yield f"token_id:{token}"


def as_dict(entries: Iterable[TokenEntry]) -> CompletionLogprobs:
    """Return OpenAI's dict of lists.

    Examples
    --------
    >>> as_dict([TokenEntry(b"\\xe6", 0, -0.5, [(b"\\xe6", -0.5), (b" man", -1.5)], 7, (7, 9))])["top_logprobs"]
    [{'bytes:\\\\xe6': -0.5, ' man': -1.5}]
    """
    entries = list(entries)
    return {
        "tokens": [entry.text for entry in entries],
        "text_offset": [entry.offset for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [entry.top_texts for entry in entries],
    }


def merge(parts: Iterable[CompletionLogprobs | None]) -> CompletionLogprobs:
    """Concatenate the lists of several chunks.

    Examples
    --------
    >>> part = as_dict([TokenEntry(b" thief", 0, -0.5, None)])
    >>> merge([part, None, part])["tokens"]
    [' thief', ' thief']
    """
    whole = as_dict([])
    for part in parts:
        for name, values in (part or {}).items():
            whole[name] += values  # type: ignore[literal-required]
    return whole


class Scorer:
    """Creates entries from tokens and logits."""

    def __init__(self, model: Model, n_top: int, piece: Callable[[int], bytes] | None = None) -> None:
        self._model = model
        self._n_top = min(n_top, int(model.info.n_vocab))
        self._piece = piece or model.piece

    def entry(self, token: int, row: NDArray[np.float32], offset: int) -> TokenEntry:
        """Return the entry of a token that follows the logits float32 [n_vocab]."""
        own, top, ids = self._score(np.array([token], np.int32), row[np.newaxis])
        return TokenEntry(self._piece(token), offset, own[0], top[0], token, tuple(ids[0]))

    def prompt(
        self, parts: Iterable[NDArray[np.float32]], tokens: NDArray[np.int32], text: str, special: bool
    ) -> list[TokenEntry]:
        """Return the entries of a prompt's tokens; ``parts``: the logits after them, step by step.

        For a text (``special``) the added BOS is left out; token ids have one entry each, as clients count them.
        Memory does not grow with vocabulary times tokens: only the entry of every row of logits is kept.
        """
        own: list[float | None] = [None]  # the first token has no predecessor
        top: list[list[tuple[bytes, float]] | None] = [None]
        ids: list[list[int]] = [[]]
        for rows in parts:
            following = tokens[len(own) : len(own) + len(rows)]
            values, likeliest, of_likeliest = self._score(following, rows[: len(following)])
            own += values
            top += likeliest
            ids += of_likeliest
        first = int(special and tokens[0] == self._model.info.token_bos)
        read = tokens[first:].tolist()
        pieces = [self._model.piece(token, special) for token in read]
        places = zip(
            pieces, _offsets(pieces, text), own[first:], top[first:], read, map(tuple, ids[first:]), strict=True
        )
        return [TokenEntry(*place) for place in places]

    def _score(
        self, tokens: NDArray[np.int32], rows: NDArray[np.float32]
    ) -> tuple[list[float], list[list[tuple[bytes, float]]], list[list[int]]]:
        """Return the log-probability of each token after its row of logits, and the most likely tokens of each row."""
        n, n_vocab = rows.shape
        own, top = np.empty(n, np.float32), np.empty((n, self._n_top), np.float32)
        ids = np.empty((n, self._n_top), np.int32)
        status = lib.lctx_logprobs(
            in_buffer("logits", rows, np.float32),
            n,
            n_vocab,
            in_buffer("tokens", tokens, np.int32),
            out_buffer("own", own, np.float32),
            self._n_top,
            out_buffer("ids", ids, np.int32),
            out_buffer("top", top, np.float32),
        )
        if status != lib.LCTX_OK:
            check_logits(rows)
            raise error(status, "the log-probabilities cannot be computed")
        likeliest = [
            [(self._piece(token), value) for token, value in zip(*pair, strict=True)]
            for pair in zip(ids.tolist(), top.tolist(), strict=True)
        ]
        return own.tolist(), likeliest, ids.tolist()


def _offsets(pieces: Sequence[bytes], text: str) -> Iterator[int]:
    """Yield the offset of each piece in ``text``, which may lack the leading space added by the tokenizer."""
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    lengths = [len(decoder.decode(piece)) for piece in pieces]
    offset = min(0, len(text) - sum(lengths))
    for length in lengths:
        yield max(0, offset)
        offset += length
