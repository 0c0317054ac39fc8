"""Jobs: the same samples for every method, one record each, nothing twice and nothing lost."""

import itertools
import json
import pickle
from dataclasses import replace

import pytest
from llamas import new
from vocabulary import Words

from pylongctx.eval import runner
from pylongctx.eval.leval import LEval
from pylongctx.eval.longbench import LongBench
from pylongctx.eval.needle import Needle
from pylongctx.eval.passkey import Passkey
from pylongctx.eval.perplexity import Divergence, Perplexity
from pylongctx.eval.recall import Recall
from pylongctx.eval.ruler import Ruler
from pylongctx.eval.runner import Cell, Results, digest, make_samples, run
from pylongctx.eval.task import ModelVocabulary, Sample

TASKS = [
    Passkey(),
    Needle(),
    Recall(),
    Ruler("vt", 3),
    LongBench("trec", "data"),
    LEval("quality.jsonl"),
    Perplexity("a.txt"),
    Divergence("a.txt"),
]
LENGTH = 160
TIMES = ("seconds", "ttft", "prompt_per_second", "token_seconds", "peak_rss")


@pytest.fixture(scope="module")
def job(embedded_model):
    return Cell(str(embedded_model), "full", Passkey(tests=3), LENGTH, options={"n_threads": 1})


@pytest.fixture(scope="module")
def samples(job):
    return make_samples(job)


@pytest.fixture(scope="module")
def records(job, samples):
    return list(run(job, samples))


def timeless(record):
    return {key: value for key, value in record.items() if key not in TIMES}


def test_a_job_makes_one_record_per_sample(records):
    assert [record["id"] for record in records] == [f"fill-{LENGTH}-0-{i}" for i in range(3)]
    for record in records:
        assert (record["task"], record["asked"], record["method"]) == ("passkey", "full", "full")
        assert (record["type_k"], record["type_v"], record["length"], record["seed"]) == ("f16", "f16", LENGTH, 0)
        assert record["answer"].strip().isdigit()
        assert record["n_tokens"] <= LENGTH
        assert 0 < record["ttft"] <= record["seconds"]
        assert 0 < record["kv_bytes"] <= record["kv_peak_bytes"] < record["peak_rss"]
        assert record["kv_full_bytes"] > 0
        assert json.loads(json.dumps(record)) == record


def test_a_peak_that_cannot_be_reset_is_not_recorded(monkeypatch, job, samples, records):
    monkeypatch.setattr(runner, "reset_peak_memory", lambda: False)
    (record,) = run(job, samples, {record["digest"] for record in records[1:]})
    assert records[0].keys() - record.keys() == {"peak_rss"}


def test_samples_that_are_answered_together_have_the_same_answers(embedded_f32):
    cell = Cell(str(embedded_f32), "full", Passkey(tests=5), LENGTH, options={"n_threads": 1})
    one_by_one = list(run(cell))
    together = list(run(replace(cell, options={"n_threads": 1, "n_parallel": 3})))
    memory = ("kv_bytes", "kv_peak_bytes", "kv_full_bytes", "tokens_read")
    for one, other in zip(together, one_by_one, strict=True):
        assert {k: v for k, v in timeless(one).items() if k not in memory} == {
            k: v for k, v in timeless(other).items() if k not in memory
        }
        assert one["seconds"] > 0 and "ttft" not in one


def test_records_do_not_depend_on_which_samples_are_run(job, samples, records):
    alone = list(run(job, samples, {records[0]["digest"], records[2]["digest"]}))
    assert list(map(timeless, alone)) == [timeless(records[1])]


def test_nothing_is_loaded_when_all_is_done(job, samples):
    gone = replace(job, model="gone.gguf")
    assert list(run(gone, samples, {digest(gone, sample) for sample in samples})) == []


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_jobs_travel_to_other_processes(task):
    job = Cell("model.gguf", "longheads", task, 4096, options={"rope_freq_base": 1e6})
    assert pickle.loads(pickle.dumps(job)) == job


@pytest.mark.parametrize(
    "changed",
    [
        {"method": "window"},
        {"type_k": "q8_0"},
        {"type_v": "q8_0"},
        {"chat": True},
        {"rope": "ntk"},
        {"options": {"rope_freq_base": 1e6}},
    ],
)
def test_the_digest_follows_what_an_answer_depends_on(job, samples, changed):
    assert digest(replace(job, **changed), samples[0]) != digest(job, samples[0])


def test_the_digest_does_not_follow_speed(job, samples):
    assert digest(replace(job, options={"n_threads": 7, "n_ubatch": 64}), samples[0]) == digest(job, samples[0])


