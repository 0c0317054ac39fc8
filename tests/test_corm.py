"""Eviction in whole models: against the whole-model oracle, in any order, saved, copied, taken back.

A decision at a near tie may fall the other way in float32 and then later logits differ for a good reason. Comparisons
with the oracle are made with tokens for which no decision is that close; the seed is searched.
"""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import test_memory
from cases import LOGIT_TOLERANCE
from model_oracle import Model, Run, WatchedModel
from oracle import Full, SelfExtend
from oracle_chunks import LongHeads
from oracle_evict import H2O, Corm, Evicting, Layer, Scissorhands, Tova
from session import assert_same
from test_longheads import assert_nearly_all_rows_equal
from test_methods import assert_same_logits, evaluate

from pylongctx import Llama

N, MARGIN = 200, 1e-4
EXTENDED = SelfExtend(5, 21)
METHODS = {
    "corm": Evicting(Full(), Corm(12, 16, 1)),
    "corm-every16": Evicting(Full(), Corm(16, 20, 16)),
    "corm-unprotected": Evicting(Full(), Corm(20, 0, 9)),
    "selfextend-corm": Evicting(EXTENDED, Corm(14, 10, 7)),
    "h2o": Evicting(Full(), H2O(60, 12, 8)),
    "scissorhands": Evicting(Full(), Scissorhands(60, 9, 10, 12)),
    "selfextend-tova": Evicting(EXTENDED, Tova(50, 3)),
}
CHUNKED = {
    "longheads-corm": Evicting(LongHeads(16, 64), Corm(8, 16, 8)),
    "longheads-corm-every1": Evicting(LongHeads(16, 64, select="group", representation="minmax"), Corm(10, 0, 1)),
    "longheads-grouped-corm": Evicting(
        LongHeads(16, 64, representation="minmax", position="grouped", group_size=8), Corm(8, 16, 16)
    ),
    "longheads-h2o": Evicting(LongHeads(16, 64, n_recent=0, n_neighbor=1), H2O(70, 12, 8)),
}
ALL = METHODS | CHUNKED
TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
IDLE = {
    "corm-recent": "corm,window=1,recent=200,evict_every=1",
    "corm-window": "corm,window=201,recent=0,evict_every=1",
    "corm-never": "corm,window=1,recent=0,evict_every=201",
    "h2o": "h2o,budget=200,recent=10,evict_every=1",
    "scissorhands": "scissorhands,budget=200,window=3,recent=10,evict_every=3",
    "tova": "tova,budget=200,evict_every=1",
    "corm-defaults": "corm",
    "full-corm": "full+corm,recent=200",
}


def random_tokens(seed: int, n: int = N) -> list[int]:
    return np.random.default_rng(seed).integers(3, 288, n).tolist()


@dataclass(frozen=True)
class Expected:
    """Tokens without a near tie, and what the oracle makes of them."""

    tokens: list[int]
    logits: np.ndarray
    model: WatchedModel


@cache
def expect(path, method: Evicting, seed: int = 0, prefix: tuple[int, ...] = (), n: int = N) -> Expected:
    """Return ``prefix`` and the first ``n`` random tokens for which the oracle has no doubts about ``method``."""
    model = Model.load(path)
    for i in range(20):
        watched, tokens = WatchedModel.watch(model, MARGIN), [*prefix, *random_tokens(100 * seed + i, n)]
        logits = watched.logits(tokens, method)
        if not watched.doubts:
            return Expected(tokens, logits, watched)
    raise AssertionError("every seed has near ties")


def open_llama(path, method: str, **settings) -> Llama:
    defaults = {"n_ctx": N, "n_batch": 64, "n_ubatch": 16, "type_k": "f32", "type_v": "f32", "logits_all": True}
    return Llama(
        str(path), method=method, verbose=False, **defaults | {"n_threads": 1, "n_threads_batch": 1} | settings
    )


