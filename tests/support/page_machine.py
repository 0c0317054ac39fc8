"""A state machine of hypothesis: any order of operations on sequences, after which no page is lost or shared."""

from collections import Counter
from dataclasses import dataclass
from itertools import count, groupby

import numpy as np
import pytest
from cases import LONGHEADS
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from oracle import DualChunk, Full, SelfExtend, Window
from oracle_chunks import LongHeads
from oracle_evict import Evicting
from oracle_rules import H2O, Corm
from session import Session

N_CTX, N_BATCH, N_UBATCH, PAGE_ROWS = 330, 48, 16, 64
N_LAYER, N_HEAD_KV, N_HEAD, HEAD_DIM = 2, 2, 4, 16  # of the model "llama"
ROW_BYTES = 4 * HEAD_DIM
PLANES = 3  # int32 lists of a row that heads may evict: its position, its score, the score before
SETTINGS = {"n_ctx": N_CTX, "n_batch": N_BATCH, "n_ubatch": N_UBATCH, "n_threads": 1, "n_threads_batch": 1}
RARELY = st.integers(0, 2**20).map(lambda n: n % 16 == 9)
METHODS = {
    "full": Full(),
    "window": Window(3, 20),
    "corm": Evicting(Full(), Corm(6, 8, 4)),
    "corm-every16": Evicting(Full(), Corm(9, 12, 16)),
    "selfextend-corm": Evicting(SelfExtend(10, 21), Corm(8, 10, 8)),
    "dca": DualChunk(23, 9),
    "longheads-h2o": Evicting(LONGHEADS["longheads-attention"], H2O(70, 12, 8)),
    "longheads-corm": Evicting(LongHeads(16, 64), Corm(8, 16, 16)),
}


