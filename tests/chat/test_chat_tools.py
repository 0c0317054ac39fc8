"""Tool calls: forced by a grammar, chosen by the model, in the old form, and back in the conversation."""

import json
import time

import numpy as np
import pytest
from chat_templates import CLOCK, TOOLS, WEATHER
from llamas import new, script

from pylongctx.chat.template import ChatTemplate
from pylongctx.engine.sampling.params import SamplingParams
from pylongctx.engine.sampling.sampler import Sampler

USER = [{"role": "user", "content": "How is the weather in Paris?"}]
CALL = ' <tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'


@pytest.fixture(scope="module")
def model(embedded_model):
    with new(embedded_model, chat_format=TOOLS, n_ctx=1024) as llm:
        yield llm


def chat(llm, messages=USER, **kwargs):
    ends_soon = {llm.token_eos(): 100.0}  # where the grammar allows it; else the model continues calling
    defaults = {"tools": [WEATHER, CLOCK], "max_tokens": 400, "seed": 1, "parallel_tool_calls": False}
    return llm.create_chat_completion(messages, **defaults | {"logit_bias": ends_soon} | kwargs)


def check_weather(call):
    assert (call["type"], call["function"]["name"]) == ("function", "get_weather")
    arguments = json.loads(call["function"]["arguments"])
    assert arguments["city"] in ("Paris", "Rome")
    assert 1 <= arguments["days"] <= 9
    assert call["id"]


