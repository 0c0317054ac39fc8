"""Key-value retrieval: the published prompt, pairs that leave where they do not fit, and the score."""

import gzip
import json

import pytest
from vocabulary import Words, total

from pylongctx.eval.retrieval import KeyValue
from pylongctx.eval.task import Answer

pytestmark = pytest.mark.check

PAIRS = [[f"key{i}", f"value{i}"] for i in range(40)]
CASE = {"ordered_kv_records": PAIRS, "key": "key30", "value": "value30"}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "kv-40.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(CASE) + "\n" for _ in range(2)).encode()))
    return str(path)


def test_the_prompt_is_the_published_one(file):
    first, second = KeyValue(file, max_tokens=10).samples(Words(), 2000, 0)
    assert first.prompt == second.prompt
    lines = first.prompt.split("\n")
    assert lines[:4] == [
        "Extract the value corresponding to the specified key in the JSON object below.",
        "",
        "JSON data:",
        '{"key0": "value0",',
    ]
    assert lines[4] == ' "key1": "value1",'
    assert lines[-4:] == [' "key39": "value39"}', "", 'Key: "key30"', "Corresponding value:"]
    assert (first.answers, first.facts) == (("value30",), {"pairs": 40, "pairs_of_case": 40, "place": 30})
    assert KeyValue(file).samples(Words(), 2000, 0)[0].max_tokens == 100


@pytest.mark.parametrize("length", [60, 150, 300, 340])
@pytest.mark.parametrize("place", [None, 0, 39])
def test_pairs_leave_where_they_do_not_fit(file, length, place):
    words, at = Words(n_bos=1), 30 if place is None else place
    sample = KeyValue(file, 1, 10, place).samples(words, length, 0)[0]
    found = json.loads(sample.prompt.split("JSON data:\n")[1].split("\n\nKey")[0])
    n = len(found)
    assert total(words, sample) <= length < total(words, sample) + 18  # a pair has 9 tokens
    assert list(found)[sample.facts["place"]] == "key30"
    assert sample.facts["place"] == pytest.approx(at * (n - 1) / 39, abs=1)
    assert (sample.facts["pairs"], sample.facts["pairs_of_case"]) == (n, 40)


def test_more_questions_about_one_object(file):
    samples = KeyValue(file, tests=1, questions=5).samples(Words(), 300, 0)
    (text,) = {sample.prompt[: sample.shared] for sample in samples}
    pairs = json.loads(text.split("JSON data:\n")[1].split("\n\nKey")[0])
    keys = [sample.prompt[sample.shared :].split('"')[0] for sample in samples]
    assert keys[0] == "key30" and len(set(keys)) == 5
    assert [sample.answers for sample in samples] == [(pairs[key],) for key in keys]


def test_the_value_anywhere_is_right(file):
    task = KeyValue(file)
    sample = task.samples(Words(), 2000, 0)[0]
    said = (' "VALUE30".', "value3", "")
    assert [task.scores(sample, Answer(text, []))["score"] for text in said] == [1, 0, 0]


def test_errors(file, tmp_path):
    with pytest.raises(ValueError, match="case 1 has 40 pairs: place must be"):
        KeyValue(file, place=40).samples(Words(), 2000, 0)
    with pytest.raises(ValueError, match=r"kv-40, length 40: one part and the answer need \d+ tokens"):
        KeyValue(file).samples(Words(), 40, 0)
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps(CASE | {"value": "x"}))
    with pytest.raises(ValueError, match=r"other.jsonl, case 1: the pair of 'key' and 'value' is not in"):
        KeyValue(str(other)).samples(Words(), 2000, 0)
