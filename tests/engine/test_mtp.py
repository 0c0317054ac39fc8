"""Drafts of the block of a model that predicts the token after the next one: against llama.cpp, and in answers."""

import numpy as np
import pytest
from llamas import EXACT, F32, new
from mtp_models import ATTENTION, HYBRID, WITH_INDEXER, make, make_apt, stock_drafts
from session import assert_same

from pylongctx import DraftChain, MtpDraft, NgramDraft
from pylongctx.errors import ContextFull, InvalidInput
from pylongctx.planning import Plan

SIZES = {"n_ctx": 384, "n_ubatch": 64} | F32
N_DRAFT = 4
LENGTHS = (150, 64, 2)  # of texts whose drafts are compared
REWOUND, RESTORED = (LENGTHS[0], (0, 130)), (LENGTHS[0], (100, 100))  # from where on states are known
LOST = (REWOUND, RESTORED)
F16 = 1.5e-3  # of the largest logit: K and V of the block are rounded


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("mtp")


@pytest.fixture(scope="module")
def stock(folder, tokens, tmp_path_factory):
    texts = [(tokens[:n], 0, 0) for n in LENGTHS] + [(tokens[:n], *where) for n, where in LOST]
    jobs = {name: (str(make(folder, name)), texts) for name in (*ATTENTION, *HYBRID, *WITH_INDEXER)}
    return stock_drafts(jobs, N_DRAFT, folder / "drafts.npz")


@pytest.fixture
def start(folder, open_llama):
    """Return a function from a model and its arguments to an open Llama that drafts."""

    def start(name, apt=False, **more):
        return open_llama((make_apt if apt else make)(folder, name), **SIZES | {"draft": "mtp"} | more)

    return start


def draft(session, last, n=N_DRAFT):
    """Return the draft after a token that follows a sequence, and the logits of its tokens."""
    rows, step = [], session.context.draft_step
    session.context.draft_step = lambda *args: rows.append(step(*args)[0]) or rows[-1][None]
    try:
        text = np.array([*session.tokens, last], np.int32)
        found = MtpDraft(n)(text, n_max=n, session=session)
    finally:
        del session.context.draft_step
    return found, np.array(rows)


def assert_draft(session, last, want):
    found, rows = draft(session, last)
    assert_same(rows, want, F16)
    assert found.tolist() == want.argmax(1).tolist()


def ids(tokens):
    return np.array(tokens, np.int32)


