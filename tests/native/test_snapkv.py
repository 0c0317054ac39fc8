"""SnapKV: the last tokens of a prompt vote and stay; against the whole-model oracle, stops, refusals."""

import numpy as np
import pytest
from model_oracle import Model, WatchedModel
from oracle import Full
from oracle_compress import CompressedModel
from oracle_evict import Evicting
from oracle_rules import H2O
from test_compress import SIZES, held
from test_corm import open_llama, random_tokens
from test_methods import assert_same_logits

from pylongctx import Llama, SnapKV
from pylongctx.errors import Aborted, InvalidInput

N, WINDOW, POOL, SHARE = 130, 17, 5, 0.4
SPEC = f"snapkv,window={WINDOW},pool={POOL}"


@pytest.fixture
def start(model_path):
    return lambda method=SPEC, **settings: open_llama(model_path("llama"), method, **SIZES | settings)


def sums_of_weights(model: Model, text: list[int]) -> np.ndarray:
    """Return the sums of the weights that the last queries give, ``[n_layer, n_head_kv, n]``."""
    watched = WatchedModel.watch(model)
    whole, before = [], []
    for sums, n in ((whole, len(text)), (before, len(text) - WINDOW)):
        watched.runs.clear()
        watched.logits(text[:n], Evicting(Full(), H2O(2**20, 1, 2**20)))
        sums += [np.pad(run.scores[1, :, :n], ((0, 0), (0, len(text) - n))) for run in watched.runs]
    return np.array(whole) - np.array(before)


def pooled(scores: np.ndarray) -> np.ndarray:
    """Return sums over neighbors."""
    reach = POOL // 2
    padded = np.pad(scores, ((0, 0), (0, 0), (reach, reach)))
    return sum(padded[..., i : i + scores.shape[-1]] for i in range(POOL))


def test_the_rows_stay_to_which_the_last_queries_attend(model_path, start):
    text, rest = random_tokens(1, N), random_tokens(2, 40)
    model = Model.load(model_path("llama"))
    with start() as llm:
        llm.eval(text)
        row = llm.scores[-1].copy()
        report = llm.compress(SHARE)
        kept = held(llm)
        np.testing.assert_allclose(llm.scores[-1], row, atol=1e-4)
        llm.eval(rest)
        logits = np.array(llm.scores[N:])
    assert report.divergence is None
    assert not report.drifts
    assert kept[..., -WINDOW:].all()
    scores = pooled(sums_of_weights(model, text)[..., :-WINDOW])
    n_own = int(SHARE * N) // 5 - WINDOW  # in addition to the window
    assert n_own < 0
    least = np.sort(scores, axis=None)[-(int(SHARE * N * kept[..., 0].size) - WINDOW * kept[..., 0].size)]
    old = kept[..., :-WINDOW]
    np.testing.assert_array_equal(old[scores > least + 1e-4], True)
    np.testing.assert_array_equal(old[scores < least - 1e-4], False)
    assert kept.sum() == int(SHARE * N * kept[..., 0].size)
    compressed = CompressedModel(model.meta, model.tensors, model.rope, kept, [])
    assert_same_logits(logits, compressed.logits([*text, *rest], Evicting(Full(), H2O(2**20, 1, 2**20)))[N:])


def test_a_state_of_a_compressed_prompt_continues_with_the_same_logits(start):
    rest = random_tokens(2, 30)
    with start() as llm, start() as other:
        llm.eval(random_tokens(1, N))
        llm.compress(SHARE)
        other.load_state(llm.save_state())
        for one in (llm, other):
            one.eval(rest)
        np.testing.assert_array_equal(llm.scores[N:], other.scores[N:])
        np.testing.assert_array_equal(llm.kv_usage().rows, other.kv_usage().rows)


def test_an_answer_continues_from_the_compressed_prompt(start):
    text = random_tokens(1, N)
    with start() as llm:
        llm.eval(text)
        whole = llm.kv_usage().rows.sum()
        llm.compress(SHARE)
        before = llm.session.n_evaluated
        llm(text, max_tokens=6, temperature=0.0, logit_bias={2: -1e9})
        assert llm.session.n_evaluated - before == 5
        assert llm.kv_usage().rows.sum() < 0.5 * whole


@pytest.mark.parametrize(
    "method", ["longheads,chunk_size=16,window=64+" + SPEC, "selfextend,group_size=16,neighbor_window=21+" + SPEC]
)
def test_snapkv_composes_with_a_base(start, method):
    with start(method) as llm:
        llm.eval(random_tokens(1, N))
        llm.compress(0.5)
        assert held(llm)[..., -WINDOW:].all()
        llm.eval(random_tokens(2, 20))


def test_a_stopped_compression_changes_nothing(start, monkeypatch):
    text, rest = random_tokens(1, N), random_tokens(2, 9)
    with start() as llm, start() as other:
        for one in (llm, other):
            one.eval(text)
        begin = llm.session.context.begin_replay
        calls = []

        def begin_and_stop(seq):
            calls.append(begin(seq))
            if len(calls) == 2:
                llm.abort()
            return calls[-1]

        monkeypatch.setattr(llm.session.context, "begin_replay", begin_and_stop)
        with pytest.raises(Aborted):
            llm.compress(SHARE)
        assert list(llm.eval_tokens) == text
        assert held(llm).all()
        for one in (llm, other):
            one.eval(rest)
        np.testing.assert_allclose(llm.scores[N:], other.scores[N:], atol=1e-4)


def test_errors(start, model_path):
    with start() as llm:
        llm.eval(random_tokens(1, WINDOW))
        with pytest.raises(InvalidInput, match="more than its window of 17 tokens, not 17"):
            llm.compress(SHARE)
        assert llm.n_tokens == WINDOW
    for spec, reason in (
        ("snapkv,pool=4", "pool must be odd, not 4"),
        ("full,spans=2+snapkv", "only be evicted with kvzip"),
    ):
        with pytest.raises(ValueError, match=reason):
            Llama(model_path("llama"), method=spec)
    with pytest.raises(ValueError, match="pool must be odd"):
        SnapKV(pool=6)


def test_the_library_refuses_an_even_pool_and_other_windows(lib, open_session):
    session = open_session("llama", SPEC, n_ctx=100)
    session.decode(random_tokens(1, 40))
    assert lib.lctx_seq_replay(session.ctx, 0, 1) == 60
    session.decode(random_tokens(2, 9))
    assert not lib.lctx_seq_compress(session.ctx, 0, 0.5)
    assert "the last 17 tokens did not vote" in session.error
