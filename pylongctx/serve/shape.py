"""Constraints of an answer: llama-server's and vLLM's fields for schemas, regular expressions, choices and grammars."""

import json
from typing import Any

from pydantic import Field

from pylongctx.completions.grammar import LlamaGrammar
from pylongctx.serve.errors import invalid
from pylongctx.serve.fields import Fields, Open


class StructuredOutputs(Open):
    """vLLM's ``structured_outputs``."""

    json_: dict[str, Any] | bool | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None


class Shaped(Fields):
    """Fields that constrain an answer, of which at most one may be set."""

    grammar: str | None = None
    json_schema: dict[str, Any] | bool | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None

    def wanted(self) -> tuple[str, Any] | None:
        """Return the kind of constraint, ``schema``, ``regex``, ``choice`` or ``grammar``, and its value."""
        inner = self.structured_outputs or StructuredOutputs()
        if inner.structural_tag is not None:
            reason = "structured_outputs.structural_tag is not supported: use a schema, a regex, a choice or a grammar"
            raise invalid(reason, "structured_outputs")
        anything = {"type": "object"} if inner.json_object or None else None
        given = [
            ("grammar", "grammar", self.grammar),
            ("json_schema", "schema", self.json_schema),
            ("guided_json", "schema", self.guided_json),
            ("guided_regex", "regex", self.guided_regex),
            ("guided_choice", "choice", self.guided_choice),
            ("guided_grammar", "grammar", self.guided_grammar),
            ("structured_outputs.json", "schema", inner.json_),
            ("structured_outputs.regex", "regex", inner.regex),
            ("structured_outputs.choice", "choice", inner.choice),
            ("structured_outputs.grammar", "grammar", inner.grammar),
            ("structured_outputs.json_object", "schema", anything),
        ]
        found = [one for one in given if one[2] is not None]
        if len(found) > 1:
            (first, *_), (second, *_) = found[:2]
            raise invalid(f"{first} and {second} cannot be combined", second.split(".")[0])
        return None if not found else (found[0][1], found[0][2])


def as_schema(value: Any) -> Any:
    """Return a schema, which may be given as JSON text."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as reason:
        raise ValueError(f"the JSON schema is not JSON: {reason}") from None


def grammar_of(kind: str, value: Any) -> LlamaGrammar | str:
    """Return the grammar for a result of ``Shaped.wanted``."""
    if kind == "schema":
        return LlamaGrammar.from_json_schema(value)
    if kind == "regex":
        return LlamaGrammar.from_regex(value)
    return LlamaGrammar.from_choice(value) if kind == "choice" else str(value)
