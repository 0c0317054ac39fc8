"""Reading an answer piece by piece says what reading it whole says, and costs what its length costs."""

import json
import random
from contextlib import closing

import pytest
from chat_templates import CLOCK, THINKING, TOOLS, WEATHER
from upstream import files

from pylongctx._lib import lib, take_text
from pylongctx.chat.answer import AnswerParser
from pylongctx.chat.template import ChatTemplate
from pylongctx.engine.model import Model

USER = [{"role": "user", "content": "hi"}]
PROSE = 'It was the b\u00e9st \u4e2d of times,\nit was the <b>worst</b> of "times", \\ in (1859); a < b, </ c? '
WRITE = {
    "type": "function",
    "function": {
        "name": "write",
        "description": "Write a text",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string"}, "numbers": {"type": "array", "items": {"type": "integer"}}},
            "required": ["text"],
        },
    },
}
FUNCTIONS = [WEATHER, CLOCK, WRITE]
BACKWARDS = TOOLS.replace("""{"name": "' + call.function.name + '", "arguments": ' }}""", """{"arguments": ' }}""")
BACKWARDS = BACKWARDS.replace("+ '}\\n</tool_call>'", """+ ', "name": "' + call.function.name + '"}\\n</tool_call>'""")


def call(text, name="write"):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'


WEATHER_CALL = call('{"city": "Rome", "days": 2}', "get_weather")
ESCAPES = call(json.dumps({"text": 'a "b" \\ \n\t \u00e9\u4e2d\U0001f600 </tool_call> {[', "numbers": [1, -2.5e3]}))
BEHIND = "\n".join(
    f'<tool_call>\n{{"arguments": {{"text": "{text}"}}, "name": "write"}}\n</tool_call>'
    for text in ("a", "} b", '\\"} c')
)
ANSWERS = {
    "content": (TOOLS, "Nice and warm."),
    "marks that are none": (TOOLS, "a < b <tool <tool_cal <<tool_calling> </tool_call> end <tool_"),
    "unicode": (TOOLS, "\u00e9\u4e2d\U0001f600 \u4e2d\n\n  \n"),
    "a call": (TOOLS, WEATHER_CALL),
    "words and a call": (TOOLS, "I look it up.\n" + WEATHER_CALL),
    "calls": (TOOLS, f"{WEATHER_CALL}\n{call('{}', 'get_time')}\n{call('{}', 'get_time')}"),
    "escapes": (TOOLS, ESCAPES),
    "spaces in a string": (TOOLS, call('{"text": "  a   b  \\n  "}')),
    "spaces between": (TOOLS, call('{ "text" :  "a" ,\n\n "numbers" : [ 1 , 2 ]  }')),
    "an empty string": (TOOLS, call('{"text": ""}')),
    "a call without an end": (TOOLS, 'Well. <tool_call>\n{"name": "write", "arguments": {"text": "a'),
    "names behind": (BACKWARDS, BEHIND),
    "thoughts": (THINKING, "<think>\nHm, two.\n</think>\n\nIt is 2."),
    "thoughts with marks": (THINKING, "<think>\na </thin </ <think> b\n</think>\n\n</think> It is 2."),
    "thoughts of spaces": (THINKING, "<think>\n \n</think>\n\nIt is 2."),
    "no thoughts": (THINKING, "It is 2."),
    "thoughts without an end": (THINKING, "<think>\nHm, two."),
}
BROKEN = {
    "no tool": (TOOLS, "Well. " + call("{}", "get_lost")),
    "no JSON": (TOOLS, 'Well. <tool_call>\n{"name": "write", "arguments": {"text": nonsense}}\n</tool_call> more'),
    "a bad escape": (TOOLS, call('{"text": "a\\qb"}')),
    "words after a call": (TOOLS, WEATHER_CALL + " Done. " + WEATHER_CALL + " and more of it"),
}


@pytest.fixture(scope="module")
def syntax(embedded_model):
    """Return a function from a template to the syntax of its answers."""
    with closing(Model(str(embedded_model), {"vocab_only": 1})) as model:

        def syntax(template, tools=FUNCTIONS, **kwargs):
            request = {"messages": USER} | ({"tools": tools} if template is not THINKING else {}) | kwargs
            return ChatTemplate(model, template).render(request).syntax

        yield syntax