def feed(llm: Llama, tokens: list[int], cuts: list[int]) -> np.ndarray:
    """Evaluate tokens, cut at these places, and return the logits of all."""
    for first, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        llm.eval(tokens[first:end])
    return np.array(llm.scores[: len(tokens)])


MIXED = [61, *range(62, 75), 139, *range(140, 151)]  # prompts, and single tokens between them


# ---- against the oracle ----


@pytest.mark.parametrize("model", ["llama", "qwen2", "llama-mha", "llama-wide"])
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("n_ubatch", [13, 64])
def test_logits_and_rows_held_equal_the_oracle(model_path, model, name, n_ubatch):
    want = expect(model_path(model), METHODS[name])
    with open_llama(model_path(model), METHODS[name].text(), n_ubatch=n_ubatch, n_threads_batch=2) as llm:
        got, usage = feed(llm, want.tokens, MIXED), llm.kv_usage()
    assert_same_logits(got, want.logits, 1e-3)
    assert np.median(abs(got - want.logits)) < LOGIT_TOLERANCE * abs(want.logits).max()
    np.testing.assert_array_equal(usage.rows, want.model.held)


@pytest.mark.parametrize("model", ["llama", "qwen2"])
@pytest.mark.parametrize("name", CHUNKED)
def test_logits_and_rows_held_equal_the_oracle_with_chunks(model_path, model, name):
    """A choice of chunks may fall otherwise at a near tie, which moves a few votes."""
    want = expect(model_path(model), CHUNKED[name])
    with open_llama(model_path(model), CHUNKED[name].text()) as llm:
        got, rows = feed(llm, want.tokens, MIXED), llm.kv_usage().rows
    assert_nearly_all_rows_equal(got, want.logits)
    assert abs(rows - want.model.held).max() <= 2


@pytest.mark.parametrize("name", METHODS)
def test_rows_are_counted_after_the_eviction_that_is_due(model_path, name):
    method, path = METHODS[name], model_path("llama")
    want = expect(path, method)
    every = method.rule.evict_every
    ends = sorted({every - 1, every, every + 1, *range(10 * every - 1, 10 * every + 2)} - {0})
    with open_llama(path, method.text()) as llm:
        for first, end in zip([0, *ends], ends, strict=False):
            llm.eval(want.tokens[first:end])
            watched = WatchedModel.watch(Model.load(path))
            watched.logits(want.tokens[:end], method)
            np.testing.assert_array_equal(llm.kv_usage().rows, watched.held)


def test_eviction_matters(model_path):
    """The comparison with the oracle could not fail if every rule gave the same logits."""
    path, tokens = model_path("llama"), random_tokens(0)
    results = [evaluate(path, method.text(), tokens, n_ctx=N)[-1] for method in ALL.values()]
    results += [
        evaluate(path, base, tokens, n_ctx=N)[-1] for base in ("full", EXTENDED.text(), LongHeads(16, 64).text())
    ]
    for i, a in enumerate(results):
        for b in results[:i]:
            assert abs(a - b).max() > 0.01


@pytest.mark.parametrize("spec", IDLE.values(), ids=IDLE)
def test_settings_that_evict_nothing_equal_full(model_path, spec):
    path, tokens = model_path("llama"), random_tokens(1)
    want = evaluate(path, "full", tokens, n_ctx=N)
    with open_llama(path, spec, n_ubatch=64, n_threads=2, n_threads_batch=2) as llm:
        assert_same_logits(feed(llm, tokens, []), want, 1e-5)
        assert (llm.kv_usage().rows == N).all()


@pytest.mark.parametrize("base", [EXTENDED, LongHeads(16, 64), LongHeads(16, 64, position="grouped", group_size=4)],
                         ids=["selfextend", "longheads", "longheads-grouped"])  # fmt: skip
def test_compositions_that_evict_nothing_equal_their_base(model_path, base):
    path, tokens = model_path("llama"), random_tokens(1)
    want = evaluate(path, base.text(), tokens, n_ctx=N)
    got = evaluate(path, Evicting(base, Corm(1, N, 1)).text(), tokens, n_ctx=N)
    assert np.median(abs(got - want)) < 1e-5 * abs(want).max()
    assert_nearly_all_rows_equal(got, want)


