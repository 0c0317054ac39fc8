"""Sampling and completion on the embedded model."""

import json
from itertools import islice

import numpy as np
import pytest
from llamas import TEXT, greedy, new, script, texts

from pylongctx.engine.sampling.sampler import LogitsProcessorList, MinTokensLogitsProcessor, StoppingCriteriaList
from pylongctx.errors import ContextFull

# ---- sampling ----


def test_seeds(llm):
    def run(**kwargs):
        return llm(TEXT.decode(), max_tokens=32, temperature=2.0, min_p=0.0, top_k=0, top_p=1.0, **kwargs)["choices"]

    run()  # reads the prompt; from here on it is read already
    assert run(seed=0) == run(seed=0)
    assert run(seed=0) != run(seed=1)
    assert run() != run()
    llm.set_seed(0)
    first, second = run(), run()
    assert first == run(seed=0) != second
    llm.set_seed(0)
    assert [run(), run()] == [first, second]


def test_a_call_seed_does_not_seed_the_object(llm):
    def run(**kwargs):
        return llm(TEXT.decode(), max_tokens=32, temperature=2.0, min_p=0.0, top_k=0, top_p=1.0, **kwargs)["choices"]

    run(seed=5)
    first = run()
    run(seed=5)
    assert run() != first


def test_greedy_is_the_argmax(llm, prompt):
    llm.eval(prompt)
    assert llm.sample(temp=0.0) == int(llm.scores[-1].argmax())
    assert llm.sample(top_k=1, temp=1.0) == int(llm.scores[-1].argmax())


def test_repeat_penalty_counts_generated_tokens(llm, prompt):
    repeated = list(islice(llm.generate(prompt, temp=0.0, repeat_penalty=1e6), 30))
    assert len(set(repeated)) == 30


@pytest.mark.parametrize("mode", [1, 2])
def test_mirostat_runs(llm, prompt, mode):
    assert len(list(islice(llm.generate(prompt, mirostat_mode=mode), 5))) == 5


def test_logit_bias_and_processor_both_work(llm):
    banned, wanted = llm.tokenize(b"the", add_bos=False)[0], llm.tokenize(b"of", add_bos=False)[0]

    def ban(input_ids, logits):
        logits[banned] = -np.inf
        return logits

    def first_token(**kwargs):
        return llm("It was", max_tokens=1, temperature=0.0, **kwargs)["choices"][0]["text"]

    assert first_token(logit_bias={banned: 1e4, wanted: 1e3}) == " the"
    assert first_token(logit_bias={banned: 1e4, wanted: 1e3}, logits_processor=LogitsProcessorList([ban])) == " of"
    assert first_token(logit_bias={str(wanted): 1e3}, logits_processor=ban) == " of"


def test_processors_do_not_change_scores(llm, prompt):
    def spoil(input_ids, logits):
        assert list(input_ids) == prompt
        logits[:] = 0
        return logits

    llm.eval(prompt)
    before = llm.scores.copy()
    next(llm.generate(prompt, logits_processor=LogitsProcessorList([spoil])))
    np.testing.assert_array_equal(llm.scores, before)


def test_min_tokens_processor(llm):
    minimum = MinTokensLogitsProcessor(3, llm.token_eos())
    done = llm("It was", max_tokens=9, temperature=0.0, logit_bias={llm.token_eos(): 1e6}, logits_processor=[minimum])
    assert done["usage"]["completion_tokens"] == 3
    assert done["choices"][0]["finish_reason"] == "stop"


def test_stopping_criteria_see_real_logits(llm, prompt):
    seen = []

    def stop(input_ids, logits):
        seen.append((len(input_ids), int(logits.argmax()), logits.shape))
        return len(input_ids) == len(prompt) + 2

    done = llm(prompt, max_tokens=9, temperature=0.0, stopping_criteria=StoppingCriteriaList([stop]))
    llm.reset()
    expected = greedy(llm, prompt, 3)
    assert seen == [(len(prompt) + i, token, (llm.n_vocab(),)) for i, token in enumerate(expected)]
    assert done["usage"]["completion_tokens"] == 2
    assert done["choices"][0]["finish_reason"] == "stop"


def test_send_injects_tokens(llm, prompt):
    tokens = llm.generate(prompt, temp=0.0)
    first = next(tokens)
    tokens.send([300, 301])
    assert list(llm.eval_tokens) == [*prompt, first, 300, 301]


def test_generate_without_reset_continues(llm, prompt):
    llm.eval(prompt[:10])
    rest = list(islice(llm.generate(prompt[10:], temp=0.0, reset=False), 5))
    llm.reset()
    assert rest == greedy(llm, prompt, 5)


# ---- completion ----


