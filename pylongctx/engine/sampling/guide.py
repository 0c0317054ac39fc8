"""Token masks for answers that follow JSON schemas, from llguidance and the grammar around the schemas."""

import json
from collections import OrderedDict
from collections.abc import Mapping
from threading import Lock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from pylongctx._lib import error, ffi, lib, out_buffer, text
from pylongctx.engine.model import Model, freed_before
from pylongctx.engine.sampling.schema import llguidance

MAX_GRAMMARS = 16  # compiled grammars to cache
SPECIAL = b"\xff"  # llguidance's mark of tokens that are not text

_making = Lock()


class Words:
    """A vocabulary in llguidance's form, followed by a token for every byte."""

    def __init__(self, model: Model) -> None:
        n = model.info.n_vocab
        ends = [token for token in range(n) if model.ends_generation(token)]
        pieces = [
            SPECIAL + model.piece(token, True) if model.is_special(token) else model.piece(token) for token in range(n)
        ]
        self.n_vocab, self.ends = n, ends
        self.tokens = pieces + [bytes([byte]) for byte in range(256)]
        self.bos_token_id = None
        self.special_token_ids: list[int] = []
        self.eos_token_id = ends[0] if ends else 0
        self.is_tokenizer_wrapper = True  # required by llguidance
        self._ids: dict[bytes, list[int]] = {}
        for token, piece in enumerate(pieces):
            self._ids.setdefault(piece, []).append(token)
        self._prototypes: OrderedDict[str, Any] = OrderedDict()
        self._lock = Lock()
        table = llguidance().LLTokenizer
        self._table = table(self, slices=table.json_slices())

    def __call__(self, data: bytes | str) -> list[int]:
        """Return the tokens of a text: its bytes, which are enough for masks."""
        return [self.n_vocab + byte for byte in (data.encode() if isinstance(data, str) else data)]

    def beginnings(self, data: bytes) -> list[int]:
        """Return the tokens that a text may begin with."""
        return [token for end in range(1, len(data) + 1) for token in self._ids.get(data[:end], ())]

    def matcher(self, grammar: str) -> Any:
        """Return a new matcher of an llguidance grammar; InvalidInput when it cannot be used."""
        with self._lock:
            known = self._prototypes.get(grammar)
            if known is None:
                known = llguidance().LLMatcher(self._table, grammar, log_level=0)
                if known.is_error():
                    raise error(lib.LCTX_INVALID, f"the schema cannot be used: {known.get_error()[:200]}")
                self._prototypes[grammar] = known
            self._prototypes.move_to_end(grammar)
            if len(self._prototypes) > MAX_GRAMMARS:
                self._prototypes.popitem(last=False)
            return known.deep_copy()


_words: WeakKeyDictionary[Model, Words] = WeakKeyDictionary()


def words_of(model: Model) -> Words:
    """Return the cached vocabulary of a model; building a large one takes a second."""
    with _making:
        found = _words.get(model)
        if found is None:
            found = _words[model] = Words(model)
    return found


class Frame:
    """Owner of one ``lctx_grammar``: the grammar around schemas, such as that of a tool call or reasoning.

    The constraint is as for ``lctx_grammar_create``. Raises InvalidInput when the grammar cannot be used.
    """

    def __init__(self, model: Model, constraint: Mapping[str, Any]) -> None:
        of_model = model.handle
        handle = lib.lctx_grammar_create(of_model, json.dumps(constraint).encode())
        self._handle = freed_before(of_model, handle, lib.lctx_grammar_free)
        self._check(lib.LCTX_INVALID if text(lib.lctx_grammar_error(handle)) else lib.LCTX_OK)

    def allows(self, token: int, part: bytes | None = None) -> bool:
        """Return True if a token, or a part of it, is allowed next."""
        return self._check(lib.lctx_grammar_allows(self._handle, token, *_given(part))) == 1

    def accept(self, token: int, part: bytes | None = None) -> None:
        """Advance over an allowed token or part of one."""
        self._check(lib.lctx_grammar_accept(self._handle, token, *_given(part)))

    def schema_behind(self, part: bytes) -> int:
        """Return the schema that may begin after a text; -1: none."""
        return int(lib.lctx_grammar_schema_behind(self._handle, part, len(part)))

    def pass_schema(self, schema: int) -> None:
        """Continue after a schema."""
        self._check(lib.lctx_grammar_pass_schema(self._handle, schema))

    def mask(self, n_vocab: int) -> NDArray[np.bool_]:
        """Return the tokens allowed next, bool [n_vocab]."""
        row = np.zeros(n_vocab, np.float32)
        self._check(lib.lctx_grammar_restrict(self._handle, out_buffer("mask", row, np.float32), n_vocab))
        return np.equal(row, 0)

    def _check(self, status: int) -> int:
        if status < 0:
            raise error(lib.LCTX_INVALID, text(lib.lctx_grammar_error(self._handle)))
        return status


def _given(part: bytes | None) -> tuple[Any, int]:
    return (ffi.NULL, 0) if part is None else (part, len(part))


class Way(NamedTuple):
    """A way to match a token: its first bytes by the current schema or grammar, the others by the next one."""

    first: int | None = None  # bytes; None: all
    schema: int = -1  # that begins after them; -1: the grammar continues


