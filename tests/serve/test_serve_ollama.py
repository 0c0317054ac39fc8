"""Ollama's API, as its own client for Python asks."""

import json
from datetime import datetime, timezone

import pytest
from chat_templates import THINKING, WEATHER
from llamas import TEXT, new
from needs import need
from serving import ALIAS, forced, poster, running

ollama = need("server", "fastapi", "httpx", "ollama")

ASKED = [{"role": "user", "content": "Say hello"}]
GREEDY = {"temperature": 0, "num_predict": 8}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
CHAPTER = {"type": "integer", "minimum": 1, "maximum": 40}
SCHEMA = {"type": "object", "properties": {"chapter": CHAPTER}, "required": ["chapter"]}


class Client(ollama.Client):
    """Asks for the one model, whatever is in the request; ``headers`` are those of the last response."""

    def __init__(self, server):
        super().__init__(host=server.url, timeout=60)
        self._client.event_hooks["response"] = [self._note]

    def _note(self, response):
        self.headers = response.headers

    def chat(self, messages=ASKED, **more):
        return super().chat(ALIAS, messages, **more)

    def generate(self, prompt="Say hello", **more):
        return super().generate(ALIAS, prompt, **more)


@pytest.fixture(scope="module")
def server(embedded_model):
    embedder = new(embedded_model, embedding=True, pooling_type=1, n_ctx=0, n_batch=256)
    with running(n_seq=1, n_ctx=1024, embedder=embedder) as server:
        yield server


@pytest.fixture
def client(server):
    server.erase()
    with Client(server) as client:
        yield client


def refused(status, what, *words):
    """Check that a call is refused, with a text that has some words."""
    with pytest.raises(ollama.ResponseError) as caught:
        what()
    assert caught.value.status_code == status
    for word in words:
        assert word in caught.value.error


# ---- /api/chat ----


@pytest.mark.parametrize("streamed", [False, True])
def test_a_chat_is_that_of_openai(server, client, streamed):
    openai = poster(server)
    expected = openai("/v1/chat/completions", messages=ASKED, temperature=0, max_tokens=8)
    if streamed:
        *parts, end = client.chat(options=GREEDY, stream=True)
        assert client.headers["content-type"] == "application/x-ndjson"
        assert {part.done for part in parts} == {False}
        assert {part.message.role for part in [*parts, end]} == {"assistant"}
        text = "".join(part.message.content for part in parts)
        assert end.message.content == ""
    else:
        end = client.chat(options=GREEDY)
        text = end.message.content
    assert text == expected["choices"][0]["message"]["content"]
    assert (end.model, end.done, end.done_reason) == (ALIAS, True, "length")
    assert abs((datetime.now(timezone.utc) - datetime.fromisoformat(end.created_at[:26] + "+00:00")).seconds) < 60
    assert (end.prompt_eval_count, end.eval_count) == (expected["usage"]["prompt_tokens"], 8)
    assert 0 < end.eval_duration < end.total_duration < 60 * 10**9
    assert end.load_duration == 0


def test_streams_are_what_is_asked_for_first(server):
    """As with Ollama: who says nothing gets a stream."""
    response = server.http.post("/api/chat", json={"messages": ASKED, "options": GREEDY})
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert len(lines) > 1
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert "total_duration" in lines[-1]


def test_options_are_those_of_the_other_dialects(server, client):
    options = {"seed": 5, "temperature": 1.5, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9}
    options |= {"repeat_penalty": 1.2, "repeat_last_n": 16, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    options |= {"mirostat": 0, "mirostat_tau": 4.0, "mirostat_eta": 0.2, "stop": ["zz"]}
    found = client.chat(options=options | {"num_predict": 24})
    assert "x-unserved-fields" not in client.headers
    server.erase()
    expected = poster(server)("/v1/chat/completions", messages=ASKED, max_tokens=24, **options)
    assert found.message.content == expected["choices"][0]["message"]["content"]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_is_called_as_a_whole(server, client, monkeypatch, streamed):
    forced(server, monkeypatch, CALL)
    found = client.chat(tools=[WEATHER], stream=streamed)
    parts = list(found) if streamed else [found]
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("get_weather", {"city": "Rome", "days": 2})
    ]
    assert "".join(part.message.content for part in parts).strip() == ""
    assert parts[-1].done_reason == "stop"


