"""Hybrids of recurrent and attention layers under methods: parity, any batches, states, sequences, going back."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from cases import LOGIT_TOLERANCE
from session import Session, assert_same
from test_corm_sequences import grow
from test_methods import assert_same_logits, evaluate
from test_models import IDLE, N_SHORT, N, full, in_two_cuts
from test_tiny_hybrids import UNROTATED, make, stock
from thinning import thin
from tiny_hybrids import HYBRIDS

POSITION = ["selfextend,group_size=8,neighbor_window=16", "dca"]
SELECTION = ["longheads,chunk_size=16,window=64,representation=attention", "corm,window=8,recent=24,evict_every=16"]
METHODS = ["full", "window,n_sink=4,window=40", POSITION[0], *SELECTION]
SERVED = [*HYBRIDS]
ROTATED = [name for name in SERVED if name not in UNROTATED]
MIXABLE = [name for name in SERVED if name != "plamo2"]  # llama.cpp mixes up the sequences of a ubatch there
# llama.cpp ends the process where n_seq_max does not divide n_ubatch (minimax-01, kimi-linear)
SIZES = {"n_ctx": 256, "n_seq_max": 4, "n_batch": 48, "n_ubatch": 16, "n_threads": 1, "n_threads_batch": 1}
ALONE = {"n_seq_max": 1, "n_batch": 256, "n_ubatch": 256}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("hybrids")


@pytest.fixture(scope="module")
def stock_logits(folder, tokens) -> dict[str, np.ndarray]:
    return stock(folder, tokens[:N], SERVED)


@pytest.fixture
def start(folder, ffi, lib):
    """Return a function from model and method to an open session."""
    sessions = []

    def start(name: str, method: str, **params) -> Session:
        sessions.append(Session(ffi, lib, make(folder, name), method, **SIZES | params))
        return sessions[-1]

    yield start
    for session in sessions:
        session.close()


@pytest.fixture
def anew(start):
    """Return a function: the logits of tokens that are evaluated alone, in one batch."""

    @cache
    def logits(name: str, method: str, tokens: tuple[int, ...]) -> np.ndarray:
        session = start(name, method, **ALONE)
        result = session.decode(list(tokens))
        session.close()
        return result

    return lambda name, method, tokens: logits(name, method, tuple(tokens))


def continued(session: Session, tokens: list[int]) -> np.ndarray:
    """Return the logits of some steps of one token, and of the rest in one batch."""
    return np.concatenate([session.decode(tokens[:5], 1), session.decode(tokens[5:])])


# ---- logits ----


@pytest.mark.parametrize("name", SERVED)
def test_full_equals_unpatched_llama_cpp(stock_logits, folder, tokens, name):
    assert_same_logits(full(make(folder, name), tokens[:N]), stock_logits[name])


@pytest.mark.parametrize("name", SERVED)
def test_methods_that_do_nothing_equal_full(folder, tokens, name):
    path, tokens = make(folder, name), tokens[:N_SHORT]
    want = full(path, tokens, n_ctx=N_SHORT)
    for method in IDLE.values():
        assert_same_logits(evaluate(path, method, tokens, n_ctx=N_SHORT), want)


@pytest.mark.parametrize("name", [name for name in SERVED if name in UNROTATED])
@pytest.mark.parametrize("method", POSITION)
def test_position_methods_change_nothing_without_rotation(folder, tokens, name, method):
    path = make(folder, name)
    assert_same_logits(evaluate(path, method, tokens[:N]), full(path, tokens[:N]))


@thin
@pytest.mark.parametrize("name", ROTATED)
@pytest.mark.parametrize("method", POSITION)
def test_position_methods_go_beyond_the_trained_context_in_any_batches(folder, tokens, name, method):
    assert_same_logits(*in_two_cuts(make(folder, name), tokens[:N], method))


@thin
@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("method", SELECTION)
def test_choices_are_the_same_in_any_batches(folder, tokens, name, method):
    """But for a near tie that falls the other way when other batches round otherwise."""
    path = make(folder, name)
    want = evaluate(path, method, tokens[:N], n_batch=256, n_ubatch=256)
    assert abs(full(path, tokens[:N]) - want).max() > 1e-3 * abs(want).max()
    got = evaluate(path, method, tokens[:N], n_batch=61, n_ubatch=37)
    assert np.median(abs(got - want)) < LOGIT_TOLERANCE * abs(want).max()


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("n_batch", [1, 61])
def test_full_is_the_same_in_any_batches(folder, tokens, name, n_batch):
    path = make(folder, name)
    assert_same_logits(evaluate(path, "full", tokens[:N], n_batch=n_batch, n_ubatch=37), full(path, tokens[:N]))


# ---- states ----


@thin
@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n", [1, 63, 65, 110])
def test_a_restored_state_continues_with_the_same_logits(start, tokens, name, method, n):
    one, other = start(name, method), start(name, method)
    one.decode(tokens[:n], 23)
    other.decode(tokens[100:131], 23)
    assert other.restore(one.save())
    assert other.n_past == n
    text = tokens[n : n + 20]
    np.testing.assert_array_equal(continued(other, text), continued(one, text))


@pytest.mark.parametrize("name", SERVED)
def test_the_state_of_a_sequence_moves_to_another(start, anew, tokens, name):
    one, other = start(name, "full"), start(name, "full")
    grow(one, 1, tokens[:70], 23)
    grow(other, 0, tokens[50:90], 23)
    assert other.restore(one.save(1), 2)
    assert [other.length(seq) for seq in range(3)] == [40, 0, 70]
    assert_same(grow(other, 2, tokens[70:N], 19), anew(name, "full", tokens[:N])[70:])
    assert_same(grow(other, 0, tokens[90:N], 19), anew(name, "full", tokens[50:N])[40:])


@pytest.mark.parametrize("name", SERVED)
def test_half_a_state_is_refused(start, anew, tokens, name):
    """It may hold all of the attention, and nothing of what recurrent layers remember."""
    one, other = start(name, "full"), start(name, "full")
    one.decode(tokens[:70], 23)
    state = one.save()
    for part in (state[: len(state) // 2], state[:-4]):
        assert not other.restore(part)
        other.clear()
        assert_same(other.decode(tokens[:N], 23), anew(name, "full", tokens[:N]))
        other.clear()


# ---- sequences ----


@thin
@pytest.mark.parametrize("name", MIXABLE)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("step", [37, 48])
def test_mixed_sequences_equal_each_alone(start, anew, tokens, name, method, step):
    parts = {0: tokens[:120], 1: tokens[40:130], 2: tokens[200:207]}
    pairs = [(seq, part[i]) for i in range(120) for seq, part in parts.items() if i < len(part)]
    session = start(name, method)
    logits = np.concatenate([session.decode_mixed(pairs[i : i + step]) for i in range(0, len(pairs), step)])
    for seq, part in parts.items():
        got, want = logits[[s == seq for s, _ in pairs]], anew(name, method, part)
        if method in SELECTION:
            assert np.median(abs(got - want)) < LOGIT_TOLERANCE * abs(want).max()
        else:
            assert_same(got, want)


@thin
@pytest.mark.parametrize("name", MIXABLE)
@pytest.mark.parametrize("method", METHODS[:3])
def test_a_copy_goes_its_own_way(start, anew, tokens, name, method):
    session, n = start(name, method), 70
    a, b = tokens[:110], [*tokens[:n], *tokens[200:240]]
    grow(session, 0, a[:n], 23)
    assert session.copy(0, 1)
    steps = [[(seq, t) for seq, part in ((0, a), (1, b)) for t in part[i : i + 10]] for i in range(n, 110, 10)]
    got_a, got_b = np.concatenate([session.decode_mixed(step).reshape(2, 10, -1) for step in steps], axis=1)
    assert_same(got_a, anew(name, method, a)[n:])
    assert_same(got_b, anew(name, method, b)[n:])


@pytest.mark.parametrize("name", SERVED)
def test_a_sequence_that_is_kept_alone_goes_on(start, anew, tokens, name):
    session = start(name, "full")
    for seq in range(3):
        grow(session, seq, tokens[10 * seq : 70 + 20 * seq], 23)
    session.keep(1)
    assert [session.length(seq) for seq in range(3)] == [0, 80, 0]
    assert_same(grow(session, 1, tokens[90:N], 19), anew(name, "full", tokens[10:N])[80:])
    grow(session, 0, tokens[:30], 30)
    session.clear()
    assert_same(session.decode(tokens[:N], 23), anew(name, "full", tokens[:N]))


# ---- going back ----


@thin
@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("method", METHODS[:3])
@pytest.mark.parametrize("n", [0, 1, 35, 69, 70])
def test_going_back_equals_evaluating_anew(start, anew, tokens, name, method, n):
    """Recurrent layers go back to where their state was written down, which may be the beginning."""
    session = start(name, method)
    session.decode(tokens[:70], 23)
    kept = session.cut_back(n, 0)
    assert session.length(0) == kept <= n
    assert n in (kept, 1, 35, 69)
    text = [*tokens[:kept], *tokens[200:240]]
    assert_same(session.decode(text[kept:], 17), anew(name, method, text)[kept:])


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("n", [1, 35, 69])
def test_a_refused_way_back_changes_nothing(start, anew, tokens, name, n):
    session = start(name, "full")
    session.decode(tokens[:70], 23)
    at = n if session.remove_tail(n) else 70
    assert session.length(0) == at
    assert_same(session.decode(tokens[at:N], 17), anew(name, "full", tokens[:N])[at:])