def test_stream_equals_the_whole(llm):
    for kwargs in ({}, {"echo": True}, {"stop": ["the", "\n"]}, {"stop": "was"}):
        whole = llm("It was", max_tokens=40, seed=3, **kwargs)
        chunks = list(llm("It was", max_tokens=40, seed=3, stream=True, **kwargs))
        assert "".join(texts(chunks)) == whole["choices"][0]["text"]
        assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
        assert chunks[-1]["usage"] == whole["usage"]
        assert all("usage" not in chunk and chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])
        assert len({(chunk["id"], chunk["created"], chunk["object"]) for chunk in chunks}) == 1


def test_echo(llm):
    done = llm("It was", max_tokens=3, temperature=0.0, echo=True)
    plain = llm("It was", max_tokens=3, temperature=0.0)
    assert done["choices"][0]["text"] == "It was" + plain["choices"][0]["text"]
    ids = llm.tokenize(b"It was")
    assert llm(ids, max_tokens=3, temperature=0.0, echo=True)["choices"][0]["text"].strip().startswith("It was")


@pytest.mark.parametrize(
    ("said", "stop", "shown"),
    [
        (" one two three four", ["o th"], " one tw"),  # across tokens
        (" one two three four", ["four", "two"], " one "),  # the first in the text, not in the list
        (" the", ["e", "h"], " t"),  # two in one token
        (" one two three", ["threat"], " one two three"),  # only the beginning of a stop
        (" one two three", ["three"], " one two "),  # the last token
        (" aab aaab", ["aaab"], " aab "),  # a beginning within a beginning
        (" one two", ["", "x"], " one two"),  # an empty stop stops nothing
    ],
)
def test_stop_strings(llm, said, stop, shown):
    chunks = list(llm("It was", max_tokens=60, stop=stop, stream=True, logits_processor=script(llm, said)))
    assert "".join(texts(chunks)) == shown
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_characters_are_streamed_whole(llm):
    said = " na\u00efve \u20ac5 \U0001f642\U0001f44d \u65e5\u672c."
    chunks = list(llm("It was", max_tokens=99, stream=True, logits_processor=script(llm, said)))
    assert "".join(texts(chunks)) == said
    assert len(chunks) > 10
    assert "\U0001f642" in texts(chunks)


def test_a_cut_character_is_left_out(llm):
    done = llm("It was", max_tokens=3, logits_processor=script(llm, " \U0001f642"))
    assert "\ufffd" not in done["choices"][0]["text"]
    assert done["choices"][0]["text"].strip() == ""
    assert done["choices"][0]["finish_reason"] == "length"


def test_finish_reasons_and_usage(llm):
    done = llm("It was", max_tokens=5, temperature=0.0, logit_bias={llm.token_eos(): -1e9})
    assert done["choices"][0]["finish_reason"] == "length"
    assert done["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
    done = llm("It was", max_tokens=50, logits_processor=script(llm, " it"))
    assert done["choices"][0]["finish_reason"] == "stop"
    assert done["usage"]["completion_tokens"] == 1
    assert (done["object"], done["model"]) == ("text_completion", llm.model_path)
    assert llm("It was", max_tokens=1, model="mine")["model"] == "mine"


@pytest.mark.parametrize("max_tokens", [None, 0, -1, 10**6])
def test_unlimited_fills_the_context(llm, prompt, max_tokens):
    tokens = (prompt * 20)[: llm.n_ctx() - 10]
    done = llm(tokens, max_tokens=max_tokens, temperature=0.0, logit_bias={llm.token_eos(): -1e9})
    assert done["usage"]["total_tokens"] == llm.n_ctx()
    assert done["choices"][0]["finish_reason"] == "length"


def test_the_empty_prompt_starts_at_bos(llm):
    done = llm("", max_tokens=4, temperature=0.0)
    assert done["usage"]["prompt_tokens"] == 1
    assert not done["choices"][0]["text"].startswith(" ")


def test_too_long_a_prompt_says_what_to_do(llm, prompt):
    tokens = (prompt * 20)[: llm.n_ctx()]
    message = r"Requested tokens \(512\) exceed context window of 512.*n_ctx_train=512"
    with pytest.raises(ValueError, match=message) as caught:
        llm(tokens)
    assert isinstance(caught.value, ContextFull)


def test_every_token_is_turned_into_text_once(llm, monkeypatch):
    pieces = []
    monkeypatch.setattr(llm.session.model, "piece", lambda token, special=False: pieces.append(token) or b" x")
    done = llm("It was", max_tokens=40, temperature=0.0, stop=["never"], logit_bias={llm.token_eos(): -1e9})
    assert done["usage"]["completion_tokens"] == 40
    assert len(pieces) == 40


@pytest.mark.parametrize("kwargs", [{}, {"logprobs": 2, "echo": True}])
def test_an_answer_is_plain_json(llm, kwargs):
    done = llm("It was", max_tokens=3, temperature=0.0, **kwargs)
    assert json.loads(json.dumps(done)) == done


def test_a_batch_larger_than_the_context(embedded_model, llm, prompt):
    expected = greedy(llm, prompt)
    with new(embedded_model, n_ctx=128, n_batch=4096, n_ubatch=4096) as other:
        assert other.n_batch < 4096
        assert greedy(other, prompt) == expected
