"""Anthropic's /v1/messages and OpenAI's /v1/responses, by the assertions of llama-server's test suite."""

import json

import pytest
from chat_templates import THINKING
from llamas import TEXT, new
from needs import need
from serving import ALIAS, forced, poster, running

from pylongctx.cli.serve import limit_reasoning

openai = need("server", "fastapi", "openai")

SCHEMA = {
    "type": "object",
    "properties": {"chapter": {"type": "integer", "minimum": 1, "maximum": 40}},
    "required": ["chapter"],
}
ASKED = [{"role": "user", "content": "Say hello"}]
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "Sunny, 25"}]}
CALLED = [
    {"role": "user", "content": "What is the weather?"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "I must look.", "signature": ""},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "t1", "name": "look_up", "input": {"chapter": 3}},
        ],
    },
    {"role": "user", "content": [RESULT, {"type": "text", "text": "So?"}]},
]


@pytest.fixture(scope="module")
def server():
    with running(n_seq=1, n_ctx=1024) as server:
        yield server


@pytest.fixture
def ask(server):
    return poster(server)


def messages(ask, status=200, **more):
    return ask("/v1/messages", status, **{"model": "any", "max_tokens": 12, "messages": ASKED} | more)


def stream(server, path, **body):
    """Return the events of a stream, each of which has its name before it."""
    found = []
    with server.http.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200, response.read()
        lines = [line for line in response.iter_lines() if line]
    for name, data in zip(lines[::2], lines[1::2], strict=True):
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


CALL = '<tool_call>\n{"name": "look_up", "arguments": {"chapter": 7}}\n</tool_call>'


# ---- /v1/messages ----


def test_a_message(server, ask):
    found = messages(ask)
    assert (found["type"], found["role"], found["model"]) == ("message", "assistant", ALIAS)
    assert [block["type"] for block in found["content"]] == ["text"]
    assert found["stop_reason"] == "max_tokens"
    assert found["usage"]["output_tokens"] == 12
    assert found["usage"]["input_tokens"] > 0 == found["usage"]["cache_read_input_tokens"]
    assert "timings" not in found
    again = messages(ask)["usage"]
    assert again["cache_read_input_tokens"] > 0
    assert again["cache_read_input_tokens"] + again["input_tokens"] == found["usage"]["input_tokens"]


def test_it_is_the_answer_of_a_chat(server, ask):
    system = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    content = [{"type": "text", "text": "Say "}, {"type": "text", "text": "hello"}]
    given = {"temperature": 0, "messages": [{"role": "user", "content": content}]}
    found = messages(ask, system=system, **given)
    chat = [{"role": "system", "content": "Be brief."}, *ASKED]
    expected = ask("/v1/chat/completions", messages=chat, temperature=0, max_tokens=12)
    assert found["content"][0]["text"] == expected["choices"][0]["message"]["content"]
    n_tokens = ask("/v1/messages/count_tokens", messages=given["messages"], system=system)
    assert n_tokens == {"input_tokens": expected["usage"]["prompt_tokens"]}


