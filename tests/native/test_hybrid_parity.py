"""Recurrent and sliding layers in addition to attention under methods: states, sequences, going back."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from cases import LOGIT_TOLERANCE
from session import Session, assert_same
from test_corm_sequences import grow
from test_models import KINDS, SELECTION, N, make
from thinning import thin
from tiny_models import GROUPS, PROVEN

METHODS = {
    "full": "full",
    "window": "window,n_sink=4,window=40",
    "selfextend": "selfextend,group_size=8,neighbor_window=16",
    "longheads": "longheads,chunk_size=16,window=64,representation=minmax",
    "corm": SELECTION["corm"],
}
EXACT = ("full", "window", "selfextend")  # those that choose nothing
RECURRENT = [name for name in PROVEN if name in GROUPS["hybrids"] or name in ("bailingmoe3", "kimi-k3", "kimi-linear")]
SERVED = [*RECURRENT, *GROUPS["windows"]]
SIZES = {"n_ctx": 256, "n_seq_max": 4, "n_batch": 48, "n_ubatch": 16, "n_threads": 1, "n_threads_batch": 1}
ALONE = {"n_seq_max": 1, "n_batch": 256, "n_ubatch": 256}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("hybrids")


@pytest.fixture
def start(folder, open_file):
    """Return a function from model and method to an open session."""

    def start(name: str, method: str, **params) -> Session:
        return open_file(make(folder, name), METHODS[method], **SIZES | params)

    return start


@pytest.fixture
def alone(start):
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


# ---- states ----


@thin(table=KINDS)
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
    got, want = continued(other, text), continued(one, text)
    if name in RECURRENT:
        np.testing.assert_array_equal(got, want)
    else:
        assert_same(got, want)  # llama.cpp restores the rows of a window in another order


@thin(table=KINDS)
@pytest.mark.parametrize("name", SERVED)
def test_the_state_of_a_sequence_moves_to_another(start, alone, tokens, name):
    one, other = start(name, "full"), start(name, "full")
    grow(one, 1, tokens[:70], 23)
    grow(other, 0, tokens[50:90], 23)
    assert other.restore(one.save(1), 2)
    assert [other.length(seq) for seq in range(3)] == [40, 0, 70]
    assert_same(grow(other, 2, tokens[70:N], 19), alone(name, "full", tokens[:N])[70:])
    assert_same(grow(other, 0, tokens[90:N], 19), alone(name, "full", tokens[50:N])[40:])


@thin(table=KINDS)
@pytest.mark.parametrize("name", SERVED)
def test_half_a_state_is_refused(start, alone, tokens, name):
    """It may hold all of the attention, and nothing of what recurrent layers remember."""
    one, other = start(name, "full"), start(name, "full")
    one.decode(tokens[:70], 23)
    state = one.save()
    for part in (state[: len(state) // 2], state[:-4]):
        assert not other.restore(part)
        other.clear()
        assert_same(other.decode(tokens[:N], 23), alone(name, "full", tokens[:N]))
        other.clear()


# ---- sequences ----


@thin(table=KINDS)
@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("n_seq", "step", "n_ubatch"), [(2, 48, 16), (3, 37, 18), (3, 48, 33)])
def test_mixed_sequences_equal_each_alone(start, alone, tokens, name, method, n_seq, step, n_ubatch):
    """Texts of several lengths, in batches of which a ubatch takes an uneven part."""
    parts = dict(enumerate([tokens[:120], tokens[40:130], tokens[200:207]][:n_seq]))
    pairs = [(seq, part[i]) for i in range(120) for seq, part in parts.items() if i < len(part)]
    session = start(name, method, n_seq_max=n_seq, n_ubatch=n_ubatch)
    logits = np.concatenate([session.decode_mixed(pairs[i : i + step]) for i in range(0, len(pairs), step)])
    for seq, part in parts.items():
        got, want = logits[[s == seq for s, _ in pairs]], alone(name, method, part)
        if method not in EXACT:
            assert np.median(abs(got - want)) < LOGIT_TOLERANCE * abs(want).max()
        else:
            assert_same(got, want)


@thin(table=KINDS)
@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("method", EXACT)
def test_a_copy_goes_its_own_way(start, alone, tokens, name, method):
    session, n = start(name, method), 70
    a, b = tokens[:110], [*tokens[:n], *tokens[200:240]]
    grow(session, 0, a[:n], 23)
    assert session.copy(0, 1)
    steps = [[(seq, t) for seq, part in ((0, a), (1, b)) for t in part[i : i + 10]] for i in range(n, 110, 10)]
    got_a, got_b = np.concatenate([session.decode_mixed(step).reshape(2, 10, -1) for step in steps], axis=1)
    assert_same(got_a, alone(name, method, a)[n:])
    assert_same(got_b, alone(name, method, b)[n:])


@thin(table=KINDS)
@pytest.mark.parametrize("name", SERVED)
def test_a_sequence_that_is_kept_alone_continues(start, alone, tokens, name):
    session = start(name, "full")
    for seq in range(3):
        grow(session, seq, tokens[10 * seq : 70 + 20 * seq], 23)
    session.keep(1)
    assert [session.length(seq) for seq in range(3)] == [0, 80, 0]
    assert_same(grow(session, 1, tokens[90:N], 19), alone(name, "full", tokens[10:N])[80:])
    grow(session, 0, tokens[:30], 30)
    session.clear()
    assert_same(session.decode(tokens[:N], 23), alone(name, "full", tokens[:N]))


# ---- going back ----


@thin(table=KINDS)
@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize("n", [0, 1, 35, 69, 70])
def test_going_back_equals_evaluating_again(start, alone, tokens, name, method, n):
    """Recurrent layers go back to where their state was written down, which may be the beginning."""
    session = start(name, method)
    session.decode(tokens[:70], 23)
    kept = session.cut_back(n, 0)
    assert session.length(0) == kept <= n
    assert n in (kept, 1, 35, 69)
    text = [*tokens[:kept], *tokens[200:240]]
    assert_same(session.decode(text[kept:], 17), alone(name, method, text)[kept:])


@thin(table=KINDS)
@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("n", [1, 35, 69])
def test_a_refused_way_back_changes_nothing(start, alone, tokens, name, n):
    session = start(name, "full")
    session.decode(tokens[:70], 23)
    at = n if session.remove_tail(n) else 70
    assert session.length(0) == at
    assert_same(session.decode(tokens[at:N], 17), alone(name, "full", tokens[:N])[at:])
