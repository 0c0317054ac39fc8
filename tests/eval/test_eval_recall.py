"""Facts in a text: paraphrases share no word with them, decoys have other answers, questions branch from one text."""

import re
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from llamas import new
from vocabulary import Words

from pylongctx.eval.haystack import NAMES, NUMBERS, PEOPLE, draw_facts, synthetic_text
from pylongctx.eval.perplexity import token_nll
from pylongctx.eval.recall import ASKED, Recall
from pylongctx.eval.report.records import measure
from pylongctx.eval.runner import Cell, digest, run
from pylongctx.eval.task import ModelVocabulary

LENGTH = 700
# words without a meaning of their own, which a question and a fact may share
EMPTY = {*"a an and any at be been by do for from has have in is it last made my next of on once or person".split(),
         *"right six that the to was what when which who with would years".split()}  # fmt: skip


def content(text):
    """Return the words with a meaning, cut to five letters: "sailing" and "sail" count as the same."""
    return {word[:5] for word in re.findall(r"[a-z]+", text.lower()) if word not in EMPTY}


@pytest.fixture
def words():
    return Words(n_bos=1)


# ---- facts ----


@pytest.mark.parametrize("fact", PEOPLE, ids=lambda fact: fact.right)
def test_a_paraphrase_shares_no_word_with_what_it_asks_for(fact):
    stated = fact.statement.format(what=fact.right, answer="")
    assert content(stated) & content(fact.literal.format(what=fact.right))
    assert not content(stated) & content(fact.paraphrase)


@pytest.mark.parametrize("fact", [*NUMBERS, *PEOPLE], ids=lambda fact: fact.literal[:24])
def test_similar_sentences_differ_from_the_fact_in_one_place(fact):
    others = {fact.statement.format(what=what, answer="x") for what in fact.others}
    assert len(others) == len(fact.others) >= 4
    assert fact.right not in fact.others
    assert "{what}" in fact.literal


def test_no_novel_name_is_part_of_another():
    assert not [(a, b) for a in NAMES for b in NAMES if a != b and a in b]


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("n_decoys", [0, 1, 3])
def test_every_answer_is_stated_once(asked, n_decoys):
    facts = draw_facts(5, asked, n_decoys, Random(n_decoys))
    sentences = [sentence for fact in facts for sentence in (fact.text, *fact.decoys)]
    assert len({fact.question for fact in facts}) == 5
    assert len(sentences) == 5 * (1 + n_decoys)
    for fact in facts:
        assert [sentence for sentence in sentences if fact.answer in sentence] == [fact.text]
        assert fact.answer not in fact.question + fact.prefix


def test_facts_come_to_an_end():
    assert len(draw_facts(len(PEOPLE), "paraphrase", 0, Random(0))) == len(PEOPLE)
    for n, n_decoys in ((len(PEOPLE) + 1, 0), (1, 5), (8, 4)):
        with pytest.raises(ValueError, match=f"ask for fewer than {n} questions with {n_decoys} decoys"):
            draw_facts(n, "literal", n_decoys, Random(0))


# ---- texts ----


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize(("length", "n"), [(500, 1), (701, 3), (2000, 5)])
def test_texts_hold_all_facts_and_leave_room_for_every_question(words, asked, length, n):
    for sample in Recall(asked, tests=2, questions=n, decoys=1).samples(words, length, 0):
        text = words.detokenize(sample.prompt)
        turns = sample.facts["turns"]
        longest = max(len(words.tokenize(turn["question"])) for turn in turns)
        assert length - 1 <= len(sample.prompt) + longest + sample.max_tokens <= length
        assert sample.prompt[0] == words.bos[0]
        for turn in turns:
            assert text.count(turn["answer"]) == (2 if asked == "number" else 1)


def test_facts_are_spread_and_the_exact_middle_is_asked_for(words):
    (sample,) = Recall(tests=1, questions=5).samples(words, 4000, 0)
    text = words.detokenize(sample.prompt)
    depths = [turn["depth_percent"] for turn in sample.facts["turns"]]
    assert depths == [10, 30, 50, 70, 90]
    for turn in sample.facts["turns"]:
        at = len(words.tokenize(text[: text.index(turn["answer"])])) / len(sample.prompt)
        assert at == pytest.approx(turn["depth_percent"] / 100, abs=0.03)


def test_every_text_has_its_own_part_of_the_haystack(words, tmp_path):
    file = tmp_path / "novel.txt"
    file.write_text(synthetic_text(60_000, 0))
    first, second = Recall(tests=2, haystack=str(file)).samples(words, 1000, 0)
    assert words.detokenize(first.prompt[200:260]) not in words.detokenize(second.prompt)
    again = Recall(tests=2, haystack=str(file)).samples(words, 1000, 0)
    assert [a.prompt.tolist() for a in again] == [s.prompt.tolist() for s in (first, second)]


def test_several_texts_take_turns(words, tmp_path):
    names = [str(tmp_path / f"{name}.txt") for name in "ab"]
    for name in names:
        Path(name).write_text(f"{Path(name).stem}-word " * 5000)
    samples = Recall(tests=3, haystack=tuple(names)).samples(words, 1000, 0)
    assert [sample.facts["haystack"] for sample in samples] == ["a", "b", "a"]
    for sample in samples:
        text = words.detokenize(sample.prompt)
        assert [f"{name}-word" in text for name in "ab"] == [sample.facts["haystack"] == name for name in "ab"]


