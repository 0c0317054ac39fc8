"""Placeholders for schemas in the grammar of an answer: llama.cpp creates the grammar, a Guide fills them."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pylongctx.engine.sampling.schema import SHARED, EnforcedSchema, hold

MARK = "<schema>"
FIRST_PLACEHOLDER = 1 << 30  # the token of the first placeholder, see native/chat/grammar.h
LITERAL = re.compile(rf'"{{\\"{MARK}\\":(\d+)}}"')  # a placeholder in the converter's output
# keywords without constraints
NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"})


def place(number: int, like: Any = None) -> dict[str, Any]:
    """Return a schema that llama.cpp turns into a placeholder; a template sees the fields of ``like`` in it."""
    shown = like if isinstance(like, Mapping) else {}
    kept = {key: value for key, value in shown.items() if key not in ("$ref", "oneOf", "anyOf")}
    return {"type": "object", **kept, "const": {MARK: number}}


def with_places(grammar: str) -> str:
    """Return llama.cpp's grammar with placeholders in the form of ``lctx_grammar_create``."""
    return LITERAL.sub(lambda found: f"<[{FIRST_PLACEHOLDER + int(found[1])}]>", grammar)


def has_places(answer: Mapping[str, Any]) -> bool:
    """Return True if the grammar of a rendered request has placeholders."""
    return bool(answer["constraint"]) and LITERAL.search(answer["constraint"]["grammar"]) is not None


class PlacedTools:
    """The tools of a request, with placeholders for their parameters.

    Parameters
    ----------
    tools : list of dict
        OpenAI's tools. Those with ``strict`` are refused if they cannot be enforced.

    Attributes
    ----------
    marked : list of dict
        The tools with placeholders.
    grammars : list of str
        The grammars of the placeholders.
    gaps : list of str
        Keywords that are not enforced.
    refusal : str
        Why a strict tool cannot be enforced; empty if all can.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self.marked: list[dict[str, Any]] = []
        self.grammars: list[str] = []
        self.gaps: list[str] = []
        self.refusal = ""
        self._tools = [tool["function"] for tool in tools]

    def whole(self) -> "PlacedTools":
        """Give each tool one placeholder: its call has the arguments as one JSON value."""
        for function in self._tools:
            self._add(function, self._place(function, function["parameters"], ""))
        return self

    def by_parameter(self) -> "PlacedTools":
        """Give each parameter a placeholder: a call lists them separately, with strings as plain text."""
        for function in self._tools:
            schema = function["parameters"]
            shared = {key: schema[key] for key in SHARED if key in schema}
            self._note(function, "", schema, {"type", "properties", "required", "additionalProperties", *SHARED})
            parts = {}
            for name, part in schema.get("properties", {}).items():
                if may_be_text(part, schema):
                    parts[name] = {"type": "string"}
                    self._note(function, f"/properties/{name}", part, {"type"})
                else:
                    parts[name] = self._place(function, {**shared, **part}, f"/properties/{name}")
            required = [name for name in schema.get("required", ()) if name in parts]
            self._add(function, {"type": "object", "properties": parts, "required": required})
        return self

    def nowhere(self) -> "PlacedTools":
        """Record that this chat template does not constrain calls, including strict ones."""
        self.gaps = [f"{function['name']}: this chat template enforces no schema" for function in self._tools]
        return self

    def _place(self, function: Mapping[str, Any], schema: Any, path: str) -> dict[str, Any]:
        try:
            held: EnforcedSchema = hold(schema, strict=function.get("strict") is True)
        except ValueError as reason:
            raise ValueError(f"the parameters{path} of {function['name']}: {reason}") from None
        self.grammars.append(held.grammar)
        self.gaps += [f"{function['name']}{path}{gap}" for gap in held.gaps]
        return place(len(self.grammars) - 1, schema)

    def _add(self, function: Mapping[str, Any], parameters: Mapping[str, Any]) -> None:
        self.marked.append({"type": "function", "function": {**function, "parameters": parameters}})

    def _note(self, function: Mapping[str, Any], path: str, schema: Any, held: set[str]) -> None:
        """Record keywords that cannot be enforced, since the template writes strings and parameters without JSON."""
        keys = [key for key in schema if key not in NOTES | held] if isinstance(schema, Mapping) else []
        if keys and function.get("strict") is True and not self.refusal:
            self.refusal = (
                f"{function['name']}{path}/{keys[0]} cannot be enforced in the calls of this chat template; "
                "leave it out, or the tool's strict"
            )
        self.gaps += [f"{function['name']}{path}/{key}: this chat template does not enforce it" for key in keys]


def may_be_text(schema: Any, root: Mapping[str, Any], depth: int = 0) -> bool:
    """Return True if a schema allows a string, by llama.cpp's rule for parameters.

    Examples
    --------
    >>> may_be_text({"anyOf": [{"type": "null"}, {"enum": ["a"]}]}, {}), may_be_text({"type": "integer"}, {})
    (True, False)
    """
    if not isinstance(schema, Mapping) or depth > 32:
        return True
    if isinstance(schema.get("$ref"), str):
        return may_be_text(_found(schema["$ref"], root), root, depth + 1)
    for key in ("oneOf", "anyOf"):
        if key in schema:
            return any(may_be_text(part, root, depth + 1) for part in schema[key])
    kind = schema.get("type")
    if isinstance(kind, list):
        return any(may_be_text({**schema, "type": one}, root, depth + 1) for one in kind)
    for values in ([schema["const"]] if "const" in schema else None, schema.get("enum")):
        if values is not None:
            return any(isinstance(value, str) for value in values)
    if kind is not None:
        return bool(kind == "string")
    if any(key in schema for key in ("properties", "additionalProperties", "items", "prefixItems")):
        return False
    return all(may_be_text(part, root, depth + 1) for part in schema.get("allOf", ()))


def _found(ref: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for step in ref.split("/")[1:]:
        found = found.get(step) if isinstance(found, Mapping) else None
    return found
