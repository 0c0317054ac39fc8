"""Compression of an evaluated text: KV entries to which queries attended are kept, and the others evicted.

With kvzip the queries are those of the text's tokens, replayed in pieces; with snapkv those of its last tokens.

Parts of the text are repeated before and after it, to measure how much the model's predictions change.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pylongctx._lib import error, lib
from pylongctx.engine.model import Model
from pylongctx.engine.session import NO_ROWS, Session
from pylongctx.methods import Full, Kvzip, Method, SnapKV
from pylongctx.methods.base import check_share

PIECE, LEAST = 2000, 64  # tokens of the text in a replay: KVzip's number, and the minimum
OVERLAP = 8  # tokens before a piece that identify its beginning
FIRST = b"\n\nRepeat the previous context exactly.\n\n"
LATER = b"\n\nRepeat the part of the previous context exactly, starting with "
NOTHING = np.empty(0, np.int32)
WHOLE_PREFILLS, PIECE_PREFILLS = 2.5, 1.5  # time of a compression, in prefills of the text
PROBES, PROBE = 3, 16  # parts of the text whose repetition is compared, and their tokens
DRIFT = 0.1  # mean divergence, in nats, from which on ``CompressionReport.drifts`` is true


@dataclass(frozen=True)
class CompressionReport:
    """Memory that a compression freed, and how much predictions changed.

    Attributes
    ----------
    n_tokens : int
        Tokens of the text.
    bytes_before, bytes_after : int
        KV memory held before and after.
    seconds : float
        Time of the replay and the eviction, without the prefill.
    divergence : float or None
        Mean Kullback-Leibler divergence, in nats, of the next-token probabilities after the compression from those
        before it, where the model repeats three parts of the text. None if it was not measured: the text is too short,
        the context has no room, or only entries for its last tokens were kept (``snapkv``).
    """

    n_tokens: int
    bytes_before: int
    bytes_after: int
    seconds: float
    divergence: float | None

    @property
    def drifts(self) -> bool:
        """True if answers are likely to differ: the divergence is above 0.1."""
        return self.divergence is not None and not self.divergence <= DRIFT  # NaN included


@dataclass(frozen=True)
class ReplayPiece:
    """A part of a text that is replayed."""

    first: int
    end: int
    tokens: NDArray[np.int32]  # what is evaluated after the text: a request to repeat the part, and the part


def compression_prefills(method: Method) -> float:
    """Return about how long a compression takes, in prefills of the text; 0 without a replay."""
    rule = next((part for part in method.parts if isinstance(part, Kvzip)), None)
    if rule is None:
        return 0.0
    full = all(isinstance(part, Full | Kvzip) for part in method.parts)
    by_pieces = rule.replay == "piece" or (rule.replay is None and full)
    return PIECE_PREFILLS if by_pieces else WHOLE_PREFILLS


def compress(session: Session, ratio: float) -> CompressionReport:
    """Keep a fraction of all KV entries, see ``Llama.compress``."""
    check_share("ratio", ratio)
    if ratio is None:
        raise TypeError("ratio must be a number, not None")
    with session.lock:
        session.context.abort = False
        session.eval(NOTHING)  # synchronizes cache and tokens
        session.context.begin_replay(session.seq)  # refuses what cannot be compressed
        session.context.end_replay(session.seq)
        started, held = time.perf_counter(), session.context.kv_usage().bytes
        window = _window(session)
        if window:
            _evict_for_last(session, ratio, window)
        divergence = None if window else _evict_measured(session, ratio)
        freed = session.context.kv_usage().bytes
        return CompressionReport(session.n_tokens, held, freed, time.perf_counter() - started, divergence)


def _window(session: Session) -> int:
    """Return how many of the last tokens vote; 0: those of a replay do."""
    parts = session.method.parts if session.method is not None else ()
    return next((part.window or 0 for part in parts if isinstance(part, SnapKV)), 0)


def _evict_for_last(session: Session, ratio: float, window: int) -> None:
    """Evaluate the last tokens again, whose queries vote, and keep the entries with the largest votes."""
    text = session.tokens.copy()
    first = len(text) - window
    if first < 1:
        raise error(lib.LCTX_INVALID, f"snapkv needs more than its window of {window} tokens, not {len(text)}")
    session.rewind(first, quiet=True)
    session.eval(text[session.n_tokens : first])
    session.context.begin_replay(session.seq)
    try:
        session.eval(text[first:])
        session.context.compress(ratio, session.seq)
        session.changes += 1
    finally:
        session.context.end_replay(session.seq)
        if session.n_tokens < len(text):  # stopped: the text is as it was
            session.context.abort = False
            session.eval(text[session.n_tokens :])


def _evict_measured(session: Session, ratio: float) -> float | None:
    """Evict by the votes of a replay; returns the divergence where parts of the text are repeated."""
    probes = list(probes_of(session))
    before = [_repeated(session, probe) for probe in probes]
    _evict(session, ratio)
    changes = [_divergence(one, _repeated(session, probe)) for one, probe in zip(before, probes, strict=True)]
    return float(np.mean(changes)) if changes else None


def probes_of(session: Session) -> Iterator[NDArray[np.int32]]:
    """Yield the tokens to evaluate after the text, to compare: a request to repeat it, and one of three parts of it."""
    text, prompt = session.tokens.copy(), _tokens(session.model, LATER)
    room = session.n_ctx - len(text) - len(prompt)
    if len(text) < PROBES * (OVERLAP + PROBE) or room < OVERLAP + PROBE:
        return
    for i in range(PROBES):
        start = (2 * i + 1) * (len(text) - OVERLAP - PROBE) // (2 * PROBES)
        yield np.concatenate([prompt, text[start : start + OVERLAP + PROBE]])


def _repeated(session: Session, probe: NDArray[np.int32]) -> NDArray[np.float32]:
    """Return the logits [PROBE, n_vocab] of the last tokens of a probe, and rewind."""
    n, n_vocab = session.n_tokens, session.context.n_vocab
    logits = np.empty((PROBE, n_vocab), np.float32)
    wanted = np.zeros(len(probe), np.int8)
    wanted[-PROBE:] = 1
    _checkpoint(session)
    try:
        _decode(session, n, probe, wanted, logits)
    finally:
        _rewind(session, n)
    return logits


def _divergence(base: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Return the mean divergence of rows of logits."""
    p, q = (rows - np.logaddexp.reduce(rows, axis=1, keepdims=True) for rows in (base, other))
    return float((np.exp(p) * (p - q)).sum(axis=1).mean())


