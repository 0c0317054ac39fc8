"""Documents: texts that are prefilled once, independently of a prompt, and reused anywhere in later prompts."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pylongctx._log import LOG
from pylongctx.engine.context import Context
from pylongctx.engine.model import Model
from pylongctx.engine.prefix import longest_prefix
from pylongctx.methods import Full, parse
from pylongctx.methods.base import check_share

FRESH_TOKENS = 32  # first tokens of a document, evaluated in each prompt
MIN_SPAN = 128  # minimum tokens of a span
PROBE = 16  # tokens used to search a document
MAX_DOCUMENTS = 256  # maximum documents if bytes are limited
EDGE_TOKENS = 8  # tokens at its ends that may be tokenized differently next to other text

Tokens = NDArray[np.int32]


@dataclass(eq=False)
class Document:
    """A text that was prefilled independently, after the model's BOS token, if it has one.

    Attributes
    ----------
    name : str
        Its name in messages.
    text : str
        The text, which prompts contain unchanged.
    tokens : numpy.ndarray
        int32 [n], its tokens without the BOS token.
    ratio : float or None
        Fraction of its KV entries to keep; None: all.

    Examples
    --------
    >>> from pylongctx import Llama
    >>> with Llama("model.gguf", n_ctx=1024, method="full,spans=2", verbose=False) as reader:
    ...     novel = reader.read("It was the best of times, it was the worst of times. " * 20, name="novel")
    ...     answer = reader(f"Two cities. {novel} Which times?", max_tokens=1)
    ...     [place.document.name for place in reader.session.placed]
    ['novel']
    """

    name: str
    text: str
    tokens: Tokens
    start: tuple[int, ...] = field(default=(), repr=False)  # tokens before it in its own prefill
    owner: str | None = field(default=None, repr=False)
    ratio: float | None = None
    rows: NDArray[np.uint8] | None = field(default=None, repr=False)  # None: not prefilled yet
    missed: bool = field(default=False, repr=False)  # a prompt with its text but not its tokens was logged

    def __str__(self) -> str:
        return self.text

    def miss(self, why: str) -> None:
        """Log once why a prompt cannot reuse it."""
        if not self.missed:
            self.missed = True
            LOG.warning("document %r is evaluated again in a prompt: %s", self.name, why)

    @property
    def prompt(self) -> Tokens:
        """int32 [n], the tokens of its prefill."""
        return np.concatenate([np.array(self.start, np.int32), self.tokens])


@dataclass(frozen=True)
class Placed:
    """Rows of a prompt that come from a document."""

    first: int
    end: int
    document: Document | None = None  # None: the prefix of these rows is unknown
    skip: int = 0  # rows of its own prefill before these


class Documents:
    """The documents of an engine, the least recently used first. Thread-safe.

    Beyond ``limit`` bytes of rows (None: no limit), the least recently used documents lose theirs.
    """

    def __init__(self, model: Model, context: Context) -> None:
        self.limit: int | None = None
        self._model, self._context = model, context
        method = parse(context.method) if context.method else None
        parts = method.parts if method else ()
        self._most = sum((part.spans or 1) - 1 for part in parts if isinstance(part, Full))  # maximum per prompt
        self._compresses = method is not None and method.replays
        self._lock = threading.Lock()
        self._all: dict[tuple[str | None, str], Document] = {}

    def __iter__(self) -> Iterator[Document]:
        with self._lock:
            return iter(list(self._all.values()))

    def add(self, text: str, name: str | None = None, owner: str | None = None, ratio: float | None = None) -> Document:
        """Register a text, which is prefilled before a prompt that contains it. ``name`` None: the text itself.

        Raises ValueError when the method or the model does not support documents, the method not their compression, or
        the ratio or the length of the text is out of range.
        """
        check_share("ratio", ratio)
        if not self._most:
            raise ValueError(
                f"documents need method='full,spans=N', where N is above the documents of a prompt, not "
                f"{self._context.method or 'llama.cpp own KV cache'}"
            )
        if ratio is not None and not self._compresses:
            raise ValueError(f"compressed documents need method='full,spans=N+kvzip', not {self._context.method}")
        if self._context.keeps_checkpoints:
            raise ValueError(
                "documents need a model without sliding windows and recurrent states, which depend on all that stands "
                "before: put the text into the prompt"
            )
        key = owner, text if name is None else name
        known = self._all.get(key)
        if known is None or (known.text, known.ratio) != (text, ratio):
            known = self._made(text, key[1], owner, ratio)  # without the lock, since tokenizing a book takes long
        with self._lock:
            other = self._all.pop(key, None)
            if other is not None and (other.text, other.ratio) == (text, ratio):
                known = other
            self._all[key] = known
            while self.limit is not None and len(self._all) > MAX_DOCUMENTS:
                del self._all[next(iter(self._all))]
        return known

    def named(self, name: str, owner: str | None = None) -> Document:
        """Return the document with a name; ValueError when there is none."""
        with self._lock:
            if (owner, name) not in self._all:
                raise ValueError(f"there is no document {name!r}: read it first, or send its text")
            return self._all[owner, name]

    def of_request(self, text: str | None, name: str | None, owner: str | None = None) -> Document:
        """Return the document with the text of a request, or without a text with the name, regardless of its ratio."""
        if text is None:
            return self.named(name or "", owner)
        with self._lock:
            known = self._all.get((owner, text if name is None else name))
        return self.add(text, name, owner, known.ratio if known is not None and known.text == text else None)

    def forget(self, name: str, owner: str | None = None) -> None:
        """Free a document; prompts with its text are prefilled normally."""
        self.named(name, owner)
        with self._lock:
            self._all.pop((owner, name), None)

    def clear(self) -> None:
        """Discard all rows, since the model's adapters have changed."""
        for document in self:
            document.rows = None

    def find(self, tokens: Tokens, owner: str | None = None, text: str = "") -> tuple[Placed, ...]:
        """Return the parts of a prompt, int32 [n], that come from documents: ascending, preferring the longest ones.

        A document whose text is in the prompt, but whose tokens are not, is logged once.
        """
        with self._lock:
            known = [document for (whose, _), document in self._all.items() if whose == owner]
        found: list[Placed] = []
        places = [place for document in known for place in _places(document, tokens)]
        self._warn(known, places, text)
        for place in sorted(places, key=_size, reverse=True):
            if all(place.end <= other.first or other.end <= place.first for other in found):
                found.append(place)
        return tuple(sorted(found[: self._most], key=lambda place: place.first))

    def _warn(self, known: Sequence[Document], places: Sequence[Placed], text: str) -> None:
        found = {id(place.document) for place in places}
        for document in known:
            if id(document) not in found and document.text.strip() in text:
                document.miss(
                    f"its {len(document.tokens)} tokens are not in the prompt. Texts of special tokens are "
                    "special tokens in plain prompts, but text in documents: send it as a part of type 'document'"
                )

    def keep(self, document: Document, rows: NDArray[np.uint8]) -> None:
        """Store the rows of a prefilled document; others are evicted when the limit is exceeded."""
        document.rows = rows
        with self._lock:
            kept = [key for key, one in self._all.items() if one.rows is not None and one is not document]
            n_bytes = rows.nbytes + sum(_bytes(self._all[key]) for key in kept)
            for key in kept:
                if self.limit is None or n_bytes <= self.limit:
                    break
                n_bytes -= _bytes(self._all.pop(key))

    @property
    def bytes(self) -> int:
        """Bytes of all rows."""
        return sum(_bytes(document) for document in self)

    def _made(self, text: str, name: str, owner: str | None, ratio: float | None) -> Document:
        tokens = np.array(self._model.tokenize(text.encode(), False, False), np.int32)
        start = tuple(self._model.start)
        if len(tokens) < MIN_SPAN:
            raise ValueError(f"a document must have at least {MIN_SPAN} tokens, not {len(tokens)}")
        if len(start) + len(tokens) > self._context.n_ctx:
            raise ValueError(f"a document of {len(tokens)} tokens does not fit into n_ctx {self._context.n_ctx}")
        return Document(name, text, tokens, start, owner, ratio)


