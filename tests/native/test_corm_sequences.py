"""Several sequences that evict, and going back."""

import numpy as np
import pytest
import test_memory
from oracle import Full
from oracle_evict import Evicting
from oracle_rules import Corm
from session import assert_same
from test_corm import ALL, METHODS, N, expect, open_llama, random_tokens
from test_methods import assert_same_logits
from thinning import thin

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


@thin
@pytest.mark.parametrize("step", [37, 48])
def test_mixed_sequences_evict_for_themselves(start, method, calm, step):
    session, parts = start(method.text()), {0: calm(1)[:190], 1: calm(2)[:155], 2: calm(3)[:7]}
    pairs = [(seq, part[i]) for i in range(190) for seq, part in parts.items() if i < len(part)]
    logits = np.concatenate([session.decode_mixed(pairs[i : i + step]) for i in range(0, len(pairs), step)])
    for seq, part in parts.items():
        assert_same(logits[[s == seq for s, _ in pairs]], fresh(start, method.text(), part))


@thin
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
        for head, held in enumerate(run.before):
            n = lib.lctx_seq_held(session.ctx, 1, layer, head, *buffers, N)
            assert rows[:n].tolist() == np.flatnonzero(held).tolist()
            got = scores[:n].view(rule.score_type).astype(np.float64)
            low, _, high = run.scores[:, head, held]
            assert (got >= rule.least(low, rows[:n]) - 1e-4).all()
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
    """Return a session with batches that end at 64 (an eviction is due), 80 (no votes since) and 94 (six votes)."""
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


def test_a_look_at_the_memory_changes_nothing(ffi, lib, start, slow):
    """An eviction is due: it comes with the next token, and until then the last batch can be taken back."""
    session = start(SLOW, n_batch=64, n_ubatch=64)
    session.decode(slow[:64], 32)
    before = session.save(0)
    assert session.kv_bytes > 0
    assert lib.lctx_seq_held(session.ctx, 0, 0, 0, ffi.NULL, ffi.NULL, 0) > 32
    assert session.restorable(40) == 32
    assert session.save(0) == before
    assert session.remove_tail(32)
    assert_same(session.decode(slow[32:], 32), fresh(start, SLOW, slow)[32:])


@thin(strength=2)
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


@thin
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
