"""Drafts of models with recurrent layers or sliding windows: a wrong one is undone with a checkpoint."""

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hybrid_files import path_of
from llamas import EXACT, F32, greedy
from session import assert_same

from pylongctx import LlamaDraftModel, ModelDraft, NgramDraft
from pylongctx._lib import lib
from pylongctx.engine.drafting import DraftLength

RECURRENT = ["qwen3next", "granitehybrid", "falcon-h1", "lfm2"]
WHOLLY_RECURRENT = ["mamba"]
WINDOWS = ["gemma2", "gemma3"]  # 37 tokens
METHODS = ["full", "longheads,chunk_size=16,window=64,representation=attention"]
MODELS = [(method, name) for method in [*METHODS, None] for name in [*RECURRENT, *WINDOWS]] + [(None, "mamba")]
SIZES = {"n_ubatch": 64, "n_ctx": 384} | F32
N, N_DRAFT = 150, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("drafts")


@pytest.fixture
def start(folder, open_llama, model_path):
    """Return a function from a model and its arguments to an open Llama."""

    def start(name, method="full", **more):
        path = Path(model_path(name)) if name in WHOLLY_RECURRENT else path_of(folder, name)
        return open_llama(path, method=method, **SIZES | more)

    return start


class Scripted(LlamaDraftModel):
    """Drafts 5 tokens of which the first ones are those of a text; of each text that is given."""

    def __init__(self, *texts, n_right):
        self.texts, self.n_right = texts, n_right

    def __call__(self, input_ids, /, **kwargs):
        text = next(one for one in self.texts if one[: len(input_ids)] == input_ids.tolist())
        draft = np.array(text[len(input_ids) :][:5], np.int32)
        draft[self.n_right :] = (draft[self.n_right :] + 1) % 200 + 5
        return draft


@pytest.mark.parametrize(("method", "name"), MODELS)
@pytest.mark.parametrize("n_right", [0, 2, 5])
def test_a_wrong_draft_is_undone(start, tokens, drafts, name, method, n_right):
    """The tokens, the logits after them, and the evaluated tokens of a text that continues it."""
    prompt, more = tokens[:N], tokens[200:230]
    plain = start(name, method)
    said = list(islice(plain.generate(prompt, temp=0.0), 40))
    wanted = plain.session.last_logits.copy()
    llm = start(name, method, draft_model=Scripted([*prompt, *said], n_right=n_right))
    assert list(islice(llm.generate(prompt, temp=0.0), 40)) == said
    assert_same(llm.session.last_logits, wanted, EXACT)
    draft = drafts[-1]
    assert draft.n_drafts > 5
    assert draft.n_accepted == n_right * draft.n_drafts or n_right > 0
    recurrent = llm.session.context.rollback == lib.LCTX_ROLLBACK_NONE
    again = 0 if n_right == 5 else draft.n_accepted + 2 * draft.n_drafts if recurrent else 0
    assert llm.session.n_evaluated <= N + 40 + draft.n_drafted + again
    for one in (plain, llm):
        one.prefill([*prompt, *said[:-1], *more])
    assert_same(llm.session.last_logits, plain.session.last_logits, EXACT)


def test_the_state_is_kept_when_all_tokens_are_right(start, tokens, drafts):
    llm = start("qwen3next")
    said = greedy(llm, tokens[:N], 36)
    llm.draft_model = Scripted([*tokens[:N], *said], n_right=5)
    llm.reset()
    llm.session.n_evaluated = 0
    assert greedy(llm, tokens[:N], 36) == said
    assert drafts[-1].n_drafted - 5 < drafts[-1].n_accepted > 20  # the last tokens are not asked for
    assert llm.session.n_evaluated <= N + 36


@pytest.mark.parametrize(
    ("name", "method"),
    [("qwen3next", "full"), ("falcon-h1", "full"), ("gemma3", "full"), ("qwen3next", None), ("mamba", None)],
)
@pytest.mark.parametrize("n", [2, 3])
def test_several_sequences(start, tokens, drafts, name, method, n):
    """Each of them with right and wrong drafts of its own, and a text afterwards."""
    prompts = [tokens[20 * i : N - 10 * i] for i in range(n)]
    options = {"max_tokens": 30, "temperature": 0.0}
    with start(name, method, n_parallel=n) as llm:
        bias = {token: -1e9 for token in llm.session.model.end_tokens.tolist()}
        plain = [one["choices"][0]["text"] for one in llm.complete_many(prompts, logit_bias=bias, **options)]
        texts = [session.tokens.tolist() for session in llm.sessions]
        rows = [session.last_logits.copy() for session in llm.sessions]
    draft = Scripted(*texts, n_right=2)
    with start(name, method, n_parallel=n, draft_model=draft) as llm:
        found = [one["choices"][0]["text"] for one in llm.complete_many(prompts, logit_bias=bias, **options)]
        assert found == plain
        for session, text, row in zip(llm.sessions, texts, rows, strict=True):
            assert session.tokens.tolist() == text
            assert_same(session.last_logits, row, EXACT)
    assert all(0 < draft.n_accepted < draft.n_drafted for draft in drafts[-n:])


