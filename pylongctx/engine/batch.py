"""One batch of tokens of several sequences."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pylongctx.engine.session import Session

Tokens = NDArray[np.int32]
Rows = NDArray[np.float32]


class Part(NamedTuple):
    """Tokens of a sequence that a step evaluates, and the number of last ones whose logits are requested."""

    session: "Session"
    tokens: Tokens
    n_rows: int


def evaluate(parts: list[Part], room: Rows) -> list[Rows]:
    """Evaluate parts of several sequences of one context in one batch, and record them in their sessions.

    Parameters
    ----------
    parts : list of Part
        Together at most ``Context.n_step`` tokens.
    room : numpy.ndarray
        float32 [n, n_vocab], buffer of the logits; a new array is used for more than n rows.

    Returns
    -------
    list of numpy.ndarray
        float32 [n_rows, n_vocab] for each part; with logits_all for all of its tokens.

    Raises
    ------
    Aborted, ContextFull, LctxError
        When nothing was evaluated; the sessions are unchanged.
    """
    context = parts[0].session.context
    positions: list[int] = []
    seqs: list[int] = []
    wanted: list[bool] = []
    n_all: list[int] = []
    for session, tokens, n_rows in parts:
        start, n = session.n_tokens, len(tokens)
        n_all.append(n if session.logits_all else n_rows)
        wanted += [False] * (n - n_all[-1]) + [True] * n_all[-1]
        positions += range(start, start + n)
        seqs += [session.seq] * n
    n_rows = sum(n_all)
    logits = room[:n_rows] if n_rows <= len(room) else np.empty((n_rows, room.shape[1]), np.float32)
    tokens = parts[0].tokens if len(parts) == 1 else np.concatenate([part.tokens for part in parts])
    context.decode(tokens, np.array(positions, np.int32), np.array(seqs, np.int32), np.array(wanted, np.int8), logits)
    found: list[Rows] = []
    for part, n in zip(parts, n_all, strict=True):
        found.append(logits[:n])
        logits = logits[n:]
        part.session.n_evaluated += len(part.tokens)
        part.session.advance(part.tokens, found[-1])
    return found
