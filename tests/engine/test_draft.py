"""Drafts change how fast the model speaks, not what it says."""

from itertools import islice

import numpy as np
import pytest
from llamas import EXACT, F32, METHODS, TEXT, new
from session import assert_same
from tiny_gguf import make_model

from pylongctx import DraftChain, Llama, LlamaDraftModel, LlamaPromptLookupDecoding, ModelDraft, NgramDraft
from pylongctx.engine.sampling.params import SamplingParams
from pylongctx.engine.sampling.sampler import Sampler
from pylongctx.errors import ContextFull

PROMPT = TEXT.decode() * 3


class Scripted(LlamaDraftModel):
    """Guess up to ``n_right`` tokens of a given text, and one wrong one."""

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


class Wrong(LlamaDraftModel):
    """Drafts four tokens that the model does not say."""

    def __call__(self, input_ids, /, **kwargs):
        return np.full(4, 9, np.int32)


@pytest.mark.parametrize("n_parallel", [1, 2])
def test_memory_that_is_full_for_a_draft_has_room_for_the_answer(embedded_model, drafted, n_parallel):
    """Pages have 64 tokens: the answer reaches the end of the last one. An idle sequence keeps its page."""
    found = []
    for draft in (None, Wrong()):
        limit = (1 + n_parallel) * 262_144 + 4096
        with new(embedded_model, kv_limit=limit, n_parallel=n_parallel, deterministic=True, draft_model=draft) as llm:
            if n_parallel == 2:
                llm.sessions[1].eval(np.array(llm.tokenize(TEXT)[:20], np.int32))
            said = llm.generate(llm.tokenize(TEXT * 6)[:90], temp=0.0)
            found.append(list(islice(said, 39)))
            assert llm.n_tokens == 128
            assert [session.n_tokens for session in llm.sessions[1:]] == [20] * (n_parallel - 1)
            if n_parallel == 1:
                with pytest.raises(ContextFull, match="kv_limit"):
                    next(said)
    assert found[1] == found[0]
    assert drafted[-1].n_drafted > 100


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


# ---- n-grams ----

IDS = np.array([0, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2, 3, 7, 6, 1, 2], np.int32)


@pytest.mark.parametrize(
    ("draft", "n_max", "expected"),
    [
        (NgramDraft(2, 3), None, [3, 7, 6]),
        (NgramDraft(2, 3), 1, [3]),
        (NgramDraft(2, 99), None, [3, 7, 6, 1, 2]),
        (NgramDraft(1, 2), None, [3, 7]),
        (NgramDraft(3, 3), None, []),
        (NgramDraft(16, 3), None, []),
        (NgramDraft(99, 3), None, []),
        (NgramDraft(2, 3, min_hits=3), None, [3, 7, 6]),
        (NgramDraft(2, 3, min_hits=4), None, []),
        (NgramDraft(2, 1, most_common=True), None, [3]),
        (NgramDraft(2, 2, most_common=True), None, [3, 7]),  # all differ: the latest
        (DraftChain([NgramDraft(3, 3), NgramDraft(2, 3)]), 2, [3, 7]),
        (DraftChain([]), 2, []),
    ],
)
def test_ngrams(draft, n_max, expected):
    assert draft(IDS, **({} if n_max is None else {"n_max": n_max})).tolist() == expected


def test_the_most_common_continuation():
    ids = np.array([1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2], np.int32)
    assert NgramDraft(2, 1)(ids).tolist() == [4]
    assert NgramDraft(2, 1, most_common=True)(ids).tolist() == [3]


@pytest.mark.parametrize("sizes", [{"size_n": 0}, {"size_m": 0}, {"min_hits": 0}])
def test_sizes(sizes):
    with pytest.raises(ValueError, match="must be at least 1, not 0"):
        NgramDraft(**sizes)


# ---- adaptive drafts say the same ----


def counted(drafts):
    return [sum(getattr(draft, name) for draft in drafts) for name in ("n_drafted", "n_accepted")]


