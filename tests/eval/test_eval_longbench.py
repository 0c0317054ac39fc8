"""LongBench: prompts, truncation and numbers, on files made here."""

import hashlib
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vocabulary import Words, total

from pylongctx.eval.longbench import LongBench, cut_middle, tasks
from pylongctx.eval.task import Answer

LINE = {
    "input": "Who came?",
    "context": " ".join(f"word{i}" for i in range(3000)),
    "answers": ["the cat", "a dog"],
    "length": 3000,
    "all_classes": None,
}


@pytest.fixture
def folder(tmp_path):
    """Return a folder with a file for every task: two lines of different length."""
    for name in tasks():
        classes = ["cat", "dog"] if name in ("trec", "lsht") else None
        lines = [LINE | {"all_classes": classes}, LINE | {"context": "short", "length": 8100, "all_classes": classes}]
        for suffix in ("", "_e"):
            (tmp_path / f"{name}{suffix}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(tmp_path)


def test_prompts_are_the_published_ones():
    prompts = {name: task["prompt"] for name, task in tasks().items()}
    digest = hashlib.sha256(json.dumps(prompts, sort_keys=True).encode()).hexdigest()
    assert digest == "2dda2560eb9b520bde3515cfa4107f6fb73cb1e2e9f994ecbb9dfd11b5a247ba"


def test_facts_of_the_tasks():
    found = tasks()
    assert len(found) == 21
    assert sum(task["e"] for task in found.values()) == 13
    plain = {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}
    assert {name for name, task in found.items() if not task["chat"]} == plain
    assert {name for name, task in found.items() if task["first_line"]} == {"trec", "triviaqa", "samsum", "lsht"}
    longest = {"gov_report", "qmsum", "multi_news", "vcsum"}
    assert {name for name, task in found.items() if task["max_gen"] == 512} == longest


@pytest.mark.parametrize(
    ("n_words", "n", "n_bos", "left"),
    [
        (10, 10, 0, "w0 w1 w2 w3 w4 w5 w6 w7 w8 w9"),
        (10, 9, 0, "w0 w1 w2 w3 w6 w7 w8 w9"),
        (10, 10, 1, "w0 w1 w2 w3 w5 w6 w7 w8 w9"),  # BOS is one of the first five
        (10, 4, 0, "w0 w1 w8 w9"),
        (3, 2, 0, "w0 w2"),
    ],
)
def test_the_middle_is_cut(n_words, n, n_bos, left):
    text = " ".join(f"w{i}" for i in range(n_words))
    assert cut_middle(Words(n_bos), text, n) == left


@given(st.integers(0, 60), st.integers(2, 70), st.integers(0, 1))
def test_what_is_left_are_both_ends(n_words, n, n_bos):
    words, text = Words(n_bos), " ".join(f"w{i}" for i in range(n_words))
    left = cut_middle(words, text, n)
    assert n_bos + len(words.tokenize(left)) <= n
    if len(words.tokenize(text)) + n_bos <= n:
        assert left == text
    else:
        assert text.startswith(words.detokenize(words.tokenize(left)[: n // 2 - n_bos]))
        assert text.endswith(words.detokenize(words.tokenize(left)[-(n // 2) :]))


@pytest.mark.parametrize("name", tasks())
def test_prompts_fit_with_their_answers(folder, name):
    words = Words(n_bos=1)
    long, short = LongBench(name, folder).samples(words, 700, 0)
    assert 700 - 25 <= total(words, long) <= 700
    prompt = tasks()[name]["prompt"]
    assert short.prompt == prompt.format(context="short", input="Who came?")
    assert short.prompt[: short.shared] == prompt.split("{context}")[0] + "short"
    assert long.prompt[long.shared :] == short.prompt[short.shared :]
    assert long.chat == (name not in ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"))
    assert long.stop == (("\n",) if name == "samsum" else ())
    assert long.answers == ("the cat", "a dog")


def test_a_longest_prompt_may_be_given(folder):
    words = Words(n_bos=1)
    task = LongBench("qasper", folder, max_length=500)
    found = task.samples(words, 512, 0)
    assert len(words.tokens(found[0])) == 500
    assert task.n_ctx(words, found, 512) == 500 + 128


@pytest.mark.parametrize(
    ("name", "answer", "score"),
    [
        ("hotpotqa", " The CAT.", 1.0),
        ("hotpotqa", "dog\nand more words here", 1 / 3),
        ("triviaqa", "\ndog\nand more words here", 1.0),  # its first line only
        ("trec", "cat", 1.0),
    ],
)
def test_scores(folder, name, answer, score):
    task = LongBench(name, folder)
    sample = task.samples(Words(), 700, 0)[0]
    if name == "trec":
        sample = replace(sample, answers=("cat",))
    assert task.scores(sample, Answer(answer, []))["score"] == pytest.approx(score, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "wanted", "answer", "score"),
    [  # the published scorers: of the numbers in the answer, the share that is the wanted one
        ("passage_count", "3", "3", 1.0),
        ("passage_count", "3", "There are 3 unique paragraphs out of 13.", 0.5),
        ("passage_count", "3", "13", 0.0),
        ("passage_count", "3", "3.0", 0.5),
        ("passage_count", "3", "three", 0.0),
        ("passage_retrieval_en", "Paragraph 3", "Paragraph 3", 1.0),
        ("passage_retrieval_en", "Paragraph 3", "3", 1.0),
        ("passage_retrieval_en", "Paragraph 3", "Paragraph 3\nParagraph 4\nParagraph 5", 1 / 3),
        ("passage_retrieval_en", "Paragraph 3", "Paragraph 30", 0.0),
        ("passage_retrieval_en", "Paragraph 3", "Paragraph three", 0.0),
        ("passage_retrieval_zh", "\u6bb5\u843d12", "\u6bb5\u843d12", 1.0),
        ("passage_retrieval_zh", "\u6bb5\u843d12", "\u6bb5\u843d1\uff0c\u6bb5\u843d12", 0.5),
    ],
)
def test_scores_of_the_synthetic_tasks(folder, name, wanted, answer, score):
    task = LongBench(name, folder)
    sample = replace(task.samples(Words(), 700, 0)[0], answers=(wanted,))
    assert task.scores(sample, Answer(answer, []))["score"] == pytest.approx(score, abs=1e-6)


def test_longbench_e_is_by_length():
    records = [{"score": score, "words": n} for score, n in ((1, 3999), (0, 4000), (0.5, 7999), (1, 8000), (0, 20000))]
    summary = LongBench("qasper", e=True).summary(records)
    assert summary == {"score": 0.5, "0-4k": 1, "4-8k": 0.25, "8k+": 0.5}
    assert LongBench("qasper").summary(records) == {"score": 0.5}


def test_longbench_e_reads_its_own_files(folder):
    plain, e = (LongBench("trec", folder, e=e).samples(Words(), 700, 0) for e in (False, True))
    assert {sample.id for sample in plain}.isdisjoint(sample.id for sample in e)


@pytest.mark.parametrize(
    ("fields", "length", "message"),
    [
        ({"name": "poetry"}, 700, "LongBench has no task 'poetry'; available: narrativeqa, qasper"),
        ({"name": "narrativeqa", "e": True}, 700, "LongBench-E has no task 'narrativeqa'"),
        ({"name": "trec", "data": "nowhere"}, 700, "--data is a folder with LongBench's .jsonl files"),
        ({"name": "gov_report"}, 500, "the answer alone may have 512 tokens"),
    ],
)
def test_errors(folder, fields, length, message):
    with pytest.raises(ValueError, match=message):
        LongBench(**{"data": folder} | fields).samples(Words(), length, 0)