def test_results_of_tools_are_those_of_openai(server, client):
    messages = [
        *ASKED,
        {"role": "Assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "tool_name": "f", "content": "7"},
    ]
    found = client.chat(messages, options=GREEDY)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    openai = [
        *ASKED,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "7"},
    ]
    expected = poster(server)("/v1/chat/completions", messages=openai, temperature=0, max_tokens=8)
    assert found.prompt_eval_count == expected["usage"]["prompt_tokens"]
    assert found.message.content == expected["choices"][0]["message"]["content"]


def test_results_find_the_call_of_their_function():
    from pylongctx.serve.ollama import OllamaChatBody

    calls = [{"function": {"name": name, "arguments": {}}} for name in "fg"]
    given = [{"role": "tool", "content": "", **more} for more in ({"tool_name": "g"}, {"tool_name": "f"}, {})]
    body = OllamaChatBody(messages=[{"role": "assistant", "tool_calls": calls}, *given])
    said, *results = body.openai_messages()
    assert [call["id"] for call in said["tool_calls"]] == ["call_0_0", "call_0_1"]
    assert [result["tool_call_id"] for result in results] == ["call_0_1", "call_0_0", "call_0_1"]


@pytest.mark.parametrize("streamed", [False, True])
def test_what_was_thought_is_a_field_of_its_own(monkeypatch, streamed):
    with running(n_seq=1, chat_format=THINKING) as server, Client(server) as client:
        assert "thinking" in client.show(ALIAS).capabilities
        forced(server, monkeypatch, "<think>\nI think so.\n</think>\n\nYes.")
        found = client.chat(think=True, stream=streamed)
        parts = list(found) if streamed else [found]
        assert "".join(part.message.thinking or "" for part in parts).strip() == "I think so."
        assert "".join(part.message.content for part in parts).strip() == "Yes."
        found = client.generate(think=True, stream=streamed)
        parts = list(found) if streamed else [found]
        assert "".join(part.thinking or "" for part in parts).strip() == "I think so."
        assert "".join(part.response for part in parts).strip() == "Yes."
        with_thoughts = client.chat(think="high").prompt_eval_count
        assert client.chat(think=False).prompt_eval_count > with_thoughts  # the template closes an empty thought


@pytest.mark.parametrize("streamed", [False, True])
def test_probabilities(client, streamed):
    found = client.chat(options=GREEDY, logprobs=True, top_logprobs=3, stream=streamed)
    entries = [entry for part in (found if streamed else [found]) for entry in part.logprobs or ()]
    assert len(entries) == 8
    for entry in entries:
        assert entry.logprob == pytest.approx(max(one.logprob for one in entry.top_logprobs))
        assert len(entry.top_logprobs) == 3
    found = client.generate(raw=True, options=GREEDY, logprobs=True, top_logprobs=2, stream=streamed)
    entries = [entry for part in (found if streamed else [found]) for entry in part.logprobs or ()]
    assert [len(entry.top_logprobs) for entry in entries] == [2] * 8


@pytest.mark.parametrize("wanted", ["json", SCHEMA])
def test_formats_hold_the_answer(client, wanted):
    found = client.chat(format=wanted, options={"num_predict": 200, "seed": 1})
    raw = client.generate(raw=True, format=wanted, options={"num_predict": 200, "seed": 1})
    for text, reason in ((found.message.content, found.done_reason), (raw.response, raw.done_reason)):
        assert text.lstrip()[:1] == "{"
        if reason == "stop":
            assert isinstance(json.loads(text), dict)
    if wanted is SCHEMA:
        assert json.loads(found.message.content).keys() == {"chapter"}


def test_without_messages_the_model_is_loaded(client):
    found = client.chat([])
    assert (found.done, found.done_reason, found.message.content) == (True, "load", "")
    found = client.generate("")
    assert (found.done, found.done_reason, found.response) == (True, "load", "")


# ---- /api/generate ----


def test_a_prompt_is_a_conversation(client):
    found = client.generate(system="Be brief.", options=GREEDY)
    expected = client.chat([{"role": "system", "content": "Be brief."}, *ASKED], options=GREEDY)
    assert found.response == expected.message.content
    assert found.prompt_eval_count == expected.prompt_eval_count
    assert "".join(part.response for part in client.generate(system="Be brief.", options=GREEDY, stream=True)) == (
        found.response
    )


