"""Streams that are read again after their connection was lost."""

import json
import threading

import pytest
from needs import need
from serving import PATIENCE, running

httpx = need("server", "fastapi", "httpx")

from pylongctx.engine.job import Job  # noqa: E402
from pylongctx.serve import streams  # noqa: E402

TEXT = " ".join(map(str, range(60)))
N_FIRST = 5  # tokens before an answer waits
NAME = "a conversation::org/model"
KEYS = ("first", "second")


@pytest.fixture(scope="module")
def server():
    with running(n_seq=2) as server:
        yield server


@pytest.fixture(scope="module")
def shared():
    with running(n_seq=1, settings={"api_keys": KEYS}) as server:
        yield server


@pytest.fixture
def waiting(monkeypatch):
    """Let the model of a server say TEXT, and wait after its first tokens until an event is set."""
    held = threading.Event()

    def wait(server):
        wanted = [*server.host.model.tokenize(TEXT.encode(), False, True), server.host.model.info.token_eos]

        def choose(self, tokens, row):
            assert self.n_generated < N_FIRST or held.wait(PATIENCE)
            return wanted[self.n_generated]

        monkeypatch.setattr(Job, "choose", choose)
        return held

    yield wait
    held.set()


def ask(server, name=NAME, path="/v1/completions", **more):
    body = {"prompt": "Count", "max_tokens": 400, "stream": True} | more
    return server.http.stream("POST", path, json=body, headers={"X-Conversation-Id": name} if name else {})


def whole(server, name=NAME, path="/v1/completions", **more):
    with ask(server, name, path, **more) as response:
        assert response.status_code == 200
        return response.read()


def again(server, at=0, name=NAME, **more):
    return server.http.get("/v1/stream", params={"conv_id": name, "from": at}, **more)


def stop(server, name=NAME):
    return server.http.delete("/v1/stream", params={"conv_id": name}).status_code


def lookup(server, *names, **more):
    return server.http.post("/v1/streams/lookup", json={"conversation_ids": names}, **more).json()


def said(content):
    lines = [line.removeprefix(b"data: ") for line in content.split(b"\n\n") if line.startswith(b"data: {")]
    return "".join(choice["text"] for line in lines for choice in json.loads(line).get("choices", [])).strip()


def is_busy(server):
    return any(slot["is_processing"] for slot in server.http.get("/slots").json())


