"""The state of a sequence: evaluated tokens, known logits, checkpoints; and the evaluation of a batch of several."""

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pylongctx._lib import error, lib
from pylongctx._log import LOG
from pylongctx.engine.call_lock import CallLock
from pylongctx.engine.context import Context
from pylongctx.engine.documents import Placed, placed_up_to
from pylongctx.engine.model import Model
from pylongctx.errors import PromptTooLong
from pylongctx.methods import Method, parse

SPACING = 2048  # tokens between two regular checkpoints
TAIL = 8  # tokens at the end of a prompt that may differ in the next one: the template's generation prompt
Tokens = NDArray[np.int32]
Rows = NDArray[np.float32]
FIRST_ROWS = 64
NO_ROWS = np.empty((0, 0), np.float32)  # no logits
UNCHECKED_BYTES = 32  # bytes per token of the context below which texts are tokenized without a size check
Progress = Callable[[int, int], None]


class Checkpoints:
    """The checkpoints of one sequence, if its cache cannot be truncated anywhere; else this does nothing.

    Sliding windows and recurrent states can only be rewound to checkpoints, which are taken at the end of a step. The
    next prompt of a conversation shares a prefix with the last one. So checkpoints are taken

    - where the evaluation of a prompt begins: the last answer ends there, and an edited message begins,
    - ``TAIL`` tokens before its end: the generation prompt may change there, and a retry rewinds there,
    - where an earlier prompt differed: other prompts may share the same prefix,
    - every ``SPACING`` tokens,

    or at the last earlier position from which the method can continue.
    """

    def __init__(self, context: Context, seq: int) -> None:
        self.needed = context.keeps_checkpoints
        self._context = context
        self._seq = seq
        self._positions: set[int] = set()

    def request(self, pos: int) -> None:
        """Request a checkpoint at ``pos``."""
        if self.needed:
            self._positions.add(self._context.cut_before(pos))

    def begin(self, pos: int, n: int) -> None:
        """Record that a text of ``n`` tokens follows position ``pos``; a short one gets no checkpoints."""
        if not self.needed:
            return
        tail = self._context.cut_before(max(pos, pos + n - TAIL))
        self._positions = {position for position in self._positions if pos < position < tail}
        if n > TAIL:
            self._positions |= {tail, self._context.cut_before(pos)}
            self.reach(pos, pos)

    def limit_step(self, pos: int, n: int) -> int:
        """Return how many of ``n`` tokens from ``pos`` a step may evaluate: it ends at a checkpoint."""
        if not self.needed:
            return n
        return min(n, *(position - pos for position in (*self._positions, self._next(pos)) if position > pos))

    def reach(self, start: int, pos: int) -> None:
        """Take the checkpoint at ``pos``, the end of the sequence, if one is requested there."""
        if self.needed and pos and (pos in self._positions or pos == self._next(pos - 1)):
            self._positions.discard(pos)
            if refusal := self._context.checkpoint(self._seq):
                LOG.warning("no checkpoint after %d tokens: %s", pos, refusal)

    def _next(self, pos: int) -> int:
        """Return the first regular position after ``pos``."""
        number = pos // SPACING + 1
        position = self._context.cut_before(number * SPACING)
        return position if position > pos else self._context.cut_before((number + 1) * SPACING)


class Part(NamedTuple):
    """Tokens of a sequence that a step evaluates, and the number of last ones whose logits are requested."""

    session: "Session"
    tokens: Tokens
    n_rows: int