@pytest.mark.parametrize(
    ("fields", "length", "message"),
    [
        ({"haystack": ()}, LENGTH, "haystack names no text"),
        ({"asked": "riddle"}, LENGTH, "not asked for as 'riddle'; available: number, literal, paraphrase"),
        ({"questions": 0}, LENGTH, "at least 1"),
        ({"decoys": -1}, LENGTH, "at least 0"),
        ({"compress": 1.5}, LENGTH, "compress must be above 0 and at most 1"),
        ({}, 150, "facts, questions and what is scored need"),
        ({"scored": 600}, LENGTH, "facts, questions and what is scored need"),
    ],
)
def test_errors(words, fields, length, message):
    with pytest.raises(ValueError, match=message):
        Recall(**fields).samples(words, length, 0)


def test_a_template_has_no_place(embedded_model):
    with (
        new(embedded_model, vocab_only=True, chat_format="chatml") as chatty,
        pytest.raises(ValueError, match="leave --chat out"),
    ):
        Recall().samples(ModelVocabulary(chatty, chat=True), LENGTH, 0)


# ---- answers ----


def one(embedded_model, method, **fields):
    task = Recall(tests=1, questions=3, **fields)
    cell = Cell(
        str(embedded_model), method, task, LENGTH, options={"n_threads": 1, "n_threads_batch": 1, "n_ubatch": 64}
    )
    (record,) = run(cell)
    return task, record


@pytest.mark.parametrize("method", ["none", "full", "longheads,window=128", "window,window=124", "tova,budget=256"])
def test_the_text_is_read_once_and_answers_are_those_of_a_fresh_prefill(embedded_f32, method):
    task, record = one(embedded_f32, method, fresh=3)
    questions = record["n_evaluated"] - record["n_tokens"]
    assert questions < LENGTH // 2  # three that each read the text would take more than 1400
    assert (record["n_fresh"], record["n_same"]) == (3, 3)
    assert task.summary([record])["same"] == 1


def test_a_text_is_compressed_before_the_questions(embedded_model):
    """The window has room for a replay, and what is held at the end is less than half of the text."""
    task, record = one(embedded_model, "kvzip", compress=0.4, fresh=3)
    assert task.name == "recall-compressed-0.4"
    assert [turn["answer"] for turn in record["turns"]] == [
        turn["answer"] for turn in one(embedded_model, "full")[1]["turns"]
    ]
    assert record["n_fresh"] == 3
    assert 0.4 < record["kv_bytes"] / record["kv_full_bytes"] < 0.6
    with pytest.raises(ValueError, match="use --method kvzip"):
        one(embedded_model, "tova,budget=256", compress=0.4)


def test_the_model_of_keys_recalls_numbers_with_chunks(embedded_model):
    task, record = one(embedded_model, "longheads,window=256")
    assert record["score"] == task.summary([record])["score"] == 1
    assert "same" not in task.summary([record])


def test_the_perplexity_of_the_end_comes_from_the_same_reading(embedded_model):
    _, plain = one(embedded_model, "full")
    task, record = one(embedded_model, "full", scored=50)
    assert record["n_evaluated"] == plain["n_evaluated"]
    assert [turn["said"] for turn in record["turns"]] == [turn["said"] for turn in plain["turns"]]
    with new(embedded_model, method="full", n_ctx=LENGTH) as llm:
        (sample,) = task.samples(ModelVocabulary(llm), LENGTH, 0)
        assert record["nll"] == pytest.approx(token_nll(llm, sample.prompt, len(sample.prompt) - 51).sum())
    assert (record["n_scored"], measure(record)) == (50, "end of recall, stride 50")
    assert "nll" not in plain


def test_scores_are_by_depth():
    turns = [{"depth_percent": d, "right": r} for d, r in ((10.0, 1), (50.0, 0), (90.0, 1))]
    records = [{"turns": turns, "n_fresh": 2, "n_same": 1}, {"turns": turns[:2], "n_fresh": 2, "n_same": 2}]
    assert Recall().summary(records) == {"score": 3 / 5, "depth 10": 1, "depth 50": 0, "depth 90": 1, "same": 0.75}


def test_the_name_and_the_digest_tell_how_is_asked(embedded_model, words):
    tasks = [Recall(), Recall("literal"), Recall("paraphrase"), Recall(decoys=2)]
    assert [task.name for task in tasks] == ["recall", "recall-names", "recall-paraphrased", "recall-2-decoys"]
    cell, (sample,) = Cell(str(embedded_model), "full", Recall(), LENGTH), Recall(tests=1).samples(words, LENGTH, 0)
    same = replace(cell, task=Recall(tests=9))
    assert digest(cell, sample) == digest(same, sample) != digest(replace(cell, task=Recall(fresh=1)), sample)


def test_a_prompt_is_compressed_for_its_question(embedded_f32):
    """The end of each prompt asks for its fact, so a part of the entries finds most of them."""
    _, record = one(embedded_f32, "snapkv,window=32,pool=13", compress=0.3)
    assert record["kv_bytes"] < 0.5 * record["kv_full_bytes"]
    whole = one(embedded_f32, "full")[1]
    assert record["score"] >= whole["score"] - 0.34