@pytest.mark.parametrize("name", ["qwen3next", "granitehybrid", "falcon-h1"])
@pytest.mark.parametrize("method", ["full", None])
def test_a_draft_model_of_the_same_kind(start, tokens, drafts, name, method):
    """It drafts the most probable tokens, and others are drawn: it undoes its own with a checkpoint."""
    llm, small = start(name, method), start(name, method)
    bias = {token: -1e9 for token in llm.session.model.end_tokens.tolist()}
    options = {"max_tokens": 40, "temperature": 5.0, "seed": 7, "logit_bias": bias}
    llm.draft_model = ModelDraft(small, n_max=4)
    found = llm(tokens[:N], **options)["choices"][0]["text"]
    llm.draft_model = None
    assert llm(tokens[:N], **options)["choices"][0]["text"] == found
    draft = drafts[0]
    assert draft.n_drafts > 10 and draft.n_accepted < draft.n_drafts
    assert small.session.n_evaluated < N + 6 * draft.n_drafts + draft.n_accepted


@pytest.mark.parametrize("name", ["qwen3next", "granitehybrid", "gemma3"])
@pytest.mark.parametrize("n", [1, 2])
def test_a_model_drafts_itself(start, tokens, drafts, name, n):
    prompts = [tokens[10 * i : N] for i in range(n)]
    options = {"max_tokens": 30, "temperature": 0.0}
    with start(name, n_parallel=n) as llm:
        plain = [one["choices"][0]["text"] for one in llm.complete_many(prompts, **options)]
    with start(name, n_parallel=n, draft="longheads,window=64,chunk_size=16") as llm:
        assert [one["choices"][0]["text"] for one in llm.complete_many(prompts, **options)] == plain
    assert all(draft.n_drafted > 5 for draft in drafts[-n:])


@pytest.mark.parametrize("n", [1, 2])
def test_windows_keep_their_bits(start, tokens, drafts, n):
    """The logits after texts that continue from where drafts were undone."""
    prompts = [tokens[20 * i : N - 10 * i] for i in range(n)]
    given = {"deterministic": True, "n_parallel": n, "type_k": "f16", "type_v": "f16"}

    def rows(llm):
        bias = {token: -1e9 for token in llm.session.model.end_tokens.tolist()}
        llm.complete_many(prompts, logit_bias=bias, max_tokens=30, temperature=0.0)
        found = []
        for session in llm.sessions:
            found.append((session.tokens.tolist(), session.last_logits.tobytes()))
            session.eval(np.array(tokens[200:210], np.int32))
            found.append((session.tokens.tolist(), session.last_logits.tobytes()))
        return found

    plain = rows(start("gemma3", **given))
    draft = Scripted(*(text for text, _ in plain[::2]), n_right=2)
    assert rows(start("gemma3", draft_model=draft, **given)) == plain
    assert all(0 < draft.n_accepted < draft.n_drafted for draft in drafts[-n:])


@pytest.mark.parametrize(("name", "copies"), [("qwen3next", True), ("gemma3", False)])
def test_the_length_of_drafts_knows_the_time_of_copies(start, tokens, monkeypatch, name, copies):
    seconds, copied = [], DraftLength.copied
    monkeypatch.setattr(DraftLength, "copied", lambda self, one: seconds.append(one) or copied(self, one))
    llm = start(name)
    said = greedy(llm, tokens[:100] * 2, 40)
    llm.draft_model = NgramDraft(1, 8)
    assert greedy(llm, tokens[:100] * 2, 40) == said
    assert bool(seconds) == copies
    assert all(0 < one < 1 for one in seconds)


@pytest.mark.parametrize("method", ["full", None])
def test_a_saved_state_is_that_of_the_answer(start, tokens, drafts, method):
    """An answer that ends within a draft has left a state that is farther."""
    llm = start("qwen3next", method)
    said = greedy(llm, tokens[:N], 40)
    llm.draft_model = Scripted([*tokens[:N], *said], n_right=5)
    assert greedy(llm, tokens[:N], 4) == said[:4]
    session = llm.session
    assert session.n_past > session.n_tokens
    ids = session.tokens.tolist()
    saved = session.save()
    assert saved[0].tolist() == ids
    other = start("qwen3next", method)
    other.session.load(*saved)
    other.prefill([*ids, *tokens[200:210]])
    llm.draft_model = None
    llm.reset()
    llm.prefill([*ids, *tokens[200:210]])
    assert_same(other.session.last_logits, llm.session.last_logits, EXACT)


@pytest.mark.parametrize("method", ["corm,window=8,recent=24,evict_every=16", "h2o,budget=64"])
def test_rules_still_refuse(start, method):
    with pytest.raises(NotImplementedError, match=r"draft_model: .* evicts KV entries"):
        start("qwen3next", method, draft_model=NgramDraft(2))


# ---- the checkpoint without a method ----


def test_the_last_checkpoint_is_where_a_sequence_can_go_back(start, tokens):
    context = start("qwen3next", None, n_parallel=2).session.context
    rows = np.empty((2, context.n_vocab), np.float32)

    def decode(first, end, seq=0):
        at, seqs = np.arange(first, end, dtype=np.int32), np.full(end - first, seq, np.int32)
        wanted = np.zeros(end - first, np.int8)
        wanted[-1] = 1
        context.decode(np.array(tokens[first:end], np.int32), at, seqs, wanted, rows[seq : seq + 1])

    decode(0, 40)
    assert context.restorable(39) == 0 and not context.checkpoint()
    decode(40, 45)
    plain = rows[0].copy()
    assert [context.restorable(n) for n in (39, 40, 44, 45)] == [0, 40, 40, 45]
    assert "evaluate the prefix again" in context.truncate(42)
    assert context.copy(0, 1, 40)
    assert context.truncate(40) == "" and context.n_past() == context.n_past(1) == 40
    for seq in range(2):
        decode(40, 45, seq)
        assert_same(rows[seq], plain, EXACT)
    assert context.restorable(44, 1) == 0  # a copy has no checkpoint of its own
    context.clear(0)
    decode(0, 45)
    assert context.restorable(44) == 0
