"""What the server does in addition to answering: limits, keys, facts about itself, tokens."""

import asyncio
import base64
import gzip
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from llamas import TEXT, new
from needs import need
from serving import ALIAS, PATIENCE, events, running

httpx = need("server", "fastapi", "httpx")

KEYS = ("first-key", "second-key")
SMALL = {"prompt": "It was", "max_tokens": 3}


@pytest.fixture(scope="module")
def server(embedded_model):
    with running(embedder=new(embedded_model, embedding=True, pooling_type=1, n_ctx=0, n_batch=256)) as server:
        yield server


@pytest.fixture
def http(server):
    server.erase()
    return server.http


@pytest.fixture(scope="module")
def strict():
    """Return a server with every limit."""
    settings = {
        "api_keys": KEYS,
        "n_body": 1000,
        "n_queue": 1,
        "n_predict": 5,
        "patience": 0.01,
        "cors_origins": ("http://page.example",),
        "sampling": {"temperature": 0.0},
    }
    with running(n_seq=1, settings=settings) as server:
        server.http.headers["Authorization"] = f"Bearer {KEYS[1]}"
        yield server


def error(response):
    found = response.json()["error"]
    assert set(found) >= {"message", "type", "param", "code"}
    return response.status_code, found["type"]


# ---- limits ----


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic first-key"}])
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/v1/longctx", "/nowhere"])
def test_a_key_is_asked_for(strict, headers, path):
    assert error(httpx.get(strict.url + path, headers=headers)) == (401, "authentication_error")


@pytest.mark.parametrize("headers", [{"Authorization": f"Bearer {KEYS[0]}"}, {"X-Api-Key": KEYS[1]}])
def test_one_of_the_keys_is_enough(strict, headers):
    assert httpx.get(f"{strict.url}/v1/models", headers=headers).status_code == 200


def test_health_needs_no_key(strict):
    assert httpx.get(f"{strict.url}/health").json() == {"status": "ok"}


@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body_is_refused(strict, chunked):
    body = json.dumps(SMALL | {"prompt": "a" * 1000}).encode()
    content = iter([body[:700], body[700:]]) if chunked else body
    response = strict.http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert error(response) == (413, "invalid_request_error")


def test_the_server_limits_the_length_of_answers_without_a_limit(strict):
    for more, n in (({}, 5), ({"max_tokens": -1}, 5), ({"max_tokens": 9}, 9)):
        answer = strict.http.post("/v1/completions", json={"prompt": "It was"} | more).json()
        assert answer["usage"]["completion_tokens"] == n
    assert strict.http.post("/v1/completions", json=SMALL).json()["usage"]["completion_tokens"] == 3


def test_the_server_has_its_own_defaults(strict):
    texts = {strict.http.post("/v1/completions", json=SMALL).json()["choices"][0]["text"] for _ in range(5)}
    assert len(texts) == 1


def test_a_full_queue_asks_to_come_again(strict):
    with strict.held(), ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(strict.http.post, "/v1/completions", json=SMALL) for _ in range(2)]
        strict.wait_for(lambda: strict.service.n_requests == 2)
        refused = strict.http.post("/v1/completions", json=SMALL)
        assert error(refused) == (503, "unavailable_error")
        assert int(refused.headers["Retry-After"]) > 0
        strict.release()
        assert [one.result(PATIENCE).status_code for one in waiting] == [200, 200]
    assert strict.service.n_requests == 0


def test_a_stream_that_waits_is_kept_alive(strict):
    with strict.held(), strict.http.stream("POST", "/v1/completions", json=SMALL | {"stream": True}) as response:
        lines = response.iter_lines()
        assert next(line for line in lines if line) == ": still working"
        strict.release()
        assert [line for line in lines if line][-1] == "data: [DONE]"


def test_pages_of_other_origins_may_ask_when_they_are_named(strict, http):
    asked = {"Origin": "http://page.example", "Access-Control-Request-Method": "POST"}
    assert strict.http.options("/v1/models", headers=asked).headers["access-control-allow-origin"] == asked["Origin"]
    assert "access-control-allow-origin" not in http.get("/v1/models", headers=asked).headers


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b'{"prompt": ', "application/json", 400),
        (b"\xff\xfe", "application/json", 400),
        (b"[1, 2]", "application/json", 400),
        (b'{"prompt": {}}', "application/json", 400),
        (b'{"prompt": []}', "application/json", 400),
        (b'{"prompt": [99999]}', "application/json", 400),
        (b'{"prompt": "a", "max_tokens": 1e99}', "application/json", 400),
        (b'{"prompt": "a", "temperature": NaN}', "application/json", 400),
        (b'{"prompt": "a", "suffix": "b"}', "application/json", 501),
        (b'{"prompt": "a"}', "text/plain", 415),
    ],
)
def test_malformed_requests_are_refused(http, body, kind, status):
    response = http.post("/v1/completions", content=body, headers={"Content-Type": kind})
    assert error(response)[0] == status