@pytest.mark.parametrize("name", [*ATTENTION, *HYBRID, *WITH_INDEXER])
def test_drafts_are_those_of_llama_cpp(start, tokens, stock, name):
    """Of texts that were evaluated in parts, one of them a single token."""
    session = start(name).session
    for n, want in zip(LENGTHS, stock[name][: len(LENGTHS)], strict=True):
        session.rewind(0)
        for first, end in ((0, n // 3), (n // 3, n // 3 + 1), (n // 3 + 1, n - 1)):
            session.eval(ids(tokens[first:end])) if end > first else None
        assert_draft(session, tokens[n - 1], want)
        assert_draft(session, tokens[n - 1], want)  # what was drafted is not in the way


@pytest.mark.parametrize("name", ["glm4moe-nextn", "step35-nextn", "qwen35-nextn"])
def test_one_state_changes_the_drafts(stock, name):
    """More than the tolerance, so that a wrong one is found."""
    whole, *others = (stock[name][i] for i in (0, len(LENGTHS), len(LENGTHS) + 1))
    for other in others:
        assert abs(whole - other).max() > 2 * F16 * abs(whole).max()


@pytest.mark.parametrize("name", ["glm4moe-nextn", "step35-nextn"])
def test_drafts_after_wrong_tokens(start, tokens, stock, name):
    """What was drafted and evaluated is taken back, as after a wrong draft."""
    session = start(name).session
    n = LENGTHS[0]
    session.eval(ids(tokens[: n - 2]))
    wrong, _ = draft(session, tokens[n - 2])
    session.eval(ids([tokens[n - 2], *wrong]))
    session.rewind(n - 1)
    assert_draft(session, tokens[n - 1], stock[name][0])


@pytest.mark.parametrize("name", ["glm4moe-nextn", "step35-nextn"])
def test_a_second_text_with_the_same_beginning(start, tokens, stock, name):
    """The state before its first token is not known any more; what the block has of the beginning is kept."""
    session, n = start(name).session, LENGTHS[0]
    session.eval(ids([*tokens[:140], *tokens[:100]]))
    assert session.rewind(130) == 130
    assert not session.context.can_draft()
    session.eval(ids(tokens[130 : n - 1]))
    assert_draft(session, tokens[n - 1], stock[name][len(LENGTHS)])


@pytest.mark.parametrize("method", ["full", None])
def test_drafts_of_a_copied_sequence(start, tokens, stock, method):
    session, other = start("glm4moe-nextn", n_parallel=2, method=method).sessions
    n = LENGTHS[0]
    session.eval(ids(tokens[: n + 4]))
    assert session.context.copy(0, 1, n - 1)
    other.input_ids[: n - 1], other.n_tokens = tokens[: n - 1], n - 1
    assert_draft(other, tokens[n - 1], stock["glm4moe-nextn"][0])
    session.rewind(n - 1)
    assert_draft(session, tokens[n - 1], stock["glm4moe-nextn"][0])


@pytest.mark.parametrize("name", ["glm4moe-nextn", "qwen35-nextn"])
def test_a_restored_sequence_is_drafted_from_its_next_token_on(start, tokens, stock, name):
    session, n = start(name).session, LENGTHS[0]
    session.eval(ids(tokens[:100]))
    saved = session.save()
    session.rewind(0)
    session.eval(ids(tokens[100:240]))
    session.load(*saved)
    assert not session.context.can_draft()
    assert len(draft(session, tokens[100])[0]) == 0
    session.eval(ids(tokens[100 : n - 1]))
    assert_draft(session, tokens[n - 1], stock[name][len(LENGTHS) + 1])


def test_rows_of_the_store_are_drafted_from_the_next_token_on(start, tokens, tmp_path, drafts):
    """Also by a model that is opened without drafts: the entries are the same."""
    given = {"kv_store": tmp_path, "deterministic": True, "apt": True, "n_ctx": 1024}
    text = tokens * 3
    with start("glm4moe-nextn", draft=None, **given) as llm:
        said = answer(llm, text)
    again = start("glm4moe-nextn", **given)
    assert answer(again, text) == said
    assert again.session.n_evaluated < len(text)
    assert drafts[-1].n_drafted > 20


def answer(llm, tokens, n=40, **more):
    bias = {token: -1e9 for token in llm.session.model.end_tokens.tolist()}
    options = {"max_tokens": n, "logit_bias": bias, "temperature": 0.0, "seed": 7}
    text = llm(tokens, **options | more)["choices"][0]["text"]
    return text, llm.session.tokens.tolist()


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_answers_have_the_bits_of_those_without_drafts(start, tokens, drafts, name, temperature):
    fixed = {"deterministic": True, "apt": True}
    plain, llm = start(name, draft=None, **fixed), start(name, **fixed)
    for text in (tokens[:100], tokens[:90], tokens[50:100]):
        assert answer(llm, text, temperature=temperature) == answer(plain, text, temperature=temperature)
        np.testing.assert_array_equal(llm.session.last_logits, plain.session.last_logits)
        assert drafts[-1].n_drafted > 20
    assert sum(one.n_accepted for one in drafts) > 8
    assert sum(one.n_accepted for one in drafts) < sum(one.n_drafted for one in drafts)


@pytest.mark.parametrize("name", [*HYBRID, *WITH_INDEXER])
def test_answers_that_are_not_deterministic(start, tokens, drafts, name):
    """Of hybrids, and without a method."""
    plain, llm = start(name, draft=None, apt=True), start(name, apt=True)
    for text in (tokens[:100], tokens[:90]):
        assert answer(llm, text) == answer(plain, text)
        assert_same(llm.session.last_logits, plain.session.last_logits, EXACT)
        assert 0 < drafts[-1].n_accepted < drafts[-1].n_drafted


@pytest.mark.parametrize(
    "method",
    [
        None,
        "dca,chunk_size=48,local_window=16",
        "selfextend,group_size=4,neighbor_window=60",
        "longheads,chunk_size=16,window=64",
    ],
)
def test_methods(start, tokens, drafts, method):
    plain, llm = (start("glm4moe-nextn", apt=True, draft=kind, method=method) for kind in (None, "mtp"))
    assert answer(llm, tokens[:150]) == answer(plain, tokens[:150])
    assert 0 < drafts[-1].n_accepted < drafts[-1].n_drafted


@pytest.mark.parametrize("name", ["glm4moe-nextn", "qwen35-nextn"])
def test_several_sequences_share_batches(start, tokens, drafts, monkeypatch, name):
    texts = [bytes(97 + token % 26 for token in tokens[20 * i : 90 + 15 * i]).decode() for i in range(3)]
    bias = {2: -1e9}
    given = {"apt": True, "n_parallel": 3}
    asked = {"max_tokens": 30, "temperature": 0.0, "logit_bias": bias}
    plain, llm = start(name, draft=None, **given), start(name, **given)
    batches, step = [], llm.session.context.draft_step
    record = lambda *args: batches.append(args[2].tolist()) or step(*args)  # noqa: E731
    monkeypatch.setattr(llm.session.context, "draft_step", record)
    want, got = ([one["choices"][0]["text"] for one in one.complete_many(texts, **asked)] for one in (plain, llm))
    assert got == want
    assert [0, 1, 2] in batches
    for one in drafts[-3:]:
        assert 0 < one.n_accepted < one.n_drafted


def test_sizes_of_drafts(start, tokens):
    session = start("glm4moe-nextn").session
    session.eval(ids(tokens[:50]))
    text = ids(tokens[:51])
    found = MtpDraft(4)(text, session=session).tolist()
    assert len(found) == 4
    assert MtpDraft(4)(text, n_max=2, session=session).tolist() == found[:2]
    assert MtpDraft(2)(text, n_max=9, session=session).tolist() == found[:2]
    assert MtpDraft(4, n_min=3)(text, n_max=2, session=session).tolist() == []
    assert MtpDraft(4, p_min=1.0)(text, session=session).tolist() == []
    assert MtpDraft(4)(ids(tokens[:40]), session=session).tolist() == []  # another text than that of the sequence


def test_a_full_context_is_not_a_draft(start, tokens, monkeypatch):
    session = start("glm4moe-nextn").session
    session.eval(ids(tokens[:50]))
    context, step, left = session.context, session.context.draft_step, [2]

    def fail(*args):
        left[0] -= 1
        if left[0] < 0:
            raise ContextFull("the KV cache is full", 1)
        return step(*args)

    monkeypatch.setattr(context, "draft_step", fail)
    assert len(MtpDraft(4)(ids(tokens[:51]), session=session)) == 2


def test_a_full_context_is_drafted_to_its_end(start, tokens, drafts):
    llm = start("glm4moe-nextn", n_ctx=256, apt=True)
    _, held = answer(llm, tokens[:200], n=100)
    assert len(held) == 255
    assert drafts[-1].n_drafted > 20


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("llama", {}, "architecture 'llama' cannot draft by itself: it has no block that drafts"),
        (
            "exaone-moe-nextn",
            {},
            "drafts of its MTP block were not compared with llama.cpp; those of cohere2moe",
        ),
        ("step35-two", {}, "its 2 MTP blocks draft in turn"),
        ("hy_v3-trunk", {}, "its MTP block is not in the file"),
        ("glm4moe-nextn", {"embedding": True}, "embeddings are not drafted"),
        ("glm4moe-nextn", {"draft": "mtp,n_max=3"}, 'draft must be "mtp", or "longheads"|unknown'),
    ],
)
def test_refusals(folder, name, given, message):
    for preflight in (True, False):
        with pytest.raises(ValueError, match=message):
            new(make(folder, name), **SIZES | {"draft": "mtp", "preflight": preflight} | given)


