"""Compression of an evaluated text: it is replayed in pieces, and KV entries that the replay attended to are kept."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from pylongctx._lib import error, lib
from pylongctx.engine.model import Model
from pylongctx.engine.session import NO_ROWS, Session
from pylongctx.methods.checks import check_share

PIECE, LEAST = 2000, 64  # tokens of the text in a replay: KVzip's number, and the minimum
OVERLAP = 8  # tokens before a piece that identify its beginning
FIRST = b"\n\nRepeat the previous context exactly.\n\n"
LATER = b"\n\nRepeat the part of the previous context exactly, starting with "
NOTHING = np.empty(0, np.int32)


def compress(session: Session, ratio: float) -> None:
    """Keep a fraction of all KV entries, see ``Llama.compress``."""
    check_share("ratio", ratio)
    if ratio is None:
        raise TypeError("ratio must be a number, not None")
    with session.lock:
        session.context.abort = False
        session.eval(NOTHING)  # synchronizes cache and tokens
        most = session.context.begin_replay(session.seq)
        n = session.n_tokens
        try:
            _replay(session, most)
            session.context.compress(ratio, session.seq)
            session.changes += 1
        finally:
            session.context.end_replay(session.seq)
            session.context.truncate(n, session.seq)


def _replay(session: Session, most: int) -> None:
    """Collect votes of the replayed text's queries, rewinding after each piece."""
    context, text = session.context, session.tokens.copy()
    if context.keeps_checkpoints and (refusal := context.checkpoint(session.seq)):
        raise error(lib.LCTX_FAILED, refusal)
    for tokens in replays(session, text, most):
        done = 0
        while done < len(tokens):
            part = tokens[done : done + context.step(len(text) + done, len(tokens) - done)]
            positions = np.arange(len(text) + done, len(text) + done + len(part), dtype=np.int32)
            context.decode(part, positions, np.full_like(part, session.seq), np.zeros(len(part), np.int8), NO_ROWS)
            done += len(part)
        if context.truncate(len(text), session.seq):
            session.eval(NOTHING)  # may evaluate the end of the text again after a rewind


def replays(session: Session, text: NDArray[np.int32], most: int) -> Iterator[NDArray[np.int32]]:
    """Yield the tokens to evaluate after the text, at most ``most`` at a time."""
    first, later = (_tokens(session.model, prompt) for prompt in (FIRST, LATER))
    room = most - max(len(first), len(later) + OVERLAP)
    n_bos = int(text[0] == session.model.info.token_bos)
    if room < LEAST:
        reason = f"compress replays the text after itself in pieces, for which n_ctx {session.n_ctx} has no room"
        raise error(lib.LCTX_NO_SLOT, f"{reason}: {len(text)} tokens are held; open with a larger n_ctx")
    for start in range(n_bos, len(text), min(PIECE, room)):
        prompt = first if start == n_bos else np.concatenate([later, text[max(n_bos, start - OVERLAP) : start]])
        yield np.concatenate([prompt, text[start : start + min(PIECE, room)]])


def _tokens(model: Model, text: bytes) -> NDArray[np.int32]:
    return np.array(model.tokenize(text, add_special=False), np.int32)