class Guide:
    """The constraint of one answer.

    The constraint has ``schemas``, llguidance's grammars, and, unless the first one is the whole answer, the
    ``grammar`` around them with the other fields of ``lctx_sampler_constrain``. The model must outlive it. Raises
    InvalidInput when a grammar cannot be used.
    """

    def __init__(self, model: Model, constraint: Mapping[str, Any]) -> None:
        self._model, self._words = model, words_of(model)
        self._schemas: list[str] = constraint["schemas"]
        self._frame: Frame | None = None
        self._matcher: Any = None  # of the current schema
        if "grammar" not in constraint:
            self._matcher = self._words.matcher(self._schemas[0])
            return
        given = {key: value for key, value in constraint.items() if key != "schemas"}
        # the frame tracks reasoning and triggers; other prefixes may end within a schema
        begun = "" if given.get("lazy") else given.pop("prefill", "")
        self._frame = Frame(model, given | {"n_schemas": len(self._schemas)})
        for token in self._begun(begun):
            if not self.allows(token):
                reason = "the grammar does not allow the beginning of the answer that the chat template writes"
                raise error(lib.LCTX_INVALID, reason)
            self.accept(token)

    def allows(self, token: int) -> bool:
        """Return True if a token is allowed next."""
        return self._way(token) is not None

    def accept(self, token: int) -> None:
        """Advance over an allowed token."""
        way, frame = self._way(token), self._frame
        assert way is not None
        part = None if way.first is None else self._piece(token)
        if self._matcher is None:
            assert frame is not None
            frame.accept(token, None if part is None else part[: way.first])
            if part is not None:
                frame.pass_schema(way.schema)
                self._begin(way.schema).consume_tokens(self._words(part[way.first :]))
        elif part is None:
            if not self._model.ends_generation(token):
                self._matcher.consume_token(token)
        else:
            assert frame is not None
            self._matcher = None
            frame.accept(token, part[way.first :] if way.first else None)

    def mask(self) -> NDArray[np.bool_]:
        """Return the tokens allowed next, bool [n_vocab], without those that end a schema and continue after it."""
        n, frame, matcher = self._words.n_vocab, self._frame, self._matcher
        if matcher is None:
            assert frame is not None
            found, schema = frame.mask(n), frame.schema_behind(b"")
            return found if schema < 0 else found | self._text_bits(self._words.matcher(self._schemas[schema]))
        found = self._text_bits(matcher)
        if not matcher.is_accepting():
            return found
        if frame is not None:
            return found | frame.mask(n)
        found[self._words.ends] = True
        return found

    def _way(self, token: int) -> Way | None:
        matcher, frame = self._matcher, self._frame
        if matcher is None:
            assert frame is not None
            return Way() if frame.allows(token) else self._way_in(token)
        ends = self._model.ends_generation(token)
        if frame is None and ends:
            return Way() if matcher.is_accepting() else None
        if not ends and matcher.validate_tokens([token]):
            return Way()
        return None if frame is None else self._way_out(token)

    def _way_in(self, token: int) -> Way | None:
        """Return how a token starts in the grammar and ends in a schema."""
        assert self._frame is not None
        part = self._piece(token)
        for first in range(len(part)):
            schema = self._frame.schema_behind(part[:first])
            if schema >= 0 and self._reads(self._words.matcher(self._schemas[schema]), part[first:]):
                return Way(first, schema)
        return None

    def _way_out(self, token: int) -> Way | None:
        """Return how a token starts in a schema, or right after it, and ends in the grammar."""
        assert self._frame is not None
        part, after = self._piece(token), self._matcher
        first = after.validate_tokens(self._words(part)) if part else 0
        if first:
            after = after.deep_copy()
            after.consume_tokens(self._words(part[:first]))
        if not after.is_accepting():
            return None
        return Way(first) if self._frame.allows(token, part[first:] if first else None) else None

    def _reads(self, matcher: Any, part: bytes) -> bool:
        return bool(part) and matcher.validate_tokens(self._words(part)) == len(part)

    def _begin(self, schema: int) -> Any:
        self._matcher = self._words.matcher(self._schemas[schema])
        return self._matcher

    def _piece(self, token: int) -> bytes:
        """Return the text of a token; a control token has none."""
        return self._model.piece(token)

    def _bits(self, matcher: Any) -> NDArray[np.bool_]:
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            raise error(lib.LCTX_INVALID, f"the schema allows nothing more here: {matcher.get_error()[:100]}")
        found = np.unpackbits(bits, count=self._words.n_vocab, bitorder="little").view(np.bool_)
        if not found.any():  # only one text can follow; llguidance returns the byte token of its beginning
            found[self._words.beginnings(matcher.compute_ff_bytes())] = True
        return found

    def _text_bits(self, matcher: Any) -> NDArray[np.bool_]:
        """Return the bits without end tokens, which belong to the grammar around a schema."""
        found = self._bits(matcher)
        found[self._words.ends] = False
        return found

    def _begun(self, prefill: str) -> list[int]:
        """Return the tokens of the answer's beginning written by the template, without a leading space added."""
        tokens = self._model.tokenize(prefill.encode(), False, True) if prefill else []
        padded = bool(tokens) and self._model.piece(tokens[0], True)[:1].isspace() and not prefill[0].isspace()
        return tokens[1:] if padded else tokens
