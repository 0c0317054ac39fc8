"""Compression of a text that was read (KVzip): against the whole-model oracle, many questions on one text, refusals."""

from dataclasses import replace

import numpy as np
import pytest
from cases import N_CTX_TRAIN
from drivers import model_of
from model_oracle import Model
from oracle import Full, SelfExtend
from oracle_chunks import LongHeads
from oracle_compress import CompressedModel, largest_weights
from oracle_evict import Evicting
from oracle_rules import Kvzip
from session import assert_same
from test_corm import open_llama, random_tokens
from test_methods import assert_same_logits

from pylongctx import Llama
from pylongctx.engine import compress
from pylongctx.errors import Aborted, ContextFull, InvalidInput

N, SHARE, SIZES = 150, 0.4, {"n_ctx": 420, "n_batch": 64, "n_ubatch": 16}
BASES = {
    "full": Full(),
    "selfextend": SelfExtend(16, 21),
    "longheads": LongHeads(16, 64, select="group", representation="minmax"),
    "longheads-dca": LongHeads(16, 64, position="dca", n_ctx_train=N_CTX_TRAIN),
}


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch):
    """Three pieces of a text rather than one."""
    monkeypatch.setattr(compress, "PIECE", 64)
    monkeypatch.setattr(compress, "LEAST", 16)


@pytest.fixture
def start(model_path):
    return lambda method="kvzip", **settings: open_llama(model_path("llama"), method, **SIZES | settings)


def held(llm: Llama) -> np.ndarray:
    """Return which of the evaluated tokens each head holds, bool ``[n_layer, n_head_kv, n_tokens]``."""
    out = np.zeros((*llm.kv_usage().rows.shape, llm.n_tokens), dtype=bool)
    for layer, head in np.ndindex(out.shape[:2]):
        out[layer, head, llm.held_rows(layer, head)[0]] = True
    return out


# ---- against the oracle ----


@pytest.mark.parametrize(
    ("name", "n", "replay"),
    [
        ("full", 130, ""),
        ("full", 130, ",replay=text"),
        ("full", 130, ",replay=piece"),
        ("selfextend", 70, ""),
        ("longheads", 96, ""),
        ("longheads-dca", 100, ""),
    ],
)
def test_the_best_rows_of_all_heads_stay(model_path, start, name, n, replay):
    text, rest, base = random_tokens(1, n), random_tokens(2, 40), BASES[name]
    model = Model.load(model_path("llama"))
    with start(Evicting(base, Kvzip(n, SHARE)).text() + replay) as llm:
        llm.eval(text)
        most = llm.session.context.begin_replay()
        pieces = list(compress.replays(llm.session, llm.session.tokens, most))
        llm.compress(SHARE)
        kept = held(llm)
        llm.eval(rest)
        logits = np.array(llm.scores[n:])
    assert len(pieces) > 1
    by_pieces = isinstance(base, Full) and replay != ",replay=text"
    scores = largest_weights(model, base, text, pieces, by_pieces)
    open_row = n // 16 * 16 if isinstance(base, LongHeads) else n
    scores[..., open_row:] = np.inf
    assert kept.sum() == int(SHARE * n * scores[..., 0].size)
    n_own = int(SHARE * n) // 5
    own = np.sort(scores, axis=-1)[..., -n_own, None]  # of these every head keeps its best
    scores = np.where(scores > own - 1e-4, np.inf, scores)
    least = np.sort(scores, axis=None)[-kept.sum()]
    np.testing.assert_array_equal(kept[scores > least + 1e-4], True)
    np.testing.assert_array_equal(kept[scores < least - 1e-4], False)
    assert (kept.sum(-1) >= n_own).all()
    assert kept.sum((0, 2)).std() > 0  # heads hold what they need
    compressed = CompressedModel(model.meta, model.tensors, model.rope, kept, [])
    if not isinstance(base, LongHeads):  # chunks of a near tie may be others
        assert_same_logits(logits, compressed.logits([*text, *rest], Evicting(base, Kvzip(n, SHARE)))[n:])