def test_a_context_continues(server, client):
    first = client.generate(options=GREEDY)
    n_text = len(server.host.tokens(first.response, False))
    assert len(first.context) == first.prompt_eval_count + n_text
    second = client.generate("And now?", options=GREEDY, context=first.context)
    assert second.context[: len(first.context)] == first.context
    alone = client.generate("And now?", options=GREEDY).prompt_eval_count
    assert second.prompt_eval_count == len(first.context) + alone - len(server.host.model.start)


def test_a_raw_prompt_is_that_of_llama_server(server, client):
    found = client.generate(TEXT.decode(), raw=True, options=GREEDY)
    expected = poster(server)("/completion", prompt=TEXT.decode(), temperature=0, n_predict=8)
    assert found.response == expected["content"]
    assert found.context is None
    parts = list(client.generate(TEXT.decode(), raw=True, options=GREEDY, stream=True))
    assert "".join(part.response for part in parts) == found.response
    assert parts[-1].done_reason == "length"


def test_a_suffix_is_filled_in(server, client, monkeypatch):
    refused(501, lambda: client.generate("a", suffix="b"), "fim_pre")
    assert "insert" not in client.show(ALIAS).capabilities
    monkeypatch.setitem(server.host.__dict__, "fill_tokens", {"fim_pre": 10, "fim_suf": 11, "fim_mid": 12})
    assert "insert" in client.show(ALIAS).capabilities
    found = client.generate("def f", suffix="return", options=GREEDY)
    expected = poster(server)("/infill", input_prefix="def f", input_suffix="return", temperature=0, n_predict=8)
    assert found.response == expected["content"]


def test_no_limit_is_none(server, client, monkeypatch):
    forced(server, monkeypatch, "It was a long answer, and it has an end.")
    for n in (-1, -2, 0):
        found = client.generate(options={"num_predict": n})
        assert (found.response.strip(), found.done_reason) == ("It was a long answer, and it has an end.", "stop")


# ---- /api/embed ----


def test_vectors(server, client):
    expected, n_tokens = server.service.embedder.embed(["a", "b c"], normalize=True)
    found = client.embed(ALIAS, ["a", "b c"])
    assert found.embeddings == [pytest.approx(one) for one in expected]
    assert (found.prompt_eval_count, found.model) == (n_tokens, ALIAS)
    assert client.embed(ALIAS, "a").embeddings == [pytest.approx(expected[0])]
    assert len(client.embed(ALIAS, "a", dimensions=3).embeddings[0]) == 3
    assert client.embed(ALIAS, []).embeddings == []
    plain, _ = server.service.embedder.embed("a")
    assert client.embeddings(ALIAS, "a").embedding == pytest.approx(plain)
    assert client.embeddings(ALIAS, "").embedding == []


def test_texts_are_cut_unless_that_is_forbidden(client):
    long = TEXT.decode() * 60
    assert client.embed(ALIAS, long).prompt_eval_count == 256
    refused(400, lambda: client.embed(ALIAS, long, truncate=False), "256")


# ---- models ----


def test_lists_of_models(server, client):
    (model,) = client.list().models
    assert (model.model, model.size) == (ALIAS, 4791584)
    assert (model.details.format, model.details.family, model.details.quantization_level) == ("gguf", "llama", "Q8_0")
    assert model.details.parameter_size == "4.46M"
    assert len(model.digest) == 64
    (loaded,) = client.ps().models
    assert (loaded.name, loaded.digest, loaded.context_length) == (ALIAS, model.digest, 1024)
    assert loaded.size_vram == 0
    assert loaded.expires_at.year == 9999


def test_what_is_shown_of_a_model(server, client):
    found = client.show(f"{ALIAS}:latest")
    assert found.modelinfo["llama.context_length"] == 512
    assert found.modelinfo["general.parameter_count"] == server.host.model.info.n_params
    assert found.modelinfo["tokenizer.ggml.tokens"] is None
    assert found.template == server.host.templates.template.info["source"]
    assert found.capabilities == ["completion", "tools", "embedding"]
    assert "num_ctx                        1024" in found.parameters
    refused(404, lambda: client.show("other"), "'other' not found")


def test_counts_of_parameters():
    from pylongctx.serve.cards import count_text

    assert [count_text(n) for n in (7, 1500, 361821120, 8030261248)] == ["7", "2K", "361.82M", "8.0B"]