def test_a_method_says_what_it_is(ffi, lib, open_session):
    for spec in (METHODS["corm"].text(), METHODS["selfextend-corm"].text(), CHUNKED["longheads-h2o"].text()):
        for given in (spec, f"full+{spec}") if "+" not in spec else (spec,):
            session = open_session("llama", given, n_ctx=N)
            assert ffi.string(lib.lctx_context_method(session.ctx)).decode() == spec


# ---- memory ----


@pytest.mark.parametrize("name", ALL)
def test_memory_returns(model_path, name):
    """Pages of 64 rows: three of four leave where a head holds less than 64."""
    with open_llama(model_path("llama"), ALL[name].text()) as llm, open_llama(model_path("llama"), "full") as full:
        for one in (llm, full):
            feed(one, random_tokens(0), [])
        usage, whole = llm.kv_usage(), full.kv_usage()
        n_page = np.ceil(usage.rows / 64).sum()
        assert n_page < 4 * usage.rows.size
        page_bytes = whole.bytes / (4 * usage.rows.size)
        assert n_page * page_bytes <= usage.bytes
        assert usage.full_bytes == whole.full_bytes
        assert usage.bytes <= usage.peak_bytes
        if isinstance(ALL[name].base, Full):
            assert usage.bytes < 0.9 * whole.bytes
        llm.reset()
        assert llm.kv_usage().bytes == 0
        assert (llm.kv_usage().rows == 0).all()


# ---- order ----


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("cuts", [[], [1], [63, 64, 65], MIXED, list(range(1, N))], ids=len)
@pytest.mark.parametrize("n_ubatch", [7, 64])
def test_the_cut_of_a_prompt_does_not_matter(model_path, name, cuts, n_ubatch):
    want = expect(model_path("llama"), ALL[name])
    with open_llama(model_path("llama"), ALL[name].text(), n_ubatch=48) as llm:
        logits, rows = feed(llm, want.tokens, [100]), llm.kv_usage().rows
    with open_llama(model_path("llama"), ALL[name].text(), n_ubatch=n_ubatch) as llm:
        assert_same_logits(feed(llm, want.tokens, cuts), logits)
        np.testing.assert_array_equal(llm.kv_usage().rows, rows)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("n_threads", [2, 3])
def test_the_number_of_threads_does_not_matter(model_path, name, n_threads):
    want, threads = expect(model_path("llama"), ALL[name]), {"n_threads": n_threads, "n_threads_batch": n_threads}
    results = []
    for settings in ({}, threads):
        with open_llama(model_path("llama"), ALL[name].text(), **settings) as llm:
            results.append((feed(llm, want.tokens, MIXED), llm.kv_usage().rows))
    assert_same_logits(results[1][0], results[0][0])
    np.testing.assert_array_equal(results[1][1], results[0][1])


@pytest.mark.parametrize("name", ALL)
def test_looking_at_the_memory_changes_nothing(model_path, name):
    tokens = random_tokens(2)
    with (
        open_llama(model_path("llama"), ALL[name].text()) as one,
        open_llama(model_path("llama"), ALL[name].text()) as other,
    ):
        for first in range(0, N, 5):
            for llm in (one, other):
                llm.eval(tokens[first : first + 5])
            other.kv_usage()
        np.testing.assert_array_equal(one.scores, other.scores)
        np.testing.assert_array_equal(one.kv_usage().rows, other.kv_usage().rows)


