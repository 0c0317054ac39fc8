"""Multiple choice from L-Eval's files: questions, documents and numbers, on a file made here."""

import json
from dataclasses import replace

import pytest
from vocabulary import Words, total

from pylongctx.eval.leval import Choices
from pylongctx.eval.task import Answer


@pytest.fixture
def quality(tmp_path):
    file = tmp_path / "quality.jsonl"
    lines = [
        {
            "input": " ".join(f"fact{i}" for i in range(900)),
            "instructions": ["Who?\n(A) He (B) She", "Where?\n(A) Here (B) There"],
            "outputs": ["(B) She", "(A) Here"],
        },
        {"input": "Little is known.", "instructions": ["What?"], "outputs": ["(C) That"]},
    ]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    return file


def test_every_question_is_a_sample_with_its_document(quality):
    words = Words(n_bos=1)
    found = Choices(str(quality)).samples(words, 400, 0)
    assert [sample.answers for sample in found] == [("(B) She",), ("(A) Here",), ("(C) That",)]
    assert all(total(words, sample) <= 400 for sample in found)
    assert total(words, found[0]) >= 400 - 8
    assert "fact0 fact1" in found[0].prompt
    assert "fact899" not in found[0].prompt
    assert found[2].prompt.endswith("Little is known.\n\nQuestion: What?")


def test_choices_are_scored_by_letter(quality):
    task = Choices(str(quality))
    sample = task.samples(Words(), 400, 0)[0]
    assert [task.scores(sample, Answer(text, []))["score"] for text in (" B", "\nB) She", " A", "")] == [1, 1, 0, 0]


def test_several_letters_are_right_in_coursera(quality):
    file = quality.rename(quality.with_name("coursera.jsonl"))
    task = Choices(str(file))
    sample = task.samples(Words(), 400, 0)[0]
    sample = replace(sample, answers=("AC",))
    assert [task.scores(sample, Answer(text, []))["score"] for text in ("AC", "C", "B")] == [1, 0.25, 0]
    assert "one or several" in sample.prompt


def test_choices_errors(quality):
    with pytest.raises(ValueError, match="length 30: the question alone is longer"):
        Choices(str(quality)).samples(Words(), 30, 0)
    with pytest.raises(ValueError, match="--data is a file of L-Eval"):
        Choices("nothing.jsonl").samples(Words(), 400, 0)
