"""Drafts change how fast the model speaks, not what it says."""

from itertools import islice

import numpy as np
import pytest
from llamas import EXACT, F32, METHODS, TEXT, new
from session import assert_same

from pylongctx import LlamaDraftModel, LlamaPromptLookupDecoding

PROMPT = TEXT.decode() * 3


class Scripted(LlamaDraftModel):
    """Guess so many tokens of a given text, and one wrong one."""

    def __init__(self, said, n_right):
        self.said = said
        self.n_right = n_right
        self.calls = 0

    def __call__(self, input_ids, /, **kwargs):
        self.calls += 1
        rest = self.said[len(input_ids) :][: self.n_right]
        return np.array([*rest, 5], np.int32)


@pytest.mark.parametrize("method", [None, *METHODS])
@pytest.mark.parametrize("n_right", [0, 1, 4])
def test_the_same_tokens_in_fewer_evaluations(embedded_f32, method, n_right):
    with new(embedded_f32, method=method, **F32) as llm:
        prompt = llm.tokenize(TEXT * 2)
        said = list(islice(llm.generate(prompt, temp=0.0), 20))
    draft = Scripted([*prompt, *said], n_right)
    with new(embedded_f32, method=method, draft_model=draft, **F32) as llm:
        steps = []
        decode = llm.session.context.decode
        llm.session.context.decode = lambda tokens, *args: steps.append(len(tokens)) or decode(tokens, *args)
        found = []
        for token in islice(llm.generate(prompt, temp=0.0), 20):
            assert llm._input_ids.tolist() == [*prompt, *found]
            found.append(token)
    assert found == said
    assert draft.calls > 2
    if n_right == 4 and method == "full":
        assert len([n for n in steps if n < 10]) <= 6


def test_the_logits_are_those_of_every_token(embedded_f32):
    with new(embedded_f32, logits_all=True, **F32) as llm:
        llm(PROMPT, max_tokens=12, temperature=0.0)
        plain, ids = llm.scores.copy(), llm._input_ids.tolist()
    with new(embedded_f32, logits_all=True, draft_model=LlamaPromptLookupDecoding(), **F32) as llm:
        llm(PROMPT, max_tokens=12, temperature=0.0)
        assert llm._input_ids.tolist() == ids
        assert_same(llm.scores, plain, EXACT)
        llm.eval([300])
        assert llm.n_tokens == len(ids) + 1


def test_logprobs_and_stops(embedded_f32):
    kwargs = {"max_tokens": 20, "temperature": 0.0, "logprobs": 2, "stop": [" wisdom"]}
    with new(embedded_f32, **F32) as llm:
        plain = llm(PROMPT, **kwargs)["choices"][0]
    with new(embedded_f32, draft_model=LlamaPromptLookupDecoding(3, 6), **F32) as llm:
        found = llm(PROMPT, **kwargs)["choices"][0]
        assert found["text"] == plain["text"]
        got, want = (one["logprobs"]["token_logprobs"] for one in (found, plain))
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
        again = llm(PROMPT, **kwargs)["choices"][0]
        assert again["text"] == plain["text"]


def test_lookup_finds_what_came_after():
    lookup = LlamaPromptLookupDecoding(2, 3)
    assert lookup(np.array([1, 2, 3, 4, 5, 9, 1, 2], np.int32)).tolist() == [3, 4, 5]
    assert lookup(np.array([7, 2, 3, 8, 2], np.int32)).tolist() == [3, 8, 2]
    assert lookup(np.array([1, 2, 3], np.int32)).tolist() == []
    assert lookup(np.array([1], np.int32)).tolist() == []


def test_the_context_may_be_full(embedded_model):
    with new(embedded_model, n_ctx=256, draft_model=LlamaPromptLookupDecoding(1, 50)) as llm:
        done = llm(PROMPT, max_tokens=None, temperature=0.0, logit_bias={llm.token_eos(): -1e9})
        assert done["usage"]["total_tokens"] == 256


@pytest.mark.parametrize("method", ["corm", "h2o,budget=64", "longheads+corm", "tova"])
def test_rules_that_evict_refuse(embedded_model, method):
    with pytest.raises(NotImplementedError, match=r"draft_model: .* evicts KV entries"):
        new(embedded_model, method=method, draft_model=LlamaPromptLookupDecoding())


def test_a_bad_guess_is_an_error(embedded_model):
    with new(embedded_model, draft_model=lambda ids: np.array([10**6])) as llm:
        with pytest.raises(ValueError, match="outside the vocabulary"):
            llm(PROMPT, max_tokens=5)
        llm.draft_model = None
        assert llm(PROMPT, max_tokens=5, temperature=0.0)["usage"]["completion_tokens"] == 5