def test_the_cuda_kernels_keep_the_same_rows(start, emulated):
    text, both = random_tokens(1, N), []
    for _ in range(2):
        with start() as llm:
            llm.eval(text)
            llm.compress(SHARE)
            both.append(held(llm))
            emulated() if len(both) == 1 else None
    assert (both[0] != both[1]).mean() < 0.01


# ---- what stays is a text like any other ----


def test_pages_are_freed(start):
    with start(n_ctx=1500, n_batch=256) as llm:
        llm.eval(random_tokens(1, 1000))
        before = llm.kv_usage()
        for share in (0.5, 0.2):
            llm.compress(share)
            usage = llm.kv_usage()
            assert usage.rows.sum() == int(share * 1000 * usage.rows.size)
            assert usage.bytes < (share + 64 / 1000) * before.bytes  # a page of each head is not full
        assert usage.peak_bytes > before.bytes


def test_many_questions_continue_from_one_text(start):
    """Each as if it was the first."""
    text, questions = random_tokens(1, N), [random_tokens(seed, 9) for seed in (3, 4, 3)]
    answers = []
    with start() as llm:
        llm.eval(text)
        llm.compress(SHARE)
        for question in questions:
            before = llm.session.n_evaluated
            answer = llm([*text, *question], max_tokens=8, temperature=0.0, logit_bias={2: -1e9})
            answers.append((answer["choices"][0]["text"], np.array(llm.scores[N : N + 9])))
            assert llm.session.n_evaluated - before == 9 + 7
    assert answers[0][0] == answers[2][0]
    np.testing.assert_array_equal(answers[0][1], answers[2][1])
    assert (answers[0][1] != answers[1][1]).any()


def test_all_of_it_is_what_full_attention_reads(start):
    text, rest = random_tokens(1, N), random_tokens(2, 20)
    with start() as llm, start("full") as other:
        for one in (llm, other):
            one.eval(text)
        row = llm.scores[-1].copy()
        llm.compress(1.0)
        np.testing.assert_array_equal(llm.scores[-1], row)
        assert list(llm.eval_tokens) == text
        for one in (llm, other):
            one.eval(rest)
        assert_same(llm.scores[N:], other.scores[N:])
        assert held(llm).all()


def test_a_text_is_compressed_again(start):
    with start() as llm:
        llm.eval(random_tokens(1, N))
        llm.compress(0.5)
        once = held(llm)
        llm.compress(0.5)
        np.testing.assert_array_equal(held(llm), once)
        llm.eval(random_tokens(2, 30))
        llm.compress(0.3)
        twice = held(llm)
        assert twice.sum() == int(0.3 * (N + 30) * twice[..., 0].size)
        assert not twice[..., :N][~once].any()


@pytest.mark.parametrize("method", ["kvzip", Evicting(BASES["longheads-dca"], Kvzip(1, 1)).text()])
@pytest.mark.parametrize("type_k", ["f32", "q8_0"])
def test_a_state_of_a_compressed_text_continues_with_the_same_logits(model_path, method, type_k):
    text, rest, path = random_tokens(1, N), random_tokens(2, 30), model_path("llama-wide")
    with open_llama(path, method, type_k=type_k, **SIZES) as llm:
        llm.eval(text)
        llm.compress(SHARE)
        state = llm.save_state()
        llm.eval(rest)
        want, usage = np.array(llm.scores[N:]), llm.kv_usage()
    with open_llama(path, method, type_k=type_k, **SIZES) as llm:
        llm.load_state(state)
        llm.eval(rest)
        np.testing.assert_array_equal(llm.scores[N:], want)
        np.testing.assert_array_equal(llm.kv_usage().rows, usage.rows)
        llm.compress(0.2)


def test_an_answer_that_was_left_early_ends(start):
    with start() as llm:
        answer = llm.generate(random_tokens(1, N), temp=0)
        next(answer)
        llm.compress(0.5)
        with pytest.raises(RuntimeError, match="another call used this Llama"):
            next(answer)


