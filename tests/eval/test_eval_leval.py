"""L-Eval's closed-ended tasks: prompts, documents and scores, on files made here."""

import hashlib
import json
from dataclasses import replace

import pytest
from vocabulary import Words, total

from pylongctx.eval.files import published
from pylongctx.eval.leval import LEval
from pylongctx.eval.task import Answer

ASKED = "answer without any additional output or explanation "
ROWS = [
    {
        "input": " ".join(f"fact{i}" for i in range(900)),
        "instructions": ["Who?\n(A) He (B) She", "Where?\n(A) Here (B) There"],
        "outputs": ["(B) She", "(A) Here"],
    },
    {"input": "Little is known.", "instructions": ["What?"], "outputs": ["(C) That"]},
]


@pytest.fixture
def written(tmp_path):
    def write(name, rows=ROWS):
        file = tmp_path / name
        file.write_text("\n".join(json.dumps(row) for row in rows))
        return str(file)

    return write


def score(task, right, said):
    sample = replace(task.samples(Words(), 900, 0)[0], answers=(right,))
    return task.scores(sample, Answer(said, []))["score"]


def test_prompts_are_the_published_ones():
    prompts = {kind: [task["system"], task["prompt"], task["prefix"]] for kind, task in published("leval").items()}
    digest = hashlib.sha256(json.dumps(prompts, sort_keys=True).encode()).hexdigest()
    assert digest == "c2d9901b7b149d159a1a3664441b2410a98485cfe3cdce307b39e83a913bb218"


def test_every_question_is_a_sample_with_its_document(written):
    words = Words(n_bos=1)
    found = LEval(written("quality.jsonl")).samples(words, 400, 0)
    assert [sample.answers for sample in found] == [("(B) She",), ("(A) Here",), ("(C) That",)]
    assert all(total(words, sample) <= 400 for sample in found)
    assert total(words, found[0]) >= 400 - 8
    assert "Document is as follows. fact0 fact1" in found[0].prompt
    assert "fact899" not in found[0].prompt
    assert "Little is known. \nQuestion: What?.  Please directly" in found[2].prompt
    assert (found[2].prefix, found[2].max_tokens) == ("\nAnswer:", 32)


@pytest.mark.parametrize(
    ("name", "beginning", "end", "n"),
    [
        ("gsm100", "Given several question answer pairs", "Little is known.\n\nWhat?", 512),
        ("topic_retrieval_longchat", "Below is a record of our previous", "Little is known.\n\nWhat?", 64),
        (
            "coursera",
            "Now you are given a very long document.",
            "answer without any additional output or explanation ",
            32,
        ),
        ("tpo", "Now you are given a very long document.", ASKED, 32),
    ],
)
def test_the_name_of_the_file_tells_the_prompt(written, name, beginning, end, n):
    sample = LEval(written(f"{name}.jsonl")).samples(Words(), 900, 0)[2]
    assert sample.prompt.startswith(beginning)
    assert sample.prompt.endswith(end)
    assert sample.max_tokens == n
    assert LEval(written(f"{name}.jsonl"), tests=1, max_tokens=5).samples(Words(), 900, 0)[0].max_tokens == 5


@pytest.mark.parametrize(
    ("name", "right", "said", "expected"),
    [
        ("quality", "(B) She", " B", 1),
        ("quality", "(B) She", "\nB) She", 1),
        ("quality", "(B) She", "He, or She: B", 1),
        ("quality", "(B) She", " A", 0),
        ("quality", "(A) He", "", 0),
        ("quality", "(B) She", "BC", 0),  # as published: an answer of letters alone is taken as it is
        ("coursera", "AC", "AC", 1),
        ("coursera", "AC", "A. This\nC. That", 1),
        ("coursera", "AC", "C", 0.25),
        ("coursera", "AC", "B", 0),
        ("gsm100", "18", "16 - 3 - 4 = 9\nThe answer is 18\n\nQuestion: 5", 1),
        ("gsm100", "18", "The answer is $18.00. So", 1),
        ("gsm100", "1800", "They sell 1,800 eggs.\n\nThen 7", 1),  # no "The answer is": the last number of a paragraph
        ("gsm100", "18", "The answer is eighteen", 0),
        ("gsm100", "18", "", 0),
        ("topic_retrieval_longchat", "The future of space tourism", 'It was "the Future of Space  Tourism".', 1),
        ("topic_retrieval_longchat", "The future of space tourism", "Space tourism", 0),
    ],
)
def test_scores_are_the_published_ones(written, name, right, said, expected):
    assert score(LEval(written(f"{name}.jsonl")), right, said) == expected


def test_topics_are_counted_by_place(written):
    task = LEval(written("topic_retrieval_longchat.jsonl"))
    records = [{"score": s, "question": j} for s, j in ((1, 0), (0, 1), (0, 2), (1, 0), (1, 1), (0, 2))]
    assert task.summary(records) == {"score": 0.5, "first": 1, "second": 0.5, "third": 0}


def test_errors(written):
    with pytest.raises(ValueError, match=r"quality, length 30: question and answer alone need \d+ tokens"):
        LEval(written("quality.jsonl")).samples(Words(), 30, 0)
    with pytest.raises(ValueError, match="--data is a file of L-Eval"):
        LEval("nothing.jsonl").samples(Words(), 400, 0)
    with pytest.raises(ValueError, match=r"quality.jsonl, line 2: there is no field 'input'"):
        LEval(written("quality.jsonl", [ROWS[0], {"context": ""}])).samples(Words(), 400, 0)
