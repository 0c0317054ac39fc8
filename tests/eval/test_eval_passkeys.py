"""Pass keys as a task: every style's prompts, byte by byte, and what counts as found."""

import hashlib
import re

import pytest
from vocabulary import Words, total

from pylongctx.eval.passkey import GARBAGE, INTRO, STYLES, Passkey
from pylongctx.eval.task import Answer, Sample

# length, seed, key and hash of LongHeads' generate_prompt_landmark(n_garbage, seed + n_garbage)
LANDMARK = [
    (2048, 0, "658", "c3a860427ce59e7e"),
    (4096, 1, "35354", "32097dc167715234"),
    (8192, 7, "46138", "a7a91ff80eb508e6"),
    (32768, 49, "18957", "ff42c284611dce0b"),
]


def text(sample):
    return sample.prompt + sample.prefix


@pytest.fixture
def words():
    return Words()


@pytest.mark.parametrize(("length", "seed", "key", "digest"), LANDMARK)
def test_landmark_prompts_are_those_of_longheads_to_the_byte(words, length, seed, key, digest):
    sample = Passkey("landmark", tests=1).samples(words, length, seed)[0]
    assert sample.answers == (key,)
    assert sample.prompt[sample.shared :] == "What is the pass key?"
    assert hashlib.sha256(text(sample).encode()).hexdigest()[:16] == digest


def test_landmark_trials_are_seeds(words):
    trials = Passkey("landmark", tests=3).samples(words, 2048, 0)
    assert text(trials[2]) == text(Passkey("landmark", tests=1).samples(words, 2048, 2)[0])


def test_selfextend_prompts_are_lines(words):
    sample = Passkey("selfextend", tests=1, junk=3, position=2).samples(words, 100, 0)[0]
    key = sample.answers[0]
    assert re.fullmatch(r"[1-9]\d{4}", key)
    intro = INTRO.replace("memorize them", "memorize it")
    needle = f"The pass key is {key}. Remember it. {key} is the pass key."
    lines = [intro, GARBAGE, GARBAGE, needle, GARBAGE, "What is the pass key? The pass key is "]
    assert text(sample) == "\n".join(lines)
    assert sample.prompt[: sample.shared] == "\n".join([*lines[:-1], ""])
    assert sample.max_tokens == len(key)


def test_llama_cpp_prompts_are_one_line(words):
    sample = Passkey("llama.cpp", tests=1, junk=2, position=0).samples(words, 100, 3)[0]
    key = sample.answers[0]
    needle = f"The pass key is {key}. Remember it. {key} is the pass key."
    assert text(sample) == " ".join([INTRO, needle, GARBAGE, GARBAGE, "What is the pass key? The pass key is"])
    assert 1 <= int(key) <= 50000
    assert sample.max_tokens == 16


@pytest.mark.parametrize("style", ["fill", "selfextend", "llama.cpp"])
@pytest.mark.parametrize("length", [200, 333, 1000])
def test_prompts_fill_the_length(style, length):
    words = Words(n_bos=1)
    unit = {"fill": 3}.get(style, len(words.tokenize(GARBAGE)) + 1)
    for sample in Passkey(style, tests=4).samples(words, length, 0):
        assert length - unit <= total(words, sample) <= length


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("digits", [5, 8, 16, 36, 48, 64, 100])
def test_keys_have_the_digits_that_are_asked_for(words, style, digits):
    for sample in Passkey(style, tests=2, digits=digits).samples(words, 1024, 0):
        assert re.fullmatch(rf"[1-9]\d{{{digits - 1}}}", sample.answers[0])
        whole = words.detokenize(sample.prompt) if style == "fill" else sample.prompt
        assert whole.count(sample.answers[0]) == 2


@pytest.mark.parametrize("style", STYLES)
def test_the_needle_is_where_the_sample_says(style):
    words = Words(n_bos=1)
    for sample in Passkey(style, tests=4).samples(words, 700, 1):
        start, stop = sample.facts["needle"]
        key = sample.answers[0]
        found = words.detokenize(words.tokens(sample)[start:stop].tolist())
        assert found.strip() == f"The pass key is {key}. Remember it. {key} is the pass key."


def test_depths_are_taken_in_turns(words):
    samples = Passkey("selfextend", tests=3, junk=10, depths=(0.0, 0.5)).samples(words, 100, 0)
    assert [sample.facts["depth"] for sample in samples] == [0, 0.5, 0]
    before = [sample.prompt.split("The pass key is")[0].count(GARBAGE) for sample in samples]
    assert before == [0, 5, 0]


@pytest.mark.parametrize("style", STYLES)
def test_samples_follow_from_length_seed_and_trial_alone(words, style):
    few, many = Passkey(style, tests=2).samples(words, 600, 5), Passkey(style, tests=4).samples(Words(), 600, 5)
    assert [sample.id for sample in few] == [sample.id for sample in many[:2]]
    assert [sample.answers for sample in few] == [sample.answers for sample in many[:2]]
    assert len({sample.id for sample in many}) == 4
    assert Passkey(style, tests=1).samples(words, 600, 6)[0].answers != few[0].answers


@pytest.mark.parametrize(
    ("answer", "strict", "regex"),
    [
        (" 12345", True, True),
        ("12345. The", True, True),
        (" 123456", False, False),
        (" is 12345", False, True),
        ("\n12345", False, True),
        (" 1234", False, False),
        ("", False, False),
    ],
)
def test_scores(answer, strict, regex):
    sample = Sample("0", "", answers=("12345",))
    assert Passkey().scores(sample, Answer(answer, [])) == {"strict": strict, "regex": regex}


def test_the_context_grows_where_a_style_counts_characters():
    letters = Words()
    letters.tokenize = lambda text: [1] * len(text)
    task = Passkey("landmark", tests=2)
    samples = task.samples(letters, 1024, 0)
    assert task.n_ctx(letters, samples, 1024) == max(total(letters, sample) for sample in samples) > 3 * 1024


@pytest.mark.parametrize(
    ("fields", "length", "message"),
    [
        ({"style": "riddle"}, 500, "unknown style 'riddle'; available: fill, landmark"),
        ({"digits": 0}, 500, "digits must be at least 1"),
        ({"style": "landmark", "depths": (0.5,)}, 500, "landmark draws its depths itself"),
        ({"style": "landmark"}, 100, "too short"),
        ({"style": "selfextend"}, 50, "length 50 is too short"),
        ({"haystack": "missing.txt"}, 500, "neither 'sentences' nor a file"),
    ],
)
def test_errors(words, fields, length, message):
    with pytest.raises(ValueError, match=message):
        Passkey(**fields).samples(words, length, 0)
