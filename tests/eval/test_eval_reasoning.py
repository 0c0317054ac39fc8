"""Evaluations with a chat template: reasoning is off, or takes tokens of the answer and is not graded."""

import json

import pytest
from chat_templates import THINKING
from llamas import new

from pylongctx.cli.eval_cells import add_run_options, chat_of
from pylongctx.eval.matrix import make
from pylongctx.eval.passkey import Passkey
from pylongctx.eval.runner import Cell, digest, make_samples
from pylongctx.eval.task import AnswerText, Chat, ModelVocabulary, Sample, greedy

pytestmark = pytest.mark.check

OPENS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
ASKED = Sample("0", "Who?", max_tokens=60, stop=("END",))
SAID = "<think>\nThe END is near.\n</think>\n\nIt is. END of it"


def prompt(llm, chat, prefix=""):
    tokens = ModelVocabulary(llm, chat).tokens(Sample("0", "Who?", prefix=prefix))
    return llm.detokenize(tokens.tolist(), special=True).decode().split("assistant\n")[-1]


@pytest.fixture(scope="module", params=[THINKING, OPENS], ids=["asked", "opens"])
def llm(request, embedded_model):
    with new(embedded_model, chat_format=request.param, n_ctx=1024) as llm:
        llm.opens = request.param == OPENS
        yield llm


def test_there_is_no_reasoning_unless_it_is_asked_for(llm):
    assert prompt(llm, True).split() == prompt(llm, Chat()).split() == ["<think>", "</think>"]
    assert prompt(llm, Chat(reasoning=True)).split() == (["<think>"] if llm.opens else [])


@pytest.mark.parametrize("chat", [True, Chat(reasoning=True)])
def test_the_beginning_of_an_answer_is_not_in_the_reasoning(llm, chat):
    found = prompt(llm, chat, prefix="The answer is")
    assert found.endswith("The answer is")
    assert found.count("<think>") == found.count("</think>") == int(llm.opens or chat is True)


def test_variables_reach_the_template(embedded_model):
    with new(embedded_model, vocab_only=True, chat_format="{{ messages[0].content }}{{ tone }}assistant\n") as llm:
        tokens = ModelVocabulary(llm, Chat(variables='{"tone": "loud"}')).tokens(Sample("0", "Who?"))
        assert "Who?loud" in llm.detokenize(tokens.tolist()).decode()


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("opened", "said", "text"),
    [
        ("", SAID, "It is. "),
        ("<think>\n", SAID.removeprefix("<think>\n"), "It is. "),
        ("", " It is. END", " It is. "),
        ("", "<th", "<th"),
        ("", "<think>\nFor ever END", ""),
        ("", "  \n", "  \n"),
    ],
)
def test_only_the_answer_is_graded(size, opened, said, text):
    shown = AnswerText(["END"], f"assistant\n{opened}")
    for i in range(0, len(said), size):
        if not shown.stopped:
            shown.feed(said[i : i + size].encode())
    if not shown.stopped:
        shown.feed(b"", final=True)
    assert (shown.text, shown.stopped) == (text, text.endswith("is. "))


def test_an_answer_ends_after_its_reasoning(llm, monkeypatch):
    wanted = llm.tokenize((SAID.removeprefix("<think>\n") if llm.opens else SAID).encode(), add_bos=False)
    tokens = ModelVocabulary(llm, Chat(reasoning=True)).tokens(ASKED)
    monkeypatch.setattr(llm, "generate", lambda *args, **kwargs: iter([*wanted, llm.token_eos()]))
    answer, _, _ = greedy(llm, tokens, ASKED)
    assert answer.text.strip() == "It is."
    assert len(answer.tokens) <= len(wanted)


def test_samples_that_are_answered_together(embedded_model, monkeypatch):
    from pylongctx.eval.needle import Needle

    task = Needle((0.0,), final_context_length_buffer=100)
    with new(embedded_model, chat_format=THINKING, n_ctx=1024, n_parallel=2) as llm:
        vocabulary = ModelVocabulary(llm, Chat(reasoning=True))
        assert vocabulary.reasons
        sample = Sample("0", "Who?", answers=("I",), max_tokens=6, stop=("e",))
        (found,) = task.run_many(llm, vocabulary, [sample])
        alone, _, _ = greedy(llm, vocabulary.tokens(sample), sample)
        assert found["answer"] == alone.text


def test_records_say_how_they_were_asked(embedded_model):
    cells = [Cell(str(embedded_model), "full", Passkey("llama.cpp", 1), 900, chat=chat) for chat in (True, Chat(True))]
    assert [cell.facts["reasoning"] for cell in cells] == [False, True]
    assert len({digest(cell, make_samples(cell)[0]) for cell in cells}) == 2


def test_a_plan_and_a_command_line_can_ask_for_it():
    import argparse

    table = {"methods": "full", "lengths": [900], "tasks": [{"kind": "passkey"}]}
    plan = make(table | {"chat": {"reasoning": True, "variables": {"tone": "loud"}}})
    assert plan.tasks[0].chat == Chat(True, '{"tone": "loud"}')
    with pytest.raises(ValueError, match="loudness"):
        make(table | {"chat": {"loudness": 1}})
    parser = argparse.ArgumentParser()
    add_run_options(parser)
    words = ["--chat", "--reasoning", "on", "--chat-template-kwargs", json.dumps({"tone": "loud"})]
    assert chat_of(parser.parse_args(words)) == plan.tasks[0].chat
    assert chat_of(parser.parse_args(["--chat"])) == Chat()
    with pytest.raises(ValueError, match="--reasoning is about the chat template: add --chat"):
        chat_of(parser.parse_args(["--reasoning", "off"]))
