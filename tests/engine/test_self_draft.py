"""A model that drafts by reading less of its KV cache, and verifies by reading all of it: two views of one cache."""

import numpy as np
import pytest
from llamas import TEXT, new

from pylongctx import SelfDraft
from pylongctx.cli.generation import own_draft
from pylongctx.errors import ContextFull, InvalidInput

DRAFT = "longheads,window=64"
FIXED = {"n_ctx": 512, "deterministic": True, "seed": 7}
LONG = TEXT * 8
N_DRAFT = 4


def answer(llm, n=40, **options):
    tokens = llm.tokenize(LONG)[:300]
    bias = {token: -1e9 for token in llm.session.model.end_tokens.tolist()}
    text = llm(tokens, max_tokens=n, logit_bias=bias, **options)["choices"][0]["text"]
    return text, llm.session.last_logits.copy()


@pytest.mark.parametrize("method", ["full", "dca"])
@pytest.mark.parametrize("kv", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_answer_has_the_bits_of_the_method_without_drafts(embedded_model, drafts, method, kv, temperature):
    given = FIXED | {"method": method, "type_k": kv, "type_v": kv}
    with new(embedded_model, **given) as llm:
        plain = answer(llm, temperature=temperature)
    with new(embedded_model, draft=DRAFT, **given) as llm:
        found = answer(llm, temperature=temperature)
    assert found[0] == plain[0]
    np.testing.assert_array_equal(found[1], plain[1])
    draft = drafts[-1]
    assert draft.n_drafted > 20
    assert draft.n_accepted > 0.1 * draft.n_drafted  # at this temperature many drafts are not what is sampled


def test_rows_and_index_are_those_of_a_context_that_never_drafted(embedded_model, drafts):
    """The whole state, after each of several answers, of which the last is stopped in the middle."""
    spec = f"{DRAFT},position=full,select_from=512"
    with new(embedded_model, method=spec, **FIXED) as plain, new(embedded_model, draft=DRAFT, **FIXED) as llm:
        assert str(llm.method) == str(plain.method)
        for n in (1, 7, 33):
            assert answer(llm, n, temperature=0.0)[0] == answer(plain, n, temperature=0.0)[0]
            for one in (llm, plain):
                one.session.rewind(one.n_tokens - 1)
            assert llm.n_tokens == plain.n_tokens
            assert llm.session.context.state(0).tobytes() == plain.session.context.state(0).tobytes()
    assert sum(draft.n_drafted for draft in drafts) > 20


def test_the_drafts_of_several_sequences(embedded_model, drafts):
    prompts = [llm_text.decode() for llm_text in (LONG[:1000], LONG[20:1100], LONG[40:1050])]
    options = {"max_tokens": 20, "temperature": 0.0}
    with new(embedded_model, n_parallel=3, **FIXED) as llm:
        plain = [one["choices"][0]["text"] for one in llm.complete_many(prompts, **options)]
    with new(embedded_model, n_parallel=3, draft=DRAFT, **FIXED) as llm:
        assert [one["choices"][0]["text"] for one in llm.complete_many(prompts, **options)] == plain
    assert sum(draft.n_drafted for draft in drafts) > 0


def test_no_room_for_drafts_is_not_a_draft(embedded_model, drafts, monkeypatch):
    """The memory is full while a token is drafted: the answer continues without a draft."""
    with new(embedded_model, **FIXED) as llm:
        plain = answer(llm, temperature=0.0)
    with new(embedded_model, draft=DRAFT, **FIXED) as llm:
        context, decode, select = llm.session.context, llm.session.context.decode, llm.session.context.select_from
        state = {"drafts": False}

        def fail(*args):
            if state["drafts"]:
                raise ContextFull("the KV cache is full", 1)
            decode(*args)

        def note(first=-1):
            state["drafts"] = first >= 0
            select(first)

        monkeypatch.setattr(context, "decode", fail)
        monkeypatch.setattr(context, "select_from", note)
        found = answer(llm, temperature=0.0)
    assert found[0] == plain[0] and drafts[-1].n_drafted == 0


def test_a_short_text_is_not_drafted(embedded_model, drafts, monkeypatch):
    """The draft model is not even asked, from which the text of each step would be copied."""
    with new(embedded_model, draft=DRAFT, **FIXED) as llm:
        asked, draft_all = [], SelfDraft.draft_all
        monkeypatch.setattr(SelfDraft, "draft_all", lambda *args: asked.append(args) or draft_all(*args))
        llm(TEXT.decode(), max_tokens=5, temperature=0.0)
        assert not asked
        answer(llm, 5, temperature=0.0)
    assert asked and drafts[0].n_drafted == 0


def test_after_an_error_the_context_reads_everything(embedded_model, drafts, monkeypatch):
    with new(embedded_model, **FIXED) as llm:
        plain = answer(llm, temperature=0.0)
    with new(embedded_model, draft=DRAFT, **FIXED) as llm:
        context, decode = llm.session.context, llm.session.context.decode

        def fail(tokens, *args):
            if len(tokens) == 1 and drafts[-1].n_drafts:
                raise KeyboardInterrupt
            decode(tokens, *args)

        with monkeypatch.context() as patch:
            patch.setattr(context, "decode", fail)
            with pytest.raises(KeyboardInterrupt):
                answer(llm, temperature=0.0)
        found = answer(llm, temperature=0.0)
    assert found[0] == plain[0]
    np.testing.assert_array_equal(found[1], plain[1])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"draft": "window"}, 'draft must be "mtp", or "longheads" with a window if wanted, not \'window\''),
        ({"draft": "longheads,select_from=128"}, 'or "longheads" with a window'),
        ({"method": "window"}, "needs the method full or dca, not 'window,n_sink=4'"),
        ({"method": "longheads"}, "needs the method full or dca, not 'longheads'"),
        ({"method": "corm"}, "needs the method full or dca, not"),
        ({"method": None}, "needs the method full or dca, not None"),
        ({"n_ctx": 0}, r"set n_ctx \(-c\)"),
        ({"overflow": "evict_middle"}, "needs the method full or dca, not 'full,spans"),
    ],
)
def test_refusals(embedded_model, given, message):
    with pytest.raises(ValueError, match=message):
        new(embedded_model, **{"draft": DRAFT} | given)


def test_where_queries_choose(embedded_model):
    with new(embedded_model, draft=DRAFT, **FIXED) as llm:
        context = llm.session.context
        for first in (64, 512, -1):
            context.select_from(first)
        for first in (63, 0, 513, -2):
            with pytest.raises(InvalidInput, match="from the window of 64 to select_from, 512, not"):
                context.select_from(first)
    with new(embedded_model, method="full") as llm, pytest.raises(InvalidInput, match=r"reads everything|has no row"):
        llm.session.context.select_from(64)
    with pytest.raises(ValueError, match="n_max must be at least 1"):
        SelfDraft(64, 0)


def test_the_option(embedded_model):
    from argparse import Namespace

    assert own_draft(Namespace(spec_type=["ngram-simple", "longheads"])) == {"draft": "longheads"}
    assert own_draft(Namespace(spec_type=None)) == {}