def test_a_stream_of_a_message(server, ask):
    whole = messages(ask, temperature=0)
    server.erase()
    found = stream(server, "/v1/messages", messages=ASKED, max_tokens=12, temperature=0)
    kinds = [event["type"] for event in found]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert found[0]["message"]["content"] == []
    assert found[0]["message"]["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert "".join(event["delta"]["text"] for event in found[2:-3]) == whole["content"][0]["text"]
    assert found[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert found[-2]["usage"] == {"output_tokens": 12}


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_is_used(server, ask, monkeypatch, streamed):
    forced(server, monkeypatch, CALL)
    tools = [{"name": "look_up", "description": "Find a chapter.", "input_schema": SCHEMA}]
    body = {"messages": ASKED, "max_tokens": 99, "tools": tools}
    if not streamed:
        found = messages(ask, **body)
        (block,) = found["content"]
        assert found["stop_reason"] == "tool_use"
    else:
        found = stream(server, "/v1/messages", **body)
        starts = [event for event in found if event["type"] == "content_block_start"]
        block = starts[-1]["content_block"] | {
            "input": json.loads(
                "".join(e["delta"]["partial_json"] for e in found if e["type"] == "content_block_delta")
            )
        }
        assert [event["index"] for event in starts] == list(range(len(starts)))
        assert found[-2]["delta"]["stop_reason"] == "tool_use"
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "look_up", {"chapter": 7})
    assert block["id"]


def test_results_of_tools_are_messages_of_their_own():
    from pylongctx.serve.anthropic import MessagesBody
    from pylongctx.serve.bodies import load
    from pylongctx.serve.unserved import Unserved

    found = load(MessagesBody, {"messages": CALLED, "max_tokens": 1}, Unserved("warn")).chat(Unserved("warn")).messages
    assert [message["role"] for message in found] == ["user", "assistant", "tool", "user"]
    assert found[1]["content"] == "I look."
    assert found[1]["reasoning_content"] == "I must look."
    assert json.loads(found[1]["tool_calls"][0]["function"]["arguments"]) == {"chapter": 3}
    assert found[2] == {"role": "tool", "tool_call_id": "t1", "content": "Sunny, 25"}


def test_a_conversation_with_tools_is_answered(ask):
    assert messages(ask, messages=CALLED)["type"] == "message"


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_choices_of_tools(choice, expected):
    from pylongctx.serve.anthropic import MessagesBody
    from pylongctx.serve.bodies import load
    from pylongctx.serve.unserved import Unserved

    fields = {"messages": ASKED, "tool_choice": choice | {"disable_parallel_tool_use": True}}
    chat = load(MessagesBody, fields, Unserved("warn")).chat(Unserved("warn"))
    assert (chat.tool_choice, chat.parallel_tool_calls) == (expected, False)


def test_a_stop_sequence_is_named(server, ask, monkeypatch):
    forced(server, monkeypatch, "one two END three")
    found = messages(ask, stop_sequences=["END", "zzz"])
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "END")
    assert found["content"][0]["text"].strip() == "one two"


@pytest.mark.parametrize("streamed", [False, True])
def test_what_was_thought_is_a_block_before(monkeypatch, streamed):
    with running(n_seq=1, chat_format=THINKING) as server:
        forced(server, monkeypatch, "<think>\nI think so.\n</think>\n\nYes.")
        body = {"messages": ASKED, "max_tokens": 60, "thinking": {"type": "enabled", "budget_tokens": 50}}
        if streamed:
            found = stream(server, "/v1/messages", **body)
            starts = [event["content_block"]["type"] for event in found if event["type"] == "content_block_start"]
            deltas = [event["delta"]["type"] for event in found if event["type"] == "content_block_delta"]
            assert starts == ["thinking", "text"]
            assert deltas.index("signature_delta") > deltas.index("thinking_delta")
            assert deltas.index("text_delta") > deltas.index("signature_delta")
        else:
            found = server.http.post("/v1/messages", json=body).json()["content"]
            assert [block["type"] for block in found] == ["thinking", "text"]
            assert found[0]["thinking"].strip() == "I think so."
            assert found[1]["text"].strip() == "Yes."


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "some"}}, "tool_choice"),
        ({"stop_sequences": ["a"] * 300}, "stop_sequences"),
    ],
)
def test_what_cannot_be_a_message_is_named(ask, more, name):
    assert name in messages(ask, 400, **more)["error"]["message"]


# ---- /v1/responses ----


def test_a_response_of_openais_client(server):
    server.erase()
    said = [{"role": "system", "content": "Book"}, {"role": "user", "content": "What is the best book"}]
    found = server.client.responses.create(model="any", input=said, max_output_tokens=8, temperature=0)
    assert found.id.startswith("resp_")
    assert found.output[0].id.startswith("msg_")
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    chat = server.client.chat.completions.create(model="any", messages=said, max_tokens=8, temperature=0)
    assert found.output_text == chat.choices[0].message.content
    assert found.usage.input_tokens == chat.usage.prompt_tokens
    assert (found.usage.output_tokens, found.usage.total_tokens) == (8, 8 + found.usage.input_tokens)


def test_a_stream_of_a_response(server):
    given = {"model": "any", "input": "What is the best book", "max_output_tokens": 8, "temperature": 0}
    whole = server.client.responses.create(**given)
    found = list(server.client.responses.create(**given, stream=True))
    assert [event.sequence_number for event in found] == list(range(len(found)))
    kinds = [event.type.removeprefix("response.") for event in found]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert "".join(event.delta for event in found[4:-4]) == whole.output_text == found[-1].response.output_text
    assert {event.item_id for event in found if hasattr(event, "item_id")} == {found[-1].response.output[0].id}
    assert {event.response.id for event in found if hasattr(event, "response")} == {found[0].response.id}