def test_eviction_rules_are_refused(folder):
    with pytest.raises(NotImplementedError, match="corm evicts KV entries"):
        new(make(folder, "glm4moe-nextn"), draft="mtp", method="corm")


def test_a_model_that_was_opened_without(start, tokens):
    llm = start("glm4moe-nextn", draft=None)
    with pytest.raises(ValueError, match="open it with draft='mtp'"):
        llm.draft_model = MtpDraft()
    with pytest.raises(ValueError, match="open it with draft='mtp'"):
        start("glm4moe-nextn", draft=None, draft_model=DraftChain([NgramDraft(), MtpDraft()]))
    llm.session.eval(ids(tokens[:5]))
    assert not llm.session.context.can_draft()
    with pytest.raises(InvalidInput, match="created without mtp"):
        llm.session.context.draft_step(ids([3]), ids([5]), ids([0]))


def test_steps_that_are_not_possible(start, tokens):
    session, other = start("glm4moe-nextn", n_parallel=2).sessions
    context = session.context
    for one in (session, other):
        one.eval(ids(tokens[:5]))
    before = draft(session, 9)[0].tolist()
    for columns, message in [
        (([], [], []), "a step takes 1 .. 2 tokens, not 0"),
        (([9, 9, 9], [5, 5, 5], [0, 1, 0]), "a step takes 1 .. 2 tokens, not 3"),
        (([9, 9], [5, 6], [0, 0]), "one token of each sequence"),
        (([9], [5], [2]), "one token of each sequence"),
        (([288], [5], [0]), "token id 288 is outside"),
        (([9], [4], [0]), "the hidden state before position 4 of sequence 0"),
        (([9], [10], [0]), "the hidden state before position 10 of sequence 0"),
    ]:
        with pytest.raises(InvalidInput, match=message):
            context.draft_step(*map(ids, columns))
    assert draft(session, 9)[0].tolist() == before


