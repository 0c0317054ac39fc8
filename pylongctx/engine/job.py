"""A prompt and its continuation on the way through the engine: what is asked, what comes out."""

import queue
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pylongctx.engine.documents import Document, Placed
from pylongctx.engine.drafting import Drafting
from pylongctx.engine.fetch import Fetch, Now
from pylongctx.engine.model import Model
from pylongctx.engine.overflow import Cut, Cuts
from pylongctx.engine.reuse import Load, Piece, Source
from pylongctx.sampling import Processors, Sampler, StoppingCriteria, process

AHEAD = 4  # tokens that the engine makes before the reader has taken the first of them

Row = NDArray[np.float32]
Drawn = Generator[tuple[int, Row | None], Sequence[int] | None, None]


class Cancelled(Exception):  # noqa: N818 - reads as what happened
    """Nobody waits for the answer any more."""


@dataclass(eq=False)
class Job:
    """A prompt and its continuation.

    Attributes
    ----------
    tokens : numpy.ndarray
        int32 [n], the prompt.
    sampler : Sampler
        Chooses the tokens; used by the engine's thread only.
    limit : int or None
        Most tokens to generate; an end token ends the job too. None: neither does, the reader stops.
    processors, criteria : callable or None
        Change the logits before a token is chosen; end the job, as in llama_cpp.
    with_rows : bool
        Every token comes with the logits that it was chosen from.
    after_samplers : bool
        These are what the samplers made of them: log-probabilities, -inf for tokens that were left out.
    every_row : bool
        The logits after every token of the prompt come too, see ``rows``.
    follows : bool
        The tokens follow those of the sequence; else they are the whole text.
    draft : Drafting or None
        Guesses tokens, which are evaluated together with the one before them.
    traced : str or None
        Record which chunks are read for the tokens that are generated, under the completion's id.
    progress : callable or None
        Called by the engine's thread before the first step of the prompt, and after each.
    owner : str or None
        Who asks: what is evaluated for one is not used for another.
    slot : int or None
        The sequence that it must run on; None: any.
    reuses : bool
        Whether tokens that are evaluated already may be used.
    placed : tuple of Placed
        What of the prompt comes from documents, ascending. They are read first.
    reads : Document or None
        The prompt is this document's, whose rows are kept.
    cuts : Cuts or None
        What leaves when the context is full before the answer ends; None: nothing, and the limit fits.
    stop_tokens : frozenset of int
        Tokens that end the answer, beside the model's own.
    dropped_tokens, dropped_turns : int
        What was left out of the prompt, and has left since: tokens, and whole turns of a conversation.
    """

    tokens: NDArray[np.int32]
    sampler: Sampler
    limit: int | None = 0
    processors: Processors = None
    criteria: StoppingCriteria | None = None
    with_rows: bool = False
    after_samplers: bool = False
    every_row: bool = False
    follows: bool = False
    draft: Drafting | None = None
    traced: str | None = None
    progress: Callable[["Job"], None] | None = None
    owner: str | None = None
    slot: int | None = None
    reuses: bool = True
    placed: tuple[Placed, ...] = ()
    reads: Document | None = None
    cuts: Cuts | None = None
    stop_tokens: frozenset[int] = frozenset()
    dropped_tokens: int = 0
    dropped_turns: int = 0

    submitted: bool = False
    together: bool = False  # it runs beside others of the same reader
    forerunner: "Job | None" = None  # reads a prompt that begins as this one, which waits for that
    considered: bool = False  # whether there is one was found out
    cancelled: bool = False
    satisfied: bool = False  # cancelled, since the reader has all that it wants
    stalled: bool = False  # the engine waits until the reader has taken something
    pending: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))  # evaluated next
    sources: list[Source] = field(default_factory=list)  # of the prompt's beginning, in addition to the sequence
    pieces: list[Piece] = field(default_factory=list)  # of the prompt that come from sources, in order
    fetch: Fetch[Load] | Now[Load] | None = None  # the loads of the first piece
    search: Fetch[NDArray[np.uint8]] | None = None  # the rows of the document, in the store
    searched: bool = False  # the store was asked for them
    begun: bool = False  # evaluation has begun
    unsettled: bool = False  # the cache may hold other tokens than the sequence
    ran_on: int = -1  # the sequence
    stop_word: str = ""  # the stop string that has ended the answer
    n_cut: int = 0  # of the dropped tokens, those that left while the answer was written
    said: list[int] = field(default_factory=list)  # the answer, where something may leave
    full: bool = False  # the context has ended the answer
    n_cached: int = 0
    n_stored: int = 0  # of these, what came from the KV store
    n_read: int = 0  # tokens of the prompt that were evaluated
    n_generated: int = 0
    asked: float = field(default_factory=time.monotonic)
    started: float = 0.0
    read: float = 0.0  # when the prompt was read
    ended: float = 0.0
    wake: Callable[[], None] = lambda: None
    results: "queue.SimpleQueue[Any]" = field(default_factory=queue.SimpleQueue)

    # ---- for the engine ----

    @property
    def is_ahead(self) -> bool:
        """Whether the reader has enough to take."""
        return self.results.qsize() >= (1 if self.every_row else AHEAD)

    @property
    def is_reading(self) -> bool:
        """Whether tokens of the prompt are left."""
        return not self.read

    @property
    def lossy(self) -> bool:
        """Whether the prompt lacks turns: then rows will do that have read them."""
        return self.dropped_turns > 0

    @property
    def is_partial(self) -> bool:
        """Whether the sequence has no use for others until all of a piece is loaded."""
        return self.fetch is not None and self.pieces[0].source.whole

    def due(self, n: int) -> Piece | None:
        """Return the piece that follows the first ``n`` tokens or is being loaded; forgets those that they reach."""
        while self.pieces and self.fetch is None and self.pieces[0].first < n:
            self.pieces.pop(0)
        return self.pieces[0] if self.pieces and (self.fetch is not None or self.pieces[0].first == n) else None

    def note(self, cut: Cut) -> None:
        """Record tokens that have left."""
        self.n_cut += cut.end - cut.first
        self.dropped_tokens += cut.end - cut.first
        self.dropped_turns += cut.n_turn
        if self.draft is not None:
            self.draft.forget()

    def seen(self, held: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return prompt and answer, what has left included; ``held``: the tokens of the sequence."""
        return np.concatenate([self.tokens, np.array(self.said, np.int32)]) if self.n_cut else held

    def wants(self, slot: int) -> bool:
        """Return whether it may run on a sequence."""
        return self.slot in (None, slot)

    def choose(self, tokens: NDArray[np.int32], row: Row) -> int | None:
        """Return the token after int32 [n], whose logits are float32 [n_vocab]; None: the criteria end the job."""
        token = self.sampler.sample(process(self.processors, tokens, row))
        return None if self.criteria is not None and self.criteria(tokens, row) else token

    def ends(self, model: Model, token: int) -> bool:
        """Return whether a token ends the answer, of which it is not a part."""
        return token in self.stop_tokens or model.ends_generation(token)

    def told(self, row: Row) -> Row | None:
        """Return what the reader gets with the token that was just chosen from these logits, float32 [n_vocab]."""
        if not self.with_rows:
            return None
        return self.sampler.logprobs(len(row)) if self.after_samplers else row.copy()

    # ---- for the reader ----

    def take(self) -> Any:
        """Wait for the next result; raises what ended the job, None when it is complete."""
        result = self.results.get()
        if self.stalled:
            self.wake()
        if isinstance(result, BaseException):
            try:
                raise result
            finally:
                del result  # which knows this frame
        return result

    def rows(self, take: Callable[[], Any]) -> Iterator[Row]:
        """Yield the logits after the tokens of the prompt, float32 [k, n_vocab] per step; ``take`` has the results."""
        n = 0
        while n < len(self.tokens):
            rows = take()
            n += len(rows)
            yield rows
        self.every_row = False

    def drawn(self, take: Callable[[], Any]) -> Drawn:
        """Yield tokens, with their logits when they were asked for; tokens that are sent follow the last one."""
        while (result := take()) is not None:
            sent = yield result
            if sent is not None and len(sent):
                self.pending = np.concatenate([self.pending, np.asarray(sent, np.int32)])

    # ---- numbers ----

    def dropped(self) -> dict[str, int]:
        """Return what usage tells of tokens that the answer has been written without; empty where it has seen all."""
        counts = {"dropped_tokens": self.dropped_tokens, "dropped_turns": self.dropped_turns}
        return counts if any(counts.values()) else {}

    def prompt_progress(self) -> dict[str, int]:
        """Return llama-server's object about a prompt that is being read."""
        return {
            "total": len(self.tokens),
            "cache": self.n_cached,
            "processed": self.n_cached + self.n_read,
            "time_ms": round(1000 * (time.monotonic() - self.started)),
        }

    def timings(self) -> dict[str, float]:
        """Return llama-server's object about the speed of a completion."""
        return {
            "cache_n": self.n_cached,
            **_rates("prompt", self.n_read, self.n_read, self.prompt_seconds),
            # the first token comes from the logits of the prompt
            **_rates("predicted", self.n_generated, self.n_generated - 1, self.answer_seconds),
        }

    @property
    def prompt_seconds(self) -> float:
        """How long the prompt was evaluated, so far."""
        now = self.read or time.monotonic()
        return max(0.0, now - self.started) if self.started and self.n_read else 0.0

    @property
    def answer_seconds(self) -> float:
        """How long the answer was written, so far."""
        return max(0.0, (self.ended or time.monotonic()) - self.read) if self.read else 0.0


def _rates(name: str, n: int, n_timed: int, seconds: float) -> dict[str, float]:
    timed = n_timed > 0 and seconds > 0
    return {
        f"{name}_n": n,
        f"{name}_ms": 1000 * seconds,
        f"{name}_per_token_ms": 1000 * seconds / n_timed if timed else 0.0,
        f"{name}_per_second": n_timed / seconds if timed else 0.0,
    }
