"""Questions about whole files: the file of questions, the score, and a run."""

import json

import pytest
from upstream import ROOT

from pylongctx.eval.ask import Ask, is_right, read_texts
from pylongctx.eval.runner import Cell, run

QUESTIONS = ROOT / "bench" / "ask" / "questions.json"


@pytest.fixture
def asked(tmp_path):
    """Return a file with questions about two small texts."""
    (tmp_path / "a.txt").write_text("The cat is called Tom.\nThe dog is called Rex.\nEND\nThe cow is called Moo.\n")
    (tmp_path / "b.txt").write_text("It rained in May. It snowed in June.\n")

    def question(words, answer, passage):
        return {"question": words, "answers": [[answer]], "passage": passage}

    texts = [
        {
            "file": "a.txt",
            "end": "END",
            "questions": [
                question("Who is the cat?", "Tom", "cat is called Tom."),
                question("Who is the dog?", "Rex", "dog is called Rex."),
            ],
        },
        {"file": "b.txt", "questions": [question("When did it rain?", "May", "rained in May.")]},
    ]
    path = tmp_path / "questions.json"
    path.write_text(json.dumps({"texts": texts}))
    return path


def test_the_questions_of_the_project():
    texts = read_texts(str(QUESTIONS))
    assert len(texts) == 6 and sum(len(questions) for questions, _ in texts) == 60
    sizes = [len(file.text.encode()) for _, file in texts]
    assert min(sizes) > 5000 and max(sizes) < 105_000
    for questions, file in texts:
        for one in questions:  # none is answered by its own words
            assert not is_right(one["question"], ["|".join(group) for group in one["answers"]]), one["question"]
            assert all(group for group in one["answers"]), file.name


@pytest.mark.parametrize(
    ("answer", "groups", "right"),
    [
        ("He is called TOM.", ["tom"], True),
        ("An atom.", ["tom"], False),
        ("A file and victuals", ["file", "wittles|victuals"], True),
        ("A file.", ["file", "wittles|victuals"], False),
        ("1,000 pounds", ["1000|1,000"], True),
        ("", ["x"], False),
    ],
)
def test_every_group_needs_a_word(answer, groups, right):
    assert is_right(answer, groups) is right


def test_a_run(asked, embedded_model):
    task = Ask(str(asked), max_tokens=8)
    records = list(run(Cell(str(embedded_model), "longheads", task, 2048)))
    assert [record["id"] for record in records] == ["2048-a-0", "2048-a-1", "2048-b-0"]
    assert [record["part"] for record in records] == ["tuned", "held", "tuned"]
    assert records[1]["tokens_read"] < records[0]["tokens_read"]  # the text is read once
    assert all({"answer", "score", "quoted", "looped", "passage"} <= record.keys() for record in records)
    assert set(task.summary(records)) >= {"score", "tuned", "held", "looped"}
    assert "moo" not in json.dumps([record["answer"] for record in records]).lower()
    plain = Ask(str(asked), tests=1, instructed=False)
    assert plain.name == "ask-plain" and len(list(run(Cell(str(embedded_model), "full", plain, 2048)))) == 2


def test_mistakes_are_named(asked, embedded_model):
    with pytest.raises(ValueError, match=r"a\.txt needs \d+ tokens, more than the length 128"):
        list(run(Cell(str(embedded_model), "full", Ask(str(asked)), 128)))
    given = json.loads(asked.read_text())
    given["texts"][1]["questions"][0]["passage"] = "It hailed"
    asked.write_text(json.dumps(given))
    with pytest.raises(ValueError, match="text 2, question 1: the text does not contain 'It hailed'"):
        read_texts(str(asked))
    given["texts"][0]["end"] = "FIN"
    asked.write_text(json.dumps(given))
    with pytest.raises(ValueError, match=r"text 1: .*a\.txt has no line 'FIN'"):
        read_texts(str(asked))
    with pytest.raises(ValueError, match="questions"):
        read_texts(str(asked.parent / "none.json"))