@pytest.mark.parametrize("name", ["pull", "push", "create", "copy", "delete"])
def test_models_are_not_changed(client, name):
    words = (ALIAS, "b") if name == "copy" else (ALIAS,)
    refused(501, lambda: getattr(client, name)(*words), f"/api/{name} is not supported", "pylongctx get")


def test_what_clients_look_for(server):
    assert server.http.head("/").status_code == 200
    assert "<html" in server.http.get("/").text
    assert server.http.get("/api/version").json()["version"].count(".") == 2
    for path in ("/api/version", "/api/tags"):
        assert server.http.head(path).status_code == 200


# ---- what is not supported ----


def test_what_has_no_effect_is_named(client):
    options = {"num_ctx": 4096, "num_thread": 3, "num_keep": 5, "temperature": 0, "num_predict": 1}
    client.chat(options=options, keep_alive="5m")
    names = client.headers["x-unserved-fields"].split(", ")
    assert names == ["options.num_ctx", "options.num_thread", "options.num_keep", "keep_alive"]
    client.chat(options={"num_ctx": 1024, "num_predict": 1})
    assert "x-unserved-fields" not in client.headers


def test_what_has_no_effect_may_be_refused():
    with running(n_seq=1, settings={"unknown_fields": "refuse"}) as server, Client(server) as client:
        refused(400, lambda: client.chat(options={"num_ctx": 4096}), "512 tokens", "start it with -c 4096")
        refused(400, lambda: client.chat(options={"num_gpu": 9}), "-ngl")
        refused(400, lambda: client.embeddings(ALIAS, "a", keep_alive=3), "keep_alive")
        assert client.chat(options={"num_ctx": 512, "num_predict": 1}).done


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"messages": [{"role": "user", "content": "a", "images": ["aGVsbG8="]}]}, ["messages[0]", "images"]),
        ({"messages": [{"role": "assistant", "tool_calls": ["f"]}]}, ["function"]),
        ({"messages": "a"}, ["messages"]),
        ({"think": True}, ["think"]),
        ({"format": "yaml"}, ["format", "yaml"]),
        ({"options": {"temperature": -1}}, ["temperature"]),
        ({"messages": [{"role": "user", "content": "a " * 9000}]}, ["1024"]),
    ],
)
def test_what_cannot_be_a_chat_is_said(server, more, words):
    response = server.http.post("/api/chat", json={"messages": ASKED, "stream": False} | more)
    assert response.status_code == 400
    for word in words:
        assert word in response.json()["error"]


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"images": ["aGVsbG8="]}, "images"),
        ({"template": "{{ .Prompt }}"}, "--chat-template"),
        ({"raw": True, "system": "Be brief."}, "system"),
        ({"raw": True, "context": [1]}, "context"),
    ],
)
def test_what_cannot_be_generated_is_said(server, more, word):
    response = server.http.post("/api/generate", json={"prompt": "a"} | more)
    assert response.status_code == 400
    assert word in response.json()["error"]


def test_errors_are_texts_wherever_they_come_from(server):
    assert server.http.get("/api/nothing").json() == {"error": "Not Found: GET /api/nothing"}
    cut = server.http.post("/api/chat", content="{", headers={"content-type": "application/json"})
    assert "not JSON" in cut.json()["error"]
    assert "messages" in server.http.post("/api/chat", content='{"messages": 5}').json()["error"]
    with running(n_seq=1, settings={"api_keys": ("secret",)}) as server:
        assert "API key" in server.http.get("/api/tags").json()["error"]
        assert ollama.Client(host=server.url, headers={"Authorization": "Bearer secret"}).list().models


def test_an_error_of_a_stream_is_its_last_line(client, monkeypatch):
    from pylongctx.serve.ollama import Pieces

    def fail(self):
        raise ValueError("lost")

    monkeypatch.setattr(Pieces, "finish", fail)
    parts = client.chat(stream=True, options=GREEDY)
    assert next(parts).done is False
    with pytest.raises(ollama.ResponseError, match="lost"):
        list(parts)


def test_a_stream_that_waits_keeps_its_connection():
    with running(n_seq=1, settings={"patience": 0.05}) as server, Client(server) as client, server.held():
        parts = client.chat(stream=True, options=GREEDY)
        first = next(parts)
        assert (first.message.content, first.done) == ("", False)
        server.release()
        assert [part.done for part in parts][-1] is True
