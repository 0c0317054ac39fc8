"""Several sequences, copies, saved states, full pools: the logits are always those of a fresh evaluation."""

import threading
from functools import cache

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from session import assert_same
from thinning import few, thin

pytestmark = pytest.mark.usefixtures("strict_arena")

N_SEQ, N_CTX, N_BATCH = 3, 200, 48
PAGE_ROWS = 64


@pytest.fixture
def start(open_session):
    """Return a function that opens a session on the tiny model."""
    sizes = {"n_ctx": N_CTX, "n_seq_max": N_SEQ, "n_batch": N_BATCH, "n_ubatch": 16}
    defaults = sizes | {"n_threads": 1, "n_threads_batch": 1}
    return lambda method, model="llama", **params: open_session(model, method, **defaults | params)


def fresh(start, method: str, tokens: list[int]) -> np.ndarray:
    """Return the logits of ``tokens`` evaluated alone, in one batch."""
    return start(method, n_seq_max=1, n_batch=256, n_ubatch=256).decode(tokens)


# ---- sequences ----


def test_mixed_sequences_do_not_see_each_other(start, method, tokens):
    mixed, parts = start(method), {0: tokens[:130], 1: tokens[70:165], 2: tokens[165:170]}
    pairs = [(seq, part[i]) for i in range(130) for seq, part in parts.items() if i < len(part)]
    logits = np.concatenate([mixed.decode_mixed(pairs[i : i + 37]) for i in range(0, len(pairs), 37)])
    for seq, part in parts.items():
        assert_same(logits[[s == seq for s, _ in pairs]], fresh(start, method, part))


def test_a_copy_continues_like_its_original(start, method, tokens):
    session = start(method)
    for i in range(0, 90, 45):
        session.decode_mixed([(0, t) for t in tokens[i : i + 45]])
    assert session.copy(0, 2)
    # both write to a shared page, complete a shared chunk, and continue until it may be chosen
    a, b = tokens[90:165], tokens[130:205]
    steps = [[(0, x) for x in a[i : i + 15]] + [(2, x) for x in b[i : i + 15]] for i in range(0, 75, 15)]
    parts = [session.decode_mixed(step).reshape(2, 15, -1) for step in steps]
    got_a, got_b = np.concatenate(parts, axis=1)
    assert_same(got_a, fresh(start, method, tokens[:90] + a)[90:])
    assert_same(got_b, fresh(start, method, tokens[:90] + b)[90:])


def test_copies_share_full_pages(start, tokens):
    session = start("full", n_batch=128, n_ubatch=128)
    session.decode_mixed([(0, t) for t in tokens[: 2 * PAGE_ROWS]])
    before = session.kv_bytes
    assert session.copy(0, 1)
    assert session.kv_bytes == before
    session.decode_mixed([(1, tokens[0])])
    assert session.kv_bytes == before * 3 / 2
    assert session.remove_tail(PAGE_ROWS + 5, seq=1)
    session.decode_mixed([(1, tokens[1])])  # in the middle of a shared page: copied first
    assert session.kv_bytes == before * 3 / 2
    assert_same(
        session.decode_mixed([(0, tokens[9])]), fresh(start, "full", [*tokens[: 2 * PAGE_ROWS], tokens[9]])[-1:]
    )


def test_a_copy_of_a_prefix(start, tokens):
    session = start("full")
    session.decode_mixed([(0, t) for t in tokens[:40]])
    assert session.copy(0, 1, 25)
    assert session.length(1) == 25
    assert_same(session.decode_mixed([(1, tokens[99])]), fresh(start, "full", [*tokens[:25], tokens[99]])[-1:])


def test_keep_forgets_the_others(start, tokens):
    session = start("full")
    session.decode_mixed([(seq, t) for t in tokens[:10] for seq in range(N_SEQ)])
    session.keep(1)
    assert [session.length(seq) for seq in range(N_SEQ)] == [0, 10, 0]


@pytest.mark.parametrize(("src", "dst"), [(-1, 0), (0, N_SEQ), (N_SEQ, 0)])
def test_a_copy_outside_the_sequences_is_refused(start, src, dst):
    session = start("full")
    assert not session.copy(src, dst)
    assert "0 .. 2" in session.error


def test_a_sequence_outside_is_refused(start, lib, tokens):
    session = start("full")
    status, _ = session.try_decode_mixed([(N_SEQ, tokens[0])])
    assert status == lib.LCTX_INVALID
    assert "sequences are 0 .. 2, not 3" in session.error


# ---- full pools, broken batches ----


