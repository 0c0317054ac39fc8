"""What is refused before it is worked on: by its size, its entries, or the time that it takes."""

import json
import resource
import socket
import time
from contextlib import ExitStack

import pytest
from llamas import new
from needs import need
from serving import PATIENCE, running

httpx = need("server", "fastapi", "httpx")

from pylongctx.errors import PromptTooLong  # noqa: E402
from pylongctx.serve import gate  # noqa: E402

JSON = {"Content-Type": "application/json"}
QUICK = 6.0  # seconds of the processor; what is refused here took many times as long when it was worked on
HUGE = "a word " * 2_000_000
MANY = 200_000


@pytest.fixture(scope="module")
def server():
    with running(n_seq=1, settings={"n_queue": 1, "body_patience": 0.3}) as server:
        yield server


def refused(server, path, body):
    """Return the error of a request, which must come soon."""
    content = json.dumps(body)
    began = time.process_time()
    response = server.http.post(path, content=content, headers=JSON)
    assert time.process_time() - began < QUICK
    assert response.status_code == 400, response.text[:300]
    return response.json()["error"]


MESSAGE = {"role": "user", "content": HUGE}
PARTS = {"role": "user", "content": [{"type": "text", "text": "a"}] * MANY}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": HUGE}),
        ("/completion", {"prompt": [1, HUGE]}),
        ("/v1/chat/completions", {"messages": [MESSAGE]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": HUGE}]}]}),
        ("/apply-template", {"messages": [MESSAGE]}),
        ("/tokenize", {"content": HUGE}),
    ],
)
def test_a_text_that_cannot_fit_is_not_tokenized(server, monkeypatch, path, body):
    host, tokenize, sizes = server.host, server.host.model.tokenize, []
    assert host.model.longest_piece >= 1  # known from here on
    monkeypatch.setattr(host.model, "tokenize", lambda text, *more: sizes.append(len(text)) or tokenize(text, *more))
    found = refused(server, path, body)
    assert found["code"] == "context_length_exceeded"
    assert found["n_ctx"] == host.n_ctx < found["n_prompt_tokens"] <= len(host.model.tokenize(b"a word ")) * 2_000_000
    assert max(sizes) < 1000


def test_llama_refuses_a_text_that_cannot_fit_without_tokenizing_it(embedded_model):
    with new(embedded_model) as llm:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for ask in (
            llm.create_completion,
            lambda text: llm.create_chat_completion([{"role": "user", "content": text}]),
        ):
            began = time.process_time()
            with pytest.raises(PromptTooLong, match="at least") as caught:
                ask(HUGE)
            assert time.process_time() - began < QUICK
            assert caught.value.n_tokens > caught.value.n_ctx == 512
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 6 * len(HUGE) >> 10  # KiB; tokenizing takes 24 bytes and more for each


def test_a_text_of_the_longest_tokens_fits(embedded_model):
    with new(embedded_model) as llm:
        model = llm.session.model
        longest = max(range(llm.n_vocab()), key=lambda token: len(model.piece(token, True)))
        llm.session.check_size(512 * len(model.piece(longest, True)))
        with pytest.raises(PromptTooLong):
            llm.session.check_size(max(32, model.longest_piece) * 512 + 1)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a", "stop": ["b"] * MANY}, "stop"),
        ("/v1/completions", {"prompt": "a", "stop": ["b" * 20000]}, "stop"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {str(i): 1 for i in range(MANY)}}, "logit_bias"),
        ("/v1/completions", {"prompt": "a", "logit_bias": [[1, 1]] * MANY}, "logit_bias"),
        ("/v1/completions", {"prompt": [1.5] * MANY}, "prompt"),
        ("/v1/completions", {"prompt": ["a"] * MANY}, "prompt"),
        ("/completion", {"prompt": [[1, "a"]] * MANY}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * MANY}, "messages"),
        ("/v1/chat/completions", {"messages": [PARTS]}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": [{}] * MANY}, "tools"),
        ("/apply-template", {"messages": [{"role": "user", "content": "a"}], "functions": [{}] * MANY}, "functions"),
        ("/v1/messages", {"messages": [PARTS], "max_tokens": 1}, "messages"),
        ("/v1/messages", {"messages": [{"role": "user", "content": [PARTS]}], "max_tokens": 1}, "messages"),
        ("/v1/messages", {"messages": [], "max_tokens": 1, "stop_sequences": ["a"] * MANY}, "stop_sequences"),
        ("/v1/responses", {"input": [{"role": "user", "content": "a"}] * MANY}, "input"),
        ("/v1/responses", {"input": [PARTS]}, "input"),
        ("/detokenize", {"tokens": [1] * ((1 << 20) + 1)}, "tokens"),
    ],
)
def test_lists_are_capped(server, path, body, param):
    assert refused(server, path, body)["param"] == param