def _evict(session: Session, ratio: float) -> None:
    """Replay the text, and keep the entries with the largest votes."""
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
    text = session.tokens.copy()
    _checkpoint(session)
    for piece in replays(session, text, most):
        session.context.replay_piece(piece.first, piece.end, session.seq)
        _decode(session, len(text), piece.tokens, np.zeros(len(piece.tokens), np.int8), NO_ROWS)
        _rewind(session, len(text))


def _checkpoint(session: Session) -> None:
    if session.context.keeps_checkpoints and (refusal := session.context.checkpoint(session.seq)):
        raise error(lib.LCTX_FAILED, refusal)


def _decode(
    session: Session, n: int, tokens: NDArray[np.int32], wanted: NDArray[np.int8], logits: NDArray[np.float32]
) -> None:
    """Evaluate tokens after ``n`` others, as many in a step as can be undone; logits has a row for each wanted one."""
    context, done = session.context, 0
    while done < len(tokens):
        end = done + context.step(n + done, len(tokens) - done)
        first, last = (int(wanted[:at].sum()) for at in (done, end))
        part = tokens[done:end]
        positions = np.arange(n + done, n + done + len(part), dtype=np.int32)
        context.decode(part, positions, np.full_like(part, session.seq), wanted[done:end], logits[first:last])
        done = end


def _rewind(session: Session, n: int) -> None:
    if session.context.truncate(n, session.seq):
        session.eval(NOTHING)  # may evaluate the end of the text again after a rewind


def replays(session: Session, text: NDArray[np.int32], most: int) -> Iterator[ReplayPiece]:
    """Yield the pieces of a replay, each of at most ``most`` tokens."""
    first, later = (_tokens(session.model, prompt) for prompt in (FIRST, LATER))
    room = most - max(len(first), len(later) + OVERLAP)
    n_bos = int(text[0] == session.model.info.token_bos)
    if room < LEAST:
        reason = f"compress replays the text after itself in pieces, for which n_ctx {session.n_ctx} has no room"
        raise error(lib.LCTX_NO_SLOT, f"{reason}: {len(text)} tokens are held; open with a larger n_ctx")
    for start in range(n_bos, len(text), min(PIECE, room)):
        prompt = first if start == n_bos else np.concatenate([later, text[max(n_bos, start - OVERLAP) : start]])
        end = min(len(text), start + min(PIECE, room))
        yield ReplayPiece(start, end, np.concatenate([prompt, text[start:end]]))


def _tokens(model: Model, text: bytes) -> NDArray[np.int32]:
    return np.array(model.tokenize(text, add_special=False), np.int32)