def test_other_fields_of_llama_server(server, ask):
    more = {"max_output_tokens": 4, "timings_per_token": True, "return_progress": True}
    found = stream(server, "/v1/responses", input=TEXT.decode() * 4, **more)
    progress = [event for event in found if "prompt_progress" in event]
    assert {event["type"] for event in progress} == {"response.in_progress"}
    assert progress[-1]["prompt_progress"]["processed"] == progress[-1]["prompt_progress"]["total"]
    assert all("timings" in event for event in found if event["type"] == "response.output_text.delta")
    assert found[-1]["timings"]["predicted_n"] == 4


def test_a_response_has_a_format(ask):
    schema = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}
    wanted = {"format": {"type": "json_schema", "name": "test", "schema": schema}}
    found = ask("/v1/responses", input="Write an example", max_output_tokens=200, text=wanted)
    assert isinstance(json.loads(found["output"][0]["content"][0]["text"])["yes"], bool)
    assert ask("/responses", input="a", max_output_tokens=4, text={"format": {"type": "text"}})["object"] == "response"
    ask("/v1/responses", 400, input="a", text={"format": {"type": "json_schema", "name": "test"}})


@pytest.mark.parametrize("streamed", [False, True])
def test_a_function_is_called(server, monkeypatch, streamed):
    forced(server, monkeypatch, CALL)
    tools = [{"type": "function", "name": "look_up", "parameters": SCHEMA, "strict": False}]
    given = {"model": "any", "input": "Look", "tools": tools, "max_output_tokens": 99}
    if streamed:
        found = list(server.client.responses.create(**given, stream=True))
        done = next(event for event in found if event.type == "response.function_call_arguments.done")
        assert json.loads(done.arguments) == {"chapter": 7}
        response = found[-1].response
    else:
        response = server.client.responses.create(**given)
    (call,) = response.output
    assert response.status == "completed"
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "look_up", {"chapter": 7})
    answered = [call.model_dump(), {"type": "function_call_output", "call_id": call.call_id, "output": "Here."}]
    monkeypatch.undo()
    again = server.client.responses.create(**given | {"input": [{"role": "user", "content": "Look"}, *answered]})
    assert again.usage.input_tokens > response.usage.input_tokens


def test_items_of_an_answer_become_one_message():
    from pylongctx.serve.bodies import load
    from pylongctx.serve.responses import ResponsesBody
    from pylongctx.serve.unserved import Unserved

    items = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "look_up", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "look_up", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"role": "user", "content": [{"type": "input_text", "text": "So?"}]},
    ]
    body = load(ResponsesBody, {"input": items, "instructions": "Be brief."}, Unserved("warn"))
    found = body.chat(Unserved("warn")).messages
    assert [message["role"] for message in found] == ["system", "assistant", "tool", "user"]
    assert (found[1]["content"], found[1]["reasoning_content"]) == ("I look.", "Hm.")
    assert [call["id"] for call in found[1]["tool_calls"]] == ["c1", "c2"]
    assert found[3]["content"] == "So?"


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]}, "input_image"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
    ],
)
def test_what_cannot_be_asked_is_named(ask, more, name):
    assert name in ask("/v1/responses", 400, **{"input": "a"} | more)["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_what_has_no_effect_is_named_in_a_header(server, path):
    body = {"input": "a"} if "responses" in path else {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    asked = {"store": True, "truncation": "auto", "context_management": {"edits": [1]}, "max_output_tokens": 2}
    if "messages" in path:
        del asked["max_output_tokens"]
    response = server.http.post(path, json=body | asked)
    assert response.status_code == 200, response.text
    assert response.headers["x-unserved-fields"] == "store, truncation, context_management"


def test_the_answers_of_llama_are_the_same(server, ask):
    with new(server.host.model_path) as llm:
        expected = llm.create_chat_completion(ASKED, max_tokens=12, temperature=0)["choices"][0]["message"]["content"]
    assert messages(ask, temperature=0)["content"][0]["text"] == expected


BROKEN = '{"chapter": 7'
HISTORIES = {
    "/v1/chat/completions": {
        "messages": [
            *ASKED,
            {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "look_up", "arguments": BROKEN}}]},
            {"role": "tool", "tool_call_id": "c", "content": "?"},
        ]
    },
    "/v1/messages": {
        "max_tokens": 4,
        "messages": [
            *ASKED,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look_up", "input": BROKEN}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "?"}]},
        ],
    },
    "/v1/responses": {
        "input": [
            *ASKED,
            {"type": "function_call", "call_id": "c", "name": "look_up", "arguments": BROKEN, "status": "incomplete"},
            {"type": "function_call_output", "call_id": "c", "output": "?"},
        ]
    },
    "/api/chat": {
        "messages": [
            *ASKED,
            {"role": "assistant", "tool_calls": [{"function": {"name": "look_up", "arguments": BROKEN}}]},
            {"role": "tool", "tool_name": "look_up", "content": "?"},
        ]
    },
}


