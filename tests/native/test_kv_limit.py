"""kv_limit: never more bytes than allowed, and nothing is lost when it is reached."""

import numpy as np
import pytest
from cases import LONGHEADS
from oracle import DualChunk, Full, SelfExtend, Window
from oracle_evict import Evicting
from oracle_rules import Corm
from page_machine import (
    METHODS,
    N_BATCH,
    N_CTX,
    N_HEAD_KV,
    N_LAYER,
    PAGE_ROWS,
    ROW_BYTES,
    SETTINGS,
    Fresh,
    Sizes,
    bound,
    kv_usage,
    run_operations,
)
from session import Session, assert_same
from thinning import thin

from pylongctx import Llama
from pylongctx.errors import ContextFull, InvalidInput

__all__ = ["bound"]  # a fixture

PAGE_BYTES = PAGE_ROWS * 2 * ROW_BYTES
N_HEADS = N_LAYER * N_HEAD_KV
CALM = {  # nothing leaves before 200 tokens
    "full": Full(),
    "window": Window(3, 60),
    "selfextend": SelfExtend(10, 21),
    "dca": DualChunk(23, 9),
    "longheads-attention": LONGHEADS["longheads-attention"],
    "longheads-minmax": LONGHEADS["longheads-minmax"],
    "longheads-keys": LONGHEADS["longheads-keys"],
    "corm": Evicting(Full(), Corm(8, 8, 256)),
    "longheads-corm": Evicting(LONGHEADS["longheads-minmax"], Corm(8, 8, 256)),
}


