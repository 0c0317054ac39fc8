"""Pages under any order of operations: none is lost, none is read by two, and what leaves returns to the system."""

import numpy as np
import pytest
from page_machine import (
    METHODS,
    N_BATCH,
    N_HEAD_KV,
    N_LAYER,
    PAGE_ROWS,
    ROW_BYTES,
    SETTINGS,
    Fresh,
    bound,
    held_lists,
    kv_usage,
    run_operations,
)

__all__ = ["bound"]  # a fixture

pytestmark = pytest.mark.usefixtures("strict_arena")


@pytest.mark.parametrize("name", METHODS)
def test_no_page_is_lost(bound, open_session, monkeypatch, name):
    """Some 7000 operations in all, with memory that comes page by page or in fours."""
    method = METHODS[name]
    monkeypatch.setenv("LCTX_STRICT_ARENA", str(4 * PAGE_ROWS * ROW_BYTES if len(name) % 2 else 1))
    fresh = Fresh(open_session("llama", method.text(), **SETTINGS | {"n_batch": 512, "n_ubatch": 512}), method)
    run_operations(bound(method, 3 + len(name) % 2, fresh.compare), 10)
    assert fresh.n_compared > 30
    assert fresh.n_long > 8
    assert fresh.n_tie <= 0.02 * fresh.n_compared


@pytest.mark.parametrize("name", METHODS)
def test_a_copy_of_nothing_is_empty(bound, name, tokens):
    """Whatever the original has evicted."""
    machine = bound(METHODS[name], 3, None)
    session = machine.session
    for seq in (0, 1):
        for first in range(0, 240, N_BATCH):
            session.decode_mixed([(seq, t) for t in tokens[first : first + N_BATCH]])
    session.clear()
    want = [session.decode_mixed([(1, t) for t in tokens[:20]])]
    session.clear()
    for first in range(0, 240, N_BATCH):
        session.decode_mixed([(0, t) for t in tokens[first : first + N_BATCH]])
    info, rows = kv_usage(session)
    assert session.copy(0, 1, 0)
    assert session.length(1) == 0
    assert [len(rows) for rows in held_lists(session, 2)[1]] == [0] * N_LAYER * N_HEAD_KV
    after, rows_after = kv_usage(session)
    assert (after.bytes, rows_after.tolist()) == (info.bytes, rows.tolist())
    np.testing.assert_array_equal(session.decode_mixed([(1, t) for t in tokens[:20]]), want[0])


@pytest.mark.parametrize("n_seq", [2, 3])
def test_copies_leave_their_last_page_together(bound, tokens, n_seq):
    """The pool is as large as the sequences, and the one that keeps the shared page needs no new one."""
    session = bound(METHODS["full"], n_seq, None, n_ctx=PAGE_ROWS).session
    session.decode_mixed([(0, t) for t in tokens[:30]])
    for seq in range(1, n_seq):
        assert session.copy(0, seq)
    got = session.decode_mixed([(seq, tokens[40]) for seq in range(n_seq)])
    assert session.kv_bytes == n_seq * N_LAYER * N_HEAD_KV * PAGE_ROWS * 2 * ROW_BYTES
    session.clear()
    want = session.decode_mixed([(0, t) for t in [*tokens[:30], tokens[40]]])[-1]
    for row in got:
        np.testing.assert_allclose(row, want, rtol=0, atol=1e-4 * abs(want).max())


def test_a_window_lists_the_rows_that_it_holds(bound, tokens):
    session = bound(METHODS["window"], 3, None).session
    for first in range(0, 240, N_BATCH):
        session.decode_mixed([(0, t) for t in tokens[first : first + N_BATCH]])
    (rows, *others), (info, n_held) = held_lists(session, 1)[0], kv_usage(session)
    assert len(rows) == n_held[0, 0] < 240
    assert set(rows) >= {0, 1, 2, *range(220, 240)}  # sinks and window
    assert all(other.tolist() == rows.tolist() for other in others)
    assert info.bytes == len(np.unique(rows // PAGE_ROWS)) * PAGE_ROWS * 2 * ROW_BYTES * N_LAYER * N_HEAD_KV


def test_held_pages_make_way(bound, monkeypatch, tokens):
    """Where 16 pages are given back together and every other sequence leaves, those of the others move together."""
    n_seq, page_bytes = 8, PAGE_ROWS * ROW_BYTES
    runs = {}
    for grain in (page_bytes, 16 * page_bytes):
        monkeypatch.setenv("LCTX_STRICT_ARENA", str(grain))
        session = bound(METHODS["full"], n_seq, None, n_ctx=1600, n_batch=PAGE_ROWS, n_ubatch=PAGE_ROWS).session
        for _ in range(20):
            for seq in range(n_seq):
                session.decode_mixed([(seq, t) for t in tokens[seq : seq + PAGE_ROWS]])
        before = kv_usage(session)[0]
        for seq in range(1, n_seq, 2):
            assert session.remove_tail(0, seq)
        after = kv_usage(session)[0]
        runs[grain] = after.bytes, session.decode_mixed([(seq, 7) for seq in range(0, n_seq, 2)])
        assert before.mapped_bytes - after.mapped_bytes > 0.9 * (before.bytes - after.bytes)
    (fine_bytes, want), (n_bytes, got) = runs.values()
    assert fine_bytes == n_bytes
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "spec", ["corm,window=8,recent=16,evict_every=16", "tova,budget=70,heads=adaptive,evict_every=8"]
)
def test_a_sequence_without_rows_takes_no_memory(open_session, monkeypatch, tokens, spec):
    """Where 2 MiB are given together, as on an NVIDIA GPU, lists of 131072 rows are 1.5 MiB apart: 384 MiB in all."""
    grain = 2 << 20
    monkeypatch.setenv("LCTX_STRICT_ARENA", str(grain))
    session = open_session("llama", spec, n_ctx=1 << 17, n_batch=64, n_ubatch=64, n_seq_max=64)
    fresh = kv_usage(session)[0].mapped_bytes
    assert 0 < fresh <= 5 * grain  # tables, headers, counts, budgets, and what is due
    session.decode_mixed([(3, t) for t in tokens[:16]])
    n_lists, n_pools = 4, 2  # the lists of one sequence are 6 MiB; K and V
    assert fresh < kv_usage(session)[0].mapped_bytes <= fresh + (n_lists + n_pools) * grain