def test_a_full_sequence_changes_nothing(start, lib, method, tokens):
    session = start(method, n_batch=256)
    want = session.decode_mixed([(0, t) for t in tokens[:190]])
    status, _ = session.try_decode_mixed([(0, t) for t in tokens[190:201]])
    assert status == lib.LCTX_NO_SLOT
    assert "n_ctx 200" in session.error
    assert session.length(0) == 190
    got = session.decode_mixed([(0, t) for t in tokens[190:200]])
    assert_same(np.concatenate([want, got]), fresh(start, method, tokens[:200]))


def test_an_aborted_batch_leaves_the_state_before_it(start, ffi, lib, method, tokens):
    session, flag = start(method, n_ubatch=8), ffi.new("int32_t *", 0)
    before = session.decode_mixed([(0, t) for t in tokens[:45]])
    lib.lctx_context_set_abort(session.ctx, flag)
    flag[0] = 1
    status, _ = session.try_decode_mixed([(seq, t) for t in tokens[45:65] for seq in (0, 1)])
    assert status == lib.LCTX_ABORTED
    assert [session.length(seq) for seq in range(2)] == [45, 0]
    flag[0] = 0
    after = session.decode_mixed([(0, t) for t in tokens[45:90]])
    assert_same(np.concatenate([before, after]), fresh(start, method, tokens[:90]))


@thin
@pytest.mark.parametrize("n", [9, 23, 40])  # 6 rows are in a chunk of 16: no border is crossed, one, two
def test_a_batch_aborted_on_its_way_is_taken_back(start, ffi, lib, method, tokens, n):
    """Whenever the flag is raised, the batch is there as a whole or not at all; the true tokens follow."""
    session, flag, prompt = start(method, n_ubatch=1), ffi.new("int32_t *", 0), tokens[:102]
    lib.lctx_context_set_abort(session.ctx, flag)
    for i in range(12):
        for first in range(session.length(0), len(prompt), 34):
            session.decode_mixed([(0, t) for t in prompt[first : first + 34]])
        timer = threading.Timer(i * 1e-4, flag.__setitem__, (0, 1))
        timer.start()
        status, _ = session.try_decode_mixed([(0, t) for t in tokens[200 : 200 + n]])
        timer.join()
        flag[0] = 0
        assert session.length(0) == len(prompt) + (n if status == lib.LCTX_OK else 0)
        assert session.remove_tail(session.restorable(len(prompt)))
    after = [(0, t) for t in tokens[session.length(0) : 150]]
    got = np.concatenate([session.decode_mixed(after[i : i + 40]) for i in range(0, len(after), 40)])
    assert_same(got, fresh(start, method, tokens[:150])[-len(got) :])


# ---- states ----


@thin
@pytest.mark.parametrize("kv_type", ["f32", "f16", "q8_0"])
def test_a_restored_sequence_continues_with_the_same_logits(start, lib, method, tokens, kv_type):
    kv = dict.fromkeys(("type_k", "type_v"), lib.lctx_type_from_name(kv_type.encode()))
    session, other = (start(method, "llama-wide", **kv) for _ in range(2))  # head_dim 64: whole q8_0 blocks
    for i in range(0, 132, 44):
        session.decode_mixed([(0, t) for t in tokens[i : i + 44]])
    state = session.save(0)
    other.decode_mixed([(2, t) for t in tokens[200:230]])  # is replaced
    assert other.restore(state, 2)
    assert other.length(2) == 132
    want = session.decode_mixed([(0, t) for t in tokens[132:150]])
    got = other.decode_mixed([(2, t) for t in tokens[132:150]])
    np.testing.assert_array_equal(got, want)


def test_a_restored_open_chunk_is_completed(start, method, tokens):
    """The state is taken with 6 rows of a chunk of 16; what follows completes it and chooses it later."""
    session, other = start(method), start(method)
    for i in range(0, 102, 34):
        session.decode_mixed([(0, t) for t in tokens[i : i + 34]])
    assert other.restore(session.save(0), 1)
    got = np.concatenate([other.decode_mixed([(1, t) for t in tokens[i : i + 9]]) for i in range(102, 192, 9)])
    assert_same(got, fresh(start, method, tokens[:192])[102:])


def test_all_sequences_at_once(start, method, tokens):
    session, other = start(method), start(method)
    session.decode_mixed([(seq, t) for t in tokens[:14] for seq in range(N_SEQ)])
    assert other.restore(session.save())
    step = [(seq, tokens[50 + seq]) for seq in range(N_SEQ)]
    np.testing.assert_array_equal(other.decode_mixed(step), session.decode_mixed(step))


