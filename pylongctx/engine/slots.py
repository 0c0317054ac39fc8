"""The sequences of the engine: the choice of one for a prompt, and operations on those without a job."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pylongctx._lib import error, lib
from pylongctx.engine.compress import CompressionReport, compress
from pylongctx.engine.documents import common
from pylongctx.engine.job import Job
from pylongctx.engine.reuse import Held, Library, Piece
from pylongctx.engine.session import Session

SIMILAR = 0.1  # fraction of a prompt that a sequence must hold to be preferred to the least recently used one
TURN_TAIL = 8  # tokens at the end of a prompt that may be others where a chat continues: they begin the answer
Snapshot = tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.uint8]]  # see Session.save


@dataclass(eq=False)
class Slot:
    """One sequence of the native context, and the job that runs on it."""

    session: Session
    job: Job | None = None
    last: Job | None = None  # the previous job, for reports
    used: int = 0  # when the last job ended, counted in jobs

    @property
    def id(self) -> int:
        """The number of the sequence."""
        return self.session.seq

    def cached_piece(self, job: Job) -> Piece | None:
        """Return the piece of a prompt that this sequence already holds, or None."""
        if not self._serves(job):
            return None
        return Held(self.session, job.placed, 0 if self.job is not None else job.min_chunk).covers(job.tokens)

    def saved(self, job: Job) -> int:
        """Return how many tokens of a prompt need no evaluation on this sequence."""
        piece = self.cached_piece(job)
        return 0 if piece is None else piece.end

    def shared(self, job: Job) -> int:
        """Return the length of the common prefix with a prompt, even if the sequence cannot be cut to it."""
        return Held(self.session, job.placed, job.min_chunk).shared(job.tokens) if self._serves(job) else 0

    def _serves(self, job: Job) -> bool:
        partial = self.job is not None and self.job.is_partial
        return self.session.owner == job.owner and job.reuses and not partial


def choose(slots: list[Slot], job: Job) -> tuple[Slot, Slot]:
    """Return the idle sequence for a job, and the one whose prefix it reuses: itself or one to copy from.

    A prompt goes to the sequence with the longest common prefix, else to the least recently used one. The prefix of a
    busy sequence is copied, which shares its pages; so is a prefix of a long text if another sequence is empty.
    """
    idle = [slot for slot in slots if slot.job is None and job.may_run_on(slot.id)]
    oldest = min(idle, key=lambda slot: (slot.session.n_tokens > 0, slot.used))
    if job.follows or job.every_row:
        return oldest, oldest
    saved = {slot: slot.saved(job) for slot in slots}
    best = max(slots, key=lambda slot: (saved[slot], slot in idle))
    if saved[best] < SIMILAR * len(job.tokens):
        return oldest, oldest
    if best in idle and not (_loses_much(best, job, saved[best]) and not oldest.session.n_tokens):
        return best, best
    nearest = max(idle, key=lambda slot: saved[slot])
    target = nearest if best not in idle and saved[nearest] >= SIMILAR * len(job.tokens) else oldest
    copies = best.session.context.method and saved[best] > saved[target]  # llama.cpp's own cache copies only whole
    return target, best if copies else target


def _loses_much(slot: Slot, job: Job, n: int) -> bool:
    """Return True if a cut to ``n`` tokens loses more than it keeps, and a copy is possible instead."""
    begins = n <= slot.shared(job)  # else not all of them are a prefix
    return bool(slot.session.context.method) and begins and slot.session.n_tokens > 2 * n


def forerunner(slots: list[Slot], job: Job, worth: int) -> Job | None:
    """Return a job in prefill whose prompt shares a prefix of at least ``worth`` tokens with this one."""
    if not slots[0].session.context.method or job.every_row:
        return None
    saved = max(slot.saved(job) for slot in slots)
    promised = {slot: _promised(slot, job) for slot in slots if slot.job is not None and slot.job.is_reading}
    best = max(promised, key=lambda slot: promised[slot], default=None)
    if best is None or promised[best] - saved < worth:
        return None
    best.session.checkpoints.request(promised[best])
    return best.job


def _promised(slot: Slot, job: Job) -> int:
    """Return how many tokens of a prompt can be copied from a sequence after its prefill."""
    assert slot.job is not None
    if slot.session.owner != job.owner or not job.reuses:
        return 0
    n = common(slot.job.tokens, slot.job.placed, job.tokens, job.placed)
    if slot.session.seam is not None and not job.min_chunk:
        n = min(n, slot.session.seam)
    return n if n > slot.session.n_tokens else slot.session.reachable(n)


class IdleSlots:
    """The slots of an engine, as far as they have no job. ValueError for others."""

    def __init__(self, slots: Sequence[Slot], library: Library | None = None) -> None:
        self._slots, self._library = slots, library
        self._context = slots[0].session.context
        self._guard = threading.Lock()  # guards the next one, and the context's abort flag
        self._compressing = False

    def erase(self, seq: int, owner: str | None) -> int:
        """Clear a slot; returns how many tokens it held. ValueError when they belong to another owner."""
        slot = self._slot(seq)
        if slot.session.n_tokens:
            self._check_owner(slot, owner)
        n = slot.session.n_tokens
        slot.session.clear()
        slot.last, slot.used, slot.session.owner = None, 0, None
        return n

    def save(self, seq: int, owner: str | None) -> Snapshot:
        """Return tokens, last logits and KV cache; ValueError when the slot holds nothing of this owner."""
        slot = self._slot(seq)
        self._check_owner(slot, owner)
        return slot.session.save()

    def load(self, seq: int, owner: str | None, saved: Snapshot) -> int:
        """Replace the content of a slot; returns the number of tokens."""
        slot = self._slot(seq)
        slot.last, slot.session.owner = None, owner
        slot.session.load(*saved)
        return slot.session.n_tokens

    def compress(self, ratio: float, seq: int = 0, owner: str | None = None, answer: str = "") -> CompressionReport:
        """Evict most KV entries of a slot, see ``Llama.compress``; the other slots wait for it.

        With the id of a completion, ``answer``, the text is that of its prompt: a chat template may render the answer
        in another way in the next prompt, which could not reuse a compressed text that ends with it. ValueError when
        the slot holds nothing of this owner, or does not end with the completion.
        """
        if self._library is not None:
            reason = "kv_store cannot store a compressed text: open without it, or use read(text, ratio=...)"
            raise error(lib.LCTX_INVALID, reason)
        slot = self._slot(seq)
        if slot.session.n_tokens:
            self._check_owner(slot, owner)
        if answer and (slot.last is None or slot.last.id != answer):
            raise ValueError(f"sequence {seq} no longer ends with this answer: send a message, then compress")
        held = self._context.kv_usage().bytes if answer else 0
        if answer:
            self._leave_answer(slot)
        with self._guard:
            self._compressing = True
        try:
            report = compress(slot.session, ratio)
            return replace(report, bytes_before=held) if answer else report
        finally:
            with self._guard:
                self._compressing = self._context.abort = False

    def stop_compression(self) -> None:
        """Stop a compression, which leaves its text as it was. Thread-safe."""
        with self._guard:
            if self._compressing:
                self._context.abort = True

    def _leave_answer(self, slot: Slot) -> None:
        """Cut a text back to the prompt of its last completion, unless it was compressed beyond that."""
        assert slot.last is not None
        end = len(slot.last.tokens) - TURN_TAIL
        if end > 0 and slot.session.reachable(end) == end:
            slot.session.rewind(end)

    def _slot(self, seq: int) -> Slot:
        slot = self._slots[seq]
        if slot.job is not None:
            raise ValueError(f"sequence {seq} is busy: wait for its request to end")
        return slot

    def _check_owner(self, slot: Slot, owner: str | None) -> None:
        if not slot.session.n_tokens or slot.session.owner != owner:
            raise ValueError(f"sequence {slot.id} holds nothing of yours")
