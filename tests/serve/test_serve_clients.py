"""Whole requests of known clients: answered, with what has no effect by name."""

import json
from pathlib import Path

import pytest
from chat_templates import THINKING
from clients import CLIENTS
from needs import need
from serving import running

need("server", "fastapi", "openai")


@pytest.fixture(scope="module")
def server():
    with running(n_seq=1, n_ctx=1024) as server:
        # the toy model has no tokens for what is missing between two texts; any will do for the shape of an answer
        server.host.fill_tokens = {"fim_pre": 5, "fim_suf": 6, "fim_mid": 7}
        yield server


def names(response):
    return set(filter(None, response.headers.get("x-unserved-fields", "").split(", ")))


@pytest.mark.parametrize("client", CLIENTS)
def test_the_request_of_a_client_is_answered(server, client):
    path, body, unserved = CLIENTS[client]
    body = {"max_output_tokens": 8} | body if path == "/v1/responses" else body
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    assert names(response) == unserved
    if body.get("stream"):
        lines = [line.removeprefix("data: ") for line in response.text.splitlines()]
        events = [json.loads(line) for line in lines if line[:1] == "{"]
        assert len(events) > 2 and not any(event.get("error") for event in events)


def test_the_table_of_clients_has_each_of_them():
    table = (Path(__file__).parents[2] / "docs" / "clients.md").read_text(encoding="utf-8")
    for path, _, unserved in CLIENTS.values():
        assert f"`{path}`" in table
        assert not [name for name in unserved if f"`{name}`" not in table]


def test_a_history_of_other_tools_becomes_a_chat():
    from pylongctx.serve.anthropic import MessagesBody
    from pylongctx.serve.bodies import load
    from pylongctx.serve.responses import ResponsesBody
    from pylongctx.serve.unserved import Unserved

    claude = load(MessagesBody, CLIENTS["claude-code"][1], Unserved("warn")).chat(Unserved("warn"))
    assert [one["role"] for one in claude.messages] == ["system", "user", "assistant", "tool", "assistant", "tool"]
    assert claude.messages[0]["content"] == "You are a coding agent.Be brief."
    called, result, said, loaded = claude.messages[2:]
    assert (called["reasoning_content"], called["tool_calls"][0]["function"]["name"]) == ("I look.", "web_search")
    assert json.loads(result["content"]) == [{"type": "web_search_result", "url": "http://a", "title": "A"}]
    assert (said["content"], said["tool_calls"][0]["id"], loaded["content"]) == ("Found.", "t1", "tool: Edit")

    body = load(ResponsesBody, CLIENTS["codex"][1], Unserved("warn"))
    codex = body.chat(Unserved("warn"))
    roles = ["system", "developer", "user", "assistant", "tool", "assistant", "tool", "user"]
    assert [one["role"] for one in codex.messages] == roles
    assert json.loads(codex.messages[5]["tool_calls"][0]["function"]["arguments"]) == {"input": "patch a"}
    assert [one["function"]["name"] for one in codex.tools] == ["open_file", "apply_patch", "add_note"]
    assert "lark grammar" in codex.tools[1]["function"]["description"]
    assert body.functions.custom == {"apply_patch"} and body.functions.namespaces == {"add_note": "notes"}


def test_the_blocks_of_an_account_do_not_cost_the_cache(server):
    """Claude Code's first system block is another one in every request."""
    server.erase()
    path, body, _ = CLIENTS["claude-code"]

    def usage(number, *more):
        changing = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.37; cch={number};"}
        asked = {"stream": False, "system": [changing, *body["system"][1:]], "messages": [*body["messages"], *more]}
        return server.http.post(path, json=body | asked).json()["usage"]

    first, again = usage("a112b"), usage("00c3f")
    assert first["cache_read_input_tokens"] == 0
    assert again["input_tokens"] <= 1 and again["cache_read_input_tokens"] >= first["input_tokens"] - 1
    only = {"system": [{"type": "text", "text": "x-anthropic-billing-header: cch=a;"}], "max_tokens": 1}
    assert server.http.post(path, json=only | {"messages": [{"role": "user", "content": "Hi"}]}).status_code == 200