@pytest.mark.parametrize(
    ("task", "changed"),
    [
        (Perplexity("a.txt", "last"), {"stride": 2}),
        (Perplexity("a.txt"), {"mode": "incremental"}),
        (Needle(), {"scorer": "exact"}),
        (Divergence("a.txt"), {"base": "window"}),
    ],
)
def test_the_digest_follows_how_is_measured(job, task, changed):
    names = {digest(replace(job, task=t), Sample("0", "x")) for t in (task, replace(task, **changed))}
    assert len(names) == 2


def test_digests_of_samples_differ(job):
    fields = ({}, {"prompt": "y"}, {"id": "1"}, {"answers": ("b",)}, {"max_tokens": 2}, {"prefix": " z"})
    found = [digest(job, replace(Sample("0", "x"), **changed)) for changed in fields]
    assert len(set(found)) == len(fields)


# ---- results ----


def test_a_file_is_continued_where_it_was_cut_off(tmp_path, job, samples, records):
    file = tmp_path / "out.jsonl"
    results = Results(str(file))
    for record in records:
        results.add(record)
    whole = file.read_bytes()
    for cut in (len(whole) - 1, len(whole) - 40):
        file.write_bytes(whole[:cut])
        again = Results(str(file))
        assert again.of(job, samples) == records[:2]
        again.add(records[2])
        assert file.read_bytes() == whole


def test_results_are_in_the_order_of_the_samples(job, samples, records):
    results = Results(None)
    for record in reversed(records):
        results.add(record)
    assert results.of(job, samples) == records
    assert results.of(replace(job, method="window"), samples) == []


@pytest.mark.parametrize("line", ["no json", "[1]", '{"method": "full"}'])
def test_a_file_of_something_else_is_refused(tmp_path, line):
    (tmp_path / "other.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=r"other.jsonl, line 1, is not a record"):
        Results(str(tmp_path / "other.jsonl"))


# ---- questions ----


class Scripted:
    """A Llama that says certain words and then repeats the last one forever; "end" ends."""

    method = None
    n_evaluated = 0

    def __init__(self, text):
        self.words = Words()
        self._script = self.words.tokenize(text)
        self.session = self.model = self

    def ends_generation(self, token):
        return self.words.detokenize([token]) == " end"

    def reset(self):
        pass

    def generate(self, tokens, temp):
        assert temp == 0
        return itertools.chain(self._script, itertools.repeat(self._script[-1]))

    def piece(self, token, special=False):
        return self.words.detokenize([token]).encode()

    def tokenize(self, text, add_special, parse_special):
        return self.words.tokenize(text.decode())

    def detokenize(self, tokens, special):
        return self.words.detokenize(tokens).encode()

    def kv_usage(self):
        return self

    bytes = peak_bytes = full_bytes = 1


@pytest.mark.parametrize(
    ("said", "stop", "max_tokens", "answer", "n"),
    [
        ("one two three", (), 2, "one two", 2),
        ("one two end three", (), 9, "one two", 2),
        ("one two\nthree", ("\n",), 9, "one two", 3),
        ("one. two", (". ", "two"), 9, "one", 3),
    ],
)
def test_an_answer_ends(said, stop, max_tokens, answer, n):
    llm = Scripted(said)
    sample = Sample("0", "question", answers=("1",), max_tokens=max_tokens, stop=stop)
    record = Passkey().run(llm, llm.words, sample)
    assert (record["answer"], record["n_generated"]) == (answer, n)
    assert record["strict"] is False


# ---- vocabularies ----


@pytest.fixture(scope="module")
def chatty(embedded_model):
    with new(embedded_model, vocab_only=True, chat_format="chatml") as llm:
        yield llm


def test_a_chat_template_surrounds_the_prompt_and_precedes_the_prefix(chatty):
    vocabulary = ModelVocabulary(chatty, chat=True)
    text = chatty.detokenize(vocabulary.tokens(Sample("0", "Who?", prefix="It was")).tolist()).decode()
    assert text.strip() == "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\nIt was"
    plain = vocabulary.tokens(Sample("0", "Who?", prefix=" It was", chat=False)).tolist()
    assert plain == chatty.tokenize(b"Who? It was")
    assert vocabulary.overhead > ModelVocabulary(chatty).overhead == len(vocabulary.bos) == 1


def test_prompts_with_a_chat_template_fit(chatty):
    vocabulary = ModelVocabulary(chatty, chat=True)
    for task in (Ruler("vt", 2), Needle((50.0,)), Passkey("llama.cpp", 2)):
        for sample in task.samples(vocabulary, 1200, 0):
            assert len(vocabulary.tokens(sample)) + sample.max_tokens <= 1200


def test_a_style_without_room_for_a_template_is_refused(chatty):
    with pytest.raises(ValueError, match="the style fill counts tokens without a chat template"):
        Passkey().samples(ModelVocabulary(chatty, chat=True), 1200, 0)


def test_text_comes_back_from_its_tokens(chatty):
    vocabulary = ModelVocabulary(chatty)
    assert vocabulary.detokenize(vocabulary.tokenize("It was. \nSo.")) == "It was. \nSo."