# ---- saved states ----


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("kv_type", ["f32", "q4_0"])
@pytest.mark.parametrize("n", [1, 95, 96, 97, 144])  # 96 and 144: many evictions are due and not done
def test_a_restored_object_continues_with_the_same_logits(model_path, name, kv_type, n):
    tokens, settings = random_tokens(3), {"type_k": kv_type, "type_v": kv_type}
    path, spec = model_path("llama-wide"), ALL[name].text()
    with open_llama(path, spec, **settings) as one, open_llama(path, spec, **settings) as other:
        other.eval(tokens[50:100])  # is replaced
        one.eval(tokens[:n])
        other.load_state(one.save_state())
        for llm in (one, other):
            feed_rest(llm, tokens[n:])
        np.testing.assert_array_equal(other.scores[n:], one.scores[n:])
        np.testing.assert_array_equal(other.kv_usage().rows, one.kv_usage().rows)


def feed_rest(llm: Llama, tokens: list[int]) -> None:
    for token in tokens[:20]:
        llm.eval([token])
    llm.eval(tokens[20:])


@pytest.mark.parametrize("other", [
    "full",
    "corm,window=12,recent=16,evict_every=2",
    "corm,window=13,recent=16,evict_every=1",
    "selfextend,group_size=5,neighbor_window=21+corm,window=12,recent=16,evict_every=1",
])  # fmt: skip
def test_a_state_of_other_settings_is_refused(model_path, other):
    with open_llama(model_path("llama"), METHODS["corm"].text()) as one, open_llama(model_path("llama"), other) as two:
        one.eval(random_tokens(0, 50))
        with pytest.raises(ValueError, match="method"):
            two.load_state(one.save_state())
        two.eval(random_tokens(0, 50))


def test_a_damaged_state_is_refused_or_harmless(model_path):
    rng, tokens = np.random.default_rng(0), random_tokens(0)
    with open_llama(model_path("llama"), METHODS["corm-every16"].text()) as llm:
        llm.eval(tokens[:150])
        state = llm.save_state()
        for i in range(150):
            data = state.llama_state.copy()
            data[rng.integers(0, 400 if i % 2 else len(data), 4)] = rng.integers(0, 256, 4)
            try:
                llm.load_state(replace(state, llama_state=data[: rng.integers(1, len(data))] if i % 3 == 0 else data))
            except ValueError:
                assert llm.n_tokens == 0
            llm.eval(tokens[150:170])
            assert (llm.kv_usage().rows <= llm.n_tokens).all()
            llm.reset()


# ---- several sequences ----


@pytest.fixture(params=ALL)
def method(request) -> Evicting:
    return ALL[request.param]


@pytest.fixture
def calm(model_path, method):
    """Return a function from a seed to random tokens on which no decision is a near tie."""
    return lambda seed, prefix=(), n=N: expect(model_path("llama"), method, seed, tuple(prefix), n).tokens


@pytest.fixture
def start(open_session):
    """Return a function that opens a session on the tiny model."""
    sizes = {"n_ctx": N, "n_seq_max": 3, "n_batch": 48, "n_ubatch": 16, "n_threads": 1, "n_threads_batch": 1}
    return lambda spec, model="llama", **params: open_session(model, spec, **sizes | params)


def fresh(start, spec: str, tokens: list[int]) -> np.ndarray:
    """Return the logits of ``tokens`` evaluated alone, in one batch."""
    return start(spec, n_seq_max=1, n_batch=256, n_ubatch=256).decode(tokens)


def grow(session, seq: int, tokens: list[int], step: int) -> np.ndarray:
    """Evaluate tokens of one sequence in batches and return all their logits."""
    parts = [tokens[i : i + step] for i in range(0, len(tokens), step)]
    return np.concatenate([session.decode_mixed([(seq, t) for t in part]) for part in parts])


@pytest.mark.parametrize("step", [37, 48])
def test_mixed_sequences_evict_for_themselves(start, method, calm, step):
    session, parts = start(method.text()), {0: calm(1)[:190], 1: calm(2)[:155], 2: calm(3)[:7]}
    pairs = [(seq, part[i]) for i in range(190) for seq, part in parts.items() if i < len(part)]
    logits = np.concatenate([session.decode_mixed(pairs[i : i + step]) for i in range(0, len(pairs), step)])
    for seq, part in parts.items():
        assert_same(logits[[s == seq for s, _ in pairs]], fresh(start, method.text(), part))