def evaluate(parts: list[Part], room: Rows) -> list[Rows]:
    """Evaluate parts of several sequences of one context in one batch, and record them in their sessions.

    The parts have together at most ``Context.n_step`` tokens. Returns the logits of each part, float32 [n_rows,
    n_vocab], with logits_all of all its tokens, in ``room`` if they fit there. Raises Aborted, ContextFull or LctxError
    when nothing was evaluated; the sessions are unchanged.
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


class Watcher(Protocol):
    """Observes the evaluation of a sequence, and limits its steps."""

    def begin(self, pos: int, n: int) -> None:
        """Called before a text of ``n`` tokens is evaluated at position ``pos``."""

    def limit_step(self, pos: int, n: int) -> int:
        """Return how many of ``n`` tokens from ``pos`` the next step may evaluate."""

    def reach(self, start: int, end: int) -> None:
        """Called after the tokens from ``start`` to before ``end`` were evaluated."""


class Session:
    """The tokens of one sequence, the logits after them, and its rewinding.

    Programs may use ``tokens``, ``last_logits``, ``eval``, ``eval_rows``, ``rewind`` and ``placed``. The other members
    are internal: they may change in any version.

    After any interrupt, ``tokens`` are the evaluated tokens; the cache is cut back to them before the next step.

    Attributes
    ----------
    placed : tuple of Placed
        Rows that come from documents, or differ from a full prefill for another reason.

    Examples
    --------
    >>> session = llm.session
    >>> session.rewind(0)
    0
    >>> session.eval(np.array([1, 7, 9], np.int32))
    >>> session.tokens.tolist()
    [1, 7, 9]
    """

    def __init__(self, model: Model, context: Context, logits_all: bool, verbose: bool, seq: int = 0) -> None:
        self.model = model
        self.context = context
        self.seq = seq
        self.logits_all = logits_all
        self.verbose = verbose
        self.progress: Progress | None = None  # called as progress(n_done, n_total) after each step of an evaluation
        self.lock = CallLock()  # held during evaluation and sampling
        self.changes = 0  # counts evaluations, so that a suspended generator can detect other calls
        self.shared = False  # other code may have changed the cache: it is filled again before the next step
        self.n_evaluated = 0  # counts evaluated tokens, including those evaluated again
        self.owner: str | None = None  # the tokens are not reused for other owners
        self.checkpoints = Checkpoints(context, seq)
        self.watchers: list[Watcher] = [self.checkpoints]  # and the writer of the KV store
        self.placed: tuple[Placed, ...] = ()
        self.evicts = False  # tokens may be evicted from a text that does not fit
        self.cache_reuse = 0  # default of ``Job.cache_reuse``
        self.n_tokens = 0  # a smaller number removes the tokens after it
        self.input_ids = np.zeros(context.n_ctx, np.int32)
        self._rows = np.empty((FIRST_ROWS if logits_all else 1, model.info.n_vocab), np.float32)
        self._known = -1  # number of tokens after which the last row of logits was computed
        self._tiles = np.zeros(context.n_ctx // self.tile + 1, bool)  # tiles whose tokens were evaluated together

    @property
    def method(self) -> Method | None:
        """The method with every automatic choice filled in; None with llama.cpp's own KV cache."""
        return parse(self.context.method) if self.context.method else None

    @property
    def n_ctx(self) -> int:
        """The context window in tokens."""
        return self.context.n_ctx

    @property
    def tokens(self) -> Tokens:
        """int32 [n_tokens], the evaluated tokens."""
        return self.input_ids[: self.n_tokens]

    @property
    def scores(self) -> Rows:
        """float32 [n_tokens, n_vocab] with logits_all, else [1, n_vocab], or [0, n_vocab] without known logits."""
        if self.logits_all:
            return self._rows[: self.n_tokens]
        return self._rows if self.has_logits else self._rows[:0]

    @property
    def n_past(self) -> int:
        """The number of positions in the cache; after an interrupt it may differ from ``n_tokens``."""
        return self.context.n_past(self.seq)

    @property
    def has_logits(self) -> bool:
        """True if the logits after the last evaluated token are known."""
        return 0 < self.n_tokens == self._known

    @property
    def last_logits(self) -> Rows:
        """float32 [n_vocab], the logits after the last evaluated token."""
        if not self.has_logits:
            raise RuntimeError("no logits: evaluate tokens first")
        row: Rows = self._rows[self.n_tokens - 1 if self.logits_all else 0]
        return row

    def row(self, index: int | None) -> Rows:
        """float32 [n_vocab], the logits after token ``index``; None is the last one."""
        if index is None or index == self.n_tokens - 1:
            return self.last_logits
        if self.logits_all and 0 <= index < self.n_tokens:
            row: Rows = self._rows[index]
            return row
        raise ValueError(f"no logits for idx={index}: earlier tokens need logits_all=True")

    @property
    def seam(self) -> int | None:
        """First position whose row was computed with tokens evicted since; None: there is none."""
        return next((place.first for place in self.placed if place.document is None), None)

    # ---- rewinding ----

    def clear(self) -> None:
        """Remove all tokens."""
        self.n_tokens = 0
        self.placed = ()
        self._known = -1
        self.changes += 1
        self.shared = False
        self.context.clear(self.seq)

    def rewind(self, n: int, quiet: bool = False) -> int:
        """Keep only the first ``n`` tokens, or fewer if the cache cannot be cut there; returns how many are left."""
        if n == 0 or self.shared:
            self.clear()
            return 0
        kept, refusal = self._cut(self._whole(n))
        if refusal and not quiet:
            self.log(f"the KV cache cannot be rewound to {n} tokens ({refusal}): evaluating again from {kept}")
        if kept == 0:
            self.clear()
        self.n_tokens = kept
        if self.placed:
            self.placed = placed_up_to(self.placed, kept)
        return kept

    def _whole(self, n: int) -> int:
        """Return ``n``, or the start of the tile that it divides: what a tile selected depends on all its tokens."""
        first = n // self.tile * self.tile
        return first if self._tiles[n // self.tile] and self._select_from < first + self.tile else n

    def _evaluated(self, start: int, end: int) -> None:
        """Record the tiles of tokens that were evaluated together."""
        first, last = -(-start // self.tile), end // self.tile
        self._tiles[start // self.tile : -(-end // self.tile)] = False
        self._tiles[first:last] = True

    def _cut(self, n: int) -> tuple[int, str]:
        """Cut the cache at ``n`` or the last possible position before; returns what is left, and why it is less."""
        n_past = self.n_past
        if n >= n_past:
            return n_past, "" if n == n_past else "it holds fewer"
        refusal = self.context.truncate(n, self.seq)
        if not refusal:
            return n, ""
        kept = self.context.restorable(n, self.seq)
        return (0 if kept and self.context.truncate(kept, self.seq) else kept), refusal

    def reachable(self, n: int) -> int:
        """Return how many of the first ``n`` tokens remain evaluated when the others are removed."""
        n = self._whole(n)
        return n if n == self.n_past else self.context.restorable(n, self.seq)

    def mend(self, quiet: bool = False) -> Tokens:
        """Cut the cache to ``n_tokens``; returns the last tokens if they were lost and must be evaluated again."""
        if not self.shared and self.n_past == self.n_tokens:
            return self.input_ids[:0]
        n = self.n_tokens
        return self.input_ids[self.rewind(n, quiet) : n].copy()

    def drop(self, first: int, end: int) -> str:
        """Evict the tokens from ``first`` to before ``end``, shifting later ones; returns why it was refused, or "".

        Later rows were computed with the evicted tokens, and are seen at their new distances. If the tokens allow it,
        the cut is placed at the seam of an earlier one, so that two spans are enough for repeated evictions.
        """
        self.rewind(self.n_tokens)
        tokens, n_left = self.tokens, end - first
        if self.seam is not None and self.seam < first:
            ahead = first - self.seam
            if np.array_equal(tokens[self.seam : first], tokens[end - ahead : end]):
                first, end = self.seam, end - ahead
        if refusal := self.context.drop(first, end, self.seq):
            return refusal
        n, self.n_tokens = self.n_tokens - n_left, first  # an interrupt here leaves the shorter, consistent state
        self.input_ids[first:n] = tokens[end:].copy()
        if self.logits_all:
            self._rows[first:n] = self._rows[end : n + n_left].copy()
        self.placed = (*placed_up_to(self.placed, first), Placed(first, n))
        self._evaluated(0, n)
        self.changes += 1
        self.n_tokens = n
        return ""

    # ---- rows from elsewhere ----

    def append(self, tokens: Tokens, rows: NDArray[np.uint8]) -> None:
        """Append tokens that were evaluated elsewhere; ``rows``: their rows, see ``Context.slice``."""
        self.context.append_slice(rows, self.seq)
        self._append(tokens)

    def place(self, placed: Placed, tokens: Tokens) -> None:
        """Append rows of a document with their ``tokens``, int32 [placed.end - placed.first]."""
        assert placed.document is not None and placed.document.rows is not None
        self.context.insert_slice(placed.document.rows, placed.skip, len(tokens), self.seq)
        self._append(tokens)
        self.placed = (*self.placed, placed)

    def _append(self, tokens: Tokens) -> None:
        end = self.n_tokens + len(tokens)
        if self.logits_all:
            self._room(len(tokens))[:] = np.nan
        self._known = -1
        self.changes += 1
        self.input_ids[self.n_tokens : end] = tokens
        self._evaluated(self.n_tokens, end)
        self.n_tokens = end

    def settle(self, n: int, row: Rows) -> None:
        """Set the state after ``n`` evaluated tokens with the logits ``row``; the cache is synchronized later."""
        self.n_tokens = n
        self._rows[n - 1 if self.logits_all else 0] = row
        self._known = n

    def save(self) -> tuple[Tokens, Rows, NDArray[np.uint8]]:
        """Return the tokens, the last logits (empty if unknown) and the cache as bytes."""
        self.eval(self.input_ids[:0])  # synchronizes cache and tokens after an interrupt or a smaller n_tokens
        row = self.last_logits.copy() if self.has_logits else np.empty(0, np.float32)
        return self.tokens.copy(), row, self.context.state(self.seq)

    def load(self, tokens: Tokens, row: Rows, rows: NDArray[np.uint8]) -> None:
        """Restore a result of ``save``; with logits_all the earlier logits are NaN."""
        self.clear()
        ids = self.model.check_tokens(tokens, allow_empty=True)
        self.check_room(len(ids))
        if len(row) not in (0, self._rows.shape[1]):
            raise error(lib.LCTX_INVALID, f"the saved state holds {len(row)} logits, not {self._rows.shape[1]}")
        self.context.set_state(rows, self.seq)
        if (n_past := self.n_past) != len(ids):
            self.clear()
            raise error(lib.LCTX_INVALID, f"the saved state holds {len(ids)} tokens, but the cache of {n_past}")
        self._append(ids)
        if (exact := self.context.n_exact(self.seq)) < len(ids):
            self.placed = (Placed(exact, len(ids)),)
        if len(row):
            self.settle(len(ids), row)

    # ---- evaluation ----

    def eval(self, tokens: Tokens) -> None:
        """Evaluate int32 [n] after the current tokens; logits are computed for the last one, or all with logits_all."""
        for _ in self._steps(tokens, every=False):
            pass

    def eval_rows(self, tokens: Tokens) -> Iterator[Rows]:
        """Evaluate int32 [n] and yield the logits, float32 [k, n_vocab] per step, valid until the next step."""
        first = self.n_tokens
        for rows in self._steps(tokens, every=True):
            known = max(first - (self.n_tokens - len(rows)), 0)  # tokens of the step that are evaluated again
            if known < len(rows):
                yield rows[known:]

    def _steps(self, tokens: Tokens, every: bool) -> Iterator[Rows]:
        """Evaluate int32 [n] in steps of at most one ubatch, so that Ctrl-C and ``abort`` return soon."""
        self.check_room(self.n_tokens + len(tokens))
        tokens = np.concatenate([self.mend(), tokens])
        kept, done = self.n_tokens, 0
        n_room = min(len(tokens), self.context.n_step) if every or self.logits_all else 1
        room = np.empty((n_room, self._rows.shape[1]), np.float32)
        self.begin(len(tokens))
        while done < len(tokens):
            with self.lock:
                part = tokens[done : done + self.next_step(len(tokens) - done)]
                done += len(part)
                (rows,) = evaluate([Part(self, part, len(part) if every else int(done == len(tokens)))], room)
            yield rows
            if self.progress is not None and len(tokens) > 1:
                with self.lock.calling():
                    self.progress(self.n_tokens, kept + len(tokens))

    def begin(self, n: int) -> None:
        """Notify the watchers that a text of ``n`` tokens follows."""
        for watcher in self.watchers:
            watcher.begin(self.n_tokens, n)

    def next_step(self, n: int) -> int:
        """Return how many of the next ``n`` tokens one step may evaluate; it also ends where heads evict."""
        n = self.context.step(self.n_tokens, min(n, self.context.n_step))
        for watcher in self.watchers:
            n = watcher.limit_step(self.n_tokens, n)
        return n

    @cached_property
    def tile(self) -> int:
        """The number of tokens of a prompt for which the method selects together."""
        return self._part("tile", 1)

    @cached_property
    def spans(self) -> int:
        """The maximum number of spans of the sequence, see ``Full``."""
        return self._part("spans", 1)

    @cached_property
    def _select_from(self) -> int:
        """The first position whose query selects; tokens before it read everything, in tiles too."""
        return self._part("select_from", 0)

    def _part(self, option: str, default: int) -> int:
        """Return an option of a part of the method."""
        parts = self.method.parts if self.method else ()
        return max((getattr(part, option, None) or default for part in parts), default=default)

    def whole_tiles(self, n: int) -> int:
        """Return how many of the next ``n`` tokens of a longer prompt to evaluate: up to the end of a tile.

        So a prompt selects alike in pieces of any size.
        """
        end = (self.n_tokens + n) // self.tile * self.tile
        return end - self.n_tokens if end > self.n_tokens else n

    def advance(self, tokens: Tokens, rows: Rows) -> None:
        """Record evaluated tokens; ``rows``: float32 [k, n_vocab], the logits after the last k of them."""
        start, end = self.n_tokens, self.n_tokens + len(tokens)
        if self.logits_all:
            room, n_known = self._room(len(tokens)), len(tokens) - len(rows)
            room[:n_known] = np.nan
            room[n_known:] = rows.reshape(len(rows), room.shape[1])
        elif len(rows):
            self._rows[0] = rows[-1]
        self.changes += 1
        self.input_ids[start:end] = tokens
        self._evaluated(start, end)
        self._known = end if len(rows) else -1
        self.n_tokens = end  # set last: an interrupt before leaves the shorter, consistent state
        for watcher in self.watchers:
            watcher.reach(start, end)

    def _room(self, n: int) -> Rows:
        """Return the rows for the logits of the next ``n`` tokens with logits_all."""
        end = self.n_tokens + n
        if end > len(self._rows):
            grown = np.empty((min(max(end, 2 * len(self._rows)), self.context.n_ctx), self._rows.shape[1]), np.float32)
            grown[: self.n_tokens] = self._rows[: self.n_tokens]
            self._rows = grown
        return self._rows[self.n_tokens : end]

    # ---- limits ----

    def check_room(self, n: int) -> None:
        """Raise PromptTooLong when the context cannot hold ``n`` tokens."""
        if n > self.n_ctx:
            raise self.too_long(n)

    def check_size(self, n_bytes: int) -> None:
        """Raise PromptTooLong before tokenization if a text is too long for any tokenization."""
        if n_bytes > UNCHECKED_BYTES * self.n_ctx and n_bytes > self.model.longest_piece * self.n_ctx:
            raise self.too_long(-(-n_bytes // self.model.longest_piece), "at least ")

    def too_long(self, n: int, about: str = "") -> PromptTooLong:
        """Return the exception for ``n`` tokens that do not fit: llama_cpp's text and the way out."""
        trained = self.model.info.n_ctx_train
        message = (
            f"Requested tokens ({about}{n}) exceed context window of {self.n_ctx}; the model was trained with "
            f"n_ctx_train={trained}. Pass a larger n_ctx" + (", with method='selfextend'" if n > trained else "")
        )
        return PromptTooLong(message, lib.LCTX_NO_SLOT, n, self.n_ctx)

    def log(self, message: str) -> None:
        """Write to the log if verbose."""
        if self.verbose:
            LOG.info(message)
