"""Grammars: what a generation may say, as GBNF text or from a JSON schema."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pylongctx._guarded import guarded


def schema_to_gbnf(schema: str) -> str:
    """Return the grammar of what a JSON schema, as JSON text, allows.

    Raises
    ------
    ValueError
        When it is no JSON, or llama.cpp cannot express the schema.

    Examples
    --------
    >>> print(schema_to_gbnf('{"type": "boolean"}').splitlines()[0])
    root ::= ("true" | "false")
    """
    return guarded("the grammar of the JSON schema", "schema_to_grammar", schema)


class LlamaGrammar:
    """A grammar in GBNF that starts at the rule ``root``, see llama.cpp's grammars/README.md.

    It is parsed when a generation begins with it, since it may name tokens of the model.

    Examples
    --------
    >>> grammar = LlamaGrammar.from_string('root ::= "yes" | "no"')
    >>> llm("Was it the butler?", grammar=grammar, max_tokens=4, temperature=0.0)["choices"][0]["text"] in ("yes", "no")
    True
    """

    def __init__(self, *args: Any, _grammar: str, **kwargs: Any) -> None:
        self._grammar = _grammar
        self._root = "root"

    @classmethod
    def from_string(cls, grammar: str, verbose: bool = True) -> "LlamaGrammar":
        """Return the grammar of GBNF text."""
        return cls(_grammar=grammar)

    @classmethod
    def from_file(cls, file: str | os.PathLike[str], verbose: bool = True) -> "LlamaGrammar":
        """Return the grammar in a file; ValueError when it is empty."""
        text = Path(file).read_text(encoding="utf-8")
        if not text.strip():
            raise ValueError(f"the grammar file {file} is empty")
        return cls.from_string(text, verbose)

    @classmethod
    def from_json_schema(cls, json_schema: str | Mapping[str, Any], verbose: bool = True) -> "LlamaGrammar":
        """Return the grammar of the JSON that a schema allows."""
        text = json_schema if isinstance(json_schema, str) else json.dumps(json_schema)
        return cls.from_string(schema_to_gbnf(text), verbose)


def constraint(grammar: Any) -> str | None:
    """Return a grammar as ``lctx_sampler_constrain`` reads it: a LlamaGrammar, also llama_cpp's, or GBNF text."""
    if grammar is None:
        return None
    text = grammar if isinstance(grammar, str) else getattr(grammar, "_grammar", None)
    if not isinstance(text, str):
        raise TypeError(f"grammar must be a LlamaGrammar or GBNF text, not {type(grammar).__name__}")
    return json.dumps({"grammar": text})
