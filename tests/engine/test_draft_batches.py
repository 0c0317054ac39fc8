"""Drafts of several sequences share batches, and each sequence keeps the bits that it has without drafts."""

import numpy as np
import pytest
from llamas import TEXT, new

from pylongctx import DraftChain, LlamaDraftModel, ModelDraft, NgramDraft
from pylongctx.engine.drafting import DraftRequest, draft_all
from pylongctx.errors import ContextFull

FIXED = {"n_ctx": 512, "deterministic": True, "seed": 7}
OWN = "longheads,window=64"
WHOLE = f"{OWN},position=full,select_from=512"  # the method of a context that drafts by selecting
TEXTS = [(TEXT * 8)[20 * i : 1000 + 30 * i].decode() for i in range(3)]
N_DRAFT = 4
ASKED = {"max_tokens": 30, "temperature": 0.0}
SMALL = "window,n_sink=4,window=64"  # a draft model that is often wrong


def answers(llm, texts=TEXTS):
    """Return the answers to texts at once, and what the sequences hold then."""
    bias = {token: -1e9 for token in llm.session.model.end_tokens.tolist()}
    said = [one["choices"][0]["text"] for one in llm.complete_many(texts, logit_bias=bias, **ASKED)]
    held = []
    for session in llm.sessions[: len(texts)]:
        row = session.last_logits.tobytes()
        session.rewind(session.n_tokens - 1)  # what was drafted after the end is still there
        held.append((session.tokens.tolist(), row, session.context.state(session.seq).tobytes()))
    return said, held


def recorded(context, monkeypatch):
    """Return the sequences of each batch of a context."""
    batches, decode = [], context.decode
    monkeypatch.setattr(context, "decode", lambda *args: batches.append(args[2].tolist()) or decode(*args))
    return batches


def check_counts(drafts, n):
    """Each of the last answers had right and wrong draft tokens."""
    for draft in drafts[-n:]:
        assert 0 < draft.n_accepted < draft.n_drafted


@pytest.mark.parametrize("n", [2, 3])
def test_a_model_drafts_all_its_sequences_in_one_batch(embedded_model, drafts, monkeypatch, n):
    with new(embedded_model, method=WHOLE, n_parallel=n, **FIXED) as llm:
        plain = answers(llm, TEXTS[:n])
    with new(embedded_model, draft=OWN, n_parallel=n, **FIXED) as llm:
        context, select, batches = llm.session.context, llm.session.context.select_from, []
        decode = context.decode
        selecting = [False]

        def note(first=-1):
            selecting[0] = first >= 0
            select(first)

        def record(*args):
            batches.extend([args[2].tolist()] * selecting[0])
            decode(*args)

        monkeypatch.setattr(context, "select_from", note)
        monkeypatch.setattr(context, "decode", record)
        assert answers(llm, TEXTS[:n]) == plain
    check_counts(drafts, n)
    assert list(range(n)) in batches
    assert all(len(set(batch)) == len(batch) for batch in batches)  # a token of each


@pytest.mark.parametrize("n", [2, 3])
def test_a_draft_model_evaluates_all_texts_in_one_batch(embedded_model, drafts, monkeypatch, n):
    with new(embedded_model, n_parallel=n, **FIXED) as llm:
        plain = answers(llm, TEXTS[:n])
    with new(embedded_model, method=SMALL, n_parallel=n) as small:
        batches = recorded(small.session.context, monkeypatch)
        with new(embedded_model, draft_model=ModelDraft(small, n_max=4), n_parallel=n, **FIXED) as llm:
            assert answers(llm, TEXTS[:n]) == plain
    check_counts(drafts, n)
    tokens = [batch for batch in batches if len(batch) == n]
    assert sum(set(batch) == set(range(n)) for batch in tokens) > 10


def test_drafts_of_one_batch_are_those_of_each_text(embedded_f32):
    """Of texts that end at different places, and with lengths of their own."""
    with new(embedded_f32, type_k="f32", type_v="f32", n_parallel=3) as small:
        ids = [
            np.array(small.tokenize(text.encode())[:n], np.int32) for text, n in zip(TEXTS, (90, 70, 50), strict=True)
        ]
        alone = [ModelDraft(small, n_max=4)(text, n_max=n).tolist() for text, n in zip(ids, (4, 1, 3), strict=True)]
        small.reset()
        for session in small.sessions:
            session.clear()
        draft = ModelDraft(small, n_max=4)
        requests = [DraftRequest(text, n) for text, n in zip(ids, (4, 1, 3), strict=True)]
        assert [one.tolist() for one in draft.draft_all(requests)] == alone
        assert [len(one) for one in alone] == [4, 1, 3]
        assert [one.tolist() for one in draft.draft_all(requests[::-1])] == alone[::-1]


