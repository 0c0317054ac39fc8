"""Drafts from texts, token by token: expected tokens, thresholds, and what several texts share."""

from types import SimpleNamespace

import numpy as np
import pytest
from llamas import TEXT, new

from pylongctx import NgramCacheDraft, NgramModDraft
from pylongctx.drafts import ngrams
from pylongctx.engine.drafting import DraftLength

pytestmark = pytest.mark.check


def ids(*tokens):
    return np.array(tokens, np.int32)


def of(owner, seq=0):
    return SimpleNamespace(owner=owner, seq=seq)


# ---- ngram-mod ----


@pytest.mark.parametrize(
    ("tokens", "n_max", "expected"),
    [
        ([7, 8, 9, 1, 2, 7, 8], None, [9, 1, 2, 7, 8, 9]),  # it goes round
        ([7, 8, 9, 1, 2, 7, 8], 2, [9, 1]),
        ([7, 8, 9, 7, 8, 4, 7, 8], None, [4, 7, 8, 4, 7, 8]),  # the latest one
        ([7, 8, 9, 1, 2, 8, 7], None, []),
        ([7, 8], None, []),
        ([8], None, []),
    ],
)
def test_the_tokens_that_followed(tokens, n_max, expected):
    draft = NgramModDraft(n_match=2, n_max=6, n_min=1)
    assert draft(ids(*tokens), **({} if n_max is None else {"n_max": n_max})).tolist() == expected


@pytest.mark.parametrize(("n_min", "n_max", "expected"), [(3, 6, [3, 4, 5]), (4, 6, []), (3, 1, [3]), (4, 1, [])])
def test_the_given_number_of_tokens_must_be_known(n_min, n_max, expected):
    """Also where fewer are wanted."""
    draft = NgramModDraft(n_match=2, n_max=6, n_min=n_min)
    draft(ids(1, 2, 3, 4, 5), session=of(None))
    assert draft(ids(9, 1, 2), n_max=n_max, session=of(None, 1)).tolist() == expected


def test_texts_learn_from_each_other_but_not_from_another_owner():
    draft = NgramModDraft(n_match=3, n_max=4, n_min=1)
    draft(ids(1, 2, 3, 4, 5, 6), session=of("me"))
    assert draft(ids(8, 1, 2, 3), session=of("me", 1)).tolist() == [4, 5, 6]
    assert draft(ids(8, 1, 2, 3), session=of("you", 2)).tolist() == []
    assert draft(ids(8, 1, 2, 3), session=of(None, 2)).tolist() == []


def test_a_text_is_stored_once_as_it_grows(monkeypatch):
    draft, stored, places = NgramModDraft(n_match=4, n_max=4, n_min=1), [], NgramModDraft._places
    monkeypatch.setattr(NgramModDraft, "_places", lambda *args: stored.append(places(*args)) or stored[-1])
    text = np.random.default_rng(0).integers(0, 30, 200).astype(np.int32)
    for n in (50, 51, 60, 60, 200):
        draft(text[:n])
    assert [len(one) for one in stored] == [46, 1, 9, 140]
    whole = places(draft, text[:-1], 0)
    assert np.concatenate(stored).tolist() == whole.tolist()
    assert len(set(whole.tolist())) > 190  # they differ
    assert draft(text[:100]).tolist() == text[100:104].tolist()


def test_a_table_that_is_full_is_cleared(monkeypatch):
    monkeypatch.setattr(ngrams, "BITS", 6)  # 64 places
    draft = NgramModDraft(n_match=2, n_max=2, n_min=1)
    draft(ids(1, 2, 3, 4))
    assert draft(ids(9, 1, 2)).tolist() == [3, 4]
    draft(np.arange(100, 160, dtype=np.int32))
    assert draft(ids(9, 1, 2)).tolist() == []
    assert draft(ids(1, 2, 3, 1, 2)).tolist() == [3, 1]


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"n_match": 0}, "n_match must be at least 1, not 0"),
        ({"n_max": 0, "n_min": 0}, "n_max must be at least 1, not 0"),
        ({"n_max": 9, "n_min": 10}, "n_min must be at most 9, not 10"),
        ({"n_min": -1}, "n_min must be at least 0, not -1"),
    ],
)
def test_numbers_of_the_table(numbers, message):
    with pytest.raises(ValueError, match=message):
        NgramModDraft(**numbers)


# ---- ngram-cache ----


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 9, 1, 2, 3], [4, 9, 1, 2, 3]),  # three tokens need one occurrence
        ([2, 3, 4, 9, 2, 3], []),  # two need two
        (
            [2, 3, 4, 2, 3, 5, 6, 2, 3],
            [5, 6, 2, 3, 5],
        ),  # of which half agree: the latest, then what followed three and four
        ([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3, 9, 1, 2, 3], []),  # no third is enough
        ([3, 4, 3, 4, 3, 5, 3], [4, 3, 5, 3, 4]),  # one token needs two thirds
        ([3, 4, 3, 5, 3], []),
        ([5], []),
    ],
)
def test_what_mostly_followed(tokens, expected):
    assert NgramCacheDraft(5)(ids(*tokens)).tolist() == expected


def test_the_number_of_tokens():
    assert NgramCacheDraft()(ids(*range(20), 0, 1, 2)).tolist() == list(range(3, 11))
    assert NgramCacheDraft()(ids(*range(20), 0, 1, 2), n_max=2).tolist() == [3, 4]
    with pytest.raises(ValueError, match="n_max must be at least 1, not 0"):
        NgramCacheDraft(0)


# ---- both ----


@pytest.mark.parametrize("draft", [NgramModDraft(1, 8, 1), NgramCacheDraft()])
def test_answers_are_those_without_drafts(embedded_model, drafted, monkeypatch, draft):
    monkeypatch.setattr(DraftLength, "choose", lambda self, times, n_others, most: min(5, most))
    given = {"n_parallel": 2, "deterministic": True}
    prompts, asked = [TEXT.decode() * 2, TEXT.decode()], {"max_tokens": 40, "temperature": 0.0}
    with new(embedded_model, **given) as llm:
        plain = [one["choices"][0]["text"] for one in llm.complete_many(prompts, **asked)]
    with new(embedded_model, draft_model=draft, **given) as llm:
        assert [one["choices"][0]["text"] for one in llm.complete_many(prompts, **asked)] == plain
    assert all(0 < one.n_accepted <= one.n_drafted for one in drafted[-2:])
