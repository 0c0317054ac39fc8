"""Grammars: JSON schemas, what they hold an answer to, and what cannot be one."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from llamas import new, texts
from needs import need

from pylongctx import Llama, LlamaGrammar
from pylongctx.completions.grammar import schema_to_gbnf
from pylongctx.errors import InvalidInput, LctxError
from pylongctx.eval.peak import peak_memory

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "ok"],
    "additionalProperties": False,
}


def follows(value) -> bool:
    """Return whether a value is what SCHEMA allows."""
    return (
        list(value) == ["name", "age", "tags", "ok"]
        and isinstance(value["name"], str)
        and len(value["name"]) <= 12
        and type(value["age"]) is int
        and 0 <= value["age"] <= 150
        and 1 <= len(value["tags"]) <= 3
        and set(value["tags"]) <= {"a", "b"}
        and type(value["ok"]) is bool
    )


def say(llm, grammar, **kwargs):
    return llm("It was", **{"max_tokens": 300, "grammar": grammar, "temperature": 1.0} | kwargs)["choices"][0]


@pytest.mark.parametrize("seed", range(5))
def test_an_answer_follows_the_schema(llm, seed):
    done = say(llm, LlamaGrammar.from_json_schema(json.dumps(SCHEMA)), seed=seed)
    assert done["finish_reason"] == "stop"
    assert follows(json.loads(done["text"]))


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"temperature": -1.0},
        {"mirostat_mode": 1},
        {"mirostat_mode": 2},
        {"repeat_penalty": 1.3, "logit_bias": {300: 50.0}},
        {"top_k": 1, "temperature": 2.0},
    ],
)
def test_every_sampler_follows_a_grammar(llm, settings):
    done = say(llm, 'root ::= "yes" | "no" [0-9]{3} "."', seed=1, **settings)
    text = done["text"].strip()
    assert text == "yes" or (text[:2] == "no" and text[2:5].isdigit() and text[5:] == ".")
    assert done["finish_reason"] == "stop"


def test_sample_and_generate_take_grammars(llm, prompt):
    digits = LlamaGrammar.from_string("root ::= [0-9]+")
    llm.eval(prompt)
    assert llm.detokenize([llm.sample(temp=0.0, grammar=digits)]).strip().isdigit()
    tokens = llm.generate(prompt, grammar=digits, temp=1.0)
    pieces = [llm.detokenize([next(tokens)]) for _ in range(5)]
    assert b"".join(pieces).strip().isdigit()


def test_a_stream_follows_too(llm):
    chunks = list(llm("It was", grammar='root ::= "one two three"', max_tokens=50, stream=True))
    assert "".join(texts(chunks)) == "one two three"
    assert len(chunks) > 2


def test_from_file(tmp_path, llm):
    path = tmp_path / "yes.gbnf"
    path.write_text('root ::= "yes"')
    assert say(llm, LlamaGrammar.from_file(path))["text"] == "yes"
    path.write_text(" \n")
    with pytest.raises(ValueError, match="is empty"):
        LlamaGrammar.from_file(str(path))


def test_a_grammar_of_llama_cpp_can_be_used(llm):
    class Theirs:
        _grammar = 'root ::= "no"'

    assert say(llm, Theirs())["text"] == "no"


def test_without_the_grammar_the_model_says_something_else(llm):
    text = say(llm, None, temperature=0.0, max_tokens=30)["text"]
    with pytest.raises(ValueError):
        json.loads(text)


# ---- what cannot be a grammar ----

BROKEN = [
    ("root := x", "expecting ::="),
    ('root ::= "x', "unexpected end of input"),
    ("root ::= other", "no rule named other"),
    ('start ::= "x"', "no rule named root"),
    ('root ::= root "x"', "left recursion"),
    ("root ::= [^\\x00-\\U0010FFFF]", "can match nothing"),
    (
        'root ::= "x" other | other\nother ::= [^\\x00-\\uD7FF\\uE000-\\U0010FFFF]',
        "can match nothing",
    ),
    ("root ::= [z-a]", "a range that ends before it begins: from code 122 to 97"),
    ("root ::= [^a-z9-0]", "from code 57 to 48"),
    ("root ::= <[99999999]>", "names token 99999999, and the vocabulary ends at 2047"),
    ("root ::= !<[2048]>", "names token 2048"),
    ("root ::= <[1073741824]>", "names token 1073741824"),  # where a schema would stand
    ('root ::= "\\UFFFFFFFF"', "a character with the code 4294967295"),
    ('root ::= "\\uD800"', "a character with the code 55296"),
    ("root ::= [a-\\U00110000]", "a character with the code 1114112"),
    ("", "no rule named root"),
    ('root ::= "x"{5000}', "repetitions"),
    ('root ::= "x"{2,1}', "at least 2 times, and at most fewer"),  # llama.cpp takes all memory for it
    ("root ::= [a{3,1}]{ 22 , # so\n 5 }", "at least 22 times"),
    ("root ::= " + "(" * 5000 + '"x"' + ")" * 5000, "too large"),
    ("root ::= a0\n" + "\n".join(f"a{i} ::= a{i + 1}" for i in range(30000)), "too large"),
    ("root ::= " + '"a"{0,1000} ' * 30, "too large"),
    ('root ::= "' + "a" * 5 * 2**20 + '"', "too large"),
    ("root ::= [", "unexpected end of input"),
    ('root ::= ("x"', "expecting '\\)'"),
    ("root ::= *", "preceding item"),
]


@pytest.mark.parametrize(("text", "reason"), BROKEN, ids=range(len(BROKEN)))
def test_a_broken_grammar_is_refused_and_nothing_is_lost(llm, text, reason, capfd):
    with pytest.raises(InvalidInput, match=reason) as caught:
        say(llm, text)
    assert len(str(caught.value)) < 300
    assert "error parsing grammar" not in capfd.readouterr().err  # llama.cpp's, with all of the text
    assert say(llm, 'root ::= "yes"')["text"] == "yes"


CHAIN = "\n".join(f"a{i} ::= a{i + 1} {{}} | a{i + 1} {{}}" for i in range(60)) + '\na60 ::= "q"'
AMBIGUOUS = {
    "400 options": "root ::= " + '"a"? ' * 400 + '"b"',
    "groups of options": 'root ::= (("a"?){200}){90} "b"',
    "chain": "root ::= a0\n" + CHAIN.replace("{}", ""),
    "chain of endings": "root ::= a0\n" + CHAIN.replace("{}", '"x"'),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_an_ambiguous_grammar_ends_its_generation_alone(llm, name):
    start, before = time.process_time(), peak_memory()
    with pytest.raises(InvalidInput, match="the grammar is too ambiguous"):
        say(llm, AMBIGUOUS[name], seed=1)
    assert time.process_time() - start < 3
    assert peak_memory() <= max(before, 2**30)
    assert say(llm, 'root ::= "yes"')["text"] == "yes"


def test_others_continue_next_to_an_ambiguous_grammar(embedded_model):
    """The engine has one thread: a token may take a second of it, and then its request fails."""
    httpx = need("server", "fastapi", "httpx")
    from serving import running

    with running(n_seq=2) as server, ThreadPoolExecutor(2) as pool:
        ask = {"prompt": "It was", "max_tokens": 12, "temperature": 1.0, "seed": 1}
        url = f"{server.url}/v1/completions"
        bad = pool.submit(httpx.post, url, json=ask | {"grammar": AMBIGUOUS["400 options"]}, timeout=60)
        good = pool.submit(httpx.post, url, json=ask, timeout=60)
        assert bad.result().status_code == 400
        assert "too ambiguous" in bad.result().json()["error"]["message"]
        assert good.result().json()["usage"]["completion_tokens"] == 12


def test_a_large_schema_can_be_followed(llm):
    properties = {f"p{i}": {"type": "integer"} for i in range(300)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    text = say(llm, LlamaGrammar.from_json_schema(schema), seed=2, max_tokens=30)["text"]
    assert text.startswith("{")


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("{", "parse error"),
        ('{"type": "nonsense"}', "nonsense"),
        ('{"$ref": "#/nowhere"}', "nowhere|ref"),
        ("7", "schema must be an object"),
    ],
)
def test_a_schema_that_is_none(schema, reason):
    with pytest.raises(InvalidInput, match=reason):
        schema_to_gbnf(schema)


def test_a_grammar_that_is_not_text(llm):
    with pytest.raises(TypeError, match="grammar must be a LlamaGrammar or GBNF text, not int"):
        say(llm, 7)


def test_no_token_left_is_an_error_and_no_abort(llm):
    """The end of the text is banned, but the grammar allows nothing else."""
    with pytest.raises(LctxError, match="no token can be sampled"):
        say(llm, 'root ::= "x"', logit_bias={llm.token_eos(): -np.inf})
    assert say(llm, 'root ::= "yes"')["text"] == "yes"


def test_a_processor_that_bans_what_the_grammar_wants(llm):
    def only_the_end(ids, logits):
        logits[:] = -np.inf
        logits[llm.token_eos()] = 0
        return logits

    with pytest.raises(LctxError, match="the grammar allows none"):
        say(llm, 'root ::= "x"', logits_processor=[only_the_end])


def test_logprobs_are_those_before_the_grammar(embedded_model):
    with new(embedded_model) as llm:
        plain = llm("It was", max_tokens=1, temperature=0.0, logprobs=5)["choices"][0]["logprobs"]
        held = say(llm, 'root ::= "Zebra"', temperature=0.0, logprobs=5, max_tokens=1)["logprobs"]
    for text, value in plain["top_logprobs"][0].items():
        assert held["top_logprobs"][0][text] == pytest.approx(value, abs=1e-2)
    assert held["token_logprobs"][0] < plain["token_logprobs"][0]
    assert isinstance(Llama, type)
