"""Tools, choices and calls in every form in which clients send them, and calls whose arguments are not JSON."""

import json

import pytest
from chat_templates import CLOCK, TAGGED, TOOLS, WEATHER
from llamas import new, script

from pylongctx.chat.conversation import check_messages
from pylongctx.chat.tools import UNREAD, choose_tools, custom_names

pytestmark = pytest.mark.check

USER = {"role": "user", "content": "List the files."}
SHELL = {"type": "custom", "custom": {"name": "shell", "description": "Runs a command."}}
BROKEN = ['{"city": "Rome', "Rome", "[1]", "7", "null", '{"a": NaN}', '{"a": "\\ud800"}', "{'a': 1}", '{"a":' * 3000]


@pytest.fixture(scope="module", params=[TOOLS, TAGGED], ids=["json", "tags"])
def model(request, embedded_model):
    with new(embedded_model, chat_format=request.param, n_ctx=4096) as llm:
        yield llm


def names(tools):
    return [tool["function"]["name"] for tool in tools]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, (["get_weather", "get_time", "shell"], "auto")),
        ("any", (["get_weather", "get_time", "shell"], "required")),
        ({"type": "any"}, (["get_weather", "get_time", "shell"], "required")),
        ({"type": "none"}, (["get_weather", "get_time", "shell"], "none")),
        ({"type": "function", "function": {"name": "get_time"}}, (["get_time"], "required")),
        ({"type": "function", "name": "get_time"}, (["get_time"], "required")),
        ({"type": "tool", "name": "get_time"}, (["get_time"], "required")),
        ({"type": "custom", "custom": {"name": "shell"}}, (["shell"], "required")),
        ({"type": "custom", "name": "shell"}, (["shell"], "required")),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "shell"}]},
            (["shell"], "auto"),
        ),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "get_time"}}, {"type": "web_search"}],
                },
            },
            (["get_time"], "required"),
        ),
    ],
)
def test_a_choice_has_many_forms(choice, expected):
    tools, word = choose_tools(None, None, [WEATHER, CLOCK, SHELL], choice)
    assert (names(tools), word) == expected


@pytest.mark.parametrize(
    "choice", ["some", 3, {"type": "some"}, {"type": "function", "name": "x"}, {"type": "allowed_tools", "mode": "x"}]
)
def test_a_choice_that_names_nothing_is_refused(choice):
    with pytest.raises(ValueError, match="tool_choice"):
        choose_tools(None, None, [WEATHER], choice)


def test_tools_of_the_newer_api_are_the_same():
    flat = {"type": "function", **WEATHER["function"]}
    assert choose_tools(None, None, [flat], None) == choose_tools(None, None, [WEATHER], None)
    assert (
        choose_tools(None, None, [{"type": "custom", **SHELL["custom"]}], None)[0]
        == choose_tools(None, None, [SHELL], None)[0]
    )
    for wrong in ({"type": "web_search"}, {"type": "function"}, "x", {"function": {"name": "x"}}):
        with pytest.raises(ValueError, match=r"tools\[0\] must be"):
            choose_tools(None, None, [wrong], None)


def test_a_grammar_is_shown():
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /a+/"}}
    tool = {"type": "custom", "custom": {"name": "a", "format": grammar}}
    (made,), _ = choose_tools(None, None, [tool], None)
    assert made["function"]["description"] == "The input follows this lark grammar:\nstart: /a+/"
    assert custom_names([tool, WEATHER]) == {"a"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_custom_tool_is_called_with_a_text(embedded_model, stream):
    said = ' <tool_call>\n{"name": "shell", "arguments": {"input": "ls \\"a\\""}}\n</tool_call>'
    with new(embedded_model, chat_format=TOOLS, n_ctx=1024) as llm:
        kwargs = {"tools": [SHELL, WEATHER], "max_tokens": 200, "logits_processor": script(llm, said)}
        found = llm.create_chat_completion([USER], stream=stream, **kwargs)
        if not stream:
            (call,) = found["choices"][0]["message"]["tool_calls"]
            answer = found["choices"][0]["message"]
        else:
            deltas = [chunk["choices"][0]["delta"] for chunk in found]
            first, *others = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
            text = "".join(one["custom"]["input"] for one in others)
            call = {"id": first["id"], "type": first["type"], "custom": first["custom"] | {"input": text}}
            answer = {"role": "assistant", "content": None, "tool_calls": [call]}
        assert (call["type"], call["custom"]) == ("custom", {"name": "shell", "input": 'ls "a"'})
        result = {"role": "tool", "tool_call_id": call["id"], "content": "a.txt"}
        prompt = llm.apply_template([USER, answer, result], tools=[SHELL])
    assert '"input": "ls \\"a\\""' in prompt.replace("\\\\", "\\")


@pytest.mark.parametrize("arguments", BROKEN, ids=[text[:12] for text in BROKEN])
def test_a_call_that_is_no_json_is_shown(model, arguments):
    call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, USER]
    prompt = model.apply_template(messages, tools=[WEATHER])
    assert arguments[:4].strip('{"\\') in prompt
    function = check_messages(messages, "")[1]["tool_calls"][0]["function"]
    assert json.loads(function["arguments"]) == {UNREAD: arguments}
    old = {"role": "assistant", "content": None, "function_call": call["function"]}
    assert check_messages([USER, old], "")[1]["tool_calls"][0]["function"] == function


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (None, {}),
        ("", {}),
        (" ", {}),
        ({}, {}),
        ({"a": 1}, {"a": 1}),
        ('{"a": 1}', {"a": 1}),
        ([1], {"arguments": [1]}),
    ],
)
def test_arguments_are_an_object(arguments, expected):
    call = {"function": {"name": "f", "arguments": arguments}}
    (found,) = check_messages([{"role": "assistant", "tool_calls": [call]}], "")[0]["tool_calls"]
    assert json.loads(found["function"]["arguments"]) == expected
