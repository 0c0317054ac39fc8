"""Several questions on one text: it is read once, and answers are those of questions on their own."""

import json
from dataclasses import replace

import numpy as np
import pytest
from llamas import new

from pylongctx.eval.executors import units_of
from pylongctx.eval.leval import LEval
from pylongctx.eval.passkey import Passkey
from pylongctx.eval.perplexity import Perplexity
from pylongctx.eval.runner import Cell, Results, digest, make_samples, run
from pylongctx.eval.task import ModelVocabulary, PrefixReader, Sample, beginning_of, by_text, prompt_hash

LENGTH = 640
N_ASKED = 4
METHODS = ["none", "full", "longheads,window=128", "window,window=124"]
EVICTS = ["tova,budget=256", "h2o,budget=256"]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """Return questions about two texts, that of the first one twice in the file."""
    texts = [f"The pass key is {key}. Remember it. " + "It rained in the hills again. " * 90 for key in (4127, 9805)]
    file = tmp_path_factory.mktemp("data") / "quality.jsonl"
    asked = ["What is the pass key?", "Which key is it that you were told?"]
    rows = [{"input": text, "instructions": asked, "outputs": ["A", "B"]} for text in (*texts, texts[0])]
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return LEval(str(file), max_tokens=8)


@pytest.fixture(scope="module")
def cell(embedded_f32, task):
    options = {"n_threads": 1, "n_threads_batch": 1, "n_ubatch": 64}
    return Cell(str(embedded_f32), "full", task, LENGTH, type_k="f32", type_v="f32", options=options)


def said(records):
    return {record["id"]: record["answer"] for record in records}


@pytest.mark.parametrize("method", METHODS)
def test_a_text_is_read_once_and_the_answers_are_the_same(cell, method):
    alone = list(run(replace(cell, method=method)))
    together = list(run(replace(cell, method=method, reuse=True)))
    assert said(together) == said(alone)
    assert [record["id"].split("-")[1] for record in together] == ["0", "0", "2", "2", "1", "1"]
    assert all(record["tokens_read"] == record["n_tokens"] - 8 for record in alone)
    read = [record["tokens_read"] for record in together]
    assert min(read[0], read[4]) > LENGTH // 2
    assert max(*read[1:4], read[5]) < LENGTH // 4
    hashes = {record["id"]: record["prompt_hash"] for record in together}
    assert hashes == {record["id"]: record["prompt_hash"] for record in alone}


@pytest.mark.parametrize("method", EVICTS)
def test_what_a_rule_evicted_for_a_question_is_back_for_the_next_one(cell, method):
    """Records do not depend on which questions were asked before."""
    shared = replace(cell, method=method, reuse=True)
    samples = make_samples(shared)
    records = list(run(shared, samples))
    assert max(record["tokens_read"] for record in records[1:4]) < LENGTH // 4
    last = {digest(shared, sample) for sample in samples if sample.id != records[3]["id"]}
    (alone,) = run(shared, samples, last)
    for name in ("answer", "kv_bytes", "n_tokens", "prompt_hash", "digest"):
        assert alone[name] == records[3][name]


def test_a_text_is_compressed_before_its_questions(cell):
    whole = list(run(replace(cell, method="kvzip", reuse=True)))
    records = list(run(replace(cell, method="kvzip", reuse=True, compress=0.4)))
    assert [record["id"] for record in records] == [record["id"] for record in whole]
    for record, other in zip(records, whole, strict=True):
        assert 0.3 < record["kv_bytes"] / other["kv_bytes"] < 0.75
        assert record["compress"] == 0.4 and "compress" not in other
        assert record["digest"] != other["digest"]


def test_a_file_of_records_is_continued(cell, tmp_path):
    shared = replace(cell, reuse=True)
    results, samples = Results(str(tmp_path / "out.jsonl")), make_samples(shared)
    for record, _ in zip(run(shared, samples), range(3), strict=False):
        results.add(record)
    rest = list(run(shared, samples, Results(str(tmp_path / "out.jsonl")).records))
    for record in rest:
        results.add(record)
    assert len(rest) == len(samples) - 3
    assert [record["id"] for record in results.of(shared, samples)] == [sample.id for sample in samples]
    assert results.of(replace(shared, reuse=False), samples) == []


def test_units_keep_the_questions_on_a_text_together(cell):
    shared = replace(cell, reuse=True)
    samples = make_samples(shared)
    assert [len(unit.todo) for unit in units_of(shared, samples, ())] == [4, 2]
    assert [len(unit.todo) for unit in units_of(shared, samples, {digest(shared, samples[0])})] == [3, 2]
    assert [len(unit.todo) for unit in units_of(cell, samples, ())] == [6]


def test_samples_without_a_shared_text_stay_alone():
    tokens = np.array([1, 2, 3], np.int32)
    samples = [Sample("0", "same"), Sample("1", "same"), Sample("2", tokens, shared=2), Sample("3", tokens, shared=2)]
    assert [[sample.id for sample in group] for group in by_text(samples)] == [["0"], ["1"], ["2", "3"]]


def test_a_beginning_leaves_a_token_to_evaluate():
    prompt = np.array([1, 2, 3], np.int32)
    assert beginning_of(prompt, prompt).tolist() == [1, 2]
    assert beginning_of(prompt, np.array([4], np.int32)).tolist() == []


def test_the_beginning_of_a_chat_ends_before_the_question(embedded_model, task):
    with new(embedded_model, n_ctx=LENGTH, chat_format="chatml") as llm:
        vocabulary = ModelVocabulary(llm, chat=True)
        first, second = task.samples(vocabulary, LENGTH, 0)[:2]
        found = [
            beginning_of(vocabulary.tokens(s), vocabulary.tokens(replace(s, prompt=s.prompt[: s.shared], prefix="")))
            for s in (first, second)
        ]
        assert found[0].tolist() == found[1].tolist()
        assert llm.detokenize(found[0].tolist()).decode().endswith(first.prompt[: first.shared][-40:])
        reader, before = PrefixReader(llm), llm.session.n_evaluated
        for beginning in found:
            reader.hold(beginning)
        assert llm.session.n_evaluated - before == len(found[0]) == llm.n_tokens


def test_prompts_are_known_by_their_hash():
    assert prompt_hash(np.array([1, 2], np.int32)) == prompt_hash(np.array([1, 2], ">i4"))
    assert prompt_hash(np.array([1, 2], np.int32)) != prompt_hash(np.array([2, 1], np.int32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": Perplexity("a.txt"), "reuse": True}, "'perplexity' asks no questions .*: leave reuse out"),
        ({"options": {"n_parallel": 2}, "reuse": True}, "answered one by one: leave n_parallel or reuse out"),
        ({"compress": 0.5, "method": "kvzip"}, "compress needs reuse"),
        ({"compress": 0.5, "reuse": True}, "rules kvzip and snapkv compress"),
        (
            {"compress": 0.5, "reuse": True, "method": "kvzip"},
            "sample 0 of 'passkey' has no end that asks about a text",
        ),
    ],
)
def test_errors(cell, changes, message):
    with pytest.raises(ValueError, match=message):
        list(run(replace(cell, **{"task": Passkey(tests=1)} | changes), [Sample("0", "x")]))


def test_compress_is_a_share(cell):
    with pytest.raises(ValueError, match="compress must be above 0 and at most 1"):
        replace(cell, reuse=True, compress=1.5)
