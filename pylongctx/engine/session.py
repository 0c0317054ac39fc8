"""The state of one sequence: which tokens are evaluated, which logits are known."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pylongctx._lib import error, lib
from pylongctx._log import LOG
from pylongctx.engine.checkpoints import Checkpoints
from pylongctx.engine.context import Context
from pylongctx.engine.documents import Placed, common, placed_up_to
from pylongctx.engine.model import Model
from pylongctx.engine.prefix import find_gap, longest_prefix
from pylongctx.errors import PromptTooLong
from pylongctx.methods import Method, parse

if TYPE_CHECKING:
    from pylongctx.store.keeper import Keeper

FIRST_ROWS = 64
SMALL = 32  # bytes per token of the context that are tokenized without a look at the vocabulary

Progress = Callable[[int, int], None]


class Session:
    """Evaluate tokens of one sequence step by step and keep tokens, logits and cache consistent.

    One step is at most one ubatch, so that Ctrl-C and ``abort`` return soon, and ends where heads evict. Whatever
    interrupts an evaluation, ``n_tokens`` and ``input_ids`` say what was evaluated; the cache is cut back to that
    before the next step. Setting ``n_tokens`` to a smaller number forgets the tokens after it.

    Attributes
    ----------
    lock : threading.RLock
        Held by whoever evaluates or samples, so that calls from several threads wait for each other.
    changes : int
        Counts evaluations; a generator that was waiting sees whether another call came between.
    shared : bool
        Whether somebody else may have changed the cache; then it is filled again before the next step.
    n_evaluated : int
        Counts tokens that were evaluated, those evaluated again included.
    progress : callable or None
        Called as ``progress(n_done, n_total)`` after each step of ``eval`` and ``eval_rows``.
    checkpoints : Checkpoints
        Where the cache can come back to, beside its end.
    stored : Keeper or None
        The store that what is evaluated goes to, and that a prompt comes from.
    placed : tuple of Placed
        Rows that come from documents, or are not what reading the tokens gives for another reason.
    evicts : bool
        Whether tokens may leave a text that does not fit.

    Examples
    --------
    >>> session = llm.session
    >>> session.rewind(0)
    0
    >>> session.eval(session.model.check_tokens([1, 7, 9]))
    >>> session.tokens.tolist()
    [1, 7, 9]
    >>> session.reuse(session.model.check_tokens([1, 7, 8])).tolist()
    [8]
    """

    def __init__(self, model: Model, context: Context, logits_all: bool, verbose: bool, seq: int = 0) -> None:
        self.model = model
        self.context = context
        self.seq = seq
        self.logits_all = logits_all
        self.verbose = verbose
        self.progress: Progress | None = None
        self.lock = threading.RLock()
        self.changes = 0
        self.shared = False
        self.n_evaluated = 0
        self.checkpoints = Checkpoints(context, seq)
        self.stored: Keeper | None = None
        self.placed: tuple[Placed, ...] = ()
        self.evicts = False
        self.n_tokens = 0
        self.input_ids = np.zeros(context.n_ctx, np.int32)
        self._rows = np.empty((FIRST_ROWS if logits_all else 1, model.info.n_vocab), np.float32)
        self._known = -1  # the last row of logits belongs to the state after this many tokens

    @property
    def method(self) -> Method | None:
        """The method with every automatic choice filled in; None with llama.cpp's own KV cache."""
        return parse(self.context.method) if self.context.method else None

    @property
    def n_ctx(self) -> int:
        """The context window in tokens."""
        return self.context.n_ctx

    @property
    def tokens(self) -> NDArray[np.int32]:
        """int32 [n_tokens], the evaluated tokens."""
        return self.input_ids[: self.n_tokens]

    @property
    def scores(self) -> NDArray[np.float32]:
        """float32 [n_tokens, n_vocab] with logits_all, else [1, n_vocab], or [0, n_vocab] when nothing is known."""
        if self.logits_all:
            return self._rows[: self.n_tokens]
        return self._rows if self.has_logits else self._rows[:0]

    @property
    def n_past(self) -> int:
        """The number of positions in the cache; after an interrupt it may differ from ``n_tokens``."""
        return self.context.n_past(self.seq)

    @property
    def has_logits(self) -> bool:
        """Whether the logits after the last evaluated token are known."""
        return 0 < self.n_tokens == self._known

    @property
    def last_logits(self) -> NDArray[np.float32]:
        """float32 [n_vocab], the logits after the last evaluated token."""
        if not self.has_logits:
            raise RuntimeError("no logits: evaluate tokens first")
        row: NDArray[np.float32] = self._rows[self.n_tokens - 1 if self.logits_all else 0]
        return row

    def row(self, index: int | None) -> NDArray[np.float32]:
        """float32 [n_vocab], the logits after token ``index``; None is the last one."""
        if index is None or index == self.n_tokens - 1:
            return self.last_logits
        if self.logits_all and 0 <= index < self.n_tokens:
            row: NDArray[np.float32] = self._rows[index]
            return row
        raise ValueError(f"no logits for idx={index}: earlier tokens need logits_all=True")

    def check_changes(self, changes: int) -> None:
        """Raise when something was evaluated since ``self.changes`` was ``changes``."""
        if self.changes != changes:
            raise RuntimeError("another call used this Llama while this generation waited; use one object for each")

    def clear(self) -> None:
        """Forget everything."""
        self.n_tokens = 0
        self.placed = ()
        self._known = -1
        self.changes += 1
        self.shared = False
        self.context.clear(self.seq)

    def rewind(self, n: int) -> int:
        """Forget all but the first ``n`` tokens, more when the cache cannot be cut there; returns how many are left."""
        if n == 0 or self.shared:
            self.clear()
            return 0
        kept, refusal = self._cut(n)
        if refusal:
            self.say(f"the cache cannot go back to {n} tokens ({refusal}): evaluating again from {kept}")
        if kept == 0:
            self.clear()
        self.n_tokens = kept
        if self.placed:
            self.placed = placed_up_to(self.placed, kept)
        return kept

    def _cut(self, n: int) -> tuple[int, str]:
        """Cut the cache at ``n`` or at the last place before; returns what is left, and why it is less than ``n``."""
        n_past = self.n_past
        if n >= n_past:
            return n_past, "" if n == n_past else "it holds fewer"
        refusal = self.context.truncate(n, self.seq)
        if not refusal:
            return n, ""
        kept = self.context.restorable(n, self.seq)
        return (0 if kept and self.context.truncate(kept, self.seq) else kept), refusal

    def reachable(self, n: int) -> int:
        """Return how many of the first ``n`` tokens need not be evaluated again when the others are forgotten."""
        return n if n == self.n_past else self.context.restorable(n, self.seq)

    @property
    def seam(self) -> int | None:
        """From where on the rows have read tokens that have left since; None: nowhere."""
        return next((place.first for place in self.placed if place.document is None), None)

    def holds(self, tokens: NDArray[np.int32], placed: Sequence[Placed] = (), lossy: bool = False) -> int:
        """Return how many tokens of a prompt it begins with, read as the prompt wants them; ``placed``: see ``Job``.

        With ``lossy`` it does not matter what they have read beside each other.
        """
        return longest_prefix(self.tokens, tokens) if lossy else common(self.tokens, self.placed, tokens, placed)

    def reuse(self, tokens: NDArray[np.int32], placed: Sequence[Placed] = (), lossy: bool = False) -> NDArray[np.int32]:
        """Keep the longest common prefix with the evaluated tokens; returns the tokens still to be evaluated.

        What the store has of them, and the session has not, comes from there. With ``lossy``, what the text lacks of
        the evaluated tokens leaves, and rows that have read it stay.
        """
        if lossy and not self.shared and (gap := find_gap(self.tokens, tokens)) and (refusal := self.drop(*gap)):
            self.say(f"what does not fit is evaluated anew, it cannot leave: {refusal}")
        prefix = self.holds(tokens, placed, lossy)
        own = tokens[: placed[0].first] if placed else tokens
        sound = self.seam is None or prefix <= self.seam
        if self.stored is not None and sound and self.stored.restore(own, self.reachable(prefix)):
            prefix = self.holds(tokens, placed, lossy)
        if prefix == len(tokens) and not (self.has_logits and prefix == self.n_tokens):
            prefix -= 1  # one token must be evaluated to get its logits
        if prefix < self.n_tokens or self.shared or self.n_past != self.n_tokens:
            self.checkpoints.wish(prefix)
            prefix = self.rewind(prefix)
        return tokens[prefix:]

    def drop(self, first: int, end: int) -> str:
        """Forget the tokens from ``first`` to before ``end``, those behind stay as they are; returns why not, or "".

        The rows behind have read what leaves, and are seen at the distances that the tokens have now. Where the tokens
        allow it they leave at the seam, so that a context with two spans does it again and again.
        """
        self.rewind(self.n_tokens)
        tokens, n_left = self.tokens, end - first
        if self.seam is not None and self.seam < first:
            ahead = first - self.seam
            if np.array_equal(tokens[self.seam : first], tokens[end - ahead : end]):
                first, end = self.seam, end - ahead
        if refusal := self.context.drop(first, end, self.seq):
            return refusal
        n, self.n_tokens = self.n_tokens - n_left, first  # an interrupt in between leaves the shorter, consistent state
        self.input_ids[first:n] = tokens[end:].copy()
        if self.logits_all:
            self._rows[first:n] = self._rows[end : n + n_left].copy()
        self.placed = (*placed_up_to(self.placed, first), Placed(first, n))
        self.changes += 1
        self.n_tokens = n
        return ""

    def eval(self, tokens: NDArray[np.int32]) -> None:
        """Evaluate int32 [n] after the current tokens; logits are computed for the last one, or all with logits_all."""
        self._eval(tokens, True, whole=True)

    def extend(self, tokens: NDArray[np.int32], wanted: bool) -> None:
        """Evaluate a part of a longer text, without telling ``progress``; ``wanted``: with the logits after it."""
        self._eval(tokens, wanted, whole=False)

    def _eval(self, tokens: NDArray[np.int32], wanted: bool, whole: bool) -> None:
        for part, is_last in self._steps(tokens, whole):
            with_row = self.logits_all or (wanted and is_last)
            self._step(part, self._row_buffer(len(part)) if with_row else None, self.logits_all)
            if with_row:
                self._known = self.n_tokens
                self._finish()

    def eval_rows(self, tokens: NDArray[np.int32], quiet: bool = False) -> Iterator[NDArray[np.float32]]:
        """Evaluate int32 [n] and yield float32 [k, n_vocab] per step, valid until the next step; see ``progress``."""
        scratch = np.empty((min(self._step_size, self.n_tokens + len(tokens)), self.model.info.n_vocab), np.float32)
        first = self.n_tokens
        for part, is_last in self._steps(tokens, not quiet):
            known = max(first - self.n_tokens, 0)  # tokens of the part that are evaluated again
            rows = self._row_buffer(len(part)) if self.logits_all else scratch[: len(part)]
            self._step(part, rows, True)
            if is_last:
                self._keep_last(rows[-1])
            if known < len(part):
                yield rows[known:]

    def begin(self, pos: int, n: int) -> None:
        """Take note that a text of ``n`` tokens follows position ``pos``."""
        self.checkpoints.begin(pos, n)
        if self.stored is not None:
            self.stored.begin(pos, n)

    def append(self, tokens: NDArray[np.int32], part: NDArray[np.uint8]) -> None:
        """Take over tokens that were evaluated elsewhere; ``part``: their rows, see ``Context.part``."""
        self.context.append_part(part, self.seq)
        self._append(tokens)

    def _append(self, tokens: NDArray[np.int32]) -> None:
        end = self.n_tokens + len(tokens)
        if self.logits_all:
            self._row_buffer(len(tokens))[:] = np.nan
        self._known = -1
        self.changes += 1
        self.input_ids[self.n_tokens : end] = tokens
        self.n_tokens = end

    def place(self, placed: Placed, tokens: NDArray[np.int32]) -> None:
        """Take over the rows of a document; ``tokens``: int32 [placed.end - placed.first], which they stand for."""
        assert placed.document is not None and placed.document.rows is not None
        self.context.place_part(placed.document.rows, placed.skip, len(tokens), self.seq)
        self._append(tokens)
        self.placed = (*self.placed, placed)

    def advance(self, part: NDArray[np.int32], row: NDArray[np.float32] | None) -> None:
        """Take note that tokens were evaluated in a batch of several sequences; ``row``: the logits after the last."""
        end = self.n_tokens + len(part)
        self._known = -1
        self.changes += 1
        self.input_ids[self.n_tokens : end] = part
        self.n_tokens = end
        if row is not None:
            self._keep_last(row)
        self.checkpoints.reach(end)
        if self.stored is not None:
            self.stored.reach(end - len(part), end)
            self._finish()

    def _finish(self) -> None:
        if self.stored is not None and self.has_logits:
            self.stored.finish()

    def settle(self, n: int, row: NDArray[np.float32]) -> None:
        """Let the state be that after ``n`` evaluated tokens, ``row`` being the logits; the cache follows later."""
        self.n_tokens = n
        self._keep_last(row)

    def save(self) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.uint8]]:
        """Return tokens, last logits (empty when not known) and the bytes of the cache."""
        self.eval(np.empty(0, np.int32))  # makes cache and tokens agree after an interrupt or a smaller n_tokens
        return self.snapshot()

    def snapshot(self) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.uint8]]:
        """Return the same of a sequence whose cache and tokens agree."""
        row = self.last_logits.copy() if self.has_logits else np.empty(0, np.float32)
        return self.tokens.copy(), row, self.context.state(self.seq)

    def load(self, tokens: NDArray[np.int32], row: NDArray[np.float32], rows: NDArray[np.uint8]) -> None:
        """Replace everything by what ``save`` returned; with logits_all the earlier logits are NaN."""
        self.clear()
        ids = self.model.check_tokens(tokens, allow_empty=True)
        self.check_room(len(ids))
        if len(row) not in (0, self._rows.shape[1]):
            raise error(lib.LCTX_INVALID, f"the saved state holds {len(row)} logits, not {self._rows.shape[1]}")
        self.context.set_state(rows, self.seq)
        if (n_past := self.n_past) != len(ids):
            self.clear()
            raise error(lib.LCTX_INVALID, f"the saved state holds {len(ids)} tokens, but the cache of {n_past}")
        if self.logits_all:
            self._row_buffer(len(ids))[:] = np.nan
        self.input_ids[: len(ids)] = ids
        self.n_tokens = len(ids)
        if (exact := self.context.n_exact(self.seq)) < len(ids):
            self.placed = (Placed(exact, len(ids)),)
        if len(row):
            self._keep_last(row)

    def _keep_last(self, row: NDArray[np.float32]) -> None:
        self._rows[self.n_tokens - 1 if self.logits_all else 0] = row
        self._known = self.n_tokens

    @property
    def _step_size(self) -> int:
        return min(self.context.n_batch, self.context.n_ubatch)

    def next_step(self, n: int) -> int:
        """Return how many of the next ``n`` tokens one step may take."""
        n = self.checkpoints.cut(self.n_tokens, self.context.step(self.n_tokens, n))
        return n if self.stored is None else self.stored.cut(self.n_tokens, n)

    def _steps(self, tokens: NDArray[np.int32], whole: bool) -> Iterator[tuple[NDArray[np.int32], bool]]:
        """Yield (int32 [k], whether it is the last) for parts of at most one ubatch; ``whole``: of a text by itself."""
        self.check_room(self.n_tokens + len(tokens))
        earlier = self.tokens  # a view: when the cache was lost these tokens are evaluated again
        kept = self.rewind(self.n_tokens)
        tokens = np.concatenate([earlier[kept:], tokens])
        if whole:
            self.begin(kept, len(tokens))
        progress, done = self.progress if whole else None, 0
        while done < len(tokens):
            part = tokens[done : done + self.next_step(len(tokens) - done)]
            done += len(part)
            yield part, done == len(tokens)
            if progress is not None and len(tokens) > 1:
                progress(self.n_tokens, kept + len(tokens))

    def _step(self, part: NDArray[np.int32], out: NDArray[np.float32] | None, every: bool) -> None:
        with self.lock:
            start, end = self.n_tokens, self.n_tokens + len(part)
            self._known = -1
            self.changes += 1
            self.context.decode(part, start, out, every)
            self.n_evaluated += len(part)
            # n_tokens last: an interrupt in between leaves the shorter, consistent state.
            self.input_ids[start:end] = part
            self.n_tokens = end
            self.checkpoints.reach(end)
            if self.stored is not None:
                self.stored.reach(start, end)

    def _row_buffer(self, n: int) -> NDArray[np.float32]:
        if not self.logits_all:
            return self._rows
        end = self.n_tokens + n
        if end > len(self._rows):
            grown = np.empty((min(max(end, 2 * len(self._rows)), self.context.n_ctx), self._rows.shape[1]), np.float32)
            grown[: self.n_tokens] = self._rows[: self.n_tokens]
            self._rows = grown
        return self._rows[self.n_tokens : end]

    def check_room(self, n: int) -> None:
        """Raise PromptTooLong when the context cannot hold ``n`` tokens."""
        if n > self.n_ctx:
            raise self.too_long(n)

    def check_size(self, n_bytes: int) -> None:
        """Raise PromptTooLong for a text that is too long whatever its tokens are, before it is tokenized."""
        if n_bytes > SMALL * self.n_ctx and n_bytes > self.model.longest_piece * self.n_ctx:
            raise self.too_long(-(-n_bytes // self.model.longest_piece), "at least ")

    def too_long(self, n: int, about: str = "") -> PromptTooLong:
        """Return the exception of ``n`` tokens that do not fit: llama_cpp's text, and what can be done."""
        trained = self.model.info.n_ctx_train
        message = (
            f"Requested tokens ({about}{n}) exceed context window of {self.n_ctx}; the model was trained with "
            f"n_ctx_train={trained}. Pass a larger n_ctx" + (", with method='selfextend'" if n > trained else "")
        )
        return PromptTooLong(message, lib.LCTX_NO_SLOT, n, self.n_ctx)

    def say(self, message: str) -> None:
        """Tell the user, when verbose."""
        if self.verbose:
            LOG.info(message)
