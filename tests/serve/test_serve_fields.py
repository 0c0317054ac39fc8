"""Every field that changes an answer, on every route that answers: it works there, or the request is refused."""

import json

import pytest
from needs import need
from serving import running

pytestmark = pytest.mark.check

need("server", "fastapi", "httpx")

from pylongctx import completer  # noqa: E402
from pylongctx.serve import foreign  # noqa: E402
from pylongctx.serve.bodies import ChatBody, CompletionBody, Conversing, InfillBody, NativeBody  # noqa: E402

TEXT = "It was the best of times."
USER = [{"role": "user", "content": "How many?"}]
ROUTES = {
    "/v1/completions": ({"prompt": TEXT}, lambda found: found["choices"][0]["text"]),
    "/completion": ({"prompt": TEXT}, lambda found: found["content"]),
    "/infill": ({"input_prefix": TEXT, "input_suffix": "."}, lambda found: found["content"]),
    "/v1/chat/completions": ({"messages": USER}, lambda found: found["choices"][0]["message"]["content"]),
    "/v1/messages": ({"messages": USER}, lambda found: found["content"][0]["text"]),
    "/v1/responses": ({"input": "How many?"}, lambda found: found["output"][0]["content"][0]["text"]),
    "/api/chat": ({"messages": USER, "stream": False}, lambda found: found["message"]["content"]),
    "/api/generate": ({"prompt": TEXT, "stream": False}, lambda found: found["response"]),
    "/api/generate raw": ({"prompt": TEXT, "raw": True, "stream": False}, lambda found: found["response"]),
}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 4}}, "required": ["n"]}
GBNF = 'root ::= "yes" | "no"'


def is_object(said):
    return json.loads(said)["n"] in (3, 4)


def is_word(said):
    return said.strip() in ("yes", "no")


FORMS = [
    ("json_schema", SCHEMA, is_object),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": SCHEMA}}, is_object),
    ("response_format", {"type": "json_schema", "schema": SCHEMA}, is_object),
    ("response_format", {"type": "json_object", "schema": SCHEMA}, is_object),
    ("guided_json", SCHEMA, is_object),
    ("guided_regex", "(yes|no)", is_word),
    ("guided_choice", ["yes", "no"], is_word),
    ("guided_grammar", GBNF, is_word),
    ("structured_outputs", {"json": SCHEMA}, is_object),
    ("structured_outputs", {"choice": ["yes", "no"]}, is_word),
    ("grammar", GBNF, is_word),
    ("grammar_string", GBNF, is_word),
]
# a value of each field that changes an answer, and the argument of ``create_completion`` that has it
OF_SAMPLERS = {
    "temperature": 0.5,
    "top_k": 7,
    "top_p": 0.5,
    "min_p": 0.25,
    "typical_p": 0.5,
    "top_n_sigma": 2.0,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.25,
    "dynatemp_range": 0.5,
    "dynatemp_exponent": 2.0,
    "adaptive_target": 0.5,
    "adaptive_decay": 0.5,
    "min_keep": 2,
    "repeat_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "dry_multiplier": 0.5,
    "dry_base": 2.0,
    "dry_allowed_length": 3,
    "dry_penalty_last_n": 16,
    "mirostat_mode": 2,
    "mirostat_tau": 3.0,
    "mirostat_eta": 0.5,
    "dry_sequence_breakers": ["x"],
    "samplers": ["top_k", "temperature"],
    "seed": 7,
    "max_tokens": 2,
    "stop": ["zzz"],
    "stop_token_ids": [5],
    "min_tokens": 1,
}
# fields that do not change a text, or whose effect other tests hold
APART = {"stream", "stream_options", "return_progress", "timings_per_token", "id_slot", "cache_prompt", "verbose"}
APART |= {"longctx", "n", "n_cache_reuse", "repeat_last_n", "logit_bias", "ignore_eos"}


@pytest.fixture(scope="module")
def http():
    with running(n_ctx=1024) as server:
        yield server.http


@pytest.fixture
def given(monkeypatch):
    """The arguments of the last completion."""
    seen = {}

    def job_of(source, tokens, sampler, given, *args, **fields):
        seen.update(given)
        return before(source, tokens, sampler, given, *args, **fields)

    before = completer.job_of
    monkeypatch.setattr(completer, "job_of", job_of)
    return seen


@pytest.fixture
def fill(monkeypatch):
    """Let the model, which was not trained for it, fill in."""
    from pylongctx.parallel import NEEDED, Host

    monkeypatch.setattr(Host, "fill_tokens", dict.fromkeys(NEEDED, 5))


def ask(http, route, **more):
    path, _, _ = route.partition(" ")
    return http.post(path, json={"max_tokens": 300, "temperature": 1.0, "seed": 3} | ROUTES[route][0] | more)


