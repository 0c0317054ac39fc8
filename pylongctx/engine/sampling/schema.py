"""JSON schemas as llguidance grammars; every keyword is either enforced or reported."""

import json
import math
import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any, NamedTuple

from pylongctx.errors import InvalidInput

# keywords whose value is a schema, a list of schemas, or schemas by name
ONE = ("items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else")
KINDS: dict[str, type] = {
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), dict),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "required"), list),
    **dict.fromkeys(("pattern", "format"), str),
}
NAMES: dict[type, str] = {dict: "an object", list: "a list", str: "a text"}
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
IN_PLACE = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas")
OF_OBJECTS = ("properties", "required", "additionalProperties", "patternProperties")
SHARED = ("$defs", "definitions", "$schema", "$id")  # shared with parts of a schema, which refer to them
MAX_GAPS = 64
MAX_WARNING = 1000  # characters of a warning
SECONDS = 2.0  # for the search of keywords that cannot be enforced
MAX_DEPTH = 100
MAX_MULTIPLE = 10_000
MAX_INTEGER = 9 * 10**18
BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")

PLAIN = 'bfnrt\\"'
OPTIONS = {
    # with unlimited white space, models generate it endlessly
    "whitespace_pattern": r" |\n{1,2}[ \t]{0,20}",
    # a name with two spellings, such as with \u0061, would be a duplicate
    "json_allowed_escapes": PLAIN,
    "lenient": False,
    "coerce_one_of": False,
}
# ECMA-262 escapes in Rust's syntax, where the same spelling has another meaning
SPACES = r"\t-\r \xa0\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}\u{feff}"
OUTSIDE = {r"\s": f"[{SPACES}]", r"\S": f"[^{SPACES}]", ".": r"[^\n\r\u{2028}\u{2029}]"}
INSIDE = {r"\s": SPACES, r"\b": r"\x08", "[": r"\[", "&": r"\&", "~": r"\~"}
# characters that need \u escapes, in strings and patterns of a schema
CONTROLS = re.compile(r"\\u00[01]|\\x[01]|\\u\{0*1?.\}|\\c[A-Za-z]|\\[0v]")
# per RFC 3339; llguidance ignores the lengths of months and allows leap seconds anywhere
DATE = (
    r"(?:\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
    r"|(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,9})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
FORMATS = {"date": f"^{DATE}$", "time": f"^{TIME}$", "date-time": f"^{DATE}T{TIME}$"}
PATTERN_PIECE = re.compile(r"\\c[A-Za-z]|\\.|.", re.DOTALL)


class EnforcedSchema(NamedTuple):
    """An llguidance grammar, and the keywords of the schema that it does not enforce."""

    grammar: str
    gaps: tuple[str, ...]


def hold(schema: Any, strict: bool = True) -> EnforcedSchema:
    """Return the grammar of a JSON schema, given as JSON text or as a value.

    Without ``strict``, parts that cannot be enforced are dropped and listed in ``gaps``. Raises InvalidInput, with the
    path of the keyword, when it is not a schema, allows nothing, or cannot be enforced.

    Examples
    --------
    >>> hold({"type": "array", "uniqueItems": True}, strict=False).gaps
    ('/uniqueItems: a grammar cannot enforce this',)
    """
    try:
        found = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps({} if found is True else found)
    except (ValueError, TypeError, RecursionError) as reason:
        raise _invalid(f"it is not JSON: {reason}") from None
    return _hold(text, strict)


def regex_grammar(pattern: str) -> str:
    """Return the grammar of texts that fully match a regular expression."""
    grammar: str = llguidance().LLMatcher.grammar_from_regex(pattern)
    if reason := _failure(grammar):
        raise InvalidInput(f"the regular expression cannot be used: {reason}", -1)
    return grammar


def warn_of(gaps: Sequence[str]) -> None:
    """Warn about keywords that an answer may violate."""
    if gaps:
        reason = f"not all of the JSON schema is enforced: {'; '.join(gaps)[:MAX_WARNING]}"
        warnings.warn(reason, RuntimeWarning, stacklevel=5)


def llguidance() -> Any:
    """Return the package llguidance; NotImplementedError when it is missing."""
    try:
        import llguidance as package
    except ImportError as reason:
        needed = "JSON schemas, tools and regular expressions need the package llguidance"
        raise NotImplementedError(
            f"{needed}, which cannot be imported ({reason}): pip install 'pylongctx[schema]'"
        ) from reason
    return package


@lru_cache(maxsize=64)
def _hold(text: str, strict: bool) -> EnforcedSchema:
    schema = json.loads(text)
    if not isinstance(schema, dict):
        raise _invalid(f"it must be an object, not {text[:40]}; false allows nothing")
    gaps, options = _prepare(schema, text)
    if gaps and strict:
        raise _refusal(gaps[0])
    until = time.monotonic() + SECONDS
    while reason := _failure(_grammar(schema, options)):
        path, node = _culprit(schema, reason, until)
        key = _keyword(node, reason)
        gaps.append(f"{path}/{key}: {readable(reason)}" if key else f"{path or '/'}: {readable(reason)}")
        if strict or key is None or len(gaps) > MAX_GAPS:
            raise _refusal(gaps[-1])
        _leave_out(node, key)
    return EnforcedSchema(_grammar(schema, options), tuple(gaps))


def _prepare(schema: dict[str, Any], text: str) -> tuple[list[str], Mapping[str, Any]]:
    """Rewrite a schema for llguidance according to the standard; returns what it would not enforce, and options."""
    schema.pop("x-guidance", None)  # not for users: pylongctx sets llguidance's options
    nodes, gaps = list(_nodes(schema)), []
    for path, node in nodes:
        _check(path, node)
    closed = not any(_joins(node) for _, node in nodes)
    for path, node in nodes:
        gaps += [path + gap for gap in _spell(node)]
        if closed and _is_plain(node):
            node["additionalProperties"] = False
    if not CONTROLS.search(text):
        return gaps, OPTIONS
    among = "/additionalProperties: it cannot be enforced together with control characters"
    gaps += [path + among for path, node in nodes if _is_open(node)]
    return gaps, {**OPTIONS, "json_allowed_escapes": PLAIN + "u"}


def _grammar(schema: Mapping[str, Any], options: Mapping[str, Any] = OPTIONS) -> str:
    try:
        found: str = llguidance().LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
    except ValueError as reason:  # values that JSON cannot represent
        raise _invalid(f"it is not JSON: {reason}") from None
    return found


def _failure(grammar: str) -> str:
    """Return why a grammar cannot be used, in one line; empty if it can be used."""
    failed, reasons = llguidance().LLMatcher.validate_grammar_with_warnings(grammar)
    if not failed and not reasons:
        return ""
    lines = [line.strip(" ^") for line in reasons[0].split("while processing")[0].splitlines()]
    return " ".join(filter(None, lines)).removesuffix(":").strip() or "it allows nothing"


def _nodes(schema: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the schemas in a schema with their paths, the inner ones first."""
    if depth > MAX_DEPTH:
        raise _refusal(f"{path[:80]}...: it nests deeper than {MAX_DEPTH} schemas")
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if key in LISTS and isinstance(value, list):
            parts: Any = enumerate(value)
        elif key in NAMED and isinstance(value, dict):
            parts = value.items()
        elif key in ONE:
            yield from _nodes(value, f"{path}/{key}", depth + 1)
            continue
        else:
            continue
        for name, part in parts:
            step = str(name).replace("~", "~0").replace("/", "~1")
            yield from _nodes(part, f"{path}/{key}/{step}", depth + 1)
    yield path, schema


def _check(path: str, node: Mapping[str, Any]) -> None:
    for key, kind in KINDS.items():
        if not isinstance(node.get(key, kind()), kind):
            raise _invalid(f"{path}/{key} must be {NAMES[kind]}")
    if not all(isinstance(name, str) for name in node.get("required", ())):
        raise _invalid(f"{path}/required must be a list of texts")


def _joins(node: Mapping[str, Any]) -> bool:
    """Return True if an object may have to match several schemas with properties of their own."""
    parts = [key for key in (*IN_PLACE, *OF_OBJECTS) if key in node]
    return len(node.get("allOf", ())) > 1 or (len(parts) > 1 and any(key in IN_PLACE for key in parts))


def _is_plain(node: Mapping[str, Any]) -> bool:
    """Return True if all properties of an object are named; then, as in llama.cpp, it has no others."""
    named, required = node.get("properties"), node.get("required", ())
    if named is None or any(name not in named for name in required):
        return False
    return not any(key in node for key in ("additionalProperties", "patternProperties", "unevaluatedProperties"))


def _is_open(node: Mapping[str, Any]) -> bool:
    """Return True if an object has named and other properties, whose names may repeat the first with other escapes."""
    return bool(node.get("properties")) and node.get("additionalProperties") is not False


def _spell(node: dict[str, Any]) -> list[str]:
    """Rewrite one schema of it; returns what llguidance would not enforce."""
    if "pattern" in node:
        node["pattern"] = ecma(node["pattern"])
    if node.get("format") in FORMATS:
        node.setdefault("allOf", []).append({"pattern": FORMATS[node.pop("format")]})
    if "patternProperties" in node:
        node["patternProperties"] = {ecma(name): part for name, part in node["patternProperties"].items()}
    if node.get("uniqueItems") is False:
        del node["uniqueItems"]
    _bound(node)
    gaps, least = [], node.get("minProperties", 0)
    if isinstance(least, int) and least > max(1, len(set(node.get("required", ())))):
        del node["minProperties"]  # duplicate names count once
        gaps.append("/minProperties: it can only be enforced for required properties")
    if _digits(node.get("multipleOf")) > MAX_MULTIPLE:
        del node["multipleOf"]  # llguidance enumerates all remainders
        gaps.append(f"/multipleOf: it can be enforced up to {MAX_MULTIPLE}, without its decimal point")
    return gaps


def _bound(node: dict[str, Any]) -> None:
    """Limit bounds to llguidance's range, and the number of digits of integers."""
    for sign, (plain, exclusive) in ((-1, BOUNDS[:2]), (1, BOUNDS[2:])):
        given = [key for key in (plain, exclusive) if key in node]
        for key in given:
            if _is_number(node[key]) and sign * node[key] > MAX_INTEGER:
                node[key] = sign * MAX_INTEGER
        near = all(abs(node[key]) <= MAX_INTEGER for key in BOUNDS if _is_number(node.get(key)))
        if near and not given and node.get("type") == "integer" and "multipleOf" not in node:
            node[plain] = sign * MAX_INTEGER


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _digits(number: Any) -> int:
    """Return a number without its decimal point; 0 for other values."""
    if not _is_number(number):
        return 0
    scaled = Decimal(repr(number)).as_tuple()
    return int(Decimal((0, scaled.digits, max(int(scaled.exponent), 0))))


def ecma(pattern: str) -> str:
    """Convert a pattern from ECMA-262, the syntax of schemas, to Rust's regular expressions.

    Examples
    --------
    >>> print(ecma(r"^[a&&b\\cA]\\0$"))
    ^[a\\&\\&b\\x01]\\x00$
    """
    found, inside = [], False
    for match in PATTERN_PIECE.finditer(pattern):
        piece = match[0]
        if piece[:2] == r"\c" and len(piece) == 3:
            found.append(f"\\x{ord(piece[2]) % 32:02x}")
        elif piece == r"\0":
            found.append(r"\x00")
        elif inside and piece == "-" and found[-1] == "-":
            found.append(r"\-")
        else:
            found.append((INSIDE if inside else OUTSIDE).get(piece, piece))
        inside = piece == "[" or (inside and piece != "]")
    return "".join(found)


def _culprit(schema: dict[str, Any], reason: str, until: float) -> tuple[str, dict[str, Any]]:
    """Return the innermost schema that fails for the same reason, and its path."""
    shared: dict[str, Any] = {key: schema[key] for key in SHARED if key in schema}
    for path, node in _nodes(schema):
        if node is not schema and time.monotonic() < until and _failure(_grammar({**shared, **node})) == reason:
            return path, node
    return "", schema


def _keyword(node: Mapping[str, Any], reason: str) -> str | None:
    """Return the keyword of a schema that cannot be enforced."""
    spelled = {"Unknown format": "format", "Resource": "$ref", "regex": "pattern", "Properties": "minProperties"}
    known = [key for key in node if f'"{key}"' in reason or f"'{key}'" in reason or reason.startswith(f"{key} ")]
    known += [key for text, key in spelled.items() if text in reason and key in node]
    return next(iter(known), None)


def readable(reason: str) -> str:
    """Return llguidance's reason in terms of the schema.

    Examples
    --------
    >>> readable('Unimplemented keys: ["not"]')
    'a grammar cannot enforce this'
    """
    if reason.startswith("Unimplemented"):
        return "a grammar cannot enforce this"
    if reason.startswith("oneOf"):
        return "alternatives must differ in type, or in the texts of a required property"
    return reason


def _leave_out(node: dict[str, Any], key: str) -> None:
    value = node.pop(key)
    if key == "oneOf" and "anyOf" not in node:
        node["anyOf"] = value


def _refusal(gap: str) -> InvalidInput:
    return _invalid(f"{gap}. Leave this out, or set strict to false so that it is not enforced")


def _invalid(reason: str) -> InvalidInput:
    return InvalidInput(f"the JSON schema cannot be used: {reason}", -1)