# ---- HEAD and compression ----


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/models", "/props", "/slots", "/metrics", "/", "/api/ps"])
def test_head_is_get_without_a_body(http, path):
    found = http.head(path)
    assert (found.status_code, found.content) == (200, b"")
    assert found.headers["content-type"] == http.get(path).headers["content-type"]
    assert int(found.headers["content-length"]) > 0


def test_head_of_other_routes(http):
    assert [http.head(path).status_code for path in ("/nowhere", "/v1/completions")] == [404, 405]


def test_answers_are_compressed_but_not_streams(http):
    plain = http.get("/props", headers={"Accept-Encoding": "identity"})
    packed = http.get("/props", headers={"Accept-Encoding": "gzip"})
    assert "content-encoding" not in plain.headers and packed.headers["content-encoding"] == "gzip"
    assert packed.json() == plain.json()
    assert int(packed.headers["content-length"]) < int(plain.headers["content-length"])
    assert "content-encoding" not in http.get("/health").headers
    for path, more in (("/v1/completions", {}), ("/api/generate", {"options": {"num_predict": 400}})):
        body = {"model": ALIAS, "stream": True, "max_tokens": 200} | SMALL | more
        answer = http.post(path, json=body, headers={"Accept-Encoding": "gzip"})
        assert answer.status_code == 200 and "content-encoding" not in answer.headers


JSON = {"Content-Type": "application/json"}


def post_packed(http, content, encoding="gzip"):
    return http.post("/v1/completions", content=content, headers={**JSON, "Content-Encoding": encoding})


def test_a_body_may_be_compressed(http):
    body = json.dumps(SMALL | {"temperature": 0}).encode()
    want = http.post("/v1/completions", content=body, headers=JSON).json()["choices"]
    for encoding, packed in (("gzip", gzip.compress(body)), ("x-gzip", gzip.compress(body)), ("identity", body)):
        assert post_packed(http, packed, encoding).json()["choices"] == want


@pytest.mark.parametrize(
    ("damage", "encoding", "status"),
    [
        (lambda packed: packed[:-9], "gzip", 400),
        (lambda packed: packed + packed, "gzip", 400),
        (lambda packed: b"{}", "gzip", 400),
        (lambda packed: packed, "br", 415),
        (lambda packed: packed, "gzip, gzip", 415),
    ],
)
def test_a_damaged_or_unknown_compression_is_refused(http, damage, encoding, status):
    packed = gzip.compress(json.dumps(SMALL).encode())
    assert error(post_packed(http, damage(packed), encoding)) == (status, "invalid_request_error")


def test_a_small_body_that_unpacks_to_a_large_one_is_refused(strict):
    packed = gzip.compress(json.dumps(SMALL | {"prompt": "a" * 100_000}).encode())
    assert len(packed) < 1000
    response = post_packed(strict.http, packed)
    assert error(response) == (413, "invalid_request_error")
    assert "unpacked request is larger than 1000 bytes" in response.text


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nowhere", 404), ("GET", "/v1/completions", 405)])
def test_unknown_routes_are_errors_of_the_same_form(http, method, path, status):
    assert error(http.request(method, path))[0] == status


def test_what_a_slow_client_has_not_read_is_bounded():
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    from pylongctx.serve.handler import MAX_QUEUED, Feed

    n = [0]

    def chunks():
        for i in range(10 * MAX_QUEUED):
            n[0] = i + 1
            yield {"i": i}

    async def look(leave):
        with ThreadPoolExecutor(2) as pool:
            feed = Feed(1)
            found = []
            pool.submit(feed.put_all, 0, chunks())
            async for _, chunk in feed.chunks(1, 30.0):
                found.append(chunk["i"])
                if len(found) == 1:
                    await asyncio.sleep(0.2)
                    assert n[0] <= MAX_QUEUED + 2
                    if leave:
                        break
            feed.close()  # else the thread that puts them would wait for ever
        return found

    assert asyncio.run(look(False)) == list(range(10 * MAX_QUEUED))
    assert asyncio.run(look(True)) == [0]