@pytest.mark.parametrize("method", ["full", "longheads", "window"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_of_a_model_and_ngrams(embedded_f32, drafted, method, temperature):
    """Of the tokens that are drawn with a seed too: each is drawn from the logits of the model."""
    kwargs = {"max_tokens": 40, "temperature": temperature, "seed": 7}
    with new(embedded_f32, method=method, **F32) as llm:
        plain = llm(PROMPT, **kwargs)["choices"][0]["text"]
    small = new(embedded_f32, **F32)
    for draft in (NgramDraft(2, 8), ModelDraft(small), DraftChain([NgramDraft(3), ModelDraft(small, 8, p_min=0.2)])):
        drafted.clear()
        with new(embedded_f32, method=method, draft_model=draft, **F32) as llm:
            assert llm(PROMPT, **kwargs)["choices"][0]["text"] == plain
            assert llm(PROMPT, **kwargs)["choices"][0]["text"] == plain
        n_drafted, n_accepted = counted(drafted)
        assert 0 < n_drafted >= n_accepted
    assert n_accepted > 0
    small.close()


def test_a_draft_model_that_is_the_model_is_always_right(embedded_f32):
    with new(embedded_f32, **F32) as small, new(embedded_f32, **F32) as llm:
        draft = ModelDraft(small, n_max=5)
        ids = llm.tokenize(TEXT)
        said = list(islice(llm.generate(ids, temp=0.0), 12))
        assert draft(np.array(ids, np.int32)).tolist() == said[:5]
        assert draft(np.array([*ids, *said[:3]], np.int32), n_max=4).tolist() == said[3:7]
        assert draft(np.array(ids[:9], np.int32), n_max=1).tolist() == list(islice(llm.generate(ids[:9], temp=0.0), 1))
        assert len(ModelDraft(small, n_max=5, p_min=1.0)(np.array(ids, np.int32))) == 0
        assert len(ModelDraft(small, n_max=5, n_min=5)(np.array(ids, np.int32), n_max=4)) == 0


def test_a_long_text_is_caught_up_in_parts(embedded_model):
    with new(embedded_model, n_ctx=1024) as small:
        draft = ModelDraft(small)
        ids = np.array((small.tokenize(TEXT) * 20)[:600], np.int32)
        assert [len(draft(ids)) for _ in range(4)] == [0, 0, 3, 3]
        assert len(draft(np.resize(ids, small.n_ctx() - 2))) == 0  # no room


def test_texts_have_a_sequence_each(embedded_model):
    with new(embedded_model, n_parallel=2) as small:
        draft, ids = ModelDraft(small), np.array(small.tokenize(TEXT), np.int32)
        for _ in range(2):
            for text in (ids, ids[::-1].copy()):
                draft(text)
        evaluated = [session.n_evaluated for session in small.sessions]
        assert max(evaluated) < 2 * len(ids)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"n_max": 0}, "n_max must be at least 1, not 0"),
        ({"n_min": 4}, "n_min must be at most 3, not 4"),
        ({"n_min": -1}, "n_min must be at least 0, not -1"),
        ({"p_min": 1.5}, "p_min must be from 0 to 1, not 1.5"),
    ],
)
def test_numbers_of_a_draft_model(embedded_model, numbers, message):
    with new(embedded_model) as small, pytest.raises(ValueError, match=message):
        ModelDraft(small, **numbers)


def test_another_vocabulary_is_refused(embedded_model, tmp_path):
    other = make_model(tmp_path / "other.gguf")
    with Llama(str(other), n_ctx=64, verbose=False) as small, new(embedded_model) as llm:
        with pytest.raises(ValueError, match=r"draft_model: it has \d+ tokens and the model \d+"):
            llm.draft_model = ModelDraft(small)
        with pytest.raises(ValueError, match="use one of the same family"):
            new(embedded_model, draft_model=ModelDraft(small))
        assert llm.draft_model is None


def test_timings_count_drafts(embedded_f32):
    with new(embedded_f32, draft_model=NgramDraft(1, 8), **F32) as llm:
        sampler = Sampler(llm.session.model, SamplingParams(seed=0, temp=0.0), None, ())
        job = llm._solo.endless(llm.tokenize(TEXT * 3), sampler, 30)
        list(llm._solo.drawn(job))
        timings, counters = job.timings(), llm._solo.engine.counters
        assert 0 < timings["draft_n"] == counters.drafted_tokens
        assert timings["draft_n_accepted"] == counters.accepted_tokens <= timings["draft_n"]
        assert 0 < counters.drafts <= counters.drafted_tokens
