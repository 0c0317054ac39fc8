"""Many prompts at once: the answers of prompts one by one, in their order, whatever they share."""

import numpy as np
import pytest
from llamas import METHODS, TEXT, new

from pylongctx.errors import Aborted, PromptTooLong

PROMPTS = [TEXT.decode()[5 * i :] * (1 + i % 3) for i in range(9)]
ASKED = {"max_tokens": 12, "temperature": 0.0}


def texts(answers):
    return [answer["choices"][0]["text"] for answer in answers]


@pytest.fixture(scope="module")
def alone(embedded_f32):
    """Return the answers to the prompts, one after the other, by method."""
    known = {}

    def answers(method):
        if method not in known:
            with new(embedded_f32, method=method) as llm:
                known[method] = [llm(prompt, **ASKED) for prompt in PROMPTS]
        return known[method]

    return answers


@pytest.fixture(scope="module")
def llm(embedded_f32):
    with new(embedded_f32, n_parallel=4) as llm:
        yield llm


@pytest.mark.parametrize("method", [*METHODS, "corm,window=64,recent=64"])
@pytest.mark.parametrize("n_parallel", [1, 3])
def test_answers_are_those_of_prompts_one_by_one(embedded_f32, alone, method, n_parallel):
    """In f32: other batches round quantized activations otherwise."""
    with new(embedded_f32, method=method, n_parallel=n_parallel) as llm:
        counts = []
        answers = llm.complete_many(PROMPTS, progress=lambda *done: counts.append(done), **ASKED)
    assert texts(answers) == texts(alone(method))
    assert [answer["usage"] for answer in answers] == [answer["usage"] for answer in alone(method)]
    assert counts == [(i + 1, len(PROMPTS)) for i in range(len(PROMPTS))]


def test_a_list_is_one_completion_with_a_choice_for_each(llm, alone):
    answer = llm(PROMPTS[:3], **ASKED)
    wanted = alone("full")[:3]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["text"] for choice in answer["choices"]] == texts(wanted)
    for name, n in answer["usage"].items():
        assert n == sum(one["usage"][name] for one in wanted)
    tokens = [llm.tokenize(prompt.encode(), special=True) for prompt in PROMPTS[:3]]
    assert llm(tokens, **ASKED)["choices"] == answer["choices"]
    assert llm([np.array(one) for one in tokens], **ASKED)["choices"] == answer["choices"]
    with pytest.raises(ValueError, match="stream=True takes one prompt"):
        llm(PROMPTS[:2], stream=True)


def test_stop_strings_log_probabilities_and_echo(llm):
    given = ASKED | {"stop": ["e "], "logprobs": 2, "echo": True}
    one_by_one = [llm(prompt, **given) for prompt in PROMPTS]
    for one, other in zip(llm.complete_many(PROMPTS, **given), one_by_one, strict=True):
        (choice,), (wanted,) = one["choices"], other["choices"]
        assert choice["text"] == wanted["text"] and choice["finish_reason"] == wanted["finish_reason"]
        assert choice["logprobs"]["tokens"] == wanted["logprobs"]["tokens"]
        np.testing.assert_allclose(
            choice["logprobs"]["token_logprobs"][1:], wanted["logprobs"]["token_logprobs"][1:], atol=1e-3
        )


def test_seeds_are_drawn_in_the_order_of_the_prompts(embedded_f32):
    given = {"max_tokens": 8, "temperature": 1.5}
    with new(embedded_f32, n_parallel=3, seed=5) as llm:
        many = texts(llm.complete_many(PROMPTS, **given))
    with new(embedded_f32, seed=5) as llm:
        assert texts(llm(prompt, **given) for prompt in PROMPTS) == many
        assert len(set(texts(llm.complete_many(PROMPTS[:1] * 3, seed=1, **given)))) == 1


@pytest.mark.parametrize("logits_all", [False, True])
def test_a_shared_beginning_is_evaluated_once(embedded_f32, logits_all):
    rng = np.random.default_rng(0)
    base = rng.integers(3, 290, 600).tolist()
    prompts = [[*base, *rng.integers(3, 290, 5).tolist()] for _ in range(4)]
    with new(embedded_f32, n_parallel=4, method="full", n_ctx=1024, logits_all=logits_all) as llm:
        llm.complete_many(prompts, **ASKED)
        assert llm._solo.engine.counters.prompt_tokens == 600 + 4 * 5


def test_no_prompts(llm):
    assert llm.complete_many([]) == []


def test_a_prompt_that_does_not_fit_fails_before_anything_is_evaluated(llm):
    before = llm.session.n_evaluated, llm._solo.engine.counters.prompt_tokens
    with pytest.raises(PromptTooLong):
        llm.complete_many([PROMPTS[0], [7] * llm.n_ctx()])
    assert (llm.session.n_evaluated, llm._solo.engine.counters.prompt_tokens) == before


@pytest.mark.parametrize("after", [1, 7])
def test_an_interrupt_ends_all_and_the_object_still_works(embedded_f32, alone, monkeypatch, after):
    with new(embedded_f32, n_parallel=3, method="full") as llm:
        decode, steps = llm.session.context.decode, []

        def interrupted(*args):
            steps.append(1)
            if len(steps) == after:
                raise Aborted("for the test", 2)
            decode(*args)

        with monkeypatch.context() as patch, pytest.raises(Aborted):
            patch.setattr(llm.session.context, "decode", interrupted)
            llm.complete_many(PROMPTS, **ASKED)
        assert not llm._solo.engine.jobs
        assert texts(llm.complete_many(PROMPTS, **ASKED)) == texts(alone("full"))


def test_the_first_sequence_answers_alone(llm):
    """Prompts that run together do not disturb a later prompt, nor a state of the first sequence."""
    want = llm(PROMPTS[0], **ASKED)["choices"]
    llm.complete_many(PROMPTS, **ASKED)
    assert llm(PROMPTS[0], **ASKED)["choices"] == want
    llm.eval(llm.tokenize(b" and"))
    state = llm.save_state()
    llm.complete_many(PROMPTS[:4], **ASKED)
    llm.load_state(state)
    np.testing.assert_array_equal(llm.scores[-1], state.logits)


def test_bad_counts(embedded_f32):
    with pytest.raises(ValueError, match="n_parallel must be from 1"):
        new(embedded_f32, n_parallel=0)
    with pytest.raises(ValueError, match="65 sequences need batches of that many tokens, not 64"):
        new(embedded_f32, n_parallel=65, n_batch=64)
    with pytest.raises(ValueError, match="leave out n_parallel=2"):
        new(embedded_f32, n_parallel=2, embedding=True, method=None)
