"""JSON schemas: what is held, what is refused with its path, and what answers are then."""

import json
import sys

import jsonschema
import llguidance
import pytest
from llamas import new
from schemas import HELD, REFUSED, WRONG

from pylongctx import LlamaGrammar
from pylongctx.engine.sampling.schema import ecma, hold
from pylongctx.errors import InvalidInput

WILD = {"max_tokens": 400, "temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def check(schema, said):
    """Raise when JSON text does not follow a schema."""
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(said))


@pytest.mark.parametrize("name", HELD)
def test_answers_follow_the_schema(llm, name):
    grammar = LlamaGrammar.from_json_schema(HELD[name])
    for seed in range(6):
        done = llm("It was", grammar=grammar, seed=seed, **WILD)["choices"][0]
        assert done["finish_reason"] == "stop", done["text"]
        check(HELD[name], done["text"])


@pytest.mark.parametrize("name", HELD)
def test_chats_follow_the_schema(llm, name):
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": HELD[name]}}
    for seed in range(2):
        done = llm.create_chat_completion(
            [{"role": "user", "content": "Say it."}], response_format=asked, seed=seed, **WILD
        )["choices"][0]
        assert done["finish_reason"] == "stop", done["message"]
        check(HELD[name], done["message"]["content"])


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_held_is_refused_by_its_path(name):
    schema, path = REFUSED[name]
    with pytest.raises(InvalidInput) as caught:
        LlamaGrammar.from_json_schema(schema)
    assert f"cannot be used: {path}: " in str(caught.value)
    with pytest.warns(RuntimeWarning, match="not all of the JSON schema is enforced") as warned:
        LlamaGrammar.from_json_schema(schema, strict=False)
    assert f": {path}: " in str(warned[0].message)


def test_the_rest_of_a_schema_holds(llm):
    schema = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
    with pytest.warns(RuntimeWarning, match="uniqueItems"):
        grammar = LlamaGrammar.from_json_schema(schema, strict=False)
    for seed in range(6):
        said = llm("It was", grammar=grammar, seed=seed, **WILD)["choices"][0]["text"]
        check({**schema, "uniqueItems": False}, said)


def test_a_format_asks_for_the_rest_with_strict_false(llm):
    wrapper = {"name": "x", "schema": {"type": "boolean", "not": {"const": True}}}
    messages = [{"role": "user", "content": "Say it."}]
    with pytest.raises(ValueError, match="/not: "):
        llm.create_chat_completion(messages, response_format={"type": "json_schema", "json_schema": wrapper})
    asked = {"type": "json_schema", "json_schema": {**wrapper, "strict": False}}
    with pytest.warns(RuntimeWarning, match="/not: "):
        done = llm.create_chat_completion(messages, response_format=asked)
    assert done["choices"][0]["message"]["content"] in ("true", "false")


@pytest.mark.parametrize(("schema", "reason"), WRONG, ids=range(len(WRONG)))
@pytest.mark.parametrize("strict", [True, False])
def test_what_is_not_a_schema(schema, reason, strict):
    with pytest.raises(InvalidInput) as caught:
        hold(schema, strict)
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_schema_cannot_choose_what_is_dropped():
    with pytest.raises(InvalidInput, match="/uniqueItems"):
        hold({"uniqueItems": True, "x-guidance": {"lenient": True}})
    other = {"type": "array", "items": {"const": 1}, "x-guidance": {"item_separator": ";"}}
    assert accepts(hold(other).grammar, "[1, 1]") and not accepts(hold(other).grammar, "[1;1]")


@pytest.mark.parametrize(
    ("pattern", "rust"),
    [
        (r"[a&&b]", r"[a\&\&b]"),
        (r"[a--z]", r"[a-\-z]"),
        (r"[\s\S]", None),
        (r"\s", None),
        (r"[[a\]]", r"[\[a\]]"),
        (r"\cJ\0[\b]", r"\x0a\x00[\x08]"),
        (r"a\.b", r"a\.b"),
    ],
)
def test_patterns_are_those_of_ecma(pattern, rust):
    found = ecma(pattern)
    assert found == rust if rust else r"\u{feff}" in found


def test_spaces_are_those_of_ecma():
    """U+FEFF is one, U+0085 is none; Rust and Python say otherwise."""
    for pattern, said, fits in ((r"^\s$", "\ufeff", True), (r"^\S$", "\ufeff", False), (r"^\S$", "\x85", True)):
        grammar = hold({"type": "string", "pattern": pattern}).grammar
        assert accepts(grammar, json.dumps(said, ensure_ascii=False)) == fits, pattern


