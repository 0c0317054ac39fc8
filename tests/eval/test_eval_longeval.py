"""LongEval's lines: the file's prompt, lines that leave where they do not fit, and the score."""

import json

import pytest
from vocabulary import Words, total

from pylongctx.eval.retrieval import LongEval
from pylongctx.eval.task import Answer

pytestmark = pytest.mark.check

LINES = [f"line quiet-word{i}: REGISTER_CONTENT is <{10000 + i}>\n" for i in range(50)]
BEFORE = "Below is a record of lines. Each line begins with 'line <line index>'. Now the record start:\n\n"
AFTER = "\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line quiet-word40? I need the number. "
CASE = {"prompt": BEFORE + "".join(LINES) + AFTER, "correct_line": LINES[40], "expected_number": 10040}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "50_lines.jsonl"
    path.write_text(json.dumps(CASE) + "\n" + json.dumps(CASE | {"correct_line": LINES[0], "expected_number": 10000}))
    return str(path)


def test_the_prompt_is_that_of_the_file(file):
    first, second = LongEval(file).samples(Words(), 2000, 0)
    assert first.prompt == second.prompt == CASE["prompt"]
    assert (first.answers, second.answers, first.max_tokens) == (("10040",), ("10000",), 100)
    assert first.facts == {"lines": 50, "lines_of_case": 50, "place": 40}


@pytest.mark.parametrize("length", [100, 200, 400])
def test_lines_leave_where_they_do_not_fit_and_the_asked_one_stays(file, length):
    words = Words(n_bos=1)
    for sample, at in zip(LongEval(file, max_tokens=5).samples(words, length, 0), (40, 0), strict=True):
        assert total(words, sample) <= length < total(words, sample) + 20  # a line has 10 tokens
        assert sample.prompt.startswith(BEFORE) and sample.prompt.endswith(AFTER)
        kept = sample.prompt[len(BEFORE) : -len(AFTER)].splitlines(keepends=True)
        start = LINES.index(kept[0])
        assert kept == LINES[start : start + len(kept)]
        assert kept[sample.facts["place"]] == LINES[at]
        assert (sample.facts["lines"], sample.facts["lines_of_case"]) == (len(kept), 50)


@pytest.mark.parametrize(
    ("said", "score"),
    [("10040", 1), ("In line 3 it is <10040>.", 1), ("10040, I think, of 50", 0), ("none", 0), ("010040", 1), ("", 0)],
)
def test_the_last_number_counts(file, said, score):
    task = LongEval(file)
    assert task.scores(task.samples(Words(), 2000, 0)[0], Answer(said, []))["score"] == score


def test_more_questions_about_one_record(file):
    samples = LongEval(file, tests=1, questions=6).samples(Words(), 400, 0)
    (text,) = {sample.prompt[: sample.shared] for sample in samples}
    assert samples[0].prompt == LongEval(file, tests=1).samples(Words(), 400, 0)[0].prompt and len(samples) == 6
    for sample in samples:
        name, answer = sample.prompt[sample.shared :].split("in line ")[1].split("?")[0], sample.answers[0]
        assert f"line {name}: REGISTER_CONTENT is <{answer}>\n" in text


def test_errors(file, tmp_path):
    with pytest.raises(ValueError, match=r"longeval-50_lines, length 60: one part and the answer need \d+ tokens"):
        LongEval(file).samples(Words(), 60, 0)
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps(CASE | {"correct_line": "line other: REGISTER_CONTENT is <1>\n"}))
    with pytest.raises(ValueError, match=r"other.jsonl, case 1: 'correct_line' is not a line of 'prompt'"):
        LongEval(str(other)).samples(Words(), 2000, 0)
