"""How a prompt is cut, how many threads run, and what was rolled back before must not change the logits."""

from functools import cache

import numpy as np
import pytest
from cases import SPECS, STRETCHED
from session import Session, assert_same
from thinning import thin

N = 200
SIZES = {"n_ctx": 256, "n_batch": 256, "n_ubatch": 256, "n_threads": 1, "n_threads_batch": 1}
# In batches of 50, what is gone: pages that left the window, near keys that were overwritten, queries of a whole chunk.
REFUSED = {
    SPECS["window"]: {64, 1},
    SPECS["selfextend"]: {64, 1},
    SPECS["longheads-selfextend"]: {64, 1},
    SPECS["longheads-attention"]: {130, 1},
}
REFUSED_OF_50 = {SPECS["longheads-attention"]: {190}}  # its chunk came in one batch with the next one


@pytest.fixture
def start(open_session):
    """Return a function that opens a session on the tiny model."""
    return lambda method, **params: open_session("llama", method, **SIZES | params)


@pytest.fixture(scope="module")
def evaluated(ffi, lib, model_path, tokens):
    """Return a function from a method to the logits of one ubatch on one thread."""

    @cache
    def evaluated(method: str) -> np.ndarray:
        with Session(ffi, lib, model_path("llama"), method, **SIZES | STRETCHED.get(method, {})) as session:
            return session.decode(tokens[:N])

    return evaluated


@pytest.fixture
def want(evaluated, method) -> np.ndarray:
    return evaluated(method)


@thin
@pytest.mark.parametrize("n_ubatch", [1, 7, 64, 65])
def test_the_size_of_a_ubatch_does_not_matter(start, method, tokens, want, n_ubatch):
    assert_same(start(method, n_ubatch=n_ubatch).decode(tokens[:N]), want)


@thin
@pytest.mark.parametrize("step", [1, 13, 64])
def test_the_size_of_a_batch_does_not_matter(start, method, tokens, want, step):
    assert_same(start(method, n_ubatch=32).decode(tokens[:N], step), want)


@pytest.mark.parametrize("n_threads", [2, 3])
def test_the_number_of_threads_does_not_matter(start, method, tokens, want, n_threads):
    session = start(method, n_threads=n_threads, n_threads_batch=n_threads)
    prompt, rest = session.decode(tokens[:190]), session.decode(tokens[190:N], 1)
    assert_same(np.concatenate([prompt, rest]), want)


def test_logits_of_the_last_token_only_are_the_same(ffi, lib, start, method, tokens, want):
    session = start(method, n_ubatch=48)
    last = np.full(session.n_vocab, np.nan, dtype=np.float32)
    buffer = ffi.from_buffer("float[]", last, require_writable=True)
    assert lib.lctx_decode(session.ctx, tokens[:N], N, 0, buffer, 0) == lib.LCTX_OK
    assert_same(last, want[-1])


@thin(strength=2)
@pytest.mark.parametrize("step", [1, 50])
@pytest.mark.parametrize("keep", [199, 190, 130, 64, 1, 0])
def test_evaluation_after_a_rollback(start, method, tokens, want, keep, step):
    """The tail is removed and evaluating it again gives the same logits; or nothing has changed, and it says why."""
    session = start(method, n_batch=50, n_ubatch=32)
    session.decode(tokens[:N], step)
    if keep in REFUSED.get(method, ()) or (step == 50 and keep in REFUSED_OF_50.get(method, ())):
        assert not session.remove_tail(keep)
        assert f"position {keep} is too far back" in session.error
        keep = N
    else:
        assert session.remove_tail(keep), session.error
    assert session.n_past == keep
    more = tokens[keep:N] + tokens[N : N + 20]
    whole = start(method).decode(tokens[: N + 20])
    assert_same(session.decode(more, step), whole[keep:])


@pytest.mark.parametrize("n", [199, 190, 131, 64, 15, 0])
def test_the_longest_restorable_prefix_is_what_can_be_kept(start, method, tokens, want, n):
    session = start(method, n_ubatch=32)
    session.decode(tokens[:N], 50)
    prefix = session.restorable(n)
    assert 0 <= prefix <= n
    if prefix < n:
        assert not session.remove_tail(n)
    if "position=packed" in method:  # others overwrite near keys
        assert n - prefix < 16
    assert session.remove_tail(prefix)
    assert_same(session.decode(tokens[prefix:N], 13), want[prefix:])


def test_a_rollback_by_one_token_is_never_refused(start, method, tokens):
    session = start(method)
    session.decode(tokens[:N])
    assert session.remove_tail(N - 1)


def test_a_rollback_forgets_what_it_removed(start, method, tokens):
    """Other tokens are evaluated and removed; the true ones follow."""
    other = tokens[150:160][::-1]
    session = start(method)
    session.decode(tokens[:150])
    session.decode(other)
    assert session.remove_tail(150)
    fresh = start(method)
    fresh.decode(tokens[:150])
    assert_same(session.decode(tokens[160:180], 1), fresh.decode(tokens[160:180], 1))


def test_clearing_starts_again(start, method, tokens, want):
    session = start(method)
    session.decode(tokens[100:N])
    session.clear()
    assert session.n_past == 0
    assert_same(session.decode(tokens[:N]), want)


def test_a_full_cache_changes_nothing(lib, start, method, tokens, want):
    session = start(method, n_ctx=256, n_batch=128)
    session.decode(tokens[:N], 100)
    status, _ = session.try_decode(tokens[:100])
    assert status == lib.LCTX_NO_SLOT
    assert session.n_past == N
    assert session.remove_tail(N - 1)
    assert_same(session.decode(tokens[N - 1 : N]), want[-1:])


def test_two_contexts_do_not_share_anything(start, method, tokens, want):
    first, second = start(method), start(method)
    parts = []
    for i in range(0, N, 50):
        second.decode(tokens[i : i + 40])
        parts.append(first.decode(tokens[i : i + 50]))
    assert_same(np.concatenate(parts), want)