def bytes_of(method, n: int) -> int:
    """Return what the first ``n`` tokens take when nothing is evicted."""
    sizes = Sizes(method, 256)
    return -(-n // PAGE_ROWS) * N_HEADS * sizes.page_bytes + sizes.beside_pages(n, n * N_HEADS)


def open_limited(open_session, method, limit: int, **params) -> Session:
    sizes = SETTINGS | {"n_batch": 256, "n_ubatch": 16}
    return open_session("llama", method.text(), **sizes | {"kv_limit": limit} | params)


# ---- the limit in the middle of a batch ----


def test_copies_at_a_border_inside_a_batch_are_counted(open_session, lib, tokens):
    """A copy shares its pages until it evicts, here after 10 of 60 tokens; what it needs then is known before."""
    method, statuses = Evicting(Full(), Corm(8, 8, 100)), []
    shared = bytes_of(method, 90)
    for extra in range(0, 5 * N_HEADS, N_HEADS // 2):
        session = open_limited(open_session, method, 2 * shared + extra * PAGE_BYTES, n_seq_max=2)
        session.decode(tokens[:90])
        assert session.copy(0, 1)
        held = session.kv_bytes
        status, _ = session.try_decode_mixed([(1, token) for token in tokens[90:150]])
        statuses.append(status)
        assert session.length(0) == 90
        if status == lib.LCTX_OK:
            assert session.length(1) == 150
        else:
            assert status == lib.LCTX_NO_SLOT, session.error
            assert "kv_limit" in session.error
            assert [session.length(1), session.kv_bytes] == [90, held]
    assert statuses == sorted(statuses, reverse=True)
    assert len(set(statuses)) == 2


@thin
@pytest.mark.parametrize("name", CALM)
@pytest.mark.parametrize("n_fit", [64, 101, 128])
def test_a_batch_fits_or_changes_nothing(open_session, lib, tokens, name, n_fit):
    """Of one to three pages, after nothing, and after the first rows of a page."""
    method, limit = CALM[name], bytes_of(CALM[name], n_fit)
    session = open_limited(open_session, method, limit)
    n_most = max(n for n in range(1, 193) if bytes_of(method, n) <= limit)
    assert n_fit <= n_most < n_fit + PAGE_ROWS
    for first in (0, 70 if n_fit > 70 else 30):
        session.clear()
        if first:
            session.decode(tokens[:first])
        held = session.kv_bytes
        for n in range(1, 193):
            status, _ = session.try_decode(tokens[first : first + n])
            assert status == (lib.LCTX_OK if first + n <= n_most else lib.LCTX_NO_SLOT)
            if status != lib.LCTX_OK:
                assert "kv_limit" in session.error
                assert str(limit) in session.error
                assert session.n_past == first
            assert session.remove_tail(first)
            assert session.kv_bytes == held
    want = open_limited(open_session, method, 0).decode(tokens[:n_most])
    assert_same(session.decode(tokens[first:n_most]), want[first:])  # what failed has left nothing
    assert kv_usage(session)[0].peak_bytes <= limit


@pytest.mark.parametrize("name", CALM)
def test_the_next_token_after_a_refusal(open_session, lib, tokens, name):
    """Bit for bit that of a run without it, and the rest when something was removed."""
    method = CALM[name]
    session = open_limited(open_session, method, bytes_of(method, 128))
    other = open_limited(open_session, method, 0)
    for one in (session, other):
        one.decode(tokens[:100], 33)
    for n in (90, 60, 29):
        assert session.try_decode(tokens[100 : 100 + n])[0] == lib.LCTX_NO_SLOT
    np.testing.assert_array_equal(session.decode(tokens[100:101]), other.decode(tokens[100:101]))
    np.testing.assert_array_equal(session.decode(tokens[101:128]), other.decode(tokens[101:128]))
    assert session.try_decode(tokens[128:129])[0] == lib.LCTX_NO_SLOT
    for one in (session, other):
        assert one.remove_tail(101)
    np.testing.assert_array_equal(session.decode(tokens[150:177]), other.decode(tokens[150:177]))
    session.clear()
    assert_same(session.decode(tokens[:128]), open_limited(open_session, method, 0).decode(tokens[:128]))


def test_a_limit_below_one_token(open_session, lib, tokens):
    session = open_limited(open_session, Full(), N_HEADS * PAGE_BYTES - 1)
    for _ in range(2):
        assert session.try_decode(tokens[:1])[0] == lib.LCTX_NO_SLOT
        assert "kv_limit" in session.error
        assert (session.n_past, session.kv_bytes) == (0, 0)


# ---- several sequences ----


def test_sequences_share_the_limit(open_session, lib, tokens):
    session = open_limited(open_session, Full(), 3 * N_HEADS * PAGE_BYTES, n_seq_max=3)
    session.decode_mixed([(0, t) for t in tokens[:100]])
    session.decode_mixed([(1, t) for t in tokens[:64]])
    before = [session.length(seq) for seq in range(3)]
    for batch in ([(1, 9)], [(2, 9)], [(0, 9)] * 30, [(0, 9), (2, 9)]):
        assert session.try_decode_mixed(batch)[0] == lib.LCTX_NO_SLOT
        assert [session.length(seq) for seq in range(3)] == before
    assert session.remove_tail(64)
    session.decode_mixed([(2, 9)])


def test_the_limit_counts_the_pages_that_are_taken(open_session, lib, tokens):
    """Of three that share a page, two need a new one."""
    for n_page, want in ((3, lib.LCTX_OK), (2, lib.LCTX_NO_SLOT)):
        session = open_limited(open_session, Full(), n_page * N_HEADS * PAGE_BYTES, n_seq_max=3)
        session.decode_mixed([(0, t) for t in tokens[:30]])
        assert session.copy(0, 1)
        assert session.copy(0, 2)
        assert session.try_decode_mixed([(0, 9), (1, 10), (2, 11)])[0] == want


# the second evicts nothing, but makes the pages its own
EVICTING = {"corm": Evicting(Full(), Corm(4, 8, 64)), "idle": Evicting(Full(), Corm(1, N_CTX, 64))}


@pytest.mark.parametrize("name", EVICTING)
@pytest.mark.parametrize("does", ["look", "decode"])
def test_an_eviction_does_not_copy_pages_beyond_the_limit(open_session, lib, tokens, name, does):
    """A copy is as long as the original, and shares its pages until one of them evicts."""
    method = EVICTING[name]
    limit = bytes_of(method, 129) + 128 * N_HEADS * 12  # the copy's lists
    session = open_limited(open_session, method, limit, n_seq_max=2)
    session.decode_mixed([(0, t) for t in tokens[:128]])
    if not session.copy(0, 1):
        assert "kv_limit" in session.error
    if does == "decode":
        status, _ = session.try_decode_mixed([(0, 9)])
        assert status in (lib.LCTX_OK, lib.LCTX_NO_SLOT)
    info, _ = kv_usage(session)
    assert info.bytes <= info.peak_bytes <= limit


@pytest.mark.parametrize("name", ["selfextend", "longheads-minmax", "corm"])
def test_a_copy_beyond_the_limit_is_refused(open_session, tokens, name):
    """Pages are shared; near keys, summaries and lists of rows are not."""
    limit = bytes_of(CALM[name], 128)
    session = open_limited(open_session, CALM[name], limit, n_seq_max=2)
    session.decode_mixed([(0, t) for t in tokens[:128]])
    assert not session.copy(0, 1)
    assert "kv_limit" in session.error
    assert [session.length(seq) for seq in range(2)] == [128, 0]
    assert session.kv_bytes == limit


@pytest.mark.parametrize("name", CALM)
def test_a_state_beyond_the_limit_is_refused(open_session, tokens, name):
    method = CALM[name]
    session = open_limited(open_session, method, bytes_of(method, 128))
    other = open_limited(open_session, method, 0)
    other.decode(tokens[:128])
    assert session.restore(other.save(0), 0)
    other.decode(tokens[128:129])
    assert not session.restore(other.save(0), 0)
    assert "kv_limit" in session.error
    assert (session.n_past, session.kv_bytes) == (0, 0)
    session.decode(tokens[:128])
    assert kv_usage(session)[0].peak_bytes <= bytes_of(method, 128)


@pytest.mark.parametrize("name", METHODS)
def test_any_order_of_operations_stays_below_the_limit(bound, open_session, name):
    """About half of what the machine of ``test_pages`` comes to hold."""
    method = METHODS[name]
    limit = 6 * N_HEADS * PAGE_BYTES + 3 * Sizes(method).beside_pages(N_CTX // 2, N_CTX // 2 * N_HEADS)

    class Limited(bound(method, 3, None, kv_limit=limit)):
        may_be_full = True

        def look(self):
            super().look()
            assert kv_usage(self.session)[0].bytes <= limit

        def fill(self):
            for seq in range(2):
                self.session.decode_mixed([(seq, 9)] * N_BATCH)

    fresh = Fresh(open_session("llama", method.text(), **SETTINGS | {"n_batch": 512, "n_ubatch": 512}), method)
    Limited.compare_next = staticmethod(fresh.compare)
    run_operations(Limited, 4)
    assert kv_usage(Limited.session)[0].peak_bytes <= limit
    assert fresh.n_compared > 5


# ---- Llama ----


def new(path, method, limit, **settings) -> Llama:
    sizes = {"n_ctx": 2000, "n_batch": N_BATCH, "n_ubatch": N_BATCH, "n_threads": 1, "n_threads_batch": 1}
    types = {"type_k": "f32", "type_v": "f32"}
    return Llama(str(path), method=method, kv_limit=limit, verbose=False, **sizes | types | settings)


@pytest.mark.parametrize("method", [
    "corm,window=1,recent=32,evict_every=16",
    "h2o,budget=100,recent=32,evict_every=32",
    "tova,budget=100,evict_every=32",
    "scissorhands,budget=100,window=16,recent=32,evict_every=32",
    "longheads,chunk_size=16,window=64,representation=minmax+h2o,budget=100,recent=32,evict_every=32",
])  # fmt: skip
def test_a_text_that_full_cannot_hold(model_path, method):
    text = np.random.default_rng(3).integers(3, 288, 1900).tolist()
    path, limit = model_path("llama"), 1900 * N_HEADS * 2 * ROW_BYTES // 3
    with new(path, "full", limit) as full:
        with pytest.raises(ContextFull, match="kv_limit") as reason:
            full.eval(text)
        assert str(limit) in str(reason.value)
        assert 0 < full.n_tokens < 800
        assert full.kv_usage().bytes <= limit
        full.reset()
        full.eval(text[:500])
    with new(path, method, limit) as llm, new(path, method, None) as free:
        for one in (llm, free):
            one.eval(text)
        assert llm.n_tokens == 1900
        usage = llm.kv_usage()
        assert usage.bytes <= usage.peak_bytes <= limit < usage.full_bytes
        np.testing.assert_array_equal(llm.scores, free.scores)


def test_what_was_evaluated_is_kept(model_path, tokens):
    path, limit = model_path("llama"), bytes_of(Full(), 128)
    with new(path, "full", limit) as llm, new(path, "full", None) as free:
        for one in (llm, free):
            one.eval(tokens[:100])
        with pytest.raises(ContextFull, match="kv_limit"):
            llm.eval(tokens[100:200])
        n = llm.n_tokens
        assert 100 <= n <= 128
        assert list(llm.eval_tokens) == tokens[:n]
        llm.n_tokens = 100
        for one in (llm, free):
            one.eval(tokens[200:228])
        np.testing.assert_array_equal(llm.scores, free.scores)
        with pytest.raises(ContextFull, match="kv_limit"):
            llm.eval([5])
        state = free.save_state()
        llm.load_state(state)
        free.eval([5])
        with pytest.raises(ValueError, match="kv_limit"):
            llm.load_state(free.save_state())
        llm.eval(tokens[:128])


@pytest.mark.parametrize("wrong", [0, -1, True, False, 1.5, "x", "100", float("inf"), np.float32(9), [5]])
def test_no_number_of_bytes_is_refused(model_path, wrong):
    with pytest.raises(ValueError, match="kv_limit"):
        new(model_path("llama"), "full", wrong)


@pytest.mark.parametrize("limit", [1, np.int64(10**6), 10**6, 2**64, 2**70])
def test_any_number_of_bytes_is_a_limit(model_path, limit):
    with new(model_path("llama"), "full", limit) as llm:
        if limit == 1:
            with pytest.raises(ContextFull, match="kv_limit"):
                llm.eval([5])
        else:
            llm.eval([5])


def test_a_limit_needs_a_method(model_path):
    with pytest.raises(InvalidInput, match="kv_limit needs a method"):
        new(model_path("llama"), None, 10**9, type_k="f16", type_v="f16")


def test_a_completion_ends_with_the_reason(embedded_model):
    with Llama(str(embedded_model), n_ctx=512, kv_limit=10**6, verbose=False) as llm:
        with pytest.raises(ContextFull, match="kv_limit"):
            llm("It was the best of times, " * 40, max_tokens=5)
        assert llm.kv_usage().peak_bytes <= 10**6
        assert llm("It was", max_tokens=2)["usage"]["completion_tokens"] > 0