@pytest.mark.parametrize("path", HISTORIES)
def test_a_conversation_goes_on_after_a_broken_call(path):
    from chat_templates import TAGGED

    limit = {"options": {"num_predict": 2}, "stream": False} if "api" in path else {"max_tokens": 2}
    with running(n_seq=1, n_ctx=1024, chat_format=TAGGED) as server:
        response = server.http.post(path, json=HISTORIES[path] | limit)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "choice",
    [
        "any",
        {"type": "function", "name": "look_up"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "look_up"}]},
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_a_choice_has_many_forms(ask, path, choice):
    flat = {"type": "function", "name": "look_up", "parameters": SCHEMA}
    body = {"messages": ASKED} if "chat" in path else {"input": "Look"}
    body |= {"max_tokens": 99, "temperature": 0}  # a sampled call may have blanks until the limit
    found = ask(path, **body, tools=[flat], tool_choice=choice, parallel_tool_calls=False)
    if "chat" in path:
        assert found["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "look_up"
    else:
        assert found["output"][-1]["name"] == "look_up"


@pytest.mark.parametrize("streamed", [False, True])
def test_a_custom_tool_in_a_chat(server, monkeypatch, streamed):
    forced(server, monkeypatch, '<tool_call>\n{"name": "shell", "arguments": {"input": "ls"}}\n</tool_call>')
    grammar = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[a-z]+"}}
    tools = [{"type": "custom", "custom": {"name": "shell", "format": grammar}}]
    given = {"model": "any", "messages": ASKED, "tools": tools, "max_tokens": 99}
    raw = server.client.chat.completions.with_raw_response.create(**given)
    assert raw.headers["x-unserved-fields"] == "tools[0].custom.format"
    if streamed:
        deltas = [chunk.choices[0].delta for chunk in server.client.chat.completions.create(**given, stream=True)]
        calls = [delta.tool_calls[0].custom for delta in deltas if delta.tool_calls]
        assert "".join(call["input"] for call in calls) == "ls" and calls[0]["name"] == "shell"
    else:
        (call,) = raw.parse().choices[0].message.tool_calls
        assert (call.type, call.custom.name, call.custom.input) == ("custom", "shell", "ls")


CUSTOM_CALL = '<tool_call>\n{"name": "shell", "arguments": {"input": "ls -l"}}\n</tool_call>'
CUT_TOOLS = [
    {"type": "function", "name": "look_up", "parameters": SCHEMA},
    {"type": "custom", "name": "shell"},
]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("said", "kind"), [(CALL, "function_call"), (CUSTOM_CALL, "custom_tool_call")])
def test_a_call_that_is_cut_off_is_incomplete_and_can_be_sent_back(server, monkeypatch, said, kind, streamed):
    forced(server, monkeypatch, said)
    cut = 0
    whole = len(server.host.model.tokenize(said.encode(), False, True))
    for n in range(whole - 14, whole - 6):
        body = {"input": "Look", "tools": CUT_TOOLS, "max_output_tokens": n}
        if streamed:
            found = stream(server, "/v1/responses", **body)
            response = found[-1]["response"]
            done = {event["type"] for event in found if event["type"].endswith((".done", "item.done"))}
            if response["output"][-1]["type"] == kind:
                assert not done & {"response.function_call_arguments.done", "response.custom_tool_call_input.done"}
                assert found[-2]["item"] == response["output"][-1]
        else:
            response = server.http.post("/v1/responses", json=body).json()
        assert response["status"] == "incomplete"
        assert [item["status"] for item in response["output"]][-1] == "incomplete"
        cut += response["output"][-1]["type"] == kind
        monkeypatch.undo()
        again = [{"role": "user", "content": "Look"}, *response["output"], {"role": "user", "content": "So?"}]
        asked = {"input": again, "tools": CUT_TOOLS, "max_output_tokens": 1}
        assert server.http.post("/v1/responses", json=asked).status_code == 200
        forced(server, monkeypatch, said)
    assert cut > 2