def test_an_error_in_the_middle_of_a_stream_is_told(server, http, monkeypatch):
    monkeypatch.setattr(server.host.model, "piece", lambda *args: 1 / 0)
    with http.stream("POST", "/v1/completions", json=SMALL | {"stream": True}) as response:
        (found,) = events(response)
    assert "ZeroDivisionError" in found["error"]["message"]
    assert server.engine.n_busy == 0 or server.wait_for(lambda: server.engine.n_busy == 0) is None


def test_names_of_llama_server_are_read_too(http):
    schema = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}
    answer = http.post("/v1/completions", json={"prompt": "It", "n_predict": 200, "json_schema": schema}).json()
    assert isinstance(json.loads(answer["choices"][0]["text"])["yes"], bool)
    assert http.post("/v1/completions", json={"prompt": "It", "n_predict": 2}).json()["timings"]["predicted_n"] == 2
    forbidden = {"prompt": "It", "n_predict": 1, "temperature": 0, "logprobs": 1}
    first = http.post("/v1/completions", json=forbidden).json()["choices"][0]["logprobs"]["tokens"]
    (token,) = http.post("/tokenize", json={"content": first[0], "parse_special": False}).json()["tokens"][-1:]
    other = http.post("/v1/completions", json=forbidden | {"logit_bias": [[token, False]]}).json()
    assert other["choices"][0]["logprobs"]["tokens"] != first


# ---- facts ----


def test_slots_tell_what_they_hold(server, http):
    usage = http.post("/v1/completions", json=SMALL).json()["usage"]
    first, second = http.get("/slots").json()
    assert (first["id"], first["is_processing"], first["n_prompt_tokens"]) == (0, False, usage["prompt_tokens"])
    assert first["next_token"][0] == {"has_next_token": False, "n_remain": -1, "n_decoded": 0}
    assert (second["id"], second["n_past"]) == (1, 0)
    assert http.post("/slots/0", json={}).json() == {"id_slot": 0, "n_erased": usage["prompt_tokens"] + 2}
    assert error(http.post("/slots/2", json={}))[0] == 400
    assert error(http.post("/slots/0", params={"action": "save"}, json={"filename": "a"}))[0] == 501
    assert error(http.post("/slots/0", params={"action": "burn"}, json={}))[0] == 400


def test_metrics_count(server, http):
    before = {name: server.metric(name) for name in ("prompt_tokens_total", "generated_tokens_total")}
    usage = http.post("/v1/completions", json=SMALL).json()["usage"]
    assert server.metric("prompt_tokens_total") == before["prompt_tokens_total"] + usage["prompt_tokens"]
    assert server.metric("generated_tokens_total") == before["generated_tokens_total"] + 3
    assert server.metric('http_requests_total{route="/v1/completions",status="200"}') >= 1


def test_props_and_longctx_describe_the_server(server, http):
    props = http.get("/props").json()
    assert (props["total_slots"], props["default_generation_settings"]["n_ctx"]) == (2, 512)
    assert props["eos_token"] == http.get("/tokenizer_info").json()["eos_token"] != ""
    found = http.get("/v1/longctx").json()
    assert (found["method"], found["n_ctx"], found["chunk_map"]) == ("full", 512, None)
    assert [one["kv_rows"] for one in found["sequences"]] == [0, 0]


def test_a_server_may_hide_its_page_and_its_slots():
    with running(settings={"slots": False, "page": False}) as server:
        answer = server.http.get("/slots")
        assert (answer.status_code, answer.json()["error"]["type"]) == (501, "not_supported_error")
        assert server.http.get("/props").json()["endpoint_slots"] is False
        assert server.http.get("/").text == "Ollama is running"


def test_without_a_method_the_memory_is_llama_cpps():
    with running(method=None) as server:
        assert server.http.post("/v1/completions", json=SMALL).json()["usage"]["completion_tokens"] == 3
        assert server.http.get("/v1/longctx").json()["kv"] is None
        assert server.metric("kv_bytes") == 0