def join(chunks):
    """Return the tool calls of a stream."""
    calls = {}
    for chunk in chunks:
        for delta in chunk["choices"][0]["delta"].get("tool_calls", []):
            call = calls.setdefault(
                delta["index"], {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
            )
            call["id"] += delta.get("id", "")
            call["function"]["name"] += delta["function"].get("name", "")
            call["function"]["arguments"] += delta["function"]["arguments"]
    return [calls[index] for index in sorted(calls)]


def begun(llm):
    """Make the model begin a call, which it would not do by itself; nothing after its mark is forced."""
    return script(llm, " <tool_call>\n", end=False)


@pytest.mark.parametrize("seed", range(4))
def test_a_named_tool_is_called(model, seed):
    choice = {"type": "function", "function": {"name": "get_weather"}}
    done = chat(model, tool_choice=choice, seed=seed, temperature=1.0, logits_processor=begun(model))["choices"][0]
    assert done["finish_reason"] == "tool_calls"
    assert not (done["message"]["content"] or "").strip()
    check_weather(done["message"]["tool_calls"][0])


@pytest.mark.parametrize("seed", range(4))
def test_required_calls_one_of_them(model, seed):
    kwargs = {"tool_choice": "required", "logits_processor": begun(model)}
    done = chat(model, seed=seed, temperature=1.5, **kwargs)["choices"][0]
    assert done["finish_reason"] == "tool_calls"
    (call,) = done["message"]["tool_calls"]
    assert call["function"]["name"] in ("get_weather", "get_time")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_time"}}])
@pytest.mark.parametrize("template", [TOOLS, None])
def test_a_required_call_comes_without_words(embedded_model, template, choice):
    """Nothing is forced but the choice: llama.cpp's grammar would let the model talk until max_tokens."""
    with new(embedded_model, chat_format=template, n_ctx=1024) as llm:
        for seed in range(2):
            done = chat(llm, tool_choice=choice, seed=seed, temperature=1.5)["choices"][0]
            assert done["finish_reason"] == "tool_calls"
            assert not (done["message"]["content"] or "").strip()
            assert done["message"]["tool_calls"][0]["function"]["name"] in ("get_weather", "get_time")
        assert chat(llm, max_tokens=30)["choices"][0]["finish_reason"] == "stop"


def test_a_required_call_and_a_format_are_two_answers(model):
    with pytest.raises(ValueError, match="cannot be combined with a response_format"):
        chat(model, tool_choice="required", response_format={"type": "json_object"})


@pytest.mark.parametrize("kwargs", [{"tool_choice": "required"}, {}])
def test_a_stream_of_calls_joins_to_the_whole(model, kwargs):
    whole = chat(model, **kwargs, logits_processor=begun(model) if kwargs else script(model, CALL))["choices"][0]
    again = begun(model) if kwargs else script(model, CALL)
    chunks = list(chat(model, stream=True, **kwargs, logits_processor=again))
    calls, expected = join(chunks), whole["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [call["function"] for call in expected]
    assert all(call["id"] for call in calls)
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert sum("tool_calls" in chunk["choices"][0]["delta"] for chunk in chunks) > 1


def test_auto_leaves_the_choice_to_the_model(model):
    called = chat(model, logits_processor=script(model, CALL))["choices"][0]
    assert called["finish_reason"] == "tool_calls"
    check_weather(called["message"]["tool_calls"][0])
    said = chat(model, logits_processor=script(model, " Nice and warm."))["choices"][0]
    assert said["finish_reason"] == "stop"
    assert said["message"]["content"].strip() == "Nice and warm."
    assert "tool_calls" not in said["message"]


def test_auto_holds_a_call_that_has_begun_to_its_schema(model):
    """Nothing is forced after the trigger: the lazy grammar does the rest."""
    kwargs = {"logits_processor": begun(model), "temperature": 1.0}
    done = chat(model, **kwargs)["choices"][0]
    assert done["finish_reason"] == "tool_calls"
    for call in done["message"]["tool_calls"]:
        json.loads(call["function"]["arguments"])


@pytest.mark.parametrize("mark", ["<tool_call>\n", "<<tool_call>\n", "a <tool_call>\n", "<tool_<tool_call>\n"])
def test_a_trigger_is_found_after_a_long_answer(model, mark):
    """In linear time: llama.cpp searches the whole answer again with every token."""
    template = ChatTemplate(model._model, TOOLS)
    request = {"messages": USER, "tools": [WEATHER], "tool_choice": "auto"}
    sampler = Sampler(model._model, SamplingParams(seed=0, temp=0.0), template.render(request).constraint)
    start = time.process_time()

    def choose(wanted):
        row = np.zeros(model.n_vocab(), np.float32)
        row[wanted] = 1.0
        return sampler.sample(row)

    (word,) = model.tokenize(b"the", add_bos=False)[-1:]
    assert all(choose(word) == word for _ in range(20000))
    assert time.process_time() - start < 10  # minutes with llama.cpp's own search
    for token in model.tokenize(mark.encode(), add_bos=False):
        assert choose(token) == token
    assert choose(word) != word  # the schema of the call
    assert model.detokenize([choose(word)])


def test_none_calls_nothing(model):
    done = chat(model, tool_choice="none", logits_processor=script(model, CALL))["choices"][0]
    assert done["finish_reason"] == "stop"
    assert "tool_calls" not in done["message"]


def test_functions_are_the_older_form(model):
    functions = [WEATHER["function"]]
    kwargs = {"tools": None, "functions": functions, "function_call": {"name": "get_weather"}}
    done = chat(model, **kwargs, logits_processor=begun(model))["choices"][0]
    assert done["finish_reason"] == "function_call"
    check_weather({"type": "function", "id": "x", "function": done["message"]["function_call"]})
    chunks = list(chat(model, stream=True, **kwargs, logits_processor=begun(model)))
    deltas = [chunk["choices"][0]["delta"].get("function_call") for chunk in chunks]
    assert "".join(delta["arguments"] for delta in deltas if delta) == done["message"]["function_call"]["arguments"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "function_call"


def test_calls_and_results_come_back_in_the_prompt(model):
    call = {"id": "c1", "type": "function", "function": {"name": "get_time", "arguments": '{"zone": "CET"}'}}
    turns = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "noon", "tool_call_id": "c1"},
    ]
    prompt = model.apply_template(turns, tools=[CLOCK])
    assert '"name": "get_time"' in prompt
    assert '<tool_call>\n{"name": "get_time", "arguments": {"zone": "CET"}}\n</tool_call>' in prompt
    assert "<tool_response>\nnoon\n</tool_response>" in prompt
    older = [
        *USER,
        {"role": "assistant", "content": None, "function_call": call["function"]},
        {"role": "function", "name": "get_time", "content": "noon"},
    ]
    assert model.apply_template(older, tools=[CLOCK]) == prompt


def test_an_answer_cut_off_is_not_an_error(model):
    done = chat(model, tool_choice="required", max_tokens=12)["choices"][0]
    assert done["finish_reason"] == "length"


def test_a_call_that_is_none_stays_text(model):
    broken = ' <tool_call>\n{"name": "get_weather", "argu'
    done = chat(model, tool_choice="none", logits_processor=script(model, broken))["choices"][0]
    assert "get_weather" in done["message"]["content"]


def test_a_bad_parameter_schema_is_refused(model):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}
    with pytest.raises(ValueError, match="nonsense"):
        chat(model, tools=[tool], tool_choice="required")
    done = chat(model, tool_choice="required", logits_processor=begun(model))["choices"][0]
    assert done["finish_reason"] == "tool_calls"


def test_a_template_without_tools_says_so(embedded_model):
    with new(embedded_model, chat_format="vicuna", n_ctx=1024) as llm:
        with pytest.raises(ValueError, match="does not support tool calls, so none can be required"):
            chat(llm, tool_choice="required")
        with pytest.warns(RuntimeWarning, match="the model, which cannot call get_weather, get_time"):
            chat(llm, max_tokens=2)


def test_chatml_shows_tools(embedded_model):
    system = {"role": "system", "content": "Be brief."}
    with new(embedded_model, n_ctx=1024) as llm:
        prompt = llm.apply_template([system, *USER], tools=[WEATHER])
        assert prompt.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
        assert prompt.count("<|im_start|>system") == 1
        assert "The weather of a city" in prompt
        done = chat(llm, tool_choice="required", logits_processor=begun(llm))["choices"][0]
        assert done["finish_reason"] == "tool_calls"