@pytest.mark.parametrize("n", [80, 90, 96])
def test_a_copy_evicts_for_itself(start, method, calm, n):
    a = calm(1)[: n + 75]
    b = calm(2, a[:n], 75)
    session = start(method.text())
    grow(session, 0, a[:n], 40)
    assert session.copy(0, 2)
    steps = [[(seq, t) for seq, part in ((0, a), (2, b)) for t in part[i : i + 15]] for i in range(n, n + 75, 15)]
    got_a, got_b = np.concatenate([session.decode_mixed(step).reshape(2, 15, -1) for step in steps], axis=1)
    assert_same(got_a, fresh(start, method.text(), a)[n:])
    assert_same(got_b, fresh(start, method.text(), b)[n:])


def test_the_memory_of_all_sequences_returns(start, method, calm):
    tokens, session = calm(1), start(method.text())
    for seq in range(3):
        grow(session, seq, tokens[: 100 + 40 * seq], 45)
    assert session.copy(2, 0)
    session.keep(0)
    assert [session.length(seq) for seq in range(3)] == [180, 0, 0]
    assert_same(grow(session, 0, tokens[180:], 7), fresh(start, method.text(), tokens)[180:])
    session.clear()
    assert session.kv_bytes == 0


def test_a_restored_sequence_continues_elsewhere(start, method):
    tokens, (session, other) = random_tokens(7), (start(method.text()) for _ in range(2))
    grow(session, 0, tokens[:144], 48)
    grow(other, 2, tokens[20:90], 48)  # is replaced
    assert other.restore(session.save(0), 2)
    np.testing.assert_array_equal(grow(other, 2, tokens[144:], 11), grow(session, 0, tokens[144:], 11))


def test_a_full_sequence_changes_nothing(start, lib, method, calm):
    tokens, session = calm(1), start(method.text())
    grow(session, 0, tokens[:190], 48)
    status, _ = session.try_decode_mixed([(0, t) for t in tokens[:11]])
    assert status == lib.LCTX_NO_SLOT
    assert session.length(0) == 190
    assert_same(grow(session, 0, tokens[190:], 10), fresh(start, method.text(), tokens)[190:])


@pytest.mark.parametrize("name", ["corm", "corm-every16", "selfextend-corm", "scissorhands", "longheads-corm"])
def test_any_order_of_operations(start, name):
    """Sequences grow, are cut, copied, saved and restored; the logits stay those of a fresh evaluation."""
    test_memory.test_any_order_of_operations(start, ALL[name].text(), random_tokens(9, 256))


@pytest.mark.parametrize("name", METHODS)
def test_the_rows_that_a_head_holds(ffi, lib, model_path, start, name):
    want, rule = expect(model_path("llama"), METHODS[name]), METHODS[name].rule
    session = start(METHODS[name].text())
    grow(session, 1, want.tokens, 48)
    rows, scores = np.full((2, N), -9, dtype=np.int32)
    buffers = [ffi.from_buffer("int32_t[]", array, require_writable=True) for array in (rows, scores)]
    for layer, run in enumerate(want.model.runs):
        for head, held in enumerate(run.held):
            n = lib.lctx_seq_held(session.ctx, 1, layer, head, *buffers, N)
            assert rows[:n].tolist() == np.flatnonzero(held).tolist()
            got = scores[:n].view(rule.score_type).astype(np.float64)
            low, _, high = run.scores[:, head, held]
            assert (got >= low - 1e-4).all()
            assert (got <= high + 1e-4).all()
        assert lib.lctx_seq_held(session.ctx, 0, layer, 0, *buffers, N) == 0
    assert lib.lctx_seq_held(session.ctx, 1, len(want.model.runs), 0, *buffers, N) == 0


