"""Tool calls after a long text: what is valid, what is right, and that the text is read once."""

import pytest

from pylongctx.eval.executors import units_of
from pylongctx.eval.files import published
from pylongctx.eval.runner import Cell, make_samples, run
from pylongctx.eval.toolcalls import ToolCalls, called, is_valid

TOOLS = published("toolcalls")["tools"]
REQUESTS = published("toolcalls")["requests"]


def call(name, **arguments):
    return {"name": name, "arguments": arguments}


def test_every_expected_call_is_valid_and_said_in_its_request():
    assert len(REQUESTS) == 100 and len({r["text"] for r in REQUESTS}) == 100
    for request in REQUESTS:
        assert is_valid(call(request["name"], **request["arguments"]), TOOLS), request
        assert all(str(value) in request["text"] for value in request["arguments"].values()), request


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        call("set_alarm", minutes=3),
        call("set_timer", minutes="3"),
        call("set_timer", minutes=True),
        call("set_timer"),
        call("set_timer", minutes=3, seconds=1),
        call("get_weather", city="Oslo", unit="kelvin"),
        {"name": "set_timer", "arguments": [3]},
    ],
)
def test_calls_that_do_not_hold_a_schema(wrong):
    assert not is_valid(wrong, TOOLS)


def test_only_one_call_with_json_counts():
    one = {"type": "function", "function": {"name": "set_timer", "arguments": '{"minutes": 3}'}}
    assert called({"tool_calls": [one]}) == call("set_timer", minutes=3)
    assert called({"tool_calls": [one, one]}) is None
    assert called({"content": "no"}) is None
    assert called({"tool_calls": [{"type": "function", "function": {"name": "a", "arguments": "{"}}]}) is None


def test_a_grammar_makes_valid_calls_and_the_text_is_read_once(embedded_model):
    cell = Cell(str(embedded_model), "full", ToolCalls(tests=3, choice="required", max_tokens=500), 200)
    samples = make_samples(cell)
    assert [sample.facts["tool"] for sample in samples] == ["get_weather", "set_timer", "convert_currency"]
    records = list(run(cell, samples))
    assert [record["valid"] for record in records] == [1.0, 1.0, 1.0]
    assert records[0]["tokens_read"] > 1000 > 300 > max(record["tokens_read"] for record in records[1:])
    assert cell.task.summary(records)["valid"] == 1.0


@pytest.mark.parametrize(
    ("options", "message"), [({"choice": "none"}, "choice must be one of auto, required"), ({"tests": 101}, "1 to 100")]
)
def test_options_that_do_not_exist(options, message):
    with pytest.raises(ValueError, match=message):
        ToolCalls(**options)


def test_all_requests_are_one_unit_of_work(embedded_model):
    cell = Cell(str(embedded_model), "full", ToolCalls(tests=20), 200)
    (unit,) = units_of(cell, make_samples(cell), ())
    assert len(unit.todo) == 20