def test_a_chain_asks_the_text_first(start, tokens, drafts):
    llm = start("glm4moe-nextn", apt=True, draft=MtpDraft(2), draft_model=NgramDraft(3))
    assert isinstance(llm.draft_model, DraftChain)
    answer(llm, tokens[:100])
    assert drafts[-1].n_drafted > 20


def test_the_cache_of_the_block_is_a_part_of_the_plan(folder):
    path = str(make(folder, "glm4moe-nextn"))
    plain, drafting = (Plan(path, {"mtp": on}, {"n_ctx": 4096, "mtp": on}, "full").sizes()[0] for on in (0, 1))
    head = 2 * 2 * 32 * 2  # K and V, KV heads, channels, bytes
    assert drafting.foreign - plain.foreign == 4096 * head
    assert drafting.weights > plain.weights
    assert drafting.kv == plain.kv


def test_texts_that_lose_their_middle(start, tokens, drafts):
    """The block forgets what comes after the cut, and drafts again from the next token on."""
    given = {"n_ctx": 256, "overflow": "evict_middle", "apt": True, "deterministic": True}
    plain, llm = start("glm4moe-nextn", draft=None, **given), start("glm4moe-nextn", **given)
    want, got = (answer(one, tokens[:200], n=150) for one in (plain, llm))
    assert got == want
    assert llm.session.placed
    assert drafts[-1].n_drafted > 100