def refuses(response, name):
    """Return True if a request is refused with the path of a field."""
    if response.status_code != 400:
        return False
    error = response.json()["error"]
    return name in (error if isinstance(error, str) else error["param"])


@pytest.mark.parametrize(("name", "value", "holds"), FORMS, ids=[f"{i}-{form[0]}" for i, form in enumerate(FORMS)])
@pytest.mark.parametrize("route", ROUTES)
def test_what_constrains_an_answer_holds_everywhere(http, fill, route, name, value, holds):
    response = ask(http, route, **{name: value})
    assert response.status_code == 200, response.text
    assert holds(ROUTES[route][1](response.json())), response.text


@pytest.mark.parametrize("route", [route for route in ROUTES if "/api/" in route])
@pytest.mark.parametrize(("name", "value", "holds"), FORMS[:2] + FORMS[-2:])
def test_options_may_hold_it_too(http, route, name, value, holds):
    response = ask(http, route, options={name: value})
    assert response.status_code == 200 and holds(ROUTES[route][1](response.json())), response.text


def test_every_field_of_a_sampler_is_walked():
    forms = {name for name, _, _ in FORMS} - {"grammar_string"}
    assert set(OF_SAMPLERS) | APART | forms == set(NativeBody.model_fields) & set(Conversing.model_fields)


@pytest.mark.parametrize("route", ROUTES)
def test_every_field_of_a_sampler_is_used(http, fill, given, route):
    for name, value in OF_SAMPLERS.items():
        given.clear()
        response = ask(http, route, **({"max_tokens": 3} | {name: value}))
        assert response.status_code == 200, response.text
        assert "x-unserved-fields" not in response.headers, name
        assert given[name] == (value if name != "samplers" else ["top_k", "temperature"]), name


@pytest.mark.parametrize("route", ROUTES)
def test_tokens_are_forbidden_and_choices_counted(http, fill, given, route):
    ask(http, route, logit_bias={"5": -100}, ignore_eos=True, max_tokens=2)
    assert given["logit_bias"][5] == -100 and float("-inf") in given["logit_bias"].values()
    several = ask(http, route, n=2, max_tokens=2)
    found = several.json()
    assert refuses(several, "n") or len(found if isinstance(found, list) else found["choices"]) == 2


@pytest.mark.parametrize("route", ROUTES)
def test_what_only_another_route_has_is_refused(http, fill, route):
    own = {"/v1/completions": CompletionBody, "/completion": NativeBody, "/infill": InfillBody}
    known = own.get(route, ChatBody).model_fields.keys() | ROUTES[route][0].keys()
    for name in foreign.REFUSED:
        response = ask(http, route, **{name: ["x"]})
        assert name in known or (name in response.text and response.status_code == 400), (name, response.text)


@pytest.mark.parametrize("name", ["banned_strings", "custom_token_bans", "allowed_token_ids", "num_beams"])
def test_the_path_of_an_option_is_named(http, name):
    response = ask(http, "/api/chat", options={name: ["x"]})
    assert response.status_code == 400 and f"options.{name}=" in response.json()["error"]


@pytest.mark.parametrize(
    ("route", "more", "name"),
    [
        (
            "/v1/messages",
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            "output_config.format",
        ),
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}, "text.format"),
        ("/api/chat", {"format": "json"}, "format"),
        ("/api/generate raw", {"format": SCHEMA}, "format"),
        ("/v1/chat/completions", {"grammar": GBNF}, "grammar"),
        ("/completion", {"guided_choice": ["a"]}, "guided_choice"),
    ],
)
def test_two_forms_exclude_each_other(http, route, more, name):
    response = ask(http, route, response_format={"type": "json_object"}, **more)
    assert response.status_code == 400, response.text
    assert f"{name} and response_format" in response.text or f"response_format and {name}" in response.text


@pytest.mark.parametrize("name", ["response_format", "json_schema", "guided_regex"])
@pytest.mark.parametrize("route", ROUTES)
def test_a_form_that_cannot_be_used_is_named(http, fill, route, name):
    wrong = {"response_format": {"type": "xml"}, "json_schema": {"type": "array", "uniqueItems": True}}
    response = ask(http, route, **{name: wrong.get(name, "(")})
    assert response.status_code == 400
    if "/api/" not in route and name != "json_schema":
        assert response.json()["error"]["param"] == name


def test_thinking_of_a_request_wins_over_the_servers():
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
    body = ChatBody(messages=USER, enable_thinking=True)
    assert body.template_arguments(kwargs, None)["enable_thinking"] is True
    body = ChatBody(messages=USER, enable_thinking=True, **kwargs)
    assert body.template_arguments({}, None)["enable_thinking"] is False
    assert ChatBody(messages=USER).template_arguments(kwargs, None)["enable_thinking"] is False
