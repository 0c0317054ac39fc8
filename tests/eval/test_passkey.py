"""The pass-key task: prompts of the right length, the same for every method, scored right."""

import re
from random import Random

import pytest

from pylongctx import Llama
from pylongctx.eval.haystack import SENTENCES, Haystack, load_haystack, synthetic_text
from pylongctx.eval.passkey import INTRO, QUESTION, make_prompt, run_trial

HAYSTACK = load_haystack("sentences")


@pytest.fixture(scope="module")
def llm(embedded_model):
    with Llama(str(embedded_model), n_ctx=512, verbose=False) as llm:
        yield llm


def text_of(llm, prompt):
    return llm.detokenize(prompt.tokens).decode()


@pytest.mark.parametrize("length", [150, 333, 512, 1000])
def test_prompt_and_answer_fill_the_length(llm, length):
    for trial in range(5):
        prompt = make_prompt(llm.tokenize, HAYSTACK, length, trial, seed=0)
        n_tokens = len(prompt.tokens) + len(prompt.answer)
        assert length - 3 <= n_tokens <= length


def test_prompt_is_the_landmark_prompt(llm):
    prompt = make_prompt(llm.tokenize, HAYSTACK, 400, 0, seed=1, separator="newline")
    intro, before, needle, after, question = text_of(llm, prompt).split("\n")
    assert (intro, question) == (INTRO, QUESTION)
    assert needle == f"The pass key is {prompt.key}. Remember it. {prompt.key} is the pass key."
    garbage = SENTENCES * 100
    assert garbage.startswith(before)
    assert garbage.startswith(after)
    assert len(before) == int(prompt.depth * (len(before) + len(after)))


@pytest.mark.parametrize("separator", ["space", "newline"])
@pytest.mark.parametrize("length", [120, 333, 1000])
def test_the_prompt_knows_where_the_key_stands(llm, length, separator):
    for trial in range(8):
        prompt = make_prompt(llm.tokenize, HAYSTACK, length, trial, 0, separator)
        start, stop = prompt.needle
        needle = llm.detokenize(prompt.tokens[start:stop]).decode()
        assert needle.strip() == f"The pass key is {prompt.key}. Remember it. {prompt.key} is the pass key."


def test_tokens_across_the_border_of_the_needle_belong_to_it():
    def tokenize(data: bytes) -> list[int]:
        return [int.from_bytes(part, "big") for part in re.findall(rb" The|key\. |.", data, re.DOTALL)]

    prompt = make_prompt(tokenize, HAYSTACK, 900, 0, seed=0)
    start, stop = prompt.needle
    text = b"".join(token.to_bytes(5, "big").lstrip(b"\0") for token in prompt.tokens[start:stop])
    assert text.decode() == f" The pass key is {prompt.key}. Remember it. {prompt.key} is the pass key. "


def test_answer_tokens_are_the_key(llm):
    prompt = make_prompt(llm.tokenize, HAYSTACK, 300, 0, seed=0)
    assert llm.detokenize(prompt.answer) == f" {prompt.key}".encode()
    whole = llm.tokenize((text_of(llm, prompt) + f" {prompt.key}").encode())
    assert whole == prompt.tokens + prompt.answer


def test_prompts_follow_from_seed_length_and_trial(llm):
    def make(*args):
        return make_prompt(llm.tokenize, HAYSTACK, *args)

    assert make(300, 4, 7) == make(300, 4, 7)
    keys = {make(length, trial, seed).key for length in (300, 301) for trial in range(4) for seed in range(4)}
    assert len(keys) == 32
    assert all(10000 <= key <= 99999 for key in keys)
    depths = [make(200, trial, 0).depth for trial in range(30)]
    assert min(depths) < 0.3 < 0.7 < max(depths)


def test_a_book_continues_after_the_key(llm):
    book = Haystack("book", " ".join(str(i) for i in range(5000)) + "\n", continues=True)
    prompt = make_prompt(llm.tokenize, book, 400, 0, seed=0, separator="newline")
    _, before, _, after, _ = text_of(llm, prompt).split("\n")
    assert before + after in book.text


def test_a_short_text_is_repeated(llm):
    prompt = make_prompt(llm.tokenize, Haystack("short", "So it goes. ", continues=True), 400, 0, seed=0)
    assert text_of(llm, prompt).count("So it goes. ") > 20


def test_a_tokenizer_that_joins_question_and_answer():
    def tokenize(data: bytes) -> list[int]:
        return [int.from_bytes(part, "big") for part in re.findall(rb"is \d+|.", data, re.DOTALL)]

    prompt = make_prompt(tokenize, HAYSTACK, 900, 0, seed=0)
    assert prompt.answer == tokenize(f"is {prompt.key}".encode())
    assert len(prompt.tokens) + 1 == 900


def test_too_short_a_length_says_how_much_is_needed(llm):
    with pytest.raises(ValueError, match=r"length 50 is too short: the prompt without haystack has \d+ tokens"):
        make_prompt(llm.tokenize, HAYSTACK, 50, 0, seed=0)


def test_a_missing_haystack_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="neither 'sentences' nor a file"):
        load_haystack(str(tmp_path / "nothing.txt"))
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(ValueError, match="is empty"):
        load_haystack(str(tmp_path / "empty.txt"))


def test_the_embedded_model_finds_keys_within_its_context(llm):
    trials = [run_trial(llm, make_prompt(llm.tokenize, HAYSTACK, 400, i, seed=0)) for i in range(8)]
    assert sum(trial.strict for trial in trials) >= 7
    for trial in trials:
        assert trial.regex == (trial.answer.strip() == str(trial.key))
        assert trial.strict == trial.regex
        assert trial.method == "full"


def test_the_embedded_model_tells_the_keys_of_several_names_apart(llm):
    random, names, found = Random(0), ["Emma", "the baker", "London", "Captain Brown"], 0
    for trial in range(20):
        keys = {name: str(random.randint(10000, 99999)) for name in names}
        needles = [f"The pass key of {name} is {key}." for name, key in keys.items()]
        hay = [synthetic_text(150, 10 * trial + i) for i in range(5)]
        asked = random.choice(names)
        text = " ".join([INTRO, hay[0], *(part for pair in zip(needles, hay[1:], strict=True) for part in pair)])
        prompt = f"{text} What is the pass key of {asked}? The pass key of {asked} is"
        answer = llm(prompt, max_tokens=8, temperature=0.0)["choices"][0]["text"]
        found += answer.split()[0].rstrip(".") == keys[asked]
    assert found >= 16


def test_a_wrong_answer_is_not_counted(llm):
    prompt = make_prompt(llm.tokenize, HAYSTACK, 200, 0, seed=0)
    other = make_prompt(llm.tokenize, HAYSTACK, 200, 1, seed=0)
    swapped = type(prompt)(**{**vars(prompt), "key": other.key, "answer": other.answer})
    trial = run_trial(llm, swapped)
    assert not trial.strict
    assert not trial.regex