def test_a_step_ends_where_a_batch_could_not_be_taken_back(lib, start):
    session = start(SLOW)
    for pos, n, want in [(0, 99, 16), (0, 5, 5), (20, 99, 12), (30, 99, 2), (31, 99, 1), (32, 99, 16), (31, 1, 1)]:
        assert lib.lctx_context_step(session.ctx, pos, n) == want


# ---- taking back ----

# votes at 24 .. 31, 56 .. 63, 88 .. 95; evictions after 31, 63, 95
SLOW_METHOD = Evicting(Full(), Corm(8, 10, 32))
SLOW = SLOW_METHOD.text()


@pytest.fixture
def slow(model_path) -> list[int]:
    return expect(model_path("llama"), SLOW_METHOD).tokens


@pytest.fixture
def voted(start, slow):
    """Return a session with batches that end at 64 (an eviction is due), 80 (nobody voted since) and 94 (six voted)."""
    session = start(SLOW, n_batch=64, n_ubatch=64)
    for first, end in ((0, 32), (32, 64), (64, 80), (80, 94)):
        session.decode(slow[first:end])
    return session


def test_the_last_batch_can_be_taken_back(start, voted, slow):
    assert voted.restorable(80) == 80
    assert voted.remove_tail(80)
    voted.decode(slow[:14])
    assert voted.remove_tail(80)  # once more, after other tokens
    assert_same(voted.decode(slow[80:], 9), fresh(start, SLOW, slow)[80:])


@pytest.mark.parametrize("n", [79, 71, 65, 64])
def test_queries_that_did_not_vote_can_be_taken_back(start, slow, n):
    session = start(SLOW, n_batch=64, n_ubatch=64)
    for first, end in ((0, 32), (32, 64), (64, 70), (70, 80)):
        session.decode(slow[first:end])
    assert session.restorable(n) == n
    assert session.remove_tail(n)
    assert_same(session.decode(slow[n:], 5), fresh(start, SLOW, slow)[n:])


@pytest.mark.parametrize("n", [93, 90, 89])
def test_single_votes_cannot_be_taken_back(start, voted, slow, n):
    assert not voted.remove_tail(n)
    assert str(n) in voted.error
    assert voted.n_past == 94
    prefix = voted.restorable(n)
    assert 80 <= prefix < n
    assert voted.remove_tail(prefix)
    assert_same(voted.decode(slow[prefix:], 20), fresh(start, SLOW, slow)[prefix:])


@pytest.mark.parametrize("n", [63, 40, 32, 31, 1])
def test_evicted_rows_cannot_be_brought_back(start, voted, slow, n):
    assert not voted.remove_tail(n)
    assert f"position {n} " in voted.error
    assert voted.restorable(n) == 0
    want = fresh(start, SLOW, slow)
    assert_same(voted.decode(slow[94:], 20), want[94:])  # nothing has changed
    assert voted.remove_tail(0)
    assert_same(voted.decode(slow, 40), want)


def test_an_eviction_that_is_due_can_be_taken_back(start, slow):
    """It is done when the next token comes, not before."""
    session = start(SLOW, n_batch=64, n_ubatch=64)
    session.decode(slow[:32])
    session.decode(slow[100:132])  # up to the border after 63
    assert session.remove_tail(32)
    assert_same(session.decode(slow[32:], 32), fresh(start, SLOW, slow)[32:])


def test_a_look_at_the_memory_does_the_eviction_that_is_due(start, slow):
    session = start(SLOW, n_batch=64, n_ubatch=64)
    session.decode(slow[:64], 32)
    assert session.kv_bytes > 0
    assert not session.remove_tail(32)
    assert session.restorable(64) == 64
    assert_same(session.decode(slow[64:], 32), fresh(start, SLOW, slow)[64:])