def with_texts(messages: Any, document: Any) -> Any:
    """Return messages whose parts of type ``document`` are texts; ``document``: called as ``(text, name)``.

    Raises ValueError when a part has neither text nor a known name.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return messages
    return [_with_text(message, document) for message in messages]


def _with_text(message: Any, document: Any) -> Any:
    parts = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(parts, Sequence) or isinstance(parts, str):
        return message
    return {**message, "content": [_text_part(part, document) for part in parts]}


def _text_part(part: Any, document: Any) -> Any:
    if not isinstance(part, Mapping) or part.get("type") != "document":
        return part
    text, name = part.get("text"), part.get("name")
    if not (isinstance(text, str) or (text is None and isinstance(name, str))) or not isinstance(name, str | None):
        raise ValueError("a content part of type 'document' must have a 'text', a 'name', or both")
    if unknown := part.keys() - {"type", "text", "name"}:
        raise ValueError(f"a content part of type 'document' has no field {min(unknown)!r}")
    return {"type": "text", "text": document(text, name).text}


def _places(document: Document, tokens: Tokens) -> Iterator[Placed]:
    """Yield the positions of a document in a prompt, ignoring its first tokens and a few at its ends."""
    own = document.tokens
    for start in _starts(tokens, own[EDGE_TOKENS : EDGE_TOKENS + PROBE]):
        rest, other = own[EDGE_TOKENS:], tokens[start : start + len(own) - EDGE_TOKENS]
        n = longest_prefix(rest, other)
        if len(rest) - n > EDGE_TOKENS:
            continue  # the text differs after this
        fresh = FRESH_TOKENS - EDGE_TOKENS
        end = min(start + n, len(tokens) - 1)  # the last token is evaluated for its logits
        if end - start - fresh >= MIN_SPAN - FRESH_TOKENS - EDGE_TOKENS:
            yield Placed(start + fresh, end, document, len(document.start) + FRESH_TOKENS)


def _starts(tokens: Tokens, probe: Tokens) -> list[int]:
    """Return the positions of a run of tokens in other tokens; empty if those are shorter."""
    starts = np.flatnonzero(tokens[: max(0, len(tokens) - len(probe) + 1)] == probe[0])
    for i in range(1, len(probe)):
        starts = starts[tokens[starts + i] == probe[i]]
    found: list[int] = starts.tolist()
    return found


def _size(place: Placed) -> int:
    return place.end - place.first


def _bytes(document: Document) -> int:
    return 0 if document.rows is None else document.rows.nbytes


def without(placed: Sequence[Placed], document: Document) -> tuple[Placed, ...]:
    """Return the parts that come from other documents."""
    return tuple(place for place in placed if place.document is not document)


def placed_up_to(placed: Sequence[Placed], n: int) -> tuple[Placed, ...]:
    """Return the parts of ``placed`` among the first ``n`` rows."""
    return tuple(replace(place, end=min(place.end, n)) for place in placed if place.first < n)


def common(
    tokens: NDArray[np.int32], placed: Sequence[Placed], others: NDArray[np.int32], others_placed: Sequence[Placed]
) -> int:
    """Return the length of the common prefix of two texts whose tokens come from the same documents."""
    n = longest_prefix(tokens, others)
    for one, other in zip_longest(placed, others_placed):
        if one != other:
            return min(n, *(place.first for place in (one, other) if place is not None))
    return n
