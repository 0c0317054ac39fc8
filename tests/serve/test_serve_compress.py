"""Compression of a sequence over HTTP: POST /slots/{seq}?action=compress."""

import threading

import pytest
from needs import need
from serving import poster, running

httpx = need("server", "fastapi", "httpx")

from pylongctx._lib import error, lib  # noqa: E402
from pylongctx.engine import slots  # noqa: E402
from pylongctx.engine.compress import CompressionReport  # noqa: E402
from pylongctx.errors import Aborted  # noqa: E402

TEXT = "The code of the mill is 4127. " + "It was the best of times, it was the worst of times. " * 25
PATIENCE = 20


@pytest.fixture(scope="module")
def server():
    with running(method="kvzip", n_ctx=2048, n_ubatch=64) as server:
        yield server


@pytest.fixture
def ask(server):
    return poster(server)


def answered(ask, **body):
    return ask("/v1/completions", prompt=TEXT, max_tokens=2, temperature=0, **body)


def test_a_compressed_sequence_is_smaller_and_continues(server, ask):
    first = answered(ask)
    facts = server.http.get("/v1/longctx", params={"id": first["id"]}).json()
    assert facts["compresses"] and facts["compression_prefills"] > 1
    seq, before = facts["id_slot"], facts["kv"]["bytes"]
    report = ask(f"/slots/{seq}?action=compress", ratio=0.3, answer=first["id"])
    assert report["id_slot"] == seq
    assert report["bytes_before"] == before
    assert report["bytes_after"] == server.http.get("/v1/longctx").json()["kv"]["bytes"] < 0.5 * before
    assert report["n_tokens"] == first["usage"]["prompt_tokens"] - slots.TURN_TAIL  # the answer is evaluated again
    assert isinstance(report["divergence"], float)
    assert report["drifts"] == (report["divergence"] > 0.1)
    more = TEXT + first["choices"][0]["text"] + " What is the code?"
    again = ask("/v1/completions", prompt=more, max_tokens=2)
    assert again["timings"]["cache_n"] == report["n_tokens"]


def test_a_chat_continues_whose_template_renders_answers_in_another_way(server, ask):
    """As templates do that trim answers, or leave out their thoughts."""
    messages = [{"role": "user", "content": TEXT}]
    first = ask("/v1/chat/completions", messages=messages, max_tokens=6, temperature=0)
    seq = server.http.get("/v1/longctx", params={"id": first["id"]}).json()["id_slot"]
    n = ask(f"/slots/{seq}?action=compress", ratio=0.3, answer=first["id"])["n_tokens"]
    messages += [{"role": "assistant", "content": "Something else."}, {"role": "user", "content": "And now?"}]
    again = ask("/v1/chat/completions", messages=messages, max_tokens=2)
    assert again["timings"]["cache_n"] == n
    repeated = ask(f"/slots/{seq}?action=compress", ratio=0.2, answer=again["id"])
    assert repeated["n_tokens"] == again["usage"]["prompt_tokens"] - slots.TURN_TAIL


def test_only_the_text_of_the_answer_is_compressed(server, ask):
    first = answered(ask)
    second = answered(ask, id_slot=server.http.get("/v1/longctx", params={"id": first["id"]}).json()["id_slot"])
    facts = server.http.get("/v1/longctx", params={"id": first["id"]}).json()
    assert facts["id_slot"] is None
    seq = server.http.get("/v1/longctx", params={"id": second["id"]}).json()["id_slot"]
    refused = ask(f"/slots/{seq}?action=compress", 400, ratio=0.3, answer=first["id"])["error"]
    assert "no longer ends with this answer" in refused["message"]
    ask(f"/slots/{seq}?action=erase")
    assert server.http.get("/v1/longctx", params={"id": second["id"]}).json()["id_slot"] is None


@pytest.mark.parametrize(("body", "words"), [
    ({}, "needs a ratio"), ({"ratio": 0}, "ratio"), ({"ratio": 1.5}, "ratio"), ({"ratio": "a"}, "ratio"),
])  # fmt: skip
def test_a_wrong_ratio_is_refused(ask, body, words):
    assert words in ask("/slots/0?action=compress", 400, **body)["error"]["message"]


def test_an_empty_sequence_is_refused(ask):
    ask("/slots/1?action=compress", 400, ratio=0.5)


def test_a_method_that_keeps_everything_is_refused():
    with running(method="full") as server:
        ask = poster(server)
        answered(ask)
        assert not server.http.get("/v1/longctx").json()["compresses"]
        assert "kvzip" in ask("/slots/0?action=compress", 400, ratio=0.5)["error"]["message"]


def test_a_busy_sequence_is_refused(server, ask):
    first = answered(ask)
    seq = server.http.get("/v1/longctx", params={"id": first["id"]}).json()["id_slot"]
    slot = server.engine.slots[seq]
    slot.job = slot.last
    try:
        with pytest.raises(ValueError, match="is busy"):
            slots.IdleSlots(server.engine.slots).compress(0.5, seq)
    finally:
        slot.job = None


def test_the_text_of_another_owner_is_refused(server, ask):
    answered(ask, id_slot=0)
    with pytest.raises(ValueError, match="nothing of yours"):
        server.engine.compress(0.5, 0, "another").result(PATIENCE)


def endless(monkeypatch):
    """Let compressions end only when they are stopped; returns an event that is set once one runs."""
    begun = threading.Event()

    def compress(session, ratio):
        begun.set()
        while not session.context.abort:
            threading.Event().wait(0.01)
        raise error(lib.LCTX_ABORTED, "stopped")

    monkeypatch.setattr(slots, "compress", compress)
    return begun


def test_a_compression_can_be_stopped(server, ask, monkeypatch):
    answered(ask, id_slot=0)
    begun = endless(monkeypatch)
    future = server.engine.compress(0.5, 0, None)
    assert begun.wait(PATIENCE)
    server.engine.stop_compression()
    with pytest.raises(Aborted):
        future.result(PATIENCE)
    server.engine.stop_compression()  # without one, nothing is stopped
    assert answered(ask)["usage"]["completion_tokens"]


def test_a_compression_stops_when_the_client_leaves(server, ask, monkeypatch):
    answered(ask, id_slot=0)
    begun = endless(monkeypatch)
    with pytest.raises(httpx.ReadTimeout):
        server.http.post("/slots/0?action=compress", json={"ratio": 0.5}, timeout=1.0)
    assert begun.is_set()
    assert answered(ask)["usage"]["completion_tokens"]  # the engine runs again


def test_a_compression_ends_with_the_server(monkeypatch):
    with running(method="kvzip", n_ctx=2048) as server:
        answered(poster(server), id_slot=0)
        begun = endless(monkeypatch)
        server.engine.compress(0.5, 0, None)
        assert begun.wait(PATIENCE)
        assert server.engine.close(PATIENCE)


def test_a_divergence_that_is_not_a_number_drifts(ask, monkeypatch):
    report = CompressionReport(1, 2, 1, 0.0, float("nan"))
    monkeypatch.setattr(slots, "compress", lambda session, ratio: report)
    found = ask("/slots/0?action=compress", ratio=0.5)
    assert found["divergence"] is None  # NaN is not JSON
    assert found["drifts"]
