"""Ways to hold answers to JSON schemas, compared: what they hold, what a token costs, how long a large schema takes.

    python bench/structured.py --suite DIR --model model.gguf --ways pylongctx,llama.cpp,llguidance,xgrammar

DIR has the public JSON-Schema-Test-Suite's tests of a draft, for instance ``json/tests/draft2020-12`` in the source
package of jsonschema on PyPI. xgrammar and outlines-core are measured where they are installed. A group of the suite
is *other* when a text that its schema forbids is allowed without an error, and *narrower* when a text that the schema
allows is not allowed, as with properties in another order.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pylongctx import Llama, LlamaGrammar
from pylongctx.engine.model import Model
from pylongctx.engine.sampling.guide import Frame, Guide, Words
from pylongctx.engine.sampling.schema import hold, llguidance
from pylongctx.models import embedded_model

ROWS = [{"id": i, "name": f"row {i}", "score": i / 8, "tags": ["a", "b"], "when": "2024-05-06"} for i in range(12)]
ROW = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0},
        "name": {"type": "string", "maxLength": 40},
        "score": {"type": "number"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 4},
        "when": {"type": "string", "format": "date"},
    },
    "required": ["id", "name", "score", "tags", "when"],
    "additionalProperties": False,
}
TABLE = {"type": "array", "items": ROW}
# about 100 KB: 400 properties of 4 kinds, and a list of 2000 words
LARGE = {
    "type": "object",
    "properties": {
        **{f"p{i}": [ROW, {"type": "string"}, {"type": "integer", "maximum": i}, {}][i % 4] for i in range(400)},
        "word": {"enum": [f"word number {i}" for i in range(2000)]},
    },
    "required": ["word"],
    "additionalProperties": False,
}


class Matcher(Protocol):
    """Where one text stands in a grammar."""

    def reads(self, text: bytes) -> bool:
        """Return whether the text is complete."""

    def mask(self) -> None:
        """Find out which tokens may come next."""

    def accept(self, token: int) -> None:
        """Continue after a token."""


class Guidance:
    """llguidance, as it is or with what pylongctx does to a schema first."""

    def __init__(self, model: Model, prepared: bool) -> None:
        self.words, self.prepared = Words(model), prepared

    def __call__(self, schema: Any) -> Matcher:
        if self.prepared:
            grammar = hold(schema).grammar
        else:
            grammar = llguidance().LLMatcher.grammar_from_json_schema(json.dumps(schema))
        self.matcher = self.words.matcher(grammar)
        return self

    def reads(self, text: bytes) -> bool:
        return self.matcher.try_consume_tokens(self.words(text)) == len(text) and self.matcher.is_accepting()

    def mask(self) -> None:
        np.unpackbits(np.frombuffer(self.matcher.compute_bitmask(), np.uint8), bitorder="little")

    def accept(self, token: int) -> None:
        assert self.matcher.consume_token(token)


class Converter:
    """llama.cpp's converter, and its grammars."""

    def __init__(self, model: Model) -> None:
        self.model, self.end = model, model.info.token_eos

    def __call__(self, schema: Any) -> Matcher:
        self.frame = Frame(self.model, {"grammar": LlamaGrammar(schema=json.dumps(schema))._grammar})
        return self

    def reads(self, text: bytes) -> bool:
        if not self.frame.allows(0, text):
            return False
        self.frame.accept(0, text)
        return self.frame.allows(self.end)

    def mask(self) -> None:
        self.frame.mask(self.model.info.n_vocab)

    def accept(self, token: int) -> None:
        self.frame.accept(token)


class XGrammar:
    """xgrammar."""

    def __init__(self, model: Model) -> None:
        import xgrammar

        self.module, self.end = xgrammar, model.info.token_eos
        pieces = [model.piece(token) for token in range(model.info.n_vocab)]
        info = xgrammar.TokenizerInfo(pieces, xgrammar.VocabType.RAW, stop_token_ids=[self.end])
        self.compiler = xgrammar.GrammarCompiler(info, cache_enabled=False, max_threads=1)
        self.bits = xgrammar.allocate_token_bitmask(1, len(pieces))

    def __call__(self, schema: Any) -> Matcher:
        compiled = self.compiler.compile_json_schema(json.dumps(schema), strict_mode=False)
        self.matcher = self.module.GrammarMatcher(compiled)
        return self

    def reads(self, text: bytes) -> bool:
        return self.matcher.accept_string(text) and self.matcher.accept_token(self.end)

    def mask(self) -> None:
        self.matcher.fill_next_token_bitmask(self.bits)

    def accept(self, token: int) -> None:
        assert self.matcher.accept_token(token)


