"""Chunks as a task: what a record holds of a trace, and which methods have nothing to show."""

import json
from itertools import islice

import numpy as np
import pytest
from llamas import new
from vocabulary import Words

from pylongctx.attention import chunks_of, cover_rate, uniformity
from pylongctx.eval import runner
from pylongctx.eval.chunks import Chunks, means, pack, unpack
from pylongctx.eval.passkey import Passkey
from pylongctx.eval.runner import Cell, make_samples, run
from pylongctx.methods import METHODS, parse

METHOD = "longheads,chunk_size=16,window=128"
LENGTH = 300


@pytest.fixture(scope="module")
def job(embedded_model) -> Cell:
    return Cell(embedded_model, METHOD, Chunks(tests=2, depths=(0.25, 0.5)), LENGTH, options={"n_threads": 1})


@pytest.fixture(scope="module")
def records(job):
    return [json.loads(json.dumps(record)) for record in run(job)]


def test_the_questions_are_those_of_passkey():
    words, depths = Words(), (0.25, 0.5)
    ours, theirs = (kind(tests=2, depths=depths).samples(words, LENGTH, 3) for kind in (Chunks, Passkey))
    assert [(a.id, a.answers, a.facts) for a in ours] == [(b.id, b.answers, b.facts) for b in theirs]
    assert all((a.prompt == b.prompt).all() for a, b in zip(ours, theirs, strict=True))


def test_a_record_is_the_trace_of_the_answer(job, records, embedded_model):
    sample, record = make_samples(job)[1], records[1]
    start = len(sample.prompt) - 1
    with new(embedded_model, method=METHOD, n_threads=1, n_ctx=LENGTH, n_ubatch=512) as llm:
        with llm.trace(start) as trace:
            answer = list(islice(llm.generate(sample.prompt.tolist(), temp=0.0), sample.max_tokens))
        assert llm.detokenize(answer).decode() == record["answer"]
    reads, forced = unpack(record)
    np.testing.assert_array_equal(reads, trace.reads())
    np.testing.assert_array_equal(forced, trace.forced().sum(axis=0))
    assert record["positions"] == trace.positions.tolist()
    assert record["answer_chunks"] == list(chunks_of(*record["needle"], 16))
    assert record["all"]["gini"] == uniformity(trace)
    assert record["first"]["cover_rate"] == cover_rate(trace.query(0))


def test_a_record_tells_whether_the_answer_is_right(records):
    for record in records:
        assert record["right"] == (record["answer"].strip() == record["answers"][0])
        assert record["method"].startswith(METHOD)


def test_counts_are_packed_without_zeros():
    reads = np.array([[[2, 0, 1], [0, 0, 0]], [[0, 3, 0], [1, 1, 1]]])
    packed = pack(reads)
    assert packed == [[[[0, 2], [2, 1]], []], [[[1, 3]], [[0, 1], [1, 1], [2, 1]]]]
    np.testing.assert_array_equal(unpack({"reads": packed, "forced": [2, 0, 1]})[0], reads)


def test_means_leave_out_what_says_nothing():
    numbers = [{"gini": 0.25, "hit": None}, {"gini": 0.75, "hit": 1.0}]
    assert means(numbers) == {"gini": 0.5, "hit": 1.0}
    assert means(numbers[:1]) == {"gini": 0.25}


@pytest.mark.parametrize("spec", [*METHODS, "longheads+corm", "dca+corm"])
def test_only_methods_that_choose_chunks_have_some_to_show(spec):
    assert bool(Chunks().refusal(parse(spec))) == ("longheads" not in spec)


def test_a_method_without_chunks_is_refused_before_a_model_is_opened(embedded_model, monkeypatch):
    job = Cell(embedded_model, "window", Chunks(), LENGTH)
    samples = make_samples(job)
    monkeypatch.setattr(runner, "Llama", None)
    with pytest.raises(ValueError, match=r"what longheads chooses, and 'window' .* give the task its own methods = \["):
        next(run(job, samples))