def test_a_copy_is_compressed_for_itself(lib, open_session):
    """Pages that two sequences share are copied before rows move in them."""
    text, rest = random_tokens(1, N), random_tokens(2, 30)
    sizes = {"n_seq_max": 2, "n_ctx": 300, "n_batch": 64, "n_ubatch": 64}
    session, alone = open_session("llama", "kvzip", **sizes), open_session("llama", "full", **sizes)
    for one in (session, alone):
        one.decode(text, 50)
    assert session.copy(0, 1)
    assert lib.lctx_seq_replay(session.ctx, 1, 1) == 300 - N
    session.decode_mixed([(1, token) for token in rest])
    assert session.remove_tail(N, 1)
    assert lib.lctx_seq_compress(session.ctx, 1, 0.3), session.error
    np.testing.assert_array_equal(session.decode(rest), alone.decode(rest))
    session.decode_mixed([(1, token) for token in rest])
    assert session.restorable(N - 1, 1) == 0
    assert session.restorable(N + 3, 1) == N + 3


def test_states_that_are_not_rows_come_back(tmp_path):
    """A window and a recurrent state go back to a checkpoint after each replay."""
    text, rest = random_tokens(1, N), random_tokens(2, 20)
    for model in ("gemma3", "qwen3next"):
        logits = []
        for share in (None, 1.0, SHARE):
            with open_llama(model_of(tmp_path, model), "kvzip", **SIZES) as llm:
                llm.eval([token % 200 for token in text])
                if share:
                    llm.compress(share)
                llm.eval([token % 200 for token in rest])
                logits.append(np.array(llm.scores[N:]))
        assert_same(logits[1], logits[0])
        assert abs(logits[2] - logits[0]).max() > 1e-3


# ---- refusals ----


def check_continues(llm: Llama, text: list[int], logits: np.ndarray) -> None:
    """The text is as it was, and can be compressed."""
    assert list(llm.eval_tokens) == text
    assert llm.kv_usage().rows.min() == len(text)
    rest = random_tokens(2, 20)
    llm.eval(rest)
    assert_same(llm.scores[len(text) :], logits)
    llm.n_tokens = len(text)
    llm.compress(SHARE)


@pytest.fixture
def logits(start) -> np.ndarray:
    with start("full") as llm:
        llm.eval(random_tokens(1, N))
        llm.eval(random_tokens(2, 20))
        return np.array(llm.scores[N:])


@pytest.mark.parametrize("ratio", [0, -0.5, 1.01, float("nan")])
def test_a_ratio_is_a_share(start, ratio):
    with start() as llm:
        llm.eval(random_tokens(1, N))
        with pytest.raises(ValueError, match="ratio must be above 0 and at most 1"):
            llm.compress(ratio)
    for no_number in (None, "half", True):
        with start() as llm, pytest.raises(TypeError, match="ratio must be a number"):
            llm.compress(no_number)


@pytest.mark.parametrize("method", ["full", "h2o,budget=40", None])
def test_another_method_is_refused(start, method):
    with start(method) as llm:
        llm.eval(random_tokens(1, 30))
        with pytest.raises(InvalidInput, match="kvzip"):
            llm.compress(0.5)
        llm.eval(random_tokens(2, 30))


@pytest.mark.parametrize("base", ["longheads", "selfextend"])
def test_pieces_are_read_by_full_attention_only(start, base):
    with pytest.raises(InvalidInput, match="replay=piece needs full attention"):
        start(f"{base}+kvzip,replay=piece")


def test_no_text_is_refused(start):
    with start() as llm, pytest.raises(InvalidInput, match="there is no text"):
        llm.compress(0.5)


def test_a_store_keeps_texts_as_they_were_read(start, tmp_path):
    with start(kv_store=str(tmp_path)) as llm:
        llm.eval(random_tokens(1, 30))
        with pytest.raises(InvalidInput, match="kv_store"):
            llm.compress(0.5)


def test_a_replay_needs_room(start, logits):
    text = random_tokens(1, N)
    with start(n_ctx=N + 20) as llm:
        llm.eval(text)
        with pytest.raises(ContextFull, match=rf"{N} tokens are held; open with a larger n_ctx"):
            llm.compress(0.5)
        assert list(llm.eval_tokens) == text
        llm.eval(random_tokens(2, 20))
        assert_same(llm.scores[N:], logits)