def join(deltas):
    """Return the message that deltas say: content, thoughts, names and arguments of the calls."""
    content = "".join(delta.get("content", "") for delta in deltas)
    thoughts = "".join(delta.get("reasoning_content", "") for delta in deltas)
    calls = []
    for delta in (delta["tool_call"] for delta in deltas if "tool_call" in delta):
        if delta["index"] == len(calls):
            assert delta["id"]
            calls.append(["", ""])
        calls[-1][0] = delta["name"] or calls[-1][0]
        calls[-1][1] += delta["arguments"]
    return content, thoughts, calls


def pieces(text, rng):
    while text:
        n = rng.choice((1, 2, 3, 4, 5, 8, 40))
        yield text[:n]
        text = text[n:]


def in_pieces(syntax, cut, complete=True):
    """Return what an answer in pieces says, and its parser."""
    parser = AnswerParser(syntax)
    deltas = [delta for piece in cut for delta in parser.feed(piece)]
    return join(deltas + parser.end(complete)), parser


def in_bytes(syntax, cut, complete=True):
    """Return what an answer in pieces of bytes says, which may end inside a character."""
    parser, deltas = AnswerParser(syntax), []
    for piece in cut:
        deltas += json.loads(take_text(lib.lctx_parser_feed(parser._handle, piece, len(piece))))
    return join(deltas + parser.end(complete))


def continues(message, reported):
    """Return whether ``message`` only adds to what was reported."""
    (content, thoughts, calls), (old_content, old_thoughts, old_calls) = message, reported
    grown = content.startswith(old_content) and thoughts.startswith(old_thoughts) and len(calls) >= len(old_calls)
    return grown and all(
        new[0] == old[0] and new[1].startswith(old[1]) for new, old in zip(calls, old_calls, strict=False)
    )


def whole_each_time(syntax, cut, complete=True):
    """Parse every prefix of an answer whole; return the last message that only added to the one reported before."""
    reported, text, nothing = ("", "", []), "", ("", "", [])
    for piece in [*cut, None]:
        parser = AnswerParser(syntax)
        text += piece or ""
        message = join(parser.feed(text) + (parser.end(complete) if piece is None else []))
        if message != nothing and continues(message, reported):
            reported = message
    return reported


@pytest.mark.parametrize("name", ANSWERS)
def test_pieces_say_what_the_whole_says(syntax, name):
    template, text = ANSWERS[name]
    found = syntax(template)
    expected, parser = in_pieces(found, [text])
    assert not parser.failure
    assert "".join(expected[0] + expected[1]) or expected[2]
    assert in_pieces(found, text)[0] == expected
    for seed in range(20):
        assert in_pieces(found, pieces(text, random.Random(seed)))[0] == expected


@pytest.mark.parametrize("name", [*ANSWERS, *BROKEN])
@pytest.mark.parametrize("complete", [True, False])
def test_pieces_say_what_parsing_again_says(syntax, name, complete):
    """Also when it is cut off anywhere or broken, where the last parse alone says less than what was reported."""
    template, text = (ANSWERS | BROKEN)[name]
    found = syntax(template)
    for seed in range(10):
        rng = random.Random(seed)
        cut = list(pieces(text[: len(text) if complete else rng.randrange(1, len(text))], rng))
        message, parser = in_pieces(found, cut, complete)
        assert message == whole_each_time(found, cut, complete)
        assert bool(parser.failure) == (complete and name in BROKEN)


def answers(template, messages):
    """Yield the syntax and the text of the messages that a template renders after its prompt."""
    try:
        asked = template.render({"messages": USER, "tools": [WRITE]})
        for message in messages:
            turns = [*USER, {"role": "assistant", **message}]
            whole = template.render({"messages": turns, "tools": [WRITE], "add_generation_prompt": False}).prompt
            if whole.startswith(asked.prompt):
                yield asked.syntax, whole[len(asked.prompt) :]
    except ValueError:
        return  # it renders no tools


def test_every_template_says_the_same_in_pieces(tmp_path_factory):
    """The templates of 60 models: their own way to write content, thoughts and calls, whole and cut off anywhere."""
    folder, n_same, n_calls = files(tmp_path_factory.getbasetemp()), 0, 0
    arguments = json.dumps({"text": PROSE, "numbers": [1, 22, 333]}, ensure_ascii=False)
    function = {"name": "write", "arguments": arguments}
    messages = [
        {"content": PROSE},
        {"content": "Yes. " + PROSE, "reasoning_content": PROSE},
        {"content": "", "tool_calls": [{"id": "call12345", "type": "function", "function": function}]},
    ]
    rng = random.Random(0)
    with closing(Model(str(folder / "ggml-vocab-qwen2.gguf"), {"vocab_only": 1})) as model:
        for path in sorted(folder.glob("*.jinja")):
            template = ChatTemplate(model, path.read_text())
            for syntax, text in answers(template, messages):
                for n in (len(text), *(rng.randrange(len(text) + 1) for _ in range(3))):
                    expected = in_pieces(syntax, [text[:n]], complete=False)[0]
                    if expected == ("", "", []):
                        continue  # what ends the turn is not part of the answer
                    said = in_bytes(syntax, pieces(text[:n].encode(), rng), complete=False)
                    assert said == expected, (path.stem, text[:n])
                    n_same += 1
                    n_calls += bool(said[2])
    assert n_same > 200
    assert n_calls > 50