def blocks(n: int | np.ndarray) -> int | np.ndarray:
    return -(-n // PAGE_ROWS)


@dataclass(frozen=True)
class Sizes:
    """What the memory of a method takes, f32 K and V of the model "llama"."""

    method: Full | Window | SelfExtend | DualChunk | LongHeads | Evicting
    n_batch: int = N_BATCH

    @property
    def base(self) -> Full | Window | SelfExtend | DualChunk | LongHeads:
        return self.method.base if isinstance(self.method, Evicting) else self.method

    def beside_pages(self, n: int, n_held: int) -> int:
        """Return the bytes of near keys, chunks and lists of a sequence of ``n`` tokens whose heads hold ``n_held``."""
        n_bytes = PLANES * 4 * n_held if isinstance(self.method, Evicting) else 0
        if isinstance(self.base, SelfExtend):
            ring = blocks(self.base.neighbor_window + N_UBATCH + self.n_batch) * PAGE_ROWS
            n_bytes += min(n, ring) * N_LAYER * N_HEAD_KV * ROW_BYTES
        if isinstance(self.base, LongHeads) and not self.base.key_bits:
            n_bytes += n // self.base.chunk_size * N_LAYER * self._representation_bytes()
            if self.base.representation == "attention":
                n_open = 0 if n == 0 else 1 if n <= self.base.chunk_size else 2
                n_bytes += n_open * self.base.chunk_size * N_LAYER * N_HEAD * ROW_BYTES
        return n_bytes

    def _representation_bytes(self) -> int:
        """Mean keys are floats as K is, bounds halves."""
        if self.base.representation == "attention":
            return N_HEAD * ROW_BYTES
        return np.dtype(np.float16).itemsize * 2 * N_HEAD_KV * HEAD_DIM

    @property
    def page_bytes(self) -> int:
        """Return the bytes of a page with the index of its keys: codes, whole words of them, and a scale."""
        bits = self.base.key_bits if isinstance(self.base, LongHeads) else 0
        index = np.dtype(np.float16).itemsize + -(-HEAD_DIM * bits // 32) * 4 if bits else 0
        return PAGE_ROWS * (2 * ROW_BYTES + index)

    @property
    def evict_every(self) -> int:
        return self.method.rule.evict_every if isinstance(self.method, Evicting) else N_CTX + 1


def held_lists(session: Session, n_seq: int) -> list[list[np.ndarray]]:
    """Return the rows that every head of every sequence holds."""
    rows = np.full(N_CTX, -9, dtype=np.int32)
    buffer = session.ffi.from_buffer("int32_t[]", rows, require_writable=True)
    lists = []
    for seq in range(n_seq):
        lists.append([])
        for layer in range(N_LAYER):
            for head in range(N_HEAD_KV):
                n = session.lib.lctx_seq_held(session.ctx, seq, layer, head, buffer, session.ffi.NULL, N_CTX)
                lists[-1].append(rows[:n].copy())
    return lists


def kv_usage(session: Session):
    """Return the ``lctx_kv_info`` and the rows held per layer and KV head."""
    info, rows = session.ffi.new("lctx_kv_info *"), np.zeros((N_LAYER, N_HEAD_KV), dtype=np.int32)
    buffer = session.ffi.from_buffer("int32_t[]", rows, require_writable=True)
    assert session.lib.lctx_kv_usage(session.ctx, info, buffer) == session.lib.LCTX_OK
    return info, rows


class Machine(RuleBasedStateMachine):
    """Lists of tokens as the model of the native memory.

    Looking at the memory changes nothing. So half of the runs look after every step, the others when the rule ``look``
    is drawn, and at the end. The class attributes below are set by the test.
    """

    session: Session
    sizes: Sizes
    n_seq: int
    tokens: list[int]
    flag: object  # the abort flag
    compare_next: staticmethod  # called with the session, a sequence, its tokens and the logits after the last one
    may_be_full = False

    def __init__(self):
        super().__init__()
        self.session.clear()
        self.model: list[list[int]] = [[] for _ in range(self.n_seq)]
        self.names = count()
        self.family = [next(self.names) for _ in range(self.n_seq)]  # sequences that may share pages
        self.done = [0] * self.n_seq  # lengths at which the eviction that is due at such a border may be done already
        self.saved: tuple[bytes, list[int], int] | None = None
        self.peak, self.is_watched = 0, False

    @initialize(is_watched=st.booleans(), seed=st.integers(0, 2**20))
    def begin(self, is_watched, seed):
        """Rules may not be drawn for long: begin with sequences of any length."""
        self.is_watched = is_watched
        for seq, n in enumerate(np.random.default_rng(seed).integers(0, N_CTX, self.n_seq).tolist()):
            for first in range(0, n, N_BATCH):
                self.append_to_one(seq, seed + first, min(N_BATCH, n - first))

    def draw_batch(self, seed: int, n: int) -> list[tuple[int, int]]:
        """Return ``n`` random tokens in runs and single ones of random sequences."""
        rng = np.random.default_rng(seed)
        some = rng.integers(0, self.n_seq, rng.integers(1, self.n_seq + 1))
        seqs = rng.choice(some, n)
        if seed % 2:
            seqs.sort()
        first = rng.integers(0, len(self.tokens))
        return [(int(seq), self.tokens[(first + i) % len(self.tokens)]) for i, seq in enumerate(seqs)]

    @rule(seed=st.integers(0, 2**20), n=st.integers(1, N_BATCH))
    def append(self, seed, n):
        self.decode(self.draw_batch(seed, n))

    @rule(seq=st.integers(0, 3), first=st.integers(0, 255), n=st.integers(N_BATCH // 2, N_BATCH))
    def append_to_one(self, seq, first, n):
        self.decode([(seq % self.n_seq, self.tokens[(first + i) % len(self.tokens)]) for i in range(n)])

    def decode(self, batch: list[tuple[int, int]]) -> np.ndarray | None:
        """Evaluate (sequence, token) pairs; returns their logits, or None when they did not fit."""
        grown = [part + [t for s, t in batch if s == seq] for seq, part in enumerate(self.model)]
        status, logits = self.session.try_decode_mixed(batch)
        is_full = any(len(part) > N_CTX for part in grown)
        if is_full or (self.may_be_full and status == self.session.lib.LCTX_NO_SLOT):
            assert status == self.session.lib.LCTX_NO_SLOT
            assert ("n_ctx" if is_full else "kv_limit") in self.session.error
            self.note_done(batch)
            return None
        assert status == self.session.lib.LCTX_OK, self.session.error
        every = self.sizes.evict_every
        for seq, (part, before) in enumerate(zip(grown, self.model, strict=True)):
            first = len(before) - (self.done[seq] != len(before))
            if (len(part) - 1) // every > first // every:
                self.family[seq] = next(
                    self.names
                )  # an eviction, when a token comes after a border, makes all pages its own
        self.model = grown
        return logits

    def note_done(self, batch: list[tuple[int, int]]) -> None:
        """Remember that evictions may be done: a batch that does not end has done those that were due before it."""
        for seq in {seq for seq, _ in batch}:
            self.done[seq] = len(self.model[seq])

    @rule(seq=st.integers(0, 3))
    def compare(self, seq):
        seq %= self.n_seq
        if self.model[seq] and (logits := self.decode([(seq, 17)])) is not None:
            self.compare_next(self.session, seq, self.model[seq], logits[0])

    @rule(seed=st.integers(0, 2**20), n=st.integers(1, N_BATCH))
    def append_and_abort(self, seed, n):
        batch = self.draw_batch(seed, n)
        self.flag[0] = 1
        status, _ = self.session.try_decode_mixed(batch)
        self.flag[0] = 0
        self.note_done(batch)
        wanted = Counter(seq for seq, _ in batch)
        if any(len(part) + wanted[seq] > N_CTX for seq, part in enumerate(self.model)):
            assert status == self.session.lib.LCTX_NO_SLOT
        else:
            full = (self.session.lib.LCTX_NO_SLOT,) if self.may_be_full else ()
            assert status in (self.session.lib.LCTX_ABORTED, *full)

    @rule(seq=st.integers(0, 3), back=st.sampled_from([1, 2, 5, 16, 30, 48, 64, 90]), rare=RARELY)
    def remove_tail(self, seq, back, rare):
        seq %= self.n_seq
        back = N_CTX if rare else back
        n = self.session.cut_back(max(0, len(self.model[seq]) - back), seq)
        if n < len(self.model[seq]):
            self.done[seq] = n
        del self.model[seq][n:]

    @rule(dst=st.integers(0, 3), back=st.sampled_from([0, 0, 1, 5, 30, N_CTX]), rare=RARELY)
    def copy(self, dst, back, rare):
        src, dst = self.longest(rare), dst % self.n_seq
        n = max(0, len(self.model[src]) - back)
        if src == dst:
            return
        if not self.session.copy(src, dst, n):
            assert n < len(self.model[src]) or (self.may_be_full and "kv_limit" in self.session.error)
            return
        self.done[dst] = n if n < len(self.model[src]) else self.done[src]
        self.model[dst], self.family[dst] = self.model[src][:n], self.family[src]
        if n == 0:
            assert [len(rows) for rows in held_lists(self.session, dst + 1)[dst]] == [0] * N_LAYER * N_HEAD_KV

    @rule(seq=st.integers(0, 3), rare=RARELY)
    def keep(self, seq, rare):
        if not rare:
            return
        self.session.keep(seq % self.n_seq)
        self.model = [part if s == seq % self.n_seq else [] for s, part in enumerate(self.model)]

    @rule(rare=RARELY)
    def save(self, rare):
        seq = self.longest(rare)
        self.saved = self.session.save(seq), list(self.model[seq]), self.done[seq]

    def longest(self, rare: bool) -> int:
        """Return the longest sequence, or the shortest."""
        return (min if rare else max)(range(self.n_seq), key=lambda seq: len(self.model[seq]))

    @precondition(lambda self: self.saved)
    @rule(seq=st.integers(0, 3))
    def restore(self, seq):
        seq %= self.n_seq
        if self.session.restore(self.saved[0], seq):
            self.model[seq], self.family[seq], self.done[seq] = list(self.saved[1]), next(self.names), self.saved[2]
        else:
            assert self.may_be_full, self.session.error
            assert "kv_limit" in self.session.error
            self.model[seq] = []

    @rule(rare=RARELY)
    def clear(self, rare):
        if rare:
            self.session.clear()
            self.model = [[] for _ in self.model]

    @invariant()
    def lengths_agree(self):
        assert [self.session.length(seq) for seq in range(self.n_seq)] == [len(part) for part in self.model]

    @invariant()
    def pages_agree(self):
        if self.is_watched:
            self.look()

    @rule()
    def look(self):
        lists = held_lists(self.session, self.n_seq)
        for part, heads in zip(self.model, lists, strict=True):
            for rows in heads:
                assert (np.diff(rows) > 0).all()
                assert len(rows) == 0 or (rows[0] >= 0 and rows[-1] < len(part))
        info, rows = kv_usage(self.session)
        n_held = np.array([[len(rows) for rows in heads] for heads in lists])
        assert rows.reshape(-1).tolist() == n_held.sum(0).tolist()
        self.check_bytes(info.bytes, lists, n_held)
        assert max(self.peak, info.bytes) <= info.peak_bytes
        self.peak = info.peak_bytes
        assert info.full_bytes == sum(map(len, self.model)) * N_LAYER * N_HEAD_KV * 2 * ROW_BYTES

    def check_bytes(self, n_bytes, lists, n_held):
        """Pages are held by one sequence, or by several of a family: never fewer than one of them needs."""
        beside = sum(self.sizes.beside_pages(len(part), n) for part, n in zip(self.model, n_held.sum(1), strict=True))
        n_page = np.array([[len(np.unique(rows // PAGE_ROWS)) for rows in heads] for heads in lists])
        if isinstance(self.sizes.method, Evicting):
            n_page = blocks(n_held)  # rows of a head move up
        order = sorted(range(self.n_seq), key=lambda seq: self.family[seq])
        shared = [n_page[list(group)].max(0).sum() for _, group in groupby(order, key=lambda seq: self.family[seq])]
        page_bytes = self.sizes.page_bytes
        assert beside + sum(shared) * page_bytes <= n_bytes <= beside + n_page.sum() * page_bytes
        if not any(self.model):
            assert n_bytes == 0

    def teardown(self):
        self.look()
        for seq in range(self.n_seq):
            self.compare(seq)
        self.look()
        self.session.clear()
        assert self.session.kv_bytes == 0
        self.fill()

    def fill(self):
        """Every sequence can grow to n_ctx, after all that happened."""
        for seq in range(self.n_seq):
            for first in range(0, N_CTX, N_BATCH):
                self.session.decode_mixed([(seq, 5 + i) for i in range(min(N_BATCH, N_CTX - first))])


def run_operations(machine: type[Machine], n_example: int, n_step: int = 100) -> None:
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
    run_machine(
        machine,
        settings=settings(
            max_examples=n_example,
            stateful_step_count=n_step,
            deadline=None,
            suppress_health_check=checks,
            derandomize=True,
            phases=[Phase.generate],
        ),
    )


@pytest.fixture
def bound(ffi, lib, open_session, tokens):
    """Return a function from method, number of sequences and settings to a machine on the tiny model."""

    def bind(method, n_seq: int, compare_next, **params) -> type[Machine]:
        flag = ffi.new("int32_t *", 0)
        session = open_session("llama", method.text(), n_seq_max=n_seq, **SETTINGS | params)
        lib.lctx_context_set_abort(session.ctx, flag)
        session.flag = flag  # as long as the context may look at it
        known = {"session": session, "sizes": Sizes(method), "n_seq": n_seq, "tokens": tokens, "flag": flag}
        return type("Bound", (Machine,), known | {"compare_next": staticmethod(compare_next)})

    return bind


class Fresh:
    """Hold logits of any order of operations against those of a fresh evaluation of the same tokens at once.

    A decision at a near tie may change when float32 rounds differently, as it may where a batch is cut elsewhere. Then
    the heads hold other rows, which distinguishes this from an error; such ties are counted.
    """

    def __init__(self, alone: Session, method):
        self.alone, self.evicts = alone, isinstance(method, Evicting)
        self.n_compared = self.n_long = self.n_tie = 0

    def compare(self, session: Session, seq: int, part: list[int], got: np.ndarray) -> None:
        self.alone.clear()
        want = self.alone.decode(part)[-1]
        self.n_compared += 1
        self.n_long += len(part) > 3 * PAGE_ROWS
        if self.evicts and abs(got - want).max() > 1e-4 * abs(want).max():
            pairs = zip(held_lists(session, seq + 1)[seq], held_lists(self.alone, 1)[0], strict=True)
            assert any(a.tolist() != b.tolist() for a, b in pairs)
            self.n_tie += 1
        else:
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * abs(want).max())