@pytest.mark.parametrize(("change", "reason"), [
    ({"method": "window,n_sink=3,window=41"}, "window=41"),
    ({"type_k": 1}, "K or V type"),
    ({"n_ctx": 20}, "n_ctx is 20"),
])  # fmt: skip
def test_a_state_that_does_not_fit_is_refused(start, tokens, change, reason):
    session = start("window,n_sink=3,window=40")
    session.decode_mixed([(0, t) for t in tokens[:30]])
    other = start(change.pop("method", "window,n_sink=3,window=40"), **change)
    assert not other.restore(session.save(0), 0)
    assert reason in other.error
    assert other.length(0) == 0
    other.decode_mixed([(0, t) for t in tokens[:15]])  # still usable


def test_a_damaged_state_is_refused(start, method, tokens):
    session = start(method)
    session.decode_mixed([(0, t) for t in tokens[:40]])
    state = session.save(0)
    for n in [0, 3, 40, len(state) // 2, len(state) - 1]:
        assert not session.restore(state[:n], 0)
        assert session.length(0) == 0
    assert not session.restore(b"\0" * len(state), 0)
    assert session.restore(state, 0)
    assert session.length(0) == 40


# ---- any order of operations ----


class Machine(RuleBasedStateMachine):
    """Lists of tokens as the model of the native memory. ``open_one``, ``want`` and ``tokens`` are set by the test."""

    def __init__(self):
        super().__init__()
        self.session = self.open_one()
        self.model: list[list[int]] = [[] for _ in range(N_SEQ)]
        self.saved: tuple[bytes, list[int]] | None = None

    @rule(data=st.data(), n=st.integers(1, N_BATCH), first=st.integers(0, 200))
    def append(self, data, n, first):
        seqs = data.draw(st.lists(st.integers(0, N_SEQ - 1), min_size=n, max_size=n))
        batch = [(seq, self.tokens[(first + i) % len(self.tokens)]) for i, seq in enumerate(seqs)]
        status, logits = self.session.try_decode_mixed(batch)
        grown = [part + [t for s, t in batch if s == seq] for seq, part in enumerate(self.model)]
        if any(len(part) > N_CTX for part in grown):
            assert status == self.session.lib.LCTX_NO_SLOT
            return
        assert status == self.session.lib.LCTX_OK, self.session.error
        self.model = grown
        last = {seq: i for i, (seq, _) in enumerate(batch)}
        for seq, i in last.items():
            assert_same(logits[i], self.want(grown[seq]))

    @rule(seq=st.integers(0, N_SEQ - 1), back=st.integers(1, N_CTX))
    def remove_tail(self, seq, back):
        n = self.session.cut_back(max(0, len(self.model[seq]) - back), seq)
        del self.model[seq][n:]

    @rule(src=st.integers(0, N_SEQ - 1), dst=st.integers(0, N_SEQ - 1))
    def copy(self, src, dst):
        assert self.session.copy(src, dst)
        self.model[dst] = list(self.model[src])

    @rule(seq=st.integers(0, N_SEQ - 1))
    def keep(self, seq):
        self.session.keep(seq)
        self.model = [part if s == seq else [] for s, part in enumerate(self.model)]

    @rule(seq=st.integers(0, N_SEQ - 1))
    def save(self, seq):
        self.saved = self.session.save(seq), list(self.model[seq])

    @precondition(lambda self: self.saved)
    @rule(seq=st.integers(0, N_SEQ - 1))
    def restore(self, seq):
        assert self.session.restore(self.saved[0], seq), self.session.error
        self.model[seq] = list(self.saved[1])

    @invariant()
    def lengths_agree(self):
        assert [self.session.length(seq) for seq in range(N_SEQ)] == [len(part) for part in self.model]

    @invariant()
    def no_page_is_lost(self):
        if not any(self.model):
            assert self.session.kv_bytes == 0

    def teardown(self):
        self.session.clear()
        assert self.session.kv_bytes == 0
        self.session.close()


def test_any_order_of_operations(start, method, tokens):
    alone = start(method, n_seq_max=1, n_batch=256, n_ubatch=256)

    @cache
    def want(*sequence: int) -> np.ndarray:
        alone.clear()
        return alone.decode(list(sequence))[-1]

    class Bound(Machine):
        open_one = staticmethod(lambda: start(method))
        want = staticmethod(lambda sequence: want(*sequence))

    Bound.tokens = tokens
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
    options = settings(
        max_examples=few(25), stateful_step_count=25, deadline=None, suppress_health_check=checks, derandomize=True
    )
    run_state_machine_as_test(Bound, settings=options)
