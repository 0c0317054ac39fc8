"""Restore mutated states of a sequence, and use those that are accepted.

Usage: states_driver.py MODEL.gguf METHOD FIRST LAST STEP (see tries.py)

A state that is refused leaves the context as it was made. One that is accepted can be continued, cut, copied, and saved
again for another sequence; checkpoints are made on the way, and are there when a state takes the place of a sequence.
"""

import random
import struct
import sys

import numpy as np
from session import Session
from tries import tell, tries

from pylongctx._lib import ffi, lib

SIZES = {"n_ctx": 256, "n_batch": 48, "n_ubatch": 16, "n_seq_max": 3, "n_threads": 1, "n_threads_batch": 1}
LENGTHS = (1, 63, 64, 130, 200)
HEAD = 320  # bytes in which header and counters lie
NUMBERS = (-(2**31), -2, -1, 0, 1, 2, 16, 63, 64, 65, 128, 129, 130, 200, 256, 257, 2**20, 2**30, 2**31 - 1)
BITS = (0x7FC00000, 0xFFC00000, 0x7F800000, 0xFF800000, 0xBF800000)  # NaN, NaN, inf, -inf, -1


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Truncate or lengthen the state, or change a few bytes or numbers, mostly among the counters."""
    kind = rng.randrange(8)
    if kind == 0:
        return data[: rng.randrange(min(HEAD, len(data)) if rng.random() < 0.5 else len(data))]
    if kind == 1:
        return data + rng.randbytes(rng.randrange(1, 64))
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4])):
        end = len(data) if rng.random() < 0.4 else min(HEAD, len(data))
        if kind < 4:
            changed[rng.randrange(end)] = rng.randrange(256)
        else:
            at = rng.randrange(max(1, end // 4 - 1)) * 4 + (rng.randrange(4) if kind == 4 else 0)
            number = rng.choice(BITS) if rng.random() < 0.2 else rng.choice(NUMBERS) & 0xFFFFFFFF
            changed[at : at + 4] = struct.pack("<I", number)
    return bytes(changed)


def tokens(rng: random.Random, n: int) -> list[int]:
    """Return n ordinary tokens of the tiny vocabulary."""
    return [rng.randrange(3, 100) for _ in range(n)]


def grow(session: Session, seq: int, rng: random.Random, n: int) -> None:
    """Decode up to n tokens; a context that is full is none of our business."""
    n = min(n, SIZES["n_batch"], max(1, SIZES["n_ctx"] - session.length(seq)))
    before = session.length(seq)
    status, _ = session.try_decode_mixed([(seq, token) for token in tokens(rng, n)])
    assert status in (lib.LCTX_OK, lib.LCTX_NO_SLOT), session.error
    assert session.length(seq) == before + (n if status == lib.LCTX_OK else 0)


def checkpoint(session: Session, seq: int) -> None:
    """Make a place that the sequence can go back to, where windows, recurrent states or evictions need one."""
    assert lib.lctx_seq_checkpoint(session.ctx, seq), session.error


def compress(session: Session, seq: int, rng: random.Random) -> None:
    """Replay a few tokens and compress the sequence, where the method does that."""
    n = session.length(seq)
    if lib.lctx_seq_replay(session.ctx, seq, 1) > 0:
        grow(session, seq, rng, 9)
        if session.remove_tail(n, seq):
            assert lib.lctx_seq_compress(session.ctx, seq, 0.4), session.error
        lib.lctx_seq_replay(session.ctx, seq, 0)


def look(session: Session, has_method: bool) -> None:
    """Ask what every head holds: ascending rows of the sequence."""
    if not has_method:
        return
    assert session.kv_bytes >= 0
    rows = np.empty(SIZES["n_ctx"], np.int32)
    for layer in range(4):
        for head in range(2):
            buffer = ffi.from_buffer("int32_t[]", rows, require_writable=True)
            n = lib.lctx_seq_held(session.ctx, 0, layer, head, buffer, ffi.NULL, len(rows))
            assert 0 <= n <= session.length(0)
            assert (np.diff(rows[:n]) > 0).all()


def use(session: Session, rng: random.Random, has_method: bool) -> None:
    """Continue an accepted state in every way that there is."""
    look(session, has_method)
    for n in (1, rng.randrange(2, 48), 17):
        checkpoint(session, 0)
        grow(session, 0, rng, n)
    if session.copy(0, 1, rng.choice([-1, session.length(0) // 2])):
        grow(session, 1, rng, 20)
    session.remove_tail(session.restorable(max(0, session.length(0) - rng.randrange(40))))
    grow(session, 0, rng, 40)
    compress(session, 0, rng)
    grow(session, 0, rng, 5)
    if session.restore(session.save(0), 2):
        assert session.length(2) == session.length(0)
        grow(session, 2, rng, 20)
    else:  # huge weights became infinite sums
        assert "not finite" in session.error, session.error
    look(session, has_method)


def fresh(session: Session) -> np.ndarray:
    """Return the logits of a short text on an empty context."""
    session.clear()
    return session.decode(list(range(3, 40)))


def states(session: Session) -> list[tuple[int, bytes]]:
    """Return (sequence, state) of sequences of several lengths, some after going back, and of all together."""
    saved = []
    for n in LENGTHS:
        session.clear()
        rng = random.Random(n)
        while session.length(0) < n:
            grow(session, 0, rng, min(n - session.length(0), 16))
        saved.append((0, session.save(0)))
        compress(session, 0, rng)
        saved.append((0, session.save(0)))
        session.remove_tail(session.restorable(n - 3))
        saved.append((0, session.save(0)))
    session.copy(0, 2)
    return [*saved, (-1, session.save(-1))]


def try_state(session: Session, saved: list[tuple[int, bytes]], rng: random.Random, has_method: bool) -> bool:
    """Restore a mutated state over a sequence that has checkpoints; returns whether it was accepted."""
    seq, state = rng.choice(saved)
    session.clear()
    grow(session, max(seq, 0), rng, 20)
    checkpoint(session, max(seq, 0))
    accepted = session.restore(mutate(state, rng), seq)
    if accepted:
        use(session, rng, has_method)
    else:
        assert session.error
        assert [session.length(s) for s in range(3)] == [0, 0, 0]
    return accepted


def main() -> None:
    path, method, *seeds = sys.argv[1:]
    lib.lctx_log_set_level(0)
    with Session(ffi, lib, path, method, **SIZES) as session:
        saved, want = states(session), fresh(session)
        for seq, state in saved:
            assert session.restore(state, seq), session.error
        for seed in tries(*seeds):
            accepted = try_state(session, saved, random.Random(seed), bool(method))
            np.testing.assert_array_equal(fresh(session), want)
            tell(accepted)


if __name__ == "__main__":
    main()
