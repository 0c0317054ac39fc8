"""Drafts that are accepted by rejection sampling: the answer has the distribution of the model."""

from functools import partial

import numpy as np
import pytest
from llamas import F32, TEXT, new

from pylongctx import DraftChain, ModelDraft, NgramDraft
from pylongctx.drafts.speculative import BatchDraft
from pylongctx.engine.drafting import DraftRequest
from pylongctx.engine.model import Model
from pylongctx.engine.sampling.params import SamplingParams
from pylongctx.engine.sampling.proposals import Proposals
from pylongctx.engine.sampling.sampler import Sampler

N_DRAFT = 2
DRAWS = 20_000
TEMP = 2.0
TARGET = [0.4, 0.3, 0.15, 0.1, 0.04, 0.01]
DRAFTED = [0.1, 0.5, 0.05, 0.05, 0.1, 0.2]
SCHEMA = '{"schemas": ["start: /[0-9]{1,9}/"]}'


@pytest.fixture(scope="module")
def model(embedded_model):
    model = Model(str(embedded_model), {"vocab_only": True})
    yield model
    model.close()


def logits(model, probs, first=10):
    row = np.full(model.info.n_vocab, -50, np.float32)
    row[first : first + len(probs)] = np.log(probs)
    return row


def params(seed=3, **settings):
    return SamplingParams(seed=seed, repeatable=False, **{"temp": 1.0, "top_p": 1.0, "min_p": 0.0} | settings)


def agree(counts, probs):
    """Return True if Pearson's statistic is one that is exceeded more often than once in a thousand."""
    expected = np.asarray(probs) * sum(counts)
    few = expected < 5
    groups = [np.append(values[~few], values[few].sum()) for values in (np.asarray(counts), expected)]
    statistic = sum((have - want) ** 2 / want for have, want in zip(*groups, strict=True) if want)
    free = int((~few).sum()) - (not few.any())
    most = free * (1 - 2 / (9 * free) + 3.09 * np.sqrt(2 / (9 * free))) ** 3  # Wilson and Hilferty
    return statistic < most


@pytest.mark.parametrize("drafted", [DRAFTED, TARGET, [0.0, 0.0, 0.0, 0.0, 0.5, 0.5]])
def test_tokens_have_the_probabilities_of_the_model(model, drafted):
    """Whatever the draft model is: another one, the same, or one that never drafts the likeliest tokens."""
    sampler = Sampler(model, params())
    assert sampler.takes_proposals
    proposals, counts, kept = Proposals(sampler), np.zeros(6), 0
    target, draft = logits(model, TARGET), logits(model, np.maximum(drafted, 1e-20))
    for _ in range(DRAWS):
        proposals.begin()
        guess = proposals.draw(draft)
        token = sampler.sample(target, partial(proposals.decide, 0))
        counts[token - 10] += 1
        kept += token == guess
    assert counts.sum() == DRAWS
    assert agree(counts, TARGET)
    overlap = np.minimum(TARGET, drafted).sum()
    assert abs(kept / DRAWS - overlap) < 4 * np.sqrt(0.25 / DRAWS)


def test_samplers_cut_both_distributions(model):
    """Of top-k 2 of both, one token is common: the others are never drawn, or drawn and never kept."""
    sampler = Sampler(model, params(top_k=2))
    proposals, found = Proposals(sampler), set()
    for _ in range(400):
        proposals.begin()
        assert proposals.draw(logits(model, DRAFTED)) in (11, 15)
        found.add(sampler.sample(logits(model, TARGET), partial(proposals.decide, 0)))
    assert found == {10, 11}


@pytest.mark.parametrize(
    ("settings", "constraint", "expected"),
    [
        ({}, None, True),
        ({}, SCHEMA, True),
        ({}, '{"grammar": "root ::= [0-9]+"}', False),
        ({"repeatable": True}, None, False),
        ({"temp": 0.0}, None, False),
        ({"mirostat_mode": 2}, None, False),
        ({"adaptive_target": 0.5}, None, False),
    ],
)
def test_what_is_chosen_by_rejection(model, settings, constraint, expected):
    given = {"seed": 3, "repeatable": False, **settings}
    assert Sampler(model, SamplingParams(**given), constraint).takes_proposals is expected


def test_vocabularies_of_other_sizes(model):
    sampler, n = Sampler(model, params()), model.info.n_vocab
    proposals, row = Proposals(sampler), logits(model, TARGET)
    longer = np.concatenate([row, np.full(7, 30, np.float32)])  # tokens that the model does not have
    drawn = {proposals.draw(given) for given in [longer, row[: n - 9]] * 50}
    assert drawn <= set(range(10, 16))
    assert sampler.sample(row, partial(proposals.decide, 1)) in range(10, 16)