def test_json_that_is_deep_is_refused(server):
    content = '{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}"
    assert server.http.post("/v1/completions", content=content, headers=JSON).status_code == 400


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/apply-template"])
def test_all_that_takes_time_waits_in_the_queue(server, monkeypatch, path):
    bodies = {"content": "a", "tokens": [1], "messages": [{"role": "user", "content": "a"}]}
    names = {"/tokenize": "content", "/detokenize": "tokens", "/apply-template": "messages"}
    monkeypatch.setattr(server.service, "n_requests", server.service.most_requests)
    response = server.http.post(path, json={names[path]: bodies[names[path]]})
    assert response.status_code == 503
    assert int(response.headers["Retry-After"]) > 0


def test_bodies_together_are_limited():
    """Bodies that clients have not sent completely are held; another one does not fit in addition to them."""
    body = json.dumps({"content": "a" * 900}).encode()
    fields = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with running(n_seq=1, settings={"n_body": 1000, "body_patience": PATIENCE}) as server:
        url = httpx.URL(server.url)
        with ExitStack() as stack:
            for _ in range(gate.BODIES):
                client = stack.enter_context(socket.create_connection((url.host, url.port), PATIENCE))
                client.sendall(f"POST /tokenize HTTP/1.1\r\n{fields}\r\n\r\n".encode() + body[:-1])
            server.wait_for(lambda: server.http.post("/tokenize", content=body, headers=JSON).status_code == 503)
        server.wait_for(lambda: server.http.post("/tokenize", content=body, headers=JSON).status_code == 200)


# ---- slow clients ----


def talk(server, head):
    """Return what the server says to a client that sends some bytes and then waits, and how long it waited."""
    url = httpx.URL(server.url)
    began = time.monotonic()
    with socket.create_connection((url.host, url.port), PATIENCE) as client:
        client.sendall(head)
        said = b""
        while part := client.recv(4096):
            said += part
    return said, time.monotonic() - began


@pytest.mark.parametrize("head", [b"", b"GET /health HTTP/1.1\r\nHost: localho", b"POST"])
def test_who_does_not_end_its_headers_is_cut_off(server, monkeypatch, head):
    monkeypatch.setattr("pylongctx.serve.server.HEAD_PATIENCE", 0.3)
    said, seconds = talk(server, head)
    assert said == b""
    assert 0.3 <= seconds < PATIENCE / 2


def test_a_client_that_sends_a_byte_now_and_then_is_cut_off(server, monkeypatch):
    monkeypatch.setattr("pylongctx.serve.server.HEAD_PATIENCE", 0.3)
    url = httpx.URL(server.url)
    began = time.monotonic()
    with socket.create_connection((url.host, url.port), PATIENCE) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")  # also after an answer
        assert client.recv(4096).startswith(b"HTTP/1.1 200")
        with pytest.raises(OSError, match=r"Broken pipe|reset"):
            while time.monotonic() - began < PATIENCE:
                client.sendall(b"G")
                time.sleep(0.05)
    assert time.monotonic() - began < PATIENCE / 2


def test_a_body_that_does_not_come_is_not_waited_for(server):
    head = (
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
    )
    said, seconds = talk(server, head)
    assert said.startswith(b"HTTP/1.1 408")
    assert b"request_timeout" in said
    assert 0.3 <= seconds < PATIENCE / 2


def test_what_all_choices_share_is_made_once(server, monkeypatch):
    from pylongctx.serve import bodies

    made = []
    monkeypatch.setattr(bodies.LlamaGrammar, "from_json_schema", lambda schema, **options: made.append(schema) or 1 / 0)
    body = {"prompt": "a", "json_schema": {"type": "object"}, "n": 16}
    assert server.http.post("/v1/completions", json=body).status_code == 500
    assert len(made) == 1


NONSENSE = [
    {"temperature": -1},
    {"top_p": 5},
    {"min_p": -1},
    {"max_tokens": -5},
    {"presence_penalty": 9},
    {"frequency_penalty": -3},
    {"repeat_penalty": 0},
    {"repetition_penalty": -1},
    {"top_k": -2},
    {"typ_p": 1.5},
    {"mirostat": 3},
    {"mirostat_tau": -1},
]


@pytest.mark.parametrize("given", NONSENSE, ids=lambda given: next(iter(given)))
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/completion"])
def test_numbers_that_make_no_sense_are_refused_by_name(server, path, given):
    (name,) = given
    body = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
    refused = server.http.post(path, json={**body, "max_tokens": 1, **given})
    assert refused.status_code == 400 and name in refused.json()["error"]["message"]


def test_synonyms_of_other_programs(server):
    one, other = ({"prompt": "It was the", "max_tokens": 8, "temperature": 0, name: 3.0} for name in REPEAT)
    texts = {server.http.post("/v1/completions", json=body).json()["choices"][0]["text"] for body in (one, other)}
    assert len(texts) == 1


REPEAT = ("repeat_penalty", "repetition_penalty")
