"""Grammars that constrain a generation, as GBNF text or from a JSON schema."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pylongctx.engine.sampling.schema import hold, regex_grammar, warn_of
from pylongctx.guarded.process import guarded


def schema_to_gbnf(schema: str) -> str:
    """Return the GBNF grammar for a JSON schema given as JSON text.

    Raises
    ------
    ValueError
        When it is not JSON, or llama.cpp cannot express the schema.

    Examples
    --------
    >>> print(schema_to_gbnf('{"type": "boolean"}').splitlines()[0])
    root ::= ("true" | "false")
    """
    return guarded("the grammar of the JSON schema", "schema_to_grammar", schema)


class LlamaGrammar:
    """A grammar in GBNF that starts at the rule ``root``, see llama.cpp's grammars/README.md.

    It is parsed when a generation starts, since it may refer to tokens of the model. A grammar from a JSON
    schema or a regular expression is enforced by llguidance instead.

    Attributes
    ----------
    schema : str
        The JSON schema that it was created from, if any.
    held : str
        llguidance's grammar, which is used instead of the GBNF text.

    Examples
    --------
    >>> grammar = LlamaGrammar.from_string('root ::= "yes" | "no"')
    >>> llm("Was it the butler?", grammar=grammar, max_tokens=4, temperature=0.0)["choices"][0]["text"] in ("yes", "no")
    True
    """

    def __init__(
        self, *args: Any, _grammar: str | None = None, schema: str = "", held: str = "", **kwargs: Any
    ) -> None:
        self._text = _grammar
        self._root = "root"
        self.schema, self.held = schema, held

    @property
    def _grammar(self) -> str:
        """The GBNF text, as in llama_cpp; for a JSON schema, llama.cpp's conversion, which may allow more.

        Empty for a regular expression.
        """
        if self._text is None:
            self._text = schema_to_gbnf(self.schema) if self.schema else ""
        return self._text

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
    def from_json_schema(
        cls, json_schema: str | Mapping[str, Any] | bool, verbose: bool = True, strict: bool = True
    ) -> "LlamaGrammar":
        """Return the grammar of a JSON schema.

        Parameters
        ----------
        json_schema : str or dict or bool
            The schema, or its JSON text.
        verbose : bool
            No effect.
        strict : bool
            Refuse a schema that cannot be fully enforced; if False, a RuntimeWarning names the gaps.

        Raises
        ------
        InvalidInput
            When the schema cannot be enforced, with the path of the keyword.
        """
        schema = json_schema if isinstance(json_schema, str | bool) else dict(json_schema)
        held = hold(schema, strict)
        warn_of(held.gaps)
        return cls(held=held.grammar, schema=schema if isinstance(schema, str) else json.dumps(schema))

    @classmethod
    def from_regex(cls, pattern: str) -> "LlamaGrammar":
        """Return the grammar of texts that fully match a regular expression (Rust's syntax).

        Examples
        --------
        >>> grammar = LlamaGrammar.from_regex(r"[A-Z][a-z]+, \\d{4}")
        """
        return cls(held=regex_grammar(pattern))

    @classmethod
    def from_choice(cls, choices: Sequence[str]) -> "LlamaGrammar":
        """Return the grammar that allows one of several texts."""
        if not choices or not all(isinstance(one, str) for one in choices):
            raise ValueError("choices must have at least one element, all str")
        return cls.from_string("root ::= " + " | ".join(map(quoted, choices)))


def quoted(text: str) -> str:
    """Return a text as a GBNF literal.

    Examples
    --------
    >>> quoted('a "b"')
    '"a \\\\"b\\\\""'
    """
    special = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return '"' + "".join(special.get(one, one) for one in text) + '"'


def constraint(grammar: Any) -> str | None:
    """Return a grammar as ``lctx_sampler_constrain`` reads it: a LlamaGrammar, also llama_cpp's, or GBNF text."""
    if grammar is None:
        return None
    if isinstance(grammar, LlamaGrammar) and grammar.held:
        return json.dumps({"schemas": [grammar.held]})
    text = grammar if isinstance(grammar, str) else getattr(grammar, "_grammar", None)
    if not isinstance(text, str):
        raise TypeError(f"grammar must be a LlamaGrammar or GBNF text, not {type(grammar).__name__}")
    return json.dumps({"grammar": text})
