"""Schemas inside the grammars of chat templates: tools and formats, after thoughts and between marks."""

import json

import pytest
from chat_templates import TAGGED, THINKING, TOOLS
from llamas import new, script
from schemas import object_of, text

from pylongctx.chat.template import PlacedTools, may_be_text

USER = [{"role": "user", "content": "Look it up."}]
WILD = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "max_tokens": 1500}
NUMBER = {"type": "number", "minimum": 2.5, "maximum": 3}
ONES = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 3}
PARAMETERS = object_of({"n": NUMBER, "s": text(r"^\d{3}$"), "t": ONES})


def tool(name="look_up", parameters=PARAMETERS, **more):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def answer(llm, *tools, **asked):
    ends_soon = {llm.token_eos(): 100.0}  # where the grammar allows it
    one = {"tool_choice": "required", "parallel_tool_calls": False, "logit_bias": ends_soon}
    return llm.create_chat_completion(USER, tools=list(tools), **one | WILD | asked)["choices"][0]


def calls(llm, *tools, **asked):
    """Return the arguments of the calls in an answer."""
    done = answer(llm, *tools, **asked)
    assert done["finish_reason"] == "tool_calls", done
    return [json.loads(call["function"]["arguments"]) for call in done["message"]["tool_calls"]]


def check(found):
    assert list(found) == ["n", "s", "t"]
    assert 2.5 <= found["n"] <= 3
    assert len(found["s"]) == 3 and found["s"].isdigit()
    assert found["t"] in ([1, 1], [1, 1, 1])


@pytest.fixture(scope="module")
def model(embedded_model):
    with new(embedded_model, chat_format=TOOLS, n_ctx=2048) as llm:
        yield llm


@pytest.fixture(scope="module")
def tagged(embedded_model):
    with new(embedded_model, chat_format=TAGGED, n_ctx=2048) as llm:
        yield llm


@pytest.mark.parametrize("seed", range(5))
def test_arguments_follow_the_schema_of_the_tool(model, seed):
    for found in calls(model, tool(), tool("other", object_of({"x": {"enum": [5]}})), seed=seed):
        if found != {"x": 5}:
            check(found)


def test_every_call_of_several_follows(model):
    most = 0
    for seed in range(5):
        asked = {"parallel_tool_calls": True, "max_tokens": 300, "seed": seed}
        done = answer(model, tool(parameters=object_of({"x": {"enum": [5]}})), **asked)
        found = [call["function"]["arguments"] for call in done["message"]["tool_calls"]]
        assert all(json.loads(one) == {"x": 5} for one in found[:-1])  # the last one may be cut off
        most = max(most, len(found))
    assert most > 1


def test_a_call_that_the_model_begins_follows_too(model):
    for seed in range(4):
        begun = script(model, " <tool_call>\n", end=False)
        for found in calls(model, tool(), tool_choice="auto", seed=seed, logits_processor=begun):
            check(found)


def test_arguments_in_tags_follow_as_far_as_they_are_json(tagged):
    parameters = object_of({"n": NUMBER, "t": ONES})
    for seed in range(4):
        begun = script(tagged, " <tool_call>\n<function=look_up>\n", end=False)
        (found,) = calls(tagged, tool(parameters=parameters), seed=seed, logits_processor=begun)
        assert 2.5 <= found["n"] <= 3 and found["t"] in ([1, 1], [1, 1, 1])


def test_texts_in_tags_cannot_be_held(tagged):
    with pytest.raises(
        ValueError, match="look_up/properties/s/pattern cannot be enforced in the calls of this chat template"
    ):
        tagged.apply_template(USER, tools=[tool(strict=True)])
    with pytest.warns(RuntimeWarning, match="look_up/properties/s/pattern: this chat template does not enforce it"):
        tagged.apply_template(USER, tools=[tool()])


def test_a_strict_tool_that_cannot_be_held_is_refused(model):
    unheld = object_of({"a": {"type": "array", "uniqueItems": True, "maxItems": 0}})
    with pytest.raises(ValueError, match=r"the parameters of look_up: .* /properties/a/uniqueItems: "):
        model.apply_template(USER, tools=[tool(parameters=unheld, strict=True)])
    with pytest.warns(RuntimeWarning, match="look_up/properties/a/uniqueItems: "):
        assert calls(model, tool(parameters=unheld)) == [{"a": []}]


def test_parameters_that_refer_to_themselves(model):
    deep = object_of({"v": {"const": 1}, "next": {"anyOf": [{"enum": [None, 0]}, {"$ref": "#"}]}})
    for seed in range(3):
        (found,) = calls(model, tool(parameters=deep), seed=seed)
        while found:
            assert list(found) == ["v", "next"]
            found = found["next"]


def test_the_prompt_shows_the_tools_as_they_are(model):
    prompt = model.apply_template(USER, tools=[tool()], tool_choice="required")
    assert json.dumps(PARAMETERS["properties"]["s"]) in prompt
    assert "<schema>" not in prompt


def test_calls_that_follow_no_schema_are_named():
    assert PlacedTools([tool(strict=True)]).nowhere().gaps == ["look_up: this chat template enforces no schema"]


@pytest.mark.parametrize(
    ("schema", "is_text"),
    [
        ({"type": "string"}, True),
        ({"type": ["null", "string"]}, True),
        ({"type": ["null", "integer"]}, False),
        ({"enum": [1, "a"]}, True),
        ({"const": 1}, False),
        ({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/x"}]}, True),
        ({"oneOf": [{"type": "null"}, {"type": "object"}]}, False),
        ({"properties": {}}, False),
        ({"items": {}}, False),
        ({"allOf": [{"type": "string"}, {"minLength": 1}]}, True),
        ({}, True),
        (True, True),
        ({"$ref": "#/$defs/loop"}, True),
    ],
)
def test_which_arguments_are_written_as_text(schema, is_text):
    root = {"$defs": {"x": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}}
    assert may_be_text(schema, root) == is_text


# ---- formats ----


def test_an_answer_follows_its_schema_after_thoughts(embedded_model):
    asked = {"type": "json_object", "schema": object_of({"n": NUMBER})}
    with new(embedded_model, chat_format=THINKING, n_ctx=1024) as llm:
        for seed in range(4):
            thought = script(llm, " <think>\nIt may be three.\n</think>\n\n", end=False)
            options = {"response_format": asked, "seed": seed, "logits_processor": thought, **WILD}
            done = llm.create_chat_completion(USER, **options)["choices"][0]
            assert done["message"]["reasoning_content"].strip() == "It may be three."
            assert 2.5 <= json.loads(done["message"]["content"])["n"] <= 3
