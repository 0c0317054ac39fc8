"""Options of drafts: kinds in their order, numbers of each, and what contradicts itself."""

import argparse

import pytest
from llamas import new

from pylongctx import DraftChain, ModelDraft, MtpDraft, NgramCacheDraft, NgramDraft, NgramModDraft
from pylongctx.cli.generation import MISSING, add_draft_options, draft_model, kinds, own_draft


def parsed(*words):
    parser = argparse.ArgumentParser()
    add_draft_options(parser)
    return parser.parse_args(words)


def made(*words, given=None):
    return draft_model(parsed(*words), {"n_ctx": 64, "verbose": False} if given is None else given)


@pytest.mark.parametrize("words", [(), ("--spec-type", "none")])
def test_no_drafts(words):
    assert made(*words) is None


def test_ngrams_and_their_sizes():
    simple = made("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3", "--spec-ngram-map-k-size-n", "9")
    assert isinstance(simple, NgramDraft)
    assert (simple.size_n, simple.size_m, simple.min_hits, simple.most_common) == (3, 48, 1, False)
    mapped = made(
        "--spec-type", "ngram-map-k4v", "--spec-ngram-map-k4v-size-m", "5", "--spec-ngram-map-k4v-min-hits", "2"
    )
    assert (mapped.size_n, mapped.size_m, mapped.min_hits, mapped.most_common) == (12, 5, 2, True)


def test_kinds_that_draft_token_by_token():
    mod = made("--spec-type", "ngram-mod", "--spec-ngram-mod-n-match", "8", "--spec-ngram-mod-n-min", "2")
    assert isinstance(mod, NgramModDraft)
    assert (mod.n_match, mod.n_max, mod.n_min) == (8, 64, 2)
    cache = made("--spec-type", "ngram-cache")
    assert isinstance(cache, NgramCacheDraft) and cache.n_max == 8
    default = made("--spec-default")
    assert isinstance(default, NgramModDraft)
    assert (default.n_match, default.n_max, default.n_min) == (24, 64, 48)
    assert isinstance(made("--spec-default", "--spec-type", "ngram-cache"), DraftChain)
    assert isinstance(made("--spec-default", "--spec-type", "ngram-mod"), NgramModDraft)


def test_a_draft_model_and_its_numbers(embedded_model):
    path = str(embedded_model)
    draft = made("-md", path, "--spec-draft-n-max", "5", "--spec-draft-p-min", "0.5", "-ctkd", "q8_0", "-td", "1")
    try:
        assert isinstance(draft, ModelDraft)
        assert (draft.n_max, draft.n_min, draft.p_min) == (5, 0, 0.5)
        with new(embedded_model, draft_model=draft) as llm:
            assert llm("It was", max_tokens=4)["usage"]["completion_tokens"] == 4
    finally:
        draft.close()


def test_kinds_keep_their_order(embedded_model):
    chain = made("--spec-type", "ngram-simple,draft-simple", "-md", str(embedded_model))
    assert isinstance(chain, DraftChain)
    chain.close()
    assert kinds("ngram-simple, none,ngram-simple") == ["ngram-simple"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--spec-type", "draft-simple"), "needs a draft model: add -md FILE"),
        (("--spec-draft-n-max", "3"), "--spec-draft-n-max is for a draft model: add -md FILE"),
        (("-md", "/none.gguf"), "/none.gguf"),
        (("-md", "/none.gguf", "--spec-type", "draft-mtp"), "draft-mtp uses the block in the file of the model"),
        (("--spec-type", "draft-mtp", "-td", "2"), "--spec-draft-threads is for a draft model: add -md FILE"),
        (("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "0"), "size_n must be at least 1"),
        (("--spec-type", "ngram-mod", "--spec-ngram-mod-n-max", "40"), "n_min must be at most 40, not 48"),
    ],
)
def test_contradictions(words, message):
    with pytest.raises(ValueError, match=message):
        made(*words)


def test_the_block_of_the_model():
    words = ("--spec-type", "ngram-simple,draft-mtp", "--spec-draft-n-max", "5", "--spec-draft-p-min", "0.25")
    draft = own_draft(parsed(*words))["draft"]
    assert isinstance(draft, MtpDraft)
    assert (draft.n_max, draft.n_min, draft.p_min) == (5, 0, 0.25)
    assert isinstance(made(*words), NgramDraft)
    assert made("--spec-type", "draft-mtp") is None
    assert own_draft(parsed("--spec-type", "ngram-simple")) == {}


@pytest.mark.parametrize(
    ("types", "message"),
    [
        ("draft-mtp,longheads", "in one way, draft-mtp or longheads, not both"),
        ("draft-mtp,ngram-simple", "draft-mtp comes after other kinds, not before ngram-simple"),
    ],
)
def test_how_the_model_drafts_itself(types, message):
    with pytest.raises(ValueError, match=message):
        own_draft(parsed("--spec-type", types))


def test_a_bad_number_frees_the_draft_model(embedded_model):
    with pytest.raises(ValueError, match="n_max must be at least 1, not 0"):
        made("-md", str(embedded_model), "--spec-draft-n-max", "0")


@pytest.mark.parametrize("kind", [*MISSING, "medusa"])
def test_other_kinds(kind):
    with pytest.raises(ValueError, match=f"{kind} is not supported: |unknown kind of drafts '{kind}'"):
        kinds(f"ngram-simple,{kind}")
