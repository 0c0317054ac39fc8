"""Operations on slots without a job, between two steps: erase, save, restore, compress."""

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pylongctx._lib import error, lib
from pylongctx.engine.compress import CompressionReport, compress
from pylongctx.engine.library import Library
from pylongctx.engine.slots import Slot

TURN = 8  # tokens at the end of a prompt that may be others where a chat continues: they begin the answer
Snapshot = tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.uint8]]  # see Session.save


class IdleSlots:
    """The slots of an engine, as far as they have no job. ValueError for others.

    Parameters
    ----------
    slots : sequence of Slot
        The slots.
    library : Library or None
        The KV store of the engine.
    """

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
        end = len(slot.last.tokens) - TURN
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