@pytest.mark.parametrize("name", ANSWERS)
def test_a_piece_may_end_inside_a_character(syntax, name):
    template, text = ANSWERS[name]
    found = syntax(template)
    assert in_bytes(found, [bytes([byte]) for byte in text.encode()]) == in_pieces(found, [text])[0]


def test_what_is_cut_off_is_not_taken_for_what_it_is_not(syntax):
    """<a could become <a>, with which the first reading would fail; as <ac it is right."""
    leaves = [{"type": "until", "delimiters": ["<a>", "<b>"]}, {"type": "literal", "literal": "<b>"}]
    rest = {"type": "until", "delimiters": []}
    tags = [{"type": "tag", "child": i, "tag": tag} for i, tag in ((0, "content"), (2, "reasoning"), (2, "content"))]
    first = {"type": "sequence", "children": [3, 1, 4]}
    parsers = [*leaves, rest, *tags, first, {"type": "choice", "children": [6, 5]}]
    grammar = json.dumps({"parsers": parsers, "rules": {}, "root": 7})
    found = json.dumps(json.loads(syntax(TOOLS)) | {"parser": grammar, "generation_prompt": ""})
    for cut in (["x<a", "c", "<b>y"], ["x<a"], ["x<", "a>y", "<b>"], ["<", "b>", "y"]):
        assert in_pieces(found, cut)[0] == in_pieces(found, ["".join(cut)])[0]


def test_a_continued_message_says_what_is_new(syntax):
    turns = [*USER, {"role": "assistant", "content": "It was the"}]
    found = syntax(TOOLS, messages=turns, continue_final_message=True, add_generation_prompt=False)
    assert in_pieces(found, " best of times.")[0] == (" best of times.", "", [])


# ---- the cost ----


def long(n):
    return (PROSE * (n // len(PROSE) + 1))[:n]


LONG = {
    "content": (TOOLS, [], long),
    "content beside tools": (TOOLS, FUNCTIONS, long),
    "thoughts": (THINKING, [], lambda n: f"<think>\n{long(n)}\n</think>\n\nTwo."),
    "an argument": (TOOLS, FUNCTIONS, lambda n: call(json.dumps({"text": long(n)}, ensure_ascii=False))),
}


def cost(syntax, text):
    """Return how many bytes were parsed for each byte, before the end."""
    parser = AnswerParser(syntax)
    for i in range(0, len(text), 4):
        parser.feed(text[i : i + 4])
    return parser.n_parsed / len(text.encode())


@pytest.mark.parametrize("name", LONG)
def test_the_cost_is_that_of_the_length(syntax, name):
    """A parse of the whole answer for each piece would cost n / 8 for each byte: 2000 at 16,000 characters."""
    template, tools, make = LONG[name]
    found = syntax(template, tools)
    short, middle, longer = (cost(found, make(n)) for n in (1000, 4000, 16000))
    assert longer < middle * 1.1 < short * 1.21
    assert longer < 16


NUMBERS = call(json.dumps({"text": "", "numbers": list(range(100, 4000))}))
MARKS = "<tool_call>{} </tool_call> " * 600


@pytest.mark.parametrize(
    ("text", "template"), [(NUMBERS, TOOLS), (MARKS, TOOLS), ("</think> a <think>" * 900, THINKING)]
)
def test_the_cost_is_bounded_where_everything_is_a_mark(syntax, text, template):
    assert len(text) > 15000
    assert cost(syntax(template), text) < 64 + 2**18 / len(text)


def test_numbers_are_reported_with_a_small_delay(syntax):
    parser, n_reported = AnswerParser(syntax(TOOLS)), 0
    for i in range(0, len(NUMBERS), 4):
        deltas = parser.feed(NUMBERS[i : i + 4])
        n_reported += sum(len(delta["tool_call"]["arguments"]) for delta in deltas)
        assert i - n_reported < 80 + i / 30