@pytest.mark.parametrize("n", [199, 190, 150, 131, 64, 15, 0])
@pytest.mark.parametrize("step", [1, 10, 48])
def test_what_can_be_taken_back_is_exact(start, method, calm, n, step):
    tokens, session = calm(1), start(method.text())
    want = fresh(start, method.text(), tokens)
    session.decode(tokens, step)
    prefix = session.restorable(n)
    assert 0 <= prefix <= n
    if prefix < n:
        assert not session.remove_tail(n)
        assert session.n_past == N
    assert session.remove_tail(prefix)
    assert_same(session.decode(tokens[prefix:], 13), want[prefix:])


@pytest.mark.parametrize("n", [199, 180, 100, 3])
def test_llama_evaluates_again_what_it_cannot_take_back(model_path, method, calm, n):
    tokens, path = calm(1), model_path("llama")
    with open_llama(path, method.text()) as llm, open_llama(path, method.text()) as alone:
        llm.eval(tokens[:n] + random_tokens(14)[n:])
        llm.n_tokens = n
        llm.eval(tokens[n:])
        alone.eval(tokens)
        assert_same_logits(llm.scores[n:], alone.scores[n:])
        assert list(llm.eval_tokens) == tokens
        np.testing.assert_array_equal(llm.kv_usage().rows, alone.kv_usage().rows)


def test_generation_reuses_what_it_can(model_path, slow):
    """A second prompt with the same beginning gives what a fresh object gives."""
    path, prompt = model_path("llama"), slow[:90] + slow[120:150]
    with open_llama(path, SLOW) as llm, open_llama(path, SLOW) as alone:
        next(llm.generate(slow[:100], temp=0.0))
        assert next(llm.generate(prompt, temp=0.0)) == next(alone.generate(prompt, temp=0.0))
        np.testing.assert_array_equal(llm.kv_usage().rows, alone.kv_usage().rows)


# ---- KV types ----


@dataclass(frozen=True)
class RoundingModel(Model):
    """The oracle with a cache of other types."""

    type_k: str = "f32"
    type_v: str = "f32"

    def evict(self, layer: Layer) -> Run:
        return super().evict(replace(layer, type_k=self.type_k, type_v=self.type_v))


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("name", ["corm-every16", "selfextend-corm", "longheads-corm", "longheads-grouped-corm"])
def test_every_kv_type_follows_the_rounding_oracle(model_path, name, type_name):
    """A decision at a near tie falls otherwise where one channel rounds the other way: not all rows must agree.

    Grouped chunks are represented from keys that were rounded at another position than the oracle's: it chooses others.
    """
    path, method, tokens = model_path("llama-wide"), ALL[name], random_tokens(0)
    base = Model.load(path)
    want = RoundingModel(base.meta, base.tensors, base.rope, type_name, type_name).logits(tokens, method)
    got = evaluate(path, method.text(), tokens, n_ctx=N, type_k=type_name, type_v=type_name)
    error, scale = abs(got - want).max(-1), abs(want).max()
    before_choices = method.base.window if "grouped" in name else None
    assert np.median(error[:before_choices]) < 1e-2 * scale
    assert np.quantile(error[:40], 0.9) < 1e-2 * scale  # before many decisions were made
    unlike = evaluate(path, method.base.text(), tokens, n_ctx=N, type_k=type_name, type_v=type_name)
    assert np.median(abs(got - unlike).max(-1)[100:]) > 5e-2 * scale


# ---- refusals ----


@pytest.mark.parametrize(("method", "reason"), [
    ("corm,window=0", "window"),
    ("corm,recent=-1", "recent"),
    ("corm,evict_every=0", "evict_every"),
    ("window,n_sink=4,window=32+corm", "window"),
    ("corm+selfextend", "selfextend"),
    ("corm+corm", "corm"),
    ("selfextend+longheads", "longheads"),
    ("selfextend+corm,group_size=4", "group_size"),
    ("selfextend,window=4+corm", "window"),
    ("h2o,budget=8,recent=9", "recent"),
    ("tova,budget=0", "budget"),
])  # fmt: skip
def test_bad_settings_are_refused_with_the_reason(open_session, method, reason):
    with pytest.raises(ValueError, match=reason):
        open_session("llama", method, n_ctx=128)