def accepts(grammar, said):
    """Return whether a grammar allows a text, by llguidance alone."""

    class Bytes:
        eos_token_id, bos_token_id, special_token_ids, is_tokenizer_wrapper = 256, None, [], True
        tokens = [bytes([byte]) for byte in range(256)] + [b""]

        def __call__(self, data):
            return list(data if isinstance(data, bytes) else data.encode())

    matcher = llguidance.LLMatcher(llguidance.LLTokenizer(Bytes()), grammar, log_level=0)
    data = list(said.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def test_names_cannot_be_spelled_twice():
    grammar = hold({"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": True}).grammar
    assert accepts(grammar, '{"a": 1, "b": 2}')
    assert not accepts(grammar, '{"a": 1, "a": 2}')
    assert not accepts(grammar, '{"a": 1, "\\u0061": 2}')


def test_white_space_between_json_values_is_bounded():
    grammar = hold({"type": "array", "items": {"const": 1}}).grammar
    assert accepts(grammar, "[1, 1]") and accepts(grammar, "[\n  1,\n  1\n]")
    assert not accepts(grammar, "[" + "\n" * 3 + "1]")
    assert not accepts(grammar, "[" + " " * 3 + "1]")


def test_objects_are_closed_unless_they_say_otherwise():
    plain = {"type": "object", "properties": {"a": {"const": 1}}}
    assert not accepts(hold(plain).grammar, '{"b": 1}')
    assert accepts(hold({**plain, "additionalProperties": {}}).grammar, '{"b": 1}')
    both = {"allOf": [plain, {"type": "object", "properties": {"b": {"const": 2}}}]}
    assert accepts(hold(both).grammar, '{"a": 1, "b": 2}')


def test_a_regular_expression_holds_a_text(llm):
    grammar = LlamaGrammar.from_regex(r"[A-Z][a-z]{2,5}, \d{4}\.")
    for seed in range(5):
        said = llm("It was", grammar=grammar, seed=seed, **WILD)["choices"][0]["text"]
        name, year = said.split(", ")
        assert name.istitle() and 3 <= len(name) <= 6 and year[:4].isdigit() and year[4:] == "."
    with pytest.raises(InvalidInput, match="the regular expression cannot be used"):
        LlamaGrammar.from_regex("(")


def test_a_choice_holds_a_text(llm):
    choices = ['a "b"', "c\\d\n", "é"]
    grammar = LlamaGrammar.from_choice(choices)
    said = {llm("It was", grammar=grammar, seed=seed, **WILD)["choices"][0]["text"] for seed in range(12)}
    assert said <= set(choices) and len(said) > 1
    with pytest.raises(ValueError, match="at least one"):
        LlamaGrammar.from_choice([])


def test_the_attributes_are_llama_cpps():
    grammar = LlamaGrammar.from_json_schema('{"type": "boolean"}')
    assert grammar._root == "root"
    assert grammar._grammar.startswith("root ::= ")


def test_drafts_follow_the_schema(embedded_model):
    from pylongctx import LlamaPromptLookupDecoding

    schema = HELD["nested"]
    with new(embedded_model, draft_model=LlamaPromptLookupDecoding()) as llm, new(embedded_model) as plain:
        for seed in range(3):
            asked = {"grammar": LlamaGrammar.from_json_schema(schema), "seed": seed, **WILD, "temperature": 0.0}
            said = llm('{"a": {"b": ["x"]}} ', **asked)["choices"][0]["text"]
            check(schema, said)
            assert said == plain('{"a": {"b": ["x"]}} ', **asked)["choices"][0]["text"]


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"mirostat_mode": 2}, {"repeat_penalty": 1.3}])
def test_every_sampler_follows_a_schema(llm, settings):
    said = llm("It was", grammar=LlamaGrammar.from_json_schema(HELD["uuid"]), seed=1, **WILD | settings)
    check(HELD["uuid"], said["choices"][0]["text"])


def test_without_llguidance_the_error_says_so(monkeypatch, llm):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(NotImplementedError, match="need the package llguidance, which cannot be imported"):
        LlamaGrammar.from_json_schema({"type": "boolean", "title": "one that was not seen before"})
    assert llm("It was", grammar='root ::= "no"', max_tokens=5)["choices"][0]["text"] == "no"