CALLS = (
    '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "patch \\"a\\""}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add_note", "arguments": {"path": "b"}}\n</tool_call>'
)


@pytest.mark.parametrize("streamed", [False, True])
def test_calls_of_custom_tools_come_as_they_were_asked(server, monkeypatch, streamed):
    wanted = [*server.host.model.tokenize(CALLS.encode(), False, True), server.host.model.info.token_eos]
    monkeypatch.setattr("pylongctx.engine.job.Job.choose", lambda self, tokens, row: wanted[self.n_generated])
    path, body, _ = CLIENTS["codex"]
    body = body | {"stream": streamed, "parallel_tool_calls": True, "max_output_tokens": 200}
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    if streamed:
        events = [json.loads(line[6:]) for line in response.text.splitlines() if line[:7] == "data: {"]
        deltas = [event for event in events if event["type"] == "response.custom_tool_call_input.delta"]
        (done,) = [event for event in events if event["type"] == "response.custom_tool_call_input.done"]
        assert "".join(event["delta"] for event in deltas) == done["input"] == 'patch "a"'
        output = events[-1]["response"]["output"]
        assert done["item_id"] == output[0]["id"]
    else:
        output = response.json()["output"]
    assert [(item["type"], item["name"]) for item in output] == [
        ("custom_tool_call", "apply_patch"),
        ("function_call", "add_note"),
    ]
    assert output[0]["input"] == 'patch "a"' and output[1]["namespace"] == "notes"


@pytest.mark.parametrize(
    ("body", "unserved"),
    [
        ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, {"repetition_penalty"}),
        ({"repetition_penalty": 1.2, "rep_pen": 1.2}, set()),
        ({"top_a": 0.2}, {"top_a"}),
        ({"top_a": 0}, set()),
        ({"stream_options": {"include_usage": True, "more": 1}}, {"stream_options.more"}),
        ({"reasoning_effort": "high"}, {"reasoning_effort"}),
        ({"reasoning_effort": "none"}, set()),
    ],
)
def test_fields_that_say_the_same_or_nothing(server, body, unserved):
    messages = [{"role": "user", "content": "hi"}]
    response = server.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2} | body)
    assert response.status_code == 200, response.text
    assert names(response) == unserved


def test_an_answer_ends_at_chosen_tokens_and_not_before_some(server):
    asked = {"prompt": "It was", "max_tokens": 12, "temperature": 0}
    plain = server.http.post("/completion", json=asked | {"return_tokens": True}).json()["tokens"]
    stop = plain[5]
    at = plain.index(stop)
    cut = server.http.post("/completion", json=asked | {"stop_token_ids": [stop], "return_tokens": True}).json()
    assert (cut["tokens"], cut["stop_type"]) == (plain[:at], "eos")
    longer = {"stop_token_ids": [stop], "min_tokens": at + 3, "return_tokens": True}
    found = server.http.post("/completion", json=asked | longer).json()["tokens"]
    assert len(found) >= at + 3 and stop not in found


def test_thinking_is_turned_off_by_any_name():
    with running(n_seq=1, chat_format=THINKING) as server:
        for body in (
            {"enable_thinking": False},
            {"reasoning_effort": "none"},
            {"chat_template_kwargs": {"enable_thinking": False}},
        ):
            asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "verbose": True}
            plain, off = (server.http.post("/v1/chat/completions", json=asked | more).json() for more in ({}, body))
            assert off["__verbose"]["prompt"] != plain["__verbose"]["prompt"], body


@pytest.mark.parametrize("client", ["sillytavern", "codex"])
def test_the_same_requests_are_refused_where_that_is_asked(client):
    path, body, unserved = CLIENTS[client]
    with running(1, n_ctx=1024, settings={"unknown_fields": "refuse"}) as server:
        response = server.http.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] in unserved
