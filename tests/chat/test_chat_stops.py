"""Stop strings of a conversation: they end the text of the answer, not its reasoning or its calls."""

import json

import pytest
from chat_templates import THINKING, TOOLS, WEATHER
from llamas import new, script

pytestmark = pytest.mark.check

USER = [{"role": "user", "content": "How is the weather?"}]
SAID = " <think>\nIt rains. END of it.\n</think>\n\nIt rains today. END of all."
CALL = ' I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'


@pytest.fixture(scope="module")
def llm(embedded_model):
    with new(embedded_model, chat_format=THINKING, n_ctx=1024) as llm:
        yield llm


def ask(llm, said, stream=False, **more):
    """Return the message, the reason and the usage of an answer."""
    given = {"max_tokens": 200, "logits_processor": script(llm, said), "stop": ["END"], "stream": stream} | more
    found = llm.create_chat_completion(USER, **given)
    if not stream:
        return found["choices"][0]
    chunks = [chunk["choices"][0] for chunk in found]
    message = {"role": "assistant"}
    for chunk in chunks:
        for name in ("content", "reasoning_content"):
            if chunk["delta"].get(name):
                message[name] = message.get(name, "") + chunk["delta"][name]
    return {"message": message, "finish_reason": chunks[-1]["finish_reason"]}


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_are_not_ended(llm, stream):
    found = ask(llm, SAID, stream)
    assert found["message"]["reasoning_content"].strip() == "It rains. END of it."
    assert found["message"]["content"].strip() == "It rains today."
    assert found["finish_reason"] == "stop"


def test_nothing_is_lost_that_only_begins_a_stop_string(llm):
    found = ask(llm, " <think>\nE\n</think>\n\nThe EN", stop=["END", "ENGLAND"])
    assert (found["message"]["content"].strip(), found["finish_reason"]) == ("The EN", "stop")
    cut = ask(llm, " It is EN and more and more", stop=["END"], max_tokens=5)
    whole = ask(llm, " It is EN and more and more", stop=[], max_tokens=5)
    assert cut["message"] == whole["message"] and cut["finish_reason"] == "length"


@pytest.mark.parametrize("stop", ["rains", "n", "rains today. E", " today"])
def test_the_text_ends_before_the_first_one(llm, stop):
    found = ask(llm, SAID, stop=["zzz", stop])
    text = "It rains today. END of all."
    assert found["message"]["content"].strip() == text[: text.index(stop)].strip()


@pytest.mark.parametrize("stop", ["END", "rains", "y. E"])
def test_tokens_of_the_stop_string_have_no_entries(llm, monkeypatch, stop):
    """A token may begin before it: the same ones as where all text is searched."""
    given = {"said": " It rains today. END of all.", "stop": [stop], "logprobs": True, "top_logprobs": 1}
    found = ask(llm, **given)
    monkeypatch.setattr(llm._templates, "stops_reasoning", True)
    assert found == ask(llm, **given)


def test_the_way_of_llama_cpp(llm, monkeypatch):
    monkeypatch.setattr(llm._templates, "stops_reasoning", True)
    found = ask(llm, SAID)
    assert found["message"]["reasoning_content"].strip() == "It rains."
    assert not found["message"]["content"]


def test_arguments_are_not_ended(embedded_model):
    with new(embedded_model, chat_format=TOOLS, n_ctx=1024) as llm:
        found = ask(llm, CALL, tools=[WEATHER], stop="Rome")
        (call,) = found["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["city"] == "Rome"
        assert found["finish_reason"] == "tool_calls"
        ended = ask(llm, CALL, tools=[WEATHER], stop="look")
        assert ended["message"]["content"].strip() == "I" and "tool_calls" not in ended["message"]
