"""Fields that hold an answer: llama-server's, vLLM's and OpenAI's, and what cannot hold one."""

import json
import re

import pytest
from needs import need
from serving import running

pytestmark = pytest.mark.check

need("server", "fastapi", "httpx")

SCHEMA = {"type": "object", "properties": {"n": {"type": "number", "minimum": 2.5, "maximum": 3}}, "required": ["n"]}
UNHELD = {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3, "uniqueItems": True}
ASKED = {"max_tokens": 300, "temperature": 1.0, "seed": 3}
USER = {"messages": [{"role": "user", "content": "How many?"}]}


@pytest.fixture(scope="module")
def http():
    with running(n_ctx=1024) as server:
        yield server.http


def follows(said):
    return 2.5 <= json.loads(said)["n"] <= 3


def chose(said):
    return said in ("a", 'b"c')


def matches(said):
    return re.fullmatch(r"\d{3}-x", said) is not None


FIELDS = [
    ({"json_schema": SCHEMA}, follows),
    ({"guided_json": SCHEMA}, follows),
    ({"guided_json": json.dumps(SCHEMA)}, follows),
    ({"structured_outputs": {"json": SCHEMA}}, follows),
    ({"structured_outputs": {"json_object": True}}, lambda said: said.startswith("{")),
    ({"guided_regex": r"\d{3}-x"}, matches),
    ({"structured_outputs": {"regex": r"\d{3}-x"}}, matches),
    ({"guided_choice": ["a", 'b"c']}, chose),
    ({"structured_outputs": {"choice": ["a", 'b"c']}}, chose),
    ({"grammar": 'root ::= "a" | "b\\"c"'}, chose),
    ({"guided_grammar": 'root ::= "a" | "b\\"c"'}, chose),
    ({"structured_outputs": {"grammar": 'root ::= "a" | "b\\"c"'}}, chose),
]


@pytest.mark.parametrize(("fields", "holds"), FIELDS, ids=range(len(FIELDS)))
def test_an_answer_follows_the_field_that_constrains_it(http, fields, holds):
    for path, said in (
        ("/v1/completions", lambda answer: answer["choices"][0]["text"]),
        ("/completion", lambda answer: answer["content"]),
        ("/v1/chat/completions", lambda answer: answer["choices"][0]["message"]["content"]),
    ):
        body = USER if "chat" in path else {"prompt": "It was"}
        response = http.post(path, json={**ASKED, **body, **fields})
        assert response.status_code == 200, response.text
        assert holds(said(response.json())), response.text


def refused(http, fields, path="/v1/completions"):
    """Return why a request is refused."""
    body = USER if "chat" in path else {"prompt": "It was"}
    response = http.post(path, json={**ASKED, **body, **fields})
    assert response.status_code == 400, response.text
    return response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/completion", "/v1/chat/completions"])
def test_what_a_schema_asks_and_cannot_be_held_is_named(http, path):
    for fields in ({"json_schema": UNHELD}, {"guided_json": UNHELD}, {"structured_outputs": {"json": UNHELD}}):
        assert "cannot be used: /uniqueItems: " in refused(http, fields, path)


def test_a_format_may_be_in_the_prompt_only(http):
    wrapper = {"name": "x", "schema": UNHELD}
    asked = {"response_format": {"type": "json_schema", "json_schema": wrapper}}
    assert "/uniqueItems: " in refused(http, asked, "/v1/chat/completions")
    wrapper["strict"] = False
    answer = http.post("/v1/chat/completions", json={**ASKED, **USER, **asked}).json()
    assert set(json.loads(answer["choices"][0]["message"]["content"])) <= {1, 2}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"grammar": "root ::= [z-a]"}, "ends before it begins"),
        ({"grammar": "root ::= <[99999999]>"}, "names token 99999999"),
        ({"grammar": 'root ::= "\\UFFFFFFFF"'}, "which Unicode does not have"),
        ({"grammar": "root ::= [^\\x00-\\U0010FFFF]"}, "can match nothing"),
        ({"guided_regex": "("}, "the regular expression cannot be used"),
        ({"guided_choice": []}, "at least one"),
        ({"guided_json": "{"}, "not JSON"),
        ({"json_schema": False}, "false allows nothing"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_json and guided_regex cannot be combined"),
        ({"grammar": 'root ::= "a"', "json_schema": {}}, "grammar and json_schema cannot be combined"),
        ({"structured_outputs": {"json": {}, "choice": ["a"]}}, "cannot be combined"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_cannot_hold_an_answer(http, path, fields, reason):
    assert reason in refused(http, fields, path)