def test_the_files_of_the_page_are_served_without_a_key(strict, monkeypatch, tmp_path):
    from pylongctx.serve import app

    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "index.html").write_text("<p>chat")
    (tmp_path / "page" / "chat.js").write_text("1")
    (tmp_path / "page" / "notes.txt").write_text("not for the world")
    monkeypatch.setattr(app.resources, "files", lambda package: tmp_path)
    transport = httpx.ASGITransport(app.create_app(strict.service))

    async def ask():
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return [await client.get(path) for path in ("/", "/index.html", "/chat.js", "/notes.txt", "/../app.py")]

    index, same, script, *others = asyncio.run(ask())
    assert index.text == same.text == "<p>chat"
    assert index.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in index.headers["content-security-policy"]
    assert script.headers["content-type"].startswith("text/javascript")
    assert [answer.status_code for answer in others] == [401, 401]


# ---- tokens ----


def test_tokens_there_and_back(server, http):
    text = TEXT.decode().strip()
    for body, add_bos in (({"content": text}, False), ({"content": text, "add_special": True}, True)):
        assert http.post("/tokenize", json=body).json()["tokens"] == server.host.model.tokenize(
            text.encode(), add_bos, True
        )
    found = http.post("/tokenize", json={"prompt": text, "add_special_tokens": True}).json()
    assert found["count"] == len(found["tokens"])
    plain = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": plain}).json()["content"].strip() == text
    assert error(http.post("/tokenize", json={}))[0] == 400


def test_a_conversation_becomes_a_prompt(server, http):
    messages = [{"role": "user", "content": "Why?"}]
    prompt = http.post("/apply-template", json={"messages": messages}).json()["prompt"]
    with new(server.host.model_path) as llm:
        assert prompt == llm.apply_template(messages)


def test_quotes_name_the_lines_of_an_answer(http):
    files = [
        {"name": "a.txt", "text": "It rained in the morning, as usual.\nNobody minded the rain any more in May.\n"},
        {"name": "b.txt", "text": "The house stood empty for many a year.\n\nThe thief was the gardener, not she.\n"},
    ]
    body = {"files": files, "question": "Who was the thief?", "answer": "The gardener.", "n": 1}
    (found,) = http.post("/v1/longctx/quotes", json=body).json()["quotes"]
    assert found == {"file": "b.txt", "line": 3, "text": "The thief was the gardener, not she."}
    assert http.post("/v1/longctx/quotes", json={**body, "files": []}).json() == {"quotes": []}
    for wrong in ({"n": 0}, {"n": 21}, {"files": [{"name": "a.txt"}]}, {"question": None}):
        assert error(http.post("/v1/longctx/quotes", json=body | wrong))[0] == 400


def test_embeddings_are_those_of_llama(server, http):
    texts = ["the thief", "the butler did it"]
    expected, _ = server.service.embedder.embed(texts, normalize=True)
    np.testing.assert_allclose(np.linalg.norm(expected, axis=1), 1, rtol=1e-6)
    found = server.client.embeddings.create(model=ALIAS, input=texts)  # as base64, which is the client's default
    np.testing.assert_allclose([one.embedding for one in found.data], expected, rtol=1e-6)
    plain = http.post("/v1/embeddings", json={"input": texts[0], "encoding_format": "base64"}).json()
    assert np.frombuffer(base64.b64decode(plain["data"][0]["embedding"]), np.float32).tolist() == expected[0]
    assert plain["usage"]["prompt_tokens"] > 0
    tokens = [server.host.model.tokenize(text.encode()) for text in texts]
    for given in (tokens, tokens[:1]):
        found = http.post("/v1/embeddings", json={"input": given}).json()["data"]
        assert [one["embedding"] for one in found] == expected[: len(given)]
    alone = http.post("/v1/embeddings", json={"input": tokens[1], "dimensions": 5}).json()["data"][0]["embedding"]
    np.testing.assert_allclose(alone, np.array(expected[1][:5]) / np.linalg.norm(expected[1][:5]), rtol=1e-5)
    many = http.post("/v1/embeddings", json={"input": ["a"] * 2049})
    assert "2048" in many.json()["error"]["message"]
    long = http.post("/v1/embeddings", json={"input": "a long text " * 99})  # not cut
    assert error(long)[0] == 400
    assert "too large" in long.json()["error"]["message"]
    assert error(http.post("/v1/embeddings", json={"input": "a", "dimensions": 10**6}))[0] == 400


def test_embeddings_name_their_option(strict):
    response = strict.http.post("/v1/embeddings", json={"input": "a"})
    assert error(response) == (501, "not_supported_error")
    assert "--embeddings" in response.json()["error"]["message"]