def test_more_texts_than_sequences(embedded_model):
    """Texts keep the sequences that they have; the others have no drafts."""
    with new(embedded_model, n_parallel=2) as small:
        draft = ModelDraft(small, n_max=2)
        ids = [np.array(small.tokenize(text.encode())[:60], np.int32) for text in ("one", "two", TEXTS[0])]
        ids = [np.concatenate([text, ids[2]]) for text in ids]
        requests = [DraftRequest(text, 2) for text in ids]
        assert [len(one) for one in draft.draft_all(requests[:2])] == [2, 2]
        before = sum(session.n_evaluated for session in small.sessions)
        assert [len(one) for one in draft.draft_all(requests[::-1])] == [0, 2, 2]
        assert sum(session.n_evaluated for session in small.sessions) - before <= 2 * (1 + 2)


def test_long_texts_catch_up_together(embedded_model):
    """One that is evaluated is drafted while the others catch up."""
    with new(embedded_model, n_ctx=1024, n_parallel=2) as small:
        draft, ids = ModelDraft(small), np.array((small.tokenize(TEXT) * 20)[:600], np.int32)
        requests = [DraftRequest(ids[50:100], 3), DraftRequest(ids, 3)]
        before, lengths = 0, []
        for _ in range(4):
            lengths.append([len(one) for one in draft.draft_all(requests)])
            n = sum(session.n_evaluated for session in small.sessions)
            assert n - before <= 256 + 3 * 2
            before = n
        assert lengths == [[3, 0], [3, 0], [3, 3], [3, 3]]


def test_a_full_draft_context_is_not_a_draft(embedded_model, monkeypatch):
    """Sequences of texts that are not drafted any more are cleared."""
    with new(embedded_model, n_parallel=3) as small:
        draft = ModelDraft(small, n_max=3)
        ids = np.array(small.tokenize(TEXT), np.int32)
        for text in (ids, ids[::-1].copy()):
            draft(text)
        context, decode = small.session.context, small.session.context.decode

        def fail(tokens, *args):
            if len(tokens) == 1:
                raise ContextFull("the KV cache is full", 1)
            decode(tokens, *args)

        with monkeypatch.context() as patch:
            patch.setattr(context, "decode", fail)
            assert len(draft(np.roll(ids, 7))) == 1
        assert sorted(session.n_tokens > 0 for session in small.sessions) == [False, False, True]
        assert len(draft(np.roll(ids, 7))) == 3


class Failing(LlamaDraftModel):
    """Fails for texts that begin with 1."""

    def __call__(self, input_ids, /, **kwargs):
        if input_ids[0] == 1:
            raise RuntimeError("no draft today")
        return input_ids[-1:]

    def draft_all(self, requests):
        return [self(request.tokens) for request in requests]


@pytest.mark.parametrize("model", [Failing(), DraftChain([NgramDraft(5), Failing()])])
def test_only_texts_that_fail_have_an_error(model):
    requests = [DraftRequest(np.array(ids, np.int32), 4) for ids in ([2, 3], [1, 4], [5, 6])]
    found = draft_all(model, requests)
    assert isinstance(found[1], RuntimeError)
    assert [found[i].tolist() for i in (0, 2)] == [[3], [6]]


def test_a_chain_asks_the_next_model_for_the_texts_without_a_draft():
    asked = []

    class Second(LlamaDraftModel):
        def draft_all(self, requests):
            asked.append(len(requests))
            return [request.tokens[:1] for request in requests]

        def __call__(self, input_ids, /, **kwargs):
            raise AssertionError("the texts are drafted together")

    requests = [DraftRequest(np.array(ids, np.int32), 2) for ids in ([7, 8, 9, 7, 8], [1, 2, 3], [4, 5, 6])]
    found = draft_all(DraftChain([NgramDraft(2), Second()]), requests)
    assert [draft.tolist() for draft in found] == [[9, 7], [1], [4]]
    assert asked == [2]