@pytest.mark.parametrize("streamed", [False, True])
def test_thoughts_are_counted(monkeypatch, streamed):
    thought = "<think>\nI think so, and I think of it for long.\n</think>\n\n"
    with running(n_seq=1, chat_format=THINKING) as server:
        n = len(server.host.model.tokenize(thought.encode(), False, True))
        forced(server, monkeypatch, f"{thought}Yes.")
        body = {"input": "Is it?", "max_output_tokens": 90}
        if streamed:
            usage = stream(server, "/v1/responses", **body)[-1]["response"]["usage"]
        else:
            usage = server.http.post("/v1/responses", json=body).json()["usage"]
        counted = usage["output_tokens_details"]["reasoning_tokens"]
        assert n - 8 <= counted <= n < usage["output_tokens"]
        cut = server.http.post("/v1/responses", json=body | {"max_output_tokens": 12}).json()
        assert cut["usage"]["output_tokens_details"] == {"reasoning_tokens": 12}
        assert [item["status"] for item in cut["output"]] == ["incomplete"]
        chat = {"messages": ASKED, "max_tokens": 90}
        usage = server.http.post("/v1/chat/completions", json=chat).json()["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": counted}


@pytest.fixture
def endless():
    """A server whose model always says the same word: it would reason for ever. Return it, and fields of requests."""
    begun = "{{- '<|im_start|>assistant\\n<think>\\n' }}"
    with running(n_seq=1, chat_format=THINKING.replace("{{- '<|im_start|>assistant\\n' }}", begun)) as server:
        word = server.host.tokens("It was the")[-1]
        yield server, {"max_tokens": 40, "logit_bias": {str(word): 100}, "temperature": 0}


def thoughts(server, path, body):
    """Return how often the model says its word in its reasoning and in its text."""
    found = server.http.post(path, json=body)
    assert found.status_code == 200, found.text
    if path == "/v1/chat/completions":
        message = found.json()["choices"][0]["message"]
        texts = [message.get("reasoning_content", ""), message["content"]]
    elif path == "/v1/messages":
        said = {part["type"]: part.get("thinking", part.get("text")) for part in found.json()["content"]}
        texts = [said.get("thinking", ""), said.get("text", "")]
    else:
        items = {item["type"]: item["content"][0]["text"] for item in found.json()["output"]}
        texts = [items.get("reasoning", ""), items.get("message", "")]
    return [text.count("the") for text in texts], found.headers.get("x-unserved-fields", "")


@pytest.mark.parametrize("n", [0, 7])
def test_reasoning_ends_after_its_budget(endless, n):
    server, options = endless
    limit_reasoning(server.host.templates, n)
    closing = len(server.host.tokens("</think>"))
    body = {"messages": ASKED, **options}
    assert thoughts(server, "/v1/chat/completions", body)[0] == [n, 40 - n - closing]
    form = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    body |= {"response_format": form, "max_tokens": 90}
    message = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert message.get("reasoning_content", "").count("the") == n
    assert message["content"].lstrip().startswith("{")


@pytest.mark.parametrize(
    ("path", "fields", "n"),
    [
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 5}}, 5),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 0}}, 0),
        ("/v1/messages", {"thinking": {"type": "enabled"}}, 40),
        ("/v1/messages", {"thinking_budget_tokens": 3}, 3),
        ("/v1/responses", {"reasoning": {"effort": None, "max_tokens": 4}}, 4),
        ("/v1/responses", {"thinking_token_budget": 3}, 3),
        ("/v1/chat/completions", {"reasoning": {"max_tokens": 6}}, 6),
        ("/v1/chat/completions", {"reasoning_budget_tokens": 2, "reasoning": {"enabled": True}}, 2),
        ("/v1/chat/completions", {"reasoning_budget_tokens": -1}, 40),
    ],
)
def test_the_budget_of_a_request(endless, path, fields, n):
    """The server's own limit remains the largest one."""
    server, options = endless
    asked = {"input": "Is it?"} if path == "/v1/responses" else {"messages": ASKED}
    closing = len(server.host.tokens("</think>"))
    (reasoned, said), unserved = thoughts(server, path, asked | options | fields)
    assert (reasoned, said) == ((n, 40 - n - closing) if n < 40 else (40, 0))
    assert not unserved
    limit_reasoning(server.host.templates, 4)
    assert thoughts(server, path, asked | options | fields)[0][0] == min(n, 4)