class Outlines:
    """outlines-core: a schema becomes a regular expression."""

    def __init__(self, model: Model) -> None:
        import outlines_core
        from outlines_core.json_schema import build_regex_from_schema

        self.module, self.regex, end = outlines_core, build_regex_from_schema, model.info.token_eos
        pieces: dict[bytes, list[int]] = {}
        for token in range(model.info.n_vocab):
            if (piece := model.piece(token)) and token != end:
                pieces.setdefault(piece, []).append(token)
        self.words = outlines_core.Vocabulary(end, pieces)

    def __call__(self, schema: Any) -> Matcher:
        index = self.module.Index(self.regex(json.dumps(schema)), self.words)
        self.guide = self.module.Guide(index)
        return self

    def reads(self, text: bytes) -> bool:
        tokens = [self.words.get(bytes([byte]))[0] for byte in text]
        return self.guide.accepts_tokens(tokens) and self._ends(tokens)

    def _ends(self, tokens: Sequence[int]) -> bool:
        for token in tokens:
            self.guide.advance(token)
        return bool(self.guide.is_finished()) or self.words.get_eos_token_id() in self.guide.get_tokens()

    def mask(self) -> None:
        self.guide.get_tokens()

    def accept(self, token: int) -> None:
        self.guide.advance(token)


WAYS: dict[str, Callable[[Model], Callable[[Any], Matcher]]] = {
    "pylongctx": lambda model: Guidance(model, prepared=True),
    "llama.cpp": Converter,
    "llguidance": lambda model: Guidance(model, prepared=False),
    "xgrammar": XGrammar,
    "outlines-core": Outlines,
}


def groups(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the groups of a suite, with their files' names."""
    for path in sorted(folder.rglob("*.json")):
        for group in json.loads(path.read_text(encoding="utf-8")):
            yield f"{path.stem}: {group['description']}", group


def verdict(way: Callable[[Any], Matcher], group: dict[str, Any]) -> str:
    """Return what a way makes of a group: held, narrower, refused, other."""
    found = []
    try:
        for test in group["tests"]:
            text = json.dumps(test["data"], ensure_ascii=False).encode()
            found.append((test["valid"], bool(way(group["schema"]).reads(text))))
    except Exception:  # whatever a package raises
        return "refused"
    if (False, True) in found:
        return "other"
    return "narrower" if (True, False) in found else "held"


def cost(way: Callable[[Any], Matcher], tokens: Sequence[int]) -> float:
    """Return the microseconds per token, to compute the mask and to accept the token."""
    matcher = way(TABLE)
    start = time.perf_counter()
    for token in tokens:
        matcher.mask()
        matcher.accept(token)
    return 1e6 * (time.perf_counter() - start) / len(tokens)


def checked(model: Model, tokens: Sequence[int]) -> float:
    """Return the microseconds of a token that the model chose by itself: pylongctx asks for no mask then."""
    guide = Guide(model, {"schemas": [hold(TABLE).grammar]})
    start = time.perf_counter()
    for token in tokens:
        assert guide.allows(token)
        guide.accept(token)
    return 1e6 * (time.perf_counter() - start) / len(tokens)


def beginning(way: Callable[[Any], Matcher]) -> float:
    """Return the milliseconds from a large schema to its first mask."""
    schema = {**LARGE, "title": str(time.time())}  # which no cache knows
    start = time.perf_counter()
    way(schema).mask()
    return 1e3 * (time.perf_counter() - start)


def timed(measure: Callable[..., float], *args: Any) -> str:
    """Return the best of three, or why there is none."""
    try:
        return f"{min(measure(*args) for _ in range(3)):.1f}"
    except Exception as reason:
        return f"{type(reason).__name__}: {str(reason)[:60]}"


def main() -> None:
    """Print a row for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", type=Path, help="folder of the suite's tests")
    parser.add_argument("--model", required=True, help="whose vocabulary is used for the times")
    parser.add_argument("--ways", default=",".join(WAYS), help="comma-separated")
    parser.add_argument("--show", help="print the groups with this verdict")
    args = parser.parse_args()
    small = Llama(str(embedded_model()), vocab_only=True, verbose=False)
    large = Llama(args.model, vocab_only=True, verbose=False)
    tokens = large.tokenize(json.dumps(ROWS).encode(), add_bos=False)
    print(f"{len(tokens)} tokens, a vocabulary of {large.n_vocab()}, a schema of {len(json.dumps(LARGE))} bytes")
    print(f"a token that is checked alone: {timed(checked, large._model, tokens)} us")
    for name in args.ways.split(","):
        try:
            way = WAYS[name](small._model)
        except ImportError as reason:
            print(f"{name}: {reason}")
            continue
        counts: Counter[str] = Counter()
        for title, group in groups(args.suite) if args.suite else ():
            found = verdict(way, group)
            counts[found] += 1
            if found == args.show:
                print(f"{name}: {found}: {title}")
        way = WAYS[name](large._model)
        shown = ", ".join(f"{counts[key]} {key}" for key in ("held", "narrower", "refused", "other"))
        print(
            f"{name}: {shown}; {timed(cost, way, tokens)} us a token; {timed(beginning, way)} ms to begin", flush=True
        )


if __name__ == "__main__":
    main()