def test_a_limit_holds_for_the_replay(start, logits):
    text = random_tokens(1, N)
    with start() as llm:
        llm.eval(text)
        limit = llm.kv_usage().bytes + 1
    with start(kv_limit=limit) as llm:
        llm.eval(text)
        with pytest.raises(ContextFull, match="kv_limit"):
            llm.compress(0.5)
        assert llm.kv_usage().bytes < limit
        assert list(llm.eval_tokens) == text


@pytest.mark.parametrize("end", [Aborted, KeyboardInterrupt])
def test_a_replay_that_is_stopped_changes_nothing(start, logits, end):
    text, calls = random_tokens(1, N), []
    with start() as llm:
        llm.eval(text)
        decode = llm.session.context.decode

        def stop(*args):
            calls.append(args)
            if len(calls) == 6:
                if end is KeyboardInterrupt:
                    raise KeyboardInterrupt
                llm.abort()
            decode(*args)

        llm.session.context.decode = stop
        with pytest.raises(end):
            llm.compress(0.5)
        del llm.session.context.decode
        llm.session.context.abort = False
        check_continues(llm, text, logits)


def repeated(llm: Llama, probe: np.ndarray) -> np.ndarray:
    """Return the log-probabilities of the last tokens of a probe, and rewind."""
    n = llm.n_tokens
    llm.eval(probe.tolist())
    logits = np.array(llm.scores[llm.n_tokens - compress.PROBE : llm.n_tokens], np.float64)
    llm.session.rewind(n)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def test_the_report_says_what_was_freed_and_what_changed(start):
    text, changes = random_tokens(1, N), []
    for ratio in (1.0, 0.6, 0.1):
        with start(logits_all=True) as llm:
            llm.eval(text)
            held, probes = llm.kv_usage().bytes, list(compress.probes_of(llm.session))
            before = [repeated(llm, probe) for probe in probes]
            report = llm.compress(ratio)
            pairs = [(p, repeated(llm, probe)) for p, probe in zip(before, probes, strict=True)]
            assert len(pairs) == compress.PROBES
            assert (report.n_tokens, report.bytes_before, report.bytes_after) == (N, held, llm.kv_usage().bytes)
            wanted = np.mean([(np.exp(p) * (p - q)).sum(axis=1) for p, q in pairs])
            np.testing.assert_allclose(report.divergence, wanted, atol=1e-4)
            changes.append(report.divergence)
    assert abs(changes[0]) < 1e-5 < changes[1] < changes[2]
    drifts = {0.2: True, 0.05: False, float("nan"): True, None: False}
    assert all(replace(report, divergence=change).drifts == drift for change, drift in drifts.items())


def test_a_text_too_short_to_repeat_is_compressed(start):
    with start() as llm:
        llm.eval(random_tokens(1, 70))
        assert not list(compress.probes_of(llm.session))
        assert llm.compress(0.5).divergence is None


def test_a_replay_is_taken_back_before_rows_leave(lib, open_session):
    session = open_session("llama", "kvzip", n_ctx=100)
    session.decode(random_tokens(1, 40))
    assert not lib.lctx_seq_compress(session.ctx, 0, 0.5)
    assert "not replayed" in session.error
    assert lib.lctx_seq_replay(session.ctx, 0, 1) == 60
    session.decode(random_tokens(2, 5))
    assert not lib.lctx_seq_compress(session.ctx, 0, 0.5)
    assert "not taken back" in session.error
    assert session.remove_tail(40)
    for share in (0.0, -1.0, 1.5, float("nan")):
        assert not lib.lctx_seq_compress(session.ctx, 0, share)
        assert "fraction" in session.error
    assert lib.lctx_seq_compress(session.ctx, 0, 0.5), session.error
    assert not lib.lctx_seq_compress(session.ctx, 0, 0.5)
    assert lib.lctx_seq_replay(session.ctx, 7, 1) == lib.LCTX_INVALID
    assert "sequences are" in session.error