def test_a_seed_says_whether_answers_repeat(embedded_f32, drafts):
    """Drafts of an answer with a seed are the most probable tokens; they are compared with those that are drawn."""
    with new(embedded_f32, **F32) as small, new(embedded_f32, draft_model=ModelDraft(small), **F32) as llm:
        llm(TEXT.decode(), max_tokens=8, temperature=1.0, seed=7)
        assert not drafts[-1].n_drafted or drafts[-1]._proposals is None
        llm(TEXT.decode(), max_tokens=8, temperature=1.0)
        assert drafts[-1].n_drafted == drafts[-1].n_accepted > 0  # both models are the same


class Recording(BatchDraft):
    """A draft model that says what it was asked."""

    n_max = 3

    def __init__(self, drafts):
        self.drafts, self.asked = drafts, []

    def draft_all(self, requests):
        self.asked += requests
        return [np.array([one.next_token(np.eye(1, 600, 77, dtype=np.float32)[0] * 99)] * self.drafts, np.int32)
                for one in requests]  # fmt: skip


def test_a_chain_draws_each_draft_anew(model):
    """What a draft model has drawn, and not drafted, does not belong to the draft of the next one."""
    proposals = Proposals(Sampler(model, params()))
    request = DraftRequest(np.array([5, 6, 7], np.int32), 3, None, proposals)
    chain = DraftChain([Recording(0), Recording(1)])
    assert [draft.tolist() for draft in chain.draft_all([request])] == [[77]]
    assert proposals.tokens == [77]
    assert [draft.tolist() for draft in DraftChain([Recording(0), NgramDraft(1)]).draft_all([request])] == [[]]
    assert not proposals.tokens


@pytest.mark.parametrize(("n_min", "p_min", "drawn"), [(0, 0.0, True), (0, 0.1, True), (2, 0.0, True), (2, 0.1, False)])
def test_a_draft_is_not_drawn_if_its_tokens_decide_whether_it_is_used(embedded_f32, model, n_min, p_min, drawn):
    proposals = Proposals(Sampler(model, params()))
    with new(embedded_f32, **F32) as small:
        ids = np.array(small.tokenize(TEXT), np.int32)
        ModelDraft(small, n_min=n_min, p_min=p_min).draft_all([DraftRequest(ids, 3, None, proposals)])
    assert bool(len(proposals)) is drawn


def top(row, k):
    """Return the k most probable tokens with their probabilities among themselves."""
    tokens = np.argsort(row)[::-1][:k]
    probs = np.exp((row[tokens].astype(np.float64) - row.max()) / TEMP)
    return list(zip(tokens.tolist(), probs / probs.sum(), strict=True))


def distribution(llm, prompt, n, k):
    """Return the probability of each answer of ``n`` tokens, of the ``k`` most probable ones at each place."""
    found = {(): 1.0}
    for _ in range(n):
        before, found = found, {}
        for tokens, p in before.items():
            llm.eval([*prompt, *tokens][llm.session.rewind(len(prompt) - 1) :])
            found |= {(*tokens, token): p * q for token, q in top(llm.session.last_logits, k)}
    return found


@pytest.mark.parametrize("kind", ["model", "longheads"])
def test_answers_have_the_distribution_of_the_model(embedded_f32, drafts, kind):
    """Of three tokens: the first is drawn before a draft, the second and third against one.

    The draft model reads 16 tokens, or the model itself reads some chunks, so that many drafts are rejected.
    """
    n, k = 500, 3
    small = new(embedded_f32, method="window,n_sink=1,window=16", **F32)
    given = {"draft_model": ModelDraft(small)} if kind == "model" else {"draft": "longheads,window=64,chunk_size=16"}
    with new(embedded_f32, **F32) as llm:
        prompt = llm.tokenize(TEXT * 8)[:150]
        expected = distribution(llm, prompt, 3, k)
    with new(embedded_f32, **given, **F32) as llm:
        samplers = (Sampler(llm.session.model, params(seed, top_k=k, temp=TEMP)) for seed in range(n))
        jobs = (llm._solo.endless(prompt, sampler, 4) for sampler in samplers)
        found = [tuple(token for token, _ in llm._solo.drawn(job))[:3] for job in jobs]
    small.close()
    counts = [found.count(tokens) for tokens in expected]
    assert sum(counts) == n
    assert agree(counts, list(expected.values()))
    drafted, accepted = (sum(getattr(one, name) for one in drafts) for name in ("n_drafted", "n_accepted"))
    assert drafted > 1.5 * n
    assert 0.2 * drafted < accepted < 0.95 * drafted


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_to_a_schema_follows_it(embedded_f32, drafts, seed):
    with new(embedded_f32, **F32) as small, new(embedded_f32, draft_model=ModelDraft(small), **F32) as llm:
        sampler = Sampler(llm.session.model, params(seed), SCHEMA)
        job = llm._solo.endless(llm.tokenize(TEXT), sampler, 6)
        text = llm.detokenize([token for token, _ in llm._solo.drawn(job)]).decode()
    assert text.strip("</s>").isdigit()
    assert sum(one.n_drafted for one in drafts) > 0
