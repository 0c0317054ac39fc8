"""Needles: haystacks from a seed, gkamradt's grid and insertion, scores without a model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vocabulary import Words, total

from pylongctx.eval.haystack import load_text, sentences, synthetic_text
from pylongctx.eval.needle import PASSKEY, Needle, context_lengths, depth_grid, insertion_point
from pylongctx.eval.task import Answer

SANDWICH = "eat a sandwich and sit in Dolores Park on a sunny day"


@pytest.fixture
def words():
    return Words(n_bos=1)


def test_a_synthetic_text_follows_from_its_seed():
    assert synthetic_text(3000, 1) == synthetic_text(3000, 1) != synthetic_text(3000, 2)
    assert synthetic_text(9000, 1).startswith(synthetic_text(3000, 1))
    assert len(synthetic_text(3000, 1)) >= 3000
    assert not any(c.isdigit() for c in synthetic_text(9000, 1))


def test_sentences_of_a_synthetic_text_differ():
    found = sentences(synthetic_text(20000, 0))
    assert len(set(found)) > 0.99 * len(found)


def test_texts_come_from_files_and_folders(tmp_path):
    (tmp_path / "b.txt").write_text("Second.\n")
    (tmp_path / "a.txt").write_text("First.")
    assert load_text(str(tmp_path), 1).split() == ["First.", "Second."]
    assert load_text(str(tmp_path / "a.txt"), 20).count("First.") == 3
    with pytest.raises(ValueError, match="neither 'synthetic' nor a text file nor a folder"):
        load_text(str(tmp_path / "c.txt"), 20)


def test_sentences_end_at_marks():
    text = 'He came. "Did he?" she asked. It was 3.5 m. (Yes!) No'
    assert sentences(text) == ["He came.", '"Did he?" she asked.', "It was 3.5 m.", "(Yes!)", "No"]


@given(st.integers(0, 100), st.lists(st.sampled_from([" a", ".", " Mr", "?", " b"]), max_size=40))
def test_a_needle_goes_to_the_end_of_a_sentence_before_its_depth(depth, pieces):
    words = Words()
    tokens = words.tokenize("".join(pieces))
    at = insertion_point(words, tokens, depth)
    wanted = int(len(tokens) * depth / 100)
    if depth == 100:
        assert at == len(tokens)
    else:
        assert at <= wanted
        assert at == 0 or words.detokenize(tokens[at - 1 : at]).endswith(".")
        assert not any(words.detokenize([token]).endswith(".") for token in tokens[at:wanted])


@pytest.mark.parametrize("length", [300, 511, 2000])
def test_samples_keep_the_buffer_and_hold_the_needle(words, length):
    task = Needle((0.0, 40.0, 100.0))
    for sample in task.samples(words, length, 0):
        assert sample.prompt.count(SANDWICH) == 1
        assert total(words, sample) <= length
        context, question = sample.prompt[: sample.shared], sample.prompt[sample.shared :]
        assert context.endswith("\n\n") and question.startswith("Question: ")
        assert abs(len(words.tokenize(context[:-2])) - (length - 200)) <= 1  # newlines join where parts meet


def test_a_haystack_is_as_long_as_it_must_be(words):
    words.tokenize = lambda text: [1] * (len(text) // 50)
    words.detokenize = lambda tokens: "." * len(tokens)
    assert len(Needle()._context(words, 777, 0)) == 777


def test_the_needle_stands_at_its_depth(words):
    deep = {sample.facts["depth_percent"]: sample for sample in Needle((0.0, 50.0, 100.0)).samples(words, 3000, 0)}
    assert deep[0].prompt.startswith("\nThe best thing")
    assert deep[100].prompt.split("\n\nQuestion")[0].endswith("sunny day.\n")
    before = len(words.tokenize(deep[50].prompt.split("\nThe best thing")[0]))
    assert 0.48 * 2800 < before <= 0.5 * 2800
    assert deep[50].prompt.split("\nThe best thing")[0].endswith(".")


def test_a_pass_key_may_be_the_needle(words):
    samples = Needle((10.0, 20.0), tests=2, **PASSKEY).samples(words, 500, 0)
    keys = [sample.answers[0] for sample in samples]
    assert len(set(keys)) == 4
    for key, sample in zip(keys, samples, strict=True):
        assert sample.prompt.count(f"The pass key is {key}. Remember it. {key} is the pass key.") == 1
        assert Needle(**PASSKEY).scores(sample, Answer(f" {key}.", []))["score"] == 1


def test_scores_are_of_words(words):
    sample = Needle((50.0,)).samples(words, 500, 0)[0]
    assert Needle().scores(sample, Answer(f" To {SANDWICH}.", [])) == {
        "score": 10 / 11,  # "day." is not "day"
        "exact": 0,
        "match": 1,
        "overlap": pytest.approx(10 / 11, abs=1e-4),
    } | {"score": pytest.approx(10 / 11, abs=1e-4)}
    assert Needle(scorer="exact").scores(sample, Answer(f"{SANDWICH}!", []))["score"] == 1


@pytest.mark.parametrize("fields", [{}, PASSKEY])
@pytest.mark.parametrize("n", [1, 4, 8])
def test_decoys_are_of_the_same_form_and_say_something_else(words, fields, n):
    task, plain = Needle((30.0,), tests=3, decoys=n, **fields), Needle((30.0,), tests=3, **fields)
    assert task.name == f"needle-{n}-decoys"
    for sample, other in zip(task.samples(words, 1000, 0), plain.samples(words, 1000, 0), strict=True):
        assert total(words, sample) <= 1000
        decoys = sample.facts["decoys"]
        assert len({*decoys, *sample.answers}) == n + 1
        assert all(said in sample.prompt for said in (*decoys, *sample.answers))
        assert sample.answers == other.answers and "decoys" not in other.facts
        at = len(words.tokenize(sample.prompt.split(task.needle.format(key=sample.answers[0]))[0]))
        assert sample.facts["needle_token"] - 1 == pytest.approx(at, abs=n)  # spaces join where parts meet
    again = task.samples(words, 1000, 0)
    assert [s.prompt for s in again] == [s.prompt for s in task.samples(words, 1000, 0)]


def test_an_answer_with_what_a_decoy_says_is_wrong(words):
    for fields in ({}, PASSKEY):
        task = Needle((30.0,), decoys=2, **fields)
        (sample,) = task.samples(words, 1000, 0)
        right, decoy = sample.answers[0], sample.facts["decoys"][1]
        said = (right, decoy, f"{right} or {decoy}", f"{decoy} or {right}", "")
        scores = [task.scores(sample, Answer(text, []))["match"] for text in said]
        assert scores == [1, 0, 0, 0, 0]
        assert [task.scores(sample, Answer(text, []))["score"] for text in (right, decoy)] == [1, 0]


def test_the_summary_is_by_depth():
    records = [{"score": s, "depth_percent": d} for s, d in ((1, 0.0), (0, 0.0), (1, 50.0))]
    assert Needle().summary(records) == {"score": 2 / 3, "depth 0": 0.5, "depth 50": 1}


def test_grids_are_gkamradts():
    assert context_lengths(1000, 16000, 35)[:3] == [1000, 1441, 1882]
    assert depth_grid(0, 100, 35, "linear")[:4] == (0, 3, 6, 9)
    sigmoid = depth_grid(0, 100, 5, "sigmoid")
    assert sigmoid == (0, 7.586, 50, 92.414, 100)
    with pytest.raises(ValueError, match="'linear' or 'sigmoid'"):
        depth_grid(0, 100, 5, "random")


@pytest.mark.parametrize(
    ("fields", "length", "message"),
    [
        ({"scorer": "judge"}, 500, "unknown scorer 'judge'; available: overlap, match"),
        ({"depth_percents": (101.0,)}, 500, "from 0 to 100"),
        ({"decoys": 9}, 500, "decoys must be from 0 to 8, the number of decoy_texts"),
        ({"final_context_length_buffer": 10}, 500, "enlarge --final-context-length-buffer"),
        ({}, 210, "make --final-context-length-buffer smaller"),
    ],
)
def test_errors(words, fields, length, message):
    with pytest.raises(ValueError, match=message):
        Needle(**fields).samples(words, length, 0)
