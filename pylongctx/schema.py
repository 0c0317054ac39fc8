"""JSON schemas as grammars of llguidance; nothing of a schema is dropped: it holds, or it is named."""

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
SHARED = ("$defs", "definitions", "$schema", "$id")  # what parts refer to
MOST_GAPS = 64
MOST_TOLD = 1000  # characters of a warning
SECONDS = 2.0  # for the search of what cannot be held
MOST_DEPTH = 100
MOST_MULTIPLE = 10_000
LARGEST = 9 * 10**18
BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")

PLAIN = 'bfnrt\\"'
OPTIONS = {
    # models end up in endless white space where it is free
    "whitespace_pattern": r" |\n{1,2}[ \t]{0,20}",
    # a name that is spelled in two ways, as with \u0061, would be there twice
    "json_allowed_escapes": PLAIN,
    "lenient": False,
    "coerce_one_of": False,
}
# of ECMA-262 in Rust's syntax: what is spelled the same there, and means something else
SPACES = r"\t-\r \xa0\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}\u{feff}"
OUTSIDE = {r"\s": f"[{SPACES}]", r"\S": f"[^{SPACES}]", ".": r"[^\n\r\u{2028}\u{2029}]"}
INSIDE = {r"\s": SPACES, r"\b": r"\x08", "[": r"\[", "&": r"\&", "~": r"\~"}
# characters that only \u spells, in texts of a schema and in its patterns
CONTROLS = re.compile(r"\\u00[01]|\\x[01]|\\u\{0*1?.\}|\\c[A-Za-z]|\\[0v]")
# as RFC 3339 has them; llguidance knows no lengths of months, and leap seconds everywhere
DATE = (
    r"(?:\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
    r"|(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,9})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
FORMATS = {"date": f"^{DATE}$", "time": f"^{TIME}$", "date-time": f"^{DATE}T{TIME}$"}
PIECE = re.compile(r"\\c[A-Za-z]|\\.|.", re.DOTALL)


class Held(NamedTuple):
    """A grammar of llguidance, and what of the schema it does not hold an answer to."""

    grammar: str
    gaps: tuple[str, ...]


def hold(schema: Any, strict: bool = True) -> Held:
    """Return the grammar of what a JSON schema, as JSON text or its value, allows.

    Parameters
    ----------
    schema : str or dict or bool
        The schema.
    strict : bool
        Whether it is refused when a part of it cannot be held; else such parts are left out, and named in ``gaps``.

    Raises
    ------
    InvalidInput
        When it is no schema, allows nothing, or cannot be held; the message has the path of the keyword.

    Examples
    --------
    >>> hold({"type": "array", "uniqueItems": True}, strict=False).gaps
    ('/uniqueItems: no grammar holds an answer to this',)
    """
    try:
        found = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps({} if found is True else found)
    except (ValueError, TypeError, RecursionError) as reason:
        raise _invalid(f"it is not JSON: {reason}") from None
    return _hold(text, strict)


def regex_grammar(pattern: str) -> str:
    """Return the grammar of the texts that a regular expression describes from their first character to the last."""
    grammar: str = llguidance().LLMatcher.grammar_from_regex(pattern)
    if reason := _failure(grammar):
        raise InvalidInput(f"the regular expression cannot be used: {reason}", -1)
    return grammar


def warn_of(gaps: Sequence[str]) -> None:
    """Warn of what an answer need not follow."""
    if gaps:
        reason = f"the answer need not follow all of its JSON schema: {'; '.join(gaps)[:MOST_TOLD]}"
        warnings.warn(reason, RuntimeWarning, stacklevel=5)


def llguidance() -> Any:
    """Return the package that makes masks of tokens from schemas; NotImplementedError where it is missing."""
    try:
        import llguidance as package
    except ImportError as reason:
        needed = "JSON schemas, tools and regular expressions need the package llguidance"
        raise NotImplementedError(f"{needed}, which cannot be imported ({reason}): pip install llguidance") from reason
    return package


@lru_cache(maxsize=64)
def _hold(text: str, strict: bool) -> Held:
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
        gaps.append(f"{path}/{key}: {told(reason)}" if key else f"{path or '/'}: {told(reason)}")
        if strict or key is None or len(gaps) > MOST_GAPS:
            raise _refusal(gaps[-1])
        _leave_out(node, key)
    return Held(_grammar(schema, options), tuple(gaps))


def _prepare(schema: dict[str, Any], text: str) -> tuple[list[str], Mapping[str, Any]]:
    """Write a schema so that llguidance reads it as the standard does; returns what it would not hold, and options."""
    schema.pop("x-guidance", None)  # llguidance's settings are ours
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
    among = "/additionalProperties: it cannot be held beside control characters"
    gaps += [path + among for path, node in nodes if _is_open(node)]
    return gaps, {**OPTIONS, "json_allowed_escapes": PLAIN + "u"}


def _grammar(schema: Mapping[str, Any], options: Mapping[str, Any] = OPTIONS) -> str:
    try:
        found: str = llguidance().LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
    except ValueError as reason:  # numbers and texts that JSON does not have
        raise _invalid(f"it is not JSON: {reason}") from None
    return found


def _failure(grammar: str) -> str:
    """Return why a grammar cannot be used, in one line; empty when it can."""
    failed, reasons = llguidance().LLMatcher.validate_grammar_with_warnings(grammar)
    if not failed and not reasons:
        return ""
    lines = [line.strip(" ^") for line in reasons[0].split("while processing")[0].splitlines()]
    return " ".join(filter(None, lines)).removesuffix(":").strip() or "it allows nothing"


def _nodes(schema: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the schemas in a schema with their paths, the inner ones first."""
    if depth > MOST_DEPTH:
        raise _refusal(f"{path[:80]}...: it nests deeper than {MOST_DEPTH} schemas")
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
    """Return whether an object may have to follow several schemas, each of which names some of its properties."""
    parts = [key for key in (*IN_PLACE, *OF_OBJECTS) if key in node]
    return len(node.get("allOf", ())) > 1 or (len(parts) > 1 and any(key in IN_PLACE for key in parts))


def _is_plain(node: Mapping[str, Any]) -> bool:
    """Return whether an object has all of its properties named; as in llama.cpp it has no others then."""
    named, required = node.get("properties"), node.get("required", ())
    if named is None or any(name not in named for name in required):
        return False
    return not any(key in node for key in ("additionalProperties", "patternProperties", "unevaluatedProperties"))


def _is_open(node: Mapping[str, Any]) -> bool:
    """Return whether an object has named properties and others, whose names may be those again, with other escapes."""
    return bool(node.get("properties")) and node.get("additionalProperties") is not False


def _spell(node: dict[str, Any]) -> list[str]:
    """Write one schema of it so; returns what it would not hold."""
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
        del node["minProperties"]  # the same name may come twice, and count once
        gaps.append("/minProperties: it can be held as far as properties are required")
    if _digits(node.get("multipleOf")) > MOST_MULTIPLE:
        del node["multipleOf"]  # llguidance tries every remainder
        gaps.append(f"/multipleOf: it can be held up to {MOST_MULTIPLE}, without its decimal point")
    return gaps


def _bound(node: dict[str, Any]) -> None:
    """Let no bound be beyond what llguidance can compare, and no integer go on without an end."""
    for sign, (plain, exclusive) in ((-1, BOUNDS[:2]), (1, BOUNDS[2:])):
        given = [key for key in (plain, exclusive) if key in node]
        for key in given:
            if _is_number(node[key]) and sign * node[key] > LARGEST:
                node[key] = sign * LARGEST
        near = all(abs(node[key]) <= LARGEST for key in BOUNDS if _is_number(node.get(key)))
        if near and not given and node.get("type") == "integer" and "multipleOf" not in node:
            node[plain] = sign * LARGEST


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _digits(number: Any) -> int:
    """Return a number without its decimal point; 0 for what is none."""
    if not _is_number(number):
        return 0
    scaled = Decimal(repr(number)).as_tuple()
    return int(Decimal((0, scaled.digits, max(int(scaled.exponent), 0))))


def ecma(pattern: str) -> str:
    """Return a pattern of ECMA-262, as schemas have them, in the syntax of Rust's regular expressions.

    Examples
    --------
    >>> print(ecma(r"^[a&&b\\cA]\\0$"))
    ^[a\\&\\&b\\x01]\\x00$
    """
    found, inside = [], False
    for match in PIECE.finditer(pattern):
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
    """Return the keyword of a schema that cannot be held."""
    spelled = {"Unknown format": "format", "Resource": "$ref", "regex": "pattern", "Properties": "minProperties"}
    known = [key for key in node if f'"{key}"' in reason or f"'{key}'" in reason or reason.startswith(f"{key} ")]
    known += [key for text, key in spelled.items() if text in reason and key in node]
    return next(iter(known), None)


def told(reason: str) -> str:
    """Return llguidance's reason in words that say what to do.

    Examples
    --------
    >>> told('Unimplemented keys: ["not"]')
    'no grammar holds an answer to this'
    """
    if reason.startswith("Unimplemented"):
        return "no grammar holds an answer to this"
    if reason.startswith("oneOf"):
        return "only alternatives of other types, or with other texts for a required property, are told apart"
    return reason


def _leave_out(node: dict[str, Any], key: str) -> None:
    value = node.pop(key)
    if key == "oneOf" and "anyOf" not in node:
        node["anyOf"] = value


def _refusal(gap: str) -> InvalidInput:
    return _invalid(f"{gap}. Leave this out, or ask with strict false for an answer that need not follow it")


def _invalid(reason: str) -> InvalidInput:
    return InvalidInput(f"the JSON schema cannot hold an answer: {reason}", -1)