@pytest.mark.parametrize("path", ["/v1/completions", "/completion", "/api/generate"])
def test_an_answer_that_has_ended_is_read_again_from_any_byte(server, path):
    found = whole(server, path=path, model="tiny")
    for at in (0, 1, len(found) // 2, len(found) - 1, len(found)):
        assert again(server, at).content == found[at:]
    with ask(server, "", path, model="tiny") as response:
        assert again(server).headers["content-type"] == response.headers["content-type"]


def test_an_answer_goes_on_without_its_reader(server, waiting):
    held = waiting(server)
    with ask(server) as response:
        first = next(response.iter_bytes())
    server.wait_for(lambda: not lookup(server, NAME)[0]["is_done"])
    with server.http.stream("GET", "/v1/stream", params={"conv_id": NAME, "from": len(first)}) as response:
        rest = response.iter_bytes()
        held.set()
        found = first + b"".join(rest)
    assert said(found) == TEXT
    assert found.endswith(b"data: [DONE]\n\n")
    assert again(server).content == found
    [entry] = lookup(server, NAME)
    assert (entry["is_done"], entry["total_bytes"]) == (True, len(found))
    assert entry["completed_at"] >= entry["started_at"] > 0


def test_an_answer_without_a_name_ends_with_its_connection(server, waiting):
    held = waiting(server)
    with ask(server, "") as response:
        next(response.iter_bytes())
    held.set()
    server.wait_for(lambda: not is_busy(server))
    assert lookup(server, "") == []


def test_an_answer_is_stopped_by_its_name(server, waiting):
    held = waiting(server)
    with ask(server) as response:
        parts = response.iter_bytes()
        found = next(parts)
        assert stop(server) == 204
        held.set()
        found += b"".join(parts)
    assert TEXT.startswith(said(found))
    assert b"the stream was stopped" in found
    server.wait_for(lambda: not is_busy(server))
    assert again(server).status_code == 404
    assert stop(server) == 204  # as when there is none


def test_another_request_of_the_same_name_takes_its_place(server, waiting):
    held = waiting(server)
    with ask(server) as response:
        next(response.iter_bytes())
        with ask(server, prompt="Count again") as other:
            held.set()
            found = other.read()
    assert said(found) == TEXT
    assert again(server).content == found


def test_names_are_looked_up_with_their_models(server):
    for name in ("one", "one::tiny", "one more"):
        whole(server, name, max_tokens=1)
    assert {one["conversation_id"] for one in lookup(server, "one", "none")} == {"one", "one::tiny"}
    assert lookup(server) == []


def test_a_request_that_fails_leaves_nothing(server):
    for more in ({"temperature": "hot"}, {"prompt": "a " * 1000}):
        with ask(server, "failed", **more) as response:
            assert response.status_code == 400
    assert again(server, name="failed").status_code == 404


@pytest.mark.parametrize(
    ("params", "word"),
    [({}, "conv_id"), ({"conv_id": NAME, "from": "-1"}, "from"), ({"conv_id": NAME, "from": "x"}, "from")],
)
def test_what_cannot_be_read_is_named(server, params, word):
    whole(server)
    response = server.http.get("/v1/stream", params=params)
    assert (response.status_code, response.json()["error"]["param"]) == (400, word)


def test_a_name_has_a_limit(server):
    with ask(server, "a" * 257) as response:
        assert response.status_code == 400
        assert "257" in response.read().decode()


# ---- keys ----


def test_the_stream_of_another_key_is_not_there(shared, waiting):
    held = waiting(shared)
    own, other = ({"headers": {"Authorization": f"Bearer {key}"}} for key in KEYS)
    shared.http.headers.update(own["headers"])
    with ask(shared) as response:
        parts = response.iter_bytes()
        found = next(parts)
        assert again(shared, **other).status_code == 404
        assert lookup(shared, NAME, **other) == []
        assert shared.http.delete("/v1/stream", params={"conv_id": NAME}, **other).status_code == 204
        held.set()
        found += b"".join(parts)
    assert said(found) == TEXT
    assert again(shared, **own).content == found
    assert httpx.get(f"{shared.url}/v1/stream", params={"conv_id": NAME}).status_code == 401


# ---- limits ----


def test_the_first_bytes_of_a_long_answer_are_dropped(server, monkeypatch, waiting):
    waiting(server).set()
    monkeypatch.setattr(streams, "MAX_BYTES", 1000)
    found = whole(server)
    assert said(found) == TEXT  # who reads at once reads all of it
    lost = again(server)
    assert lost.status_code == 400
    assert f"the first {len(found) - 1000} bytes" in lost.json()["error"]["message"]
    assert again(server, len(found) - 1000).content == found[-1000:]
    assert lookup(server, NAME)[0]["total_bytes"] == len(found)


def test_the_oldest_answers_make_room(server, monkeypatch):
    n = len(whole(server, "oldest", max_tokens=4))
    monkeypatch.setattr(streams, "MAX_ENDED", 2 * n + n // 2)
    for name in ("older", "newer"):
        whole(server, name, max_tokens=4)
    assert again(server, name="oldest").status_code == 404
    assert [again(server, name=name).status_code for name in ("older", "newer")] == [200, 200]


def test_an_answer_without_readers_expires(waiting):
    with running(n_seq=1, settings={"rejoin": 0.05}) as server:
        held = waiting(server)
        with ask(server) as response:
            next(response.iter_bytes())
        server.wait_for(lambda: not lookup(server, NAME))
        held.set()
        server.wait_for(lambda: not is_busy(server))
        assert said(whole(server)) == TEXT  # a reader keeps it
        server.wait_for(lambda: not lookup(server, NAME))


def test_nothing_is_kept_where_that_is_off():
    with running(n_seq=1, settings={"rejoin": 0.0}) as server:
        whole(server, max_tokens=2)
        assert again(server).status_code == 404


def test_the_server_ends_while_an_answer_is_written(waiting):
    with running(n_seq=1) as server:
        held = waiting(server)
        with ask(server) as response:
            next(response.iter_bytes())
        service = server.service
        held.set()
    assert not service.is_stuck
    assert service.n_requests == 0
