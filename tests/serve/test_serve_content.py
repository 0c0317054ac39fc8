"""Pictures, files and unknown parts: notes in old turns, refusals in the last one, in every API."""

import pytest
from needs import need
from serving import running

pytestmark = pytest.mark.check

need("server", "fastapi", "httpx")

CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
USE = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
ITEM = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
PDF = {
    "type": "document",
    "title": "a.pdf",
    "source": {"type": "base64", "media_type": "application/pdf", "data": "aA=="},
}
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aA=="}}
SHOT = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aA=="}}


def user(*parts):
    return {"role": "user", "content": [{"type": "text", "text": "See:"}, *parts]}


def said(*parts):
    return {"role": "assistant", "content": [{"type": "text", "text": "Yes."}, *parts]}


LATER = {"role": "user", "content": "So?"}
# the messages of an old turn, and the note in its place
OLD = {
    "/v1/chat/completions": [
        ([user(SHOT)], "[image left out:"),
        ([user({"type": "input_audio", "input_audio": {}})], "[audio left out:"),
        ([user({"type": "file", "file": {"file_id": "x"}})], "[file left out:"),
        ([user(), said({"type": "sculpture"})], "[sculpture left out:"),
        ([user(), said({"type": "refusal", "refusal": "I cannot."})], "I cannot."),
        (
            [user(), {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": [SHOT]}],
            "[image left out:",
        ),
    ],
    "/v1/messages": [
        ([user(PICTURE)], "[image left out:"),
        ([user(PDF)], '[document "a.pdf" left out:'),
        ([user({"type": "container_upload", "file_id": "x"})], "[container_upload left out:"),
        ([user(), said({"type": "compaction"})], "[compaction left out:"),
        (
            [user(), said(USE), {"role": "user", "content": [{"type": "tool_result", "content": [PICTURE]}]}],
            "[image left out:",
        ),
        ([user(), said(USE), {"role": "user", "content": [{"type": "tool_result", "content": [PDF]}]}], "[document"),
    ],
    "/v1/responses": [
        ([{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}], "[image left out:"),
        (
            [{"role": "user", "content": [{"type": "input_file", "filename": "b.pdf", "file_data": "a"}]}],
            '[file "b.pdf" left out:',
        ),
        (
            [
                {"role": "user", "content": "Look"},
                ITEM,
                {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]},
            ],
            "[image left out:",
        ),
    ],
    "/api/chat": [([{"role": "user", "content": "See:", "images": ["aA=="]}], "[image left out:")],
}
CASES = [(path, messages, note) for path, cases in OLD.items() for messages, note in cases]


def ask(server, path, messages):
    name = "input" if "responses" in path else "messages"
    limit = {"options": {"num_predict": 1}, "stream": False} if "api" in path else {"max_tokens": 1}
    return server.http.post(path, json={name: messages} | limit)


def prompt(server, path, messages):
    """Return the prompt that was evaluated last."""
    server.erase()
    response = ask(server, path, messages)
    assert response.status_code == 200, response.text
    tokens = max((slot.session.tokens.tolist() for slot in server.engine.slots), key=len)
    return server.host.model.detokenize(tokens, True).decode(), response


@pytest.fixture(scope="module")
def server():
    with running(n_seq=1, n_ctx=1024) as server:
        yield server


@pytest.mark.parametrize(("path", "messages", "note"), CASES)
def test_a_note_is_in_the_place_of_an_old_part(server, path, messages, note):
    text, response = prompt(server, path, [*messages, LATER])
    assert note in text
    assert "refusal" in str(messages) or "[" in response.headers["x-unserved-fields"]


@pytest.mark.parametrize(("path", "messages", "note"), [case for case in CASES if "refusal" not in str(case)])
def test_the_last_turn_is_refused(server, path, messages, note):
    response = ask(server, path, messages)
    assert response.status_code == 400
    assert "cannot be read" in response.text
    if "api" not in path:
        assert "[" in response.json()["error"]["param"]


@pytest.mark.parametrize("path", OLD)
def test_all_turns_may_be_refused(path):
    messages, _ = OLD[path][0]
    with running(n_seq=1, settings={"unknown_content": "refuse"}) as server:
        assert ask(server, path, [*messages, LATER]).status_code == 400
    with running(n_seq=1, settings={"unknown_fields": "refuse"}) as server:
        assert ask(server, path, [*messages, LATER]).status_code == 200


def test_what_is_no_part_is_refused_everywhere(server):
    for part in ("text", 3, None, {"type": "text", "text": 3}):
        assert ask(server, "/v1/chat/completions", [user(part), LATER]).status_code == 400