@pytest.mark.parametrize(
    ("fields", "noted"),
    [
        ({"reasoning": {"max_tokens": 6}, "reasoning_budget_tokens": 2}, "reasoning.max_tokens"),
        ({"reasoning": {"exclude": True}}, "reasoning.exclude"),
        ({"reasoning": {"effort": "high"}}, "reasoning_effort"),
        ({"reasoning": {"effort": "none"}}, ""),
    ],
)
def test_reasoning_that_a_chat_does_not_have(endless, fields, noted):
    server, options = endless
    assert thoughts(server, "/v1/chat/completions", {"messages": ASKED} | options | fields)[1] == noted


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": -5}}, "greater than or equal to 0"),
        ("/v1/chat/completions", {"reasoning": {"max_tokens": -1}}, "greater than or equal to 0"),
        ("/v1/chat/completions", {"reasoning_budget_tokens": -2}, "greater than or equal to -1"),
        ("/v1/completions", {"prompt": "It", "reasoning_budget_tokens": 5}, "only conversations have it"),
    ],
)
def test_budgets_that_are_refused(server, path, fields, message):
    asked = {"max_tokens": 4, **({} if "prompt" in fields else {"messages": ASKED})}
    found = server.http.post(path, json=asked | fields)
    assert found.status_code == 400
    assert message in found.text


def test_a_budget_without_reasoning_is_warned_about(server, caplog):
    limit_reasoning(server.host.templates, 5)
    server.host.templates.reasoning_budget = None
    assert "--reasoning-budget 5 has no effect" in caplog.text


STOPPED = {
    "/v1/chat/completions": (
        {"messages": ASKED, "stop": ["END"]},
        lambda found: found["choices"][0]["message"]["content"],
    ),
    "/v1/messages": ({"messages": ASKED, "stop_sequences": ["END"]}, lambda found: found["content"][1]["text"]),
    "/v1/responses": ({"input": "Is it?", "stop": "END"}, lambda found: found["output"][1]["content"][0]["text"]),
    "/api/chat": ({"messages": ASKED, "options": {"stop": ["END"]}}, lambda found: found["message"]["content"]),
    "/api/generate": ({"prompt": "Is it?", "options": {"stop": ["END"]}}, lambda found: found["response"]),
}


@pytest.mark.parametrize("path", STOPPED)
def test_stop_strings_end_the_answer_and_not_the_thoughts(monkeypatch, path):
    body, text = STOPPED[path]
    with running(n_seq=1, chat_format=THINKING) as server:
        forced(server, monkeypatch, "<think>\nThe END is near.\n</think>\n\nIt is. END of it")
        found = server.http.post(path, json={"max_tokens": 90, "stream": False} | body).json()
        assert text(found).strip() == "It is."
        assert "The END is near." in json.dumps(found)
        if "messages" in path:
            assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "END")


@pytest.mark.parametrize("path", ["/v1/messages", "/api/chat"])
def test_what_was_said_of_a_call_that_is_cut_off_is_shown(server, ask, monkeypatch, path):
    forced(server, monkeypatch, CALL)
    n = len(server.host.model.tokenize(CALL.encode(), False, True)) - 13
    if "messages" in path:
        found = messages(ask, tools=[{"name": "look_up", "input_schema": SCHEMA}], max_tokens=n)
        called = found["content"][-1]["input"]
    else:
        tools = [{"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}]
        found = ask(path, messages=ASKED, tools=tools, options={"num_predict": n}, stream=False)
        called = found["message"]["tool_calls"][0]["function"]["arguments"]
    assert "max_tokens" in json.dumps(found) or found["done_reason"] == "length"
    assert list(called) == ["arguments"] and called["arguments"].startswith('{"')
