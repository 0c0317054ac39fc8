"""Jobs of the engine: a prompt with its options, and the resulting tokens; and counters of them."""

import queue
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pylongctx.engine.documents import Document, Placed
from pylongctx.engine.drafting import Drafting
from pylongctx.engine.model import Model
from pylongctx.engine.overflow import Eviction, Evictions
from pylongctx.engine.prefix import MIN_AFTER_GAP
from pylongctx.engine.reuse import Fetch, Load, Now, Piece, Source
from pylongctx.engine.sampling.sampler import Processors, Sampler, StoppingCriteria, process

AHEAD = 4  # tokens that the engine generates ahead of the reader
Row = NDArray[np.float32]
Drawn = Generator[tuple[int, Row | None], Sequence[int] | None, None]


@dataclass
class Counters:
    """The work of an engine since its start."""

    prompt_tokens: int = 0  # evaluated
    cached_tokens: int = 0
    generated_tokens: int = 0
    dropped_tokens: int = 0  # of texts that did not fit
    steps: int = 0
    sequences: int = 0  # of all steps together
    longest: int = 0  # tokens of a sequence
    prompt_seconds: float = 0.0  # of finished completions, like the next field
    answer_seconds: float = 0.0
    busy_seconds: float = 0.0
    drafts: int = 0  # of finished completions, like the next two fields
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    completed: int = 0
    cancelled: int = 0
    failed: int = 0

    def count_drafts(self, draft: Drafting | None) -> None:
        """Add the drafts of a job."""
        if draft is not None:
            self.drafts += draft.n_drafts
            self.drafted_tokens += draft.n_drafted
            self.accepted_tokens += draft.n_accepted


class Cancelled(Exception):  # noqa: N818 - reads as what happened
    """The reader of the answer is gone."""


@dataclass(eq=False)
class Job:
    """A prompt and its continuation."""

    tokens: NDArray[np.int32]  # the prompt
    sampler: Sampler  # used only by the engine's thread
    limit: int | None = 0  # maximum tokens to generate; None: only the reader ends it, not even an end token
    processors: Processors = None  # change the logits before sampling, as in llama_cpp
    criteria: StoppingCriteria | None = None  # end the job, as in llama_cpp
    calling: Callable[[], AbstractContextManager[None]] = nullcontext  # entered around these
    with_rows: bool = False  # every token comes with the logits that it was sampled from
    after_samplers: bool = False  # these are log-probabilities after all samplers, -inf for removed tokens
    every_row: bool = False  # the logits after every token of the prompt are returned too, see ``rows``
    follows: bool = False  # the tokens are appended to the sequence; else they are the whole text
    draft: Drafting | None = None  # drafts tokens, which are evaluated in one batch with the token before them
    id: str = ""  # of the completion, "" for other jobs
    traced: bool = False  # record the chunks read for generated tokens
    progress: Callable[["Job"], None] | None = None  # called before the first step of the prompt, and after each
    owner: str | None = None  # of the tokens, which are not reused for other owners
    slot: int | None = None  # the sequence that it must run on; None: any
    reuses: bool = True  # a cached prefix may be used
    cache_reuse: int = 0  # minimum tokens after a gap that are reused, see ``min_chunk``; 0: none
    placed: tuple[Placed, ...] = ()  # parts of the prompt from documents, ascending; documents are prefilled first
    reads: Document | None = None  # its text is the prompt, and its rows are kept
    evictions: Evictions | None = None  # when the context is full before the answer ends; None: the limit fits
    stop_tokens: frozenset[int] = frozenset()  # end the answer, as the model's end tokens do
    dropped_tokens: int = 0  # left out of the prompt or evicted since
    dropped_turns: int = 0  # whole turns, likewise

    submitted: bool = False
    together: bool = False  # runs concurrently with other jobs of the same reader
    forerunner: "Job | None" = None  # a job with a common prefix, for whose prefill this one waits
    forerunner_searched: bool = False
    cancelled: bool = False
    reader_done: bool = False  # cancelled because the reader has all it needs
    stalled: bool = False  # the engine waits for the reader to take results
    pending: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))  # tokens to evaluate next
    sources: list[Source] = field(default_factory=list)  # sources of the prompt's prefix, in addition to the sequence
    pieces: list[Piece] = field(default_factory=list)  # parts of the prompt that come from sources, in order
    fetch: Fetch[Load] | Now[Load] | None = None  # the loads of the first piece
    search: Fetch[NDArray[np.uint8]] | None = None  # reads the rows of the document from the store
    searched: bool = False  # the store was searched for them
    begun: bool = False  # the evaluation has begun
    unsettled: bool = False  # the cache may hold other tokens than the sequence
    ran_on: int = -1  # the sequence
    stop_word: str = ""  # the stop string that ended the answer
    n_evicted: int = 0  # dropped tokens that were evicted during the answer
    answer_tokens: list[int] = field(default_factory=list)  # the answer, if tokens may be evicted
    full: bool = False  # the answer ended because the context is full
    n_cached: int = 0
    n_stored: int = 0  # of these, the tokens from the KV store
    n_read: int = 0  # tokens of the prompt that were evaluated
    n_generated: int = 0
    created_at: float = field(default_factory=time.monotonic)
    started_at: float = 0.0
    prefilled_at: float = 0.0
    ended_at: float = 0.0
    wake: Callable[[], None] = lambda: None
    results: "queue.SimpleQueue[Any]" = field(default_factory=queue.SimpleQueue)

    # ---- for the engine ----

    @property
    def is_ahead(self) -> bool:
        """True if the reader has enough results to take."""
        return self.results.qsize() >= (1 if self.every_row else AHEAD)

    @property
    def is_reading(self) -> bool:
        """True if tokens of the prompt are not evaluated yet."""
        return not self.prefilled_at

    @property
    def min_chunk(self) -> int:
        """How many tokens must follow a gap for their rows, which were computed with what is missing, to be accepted.

        0: the prompt accepts no such rows. One whose turns were dropped here always does.
        """
        return MIN_AFTER_GAP if self.dropped_turns > 0 else self.cache_reuse

    @property
    def is_partial(self) -> bool:
        """True if the sequence is unusable for other jobs until a piece is completely loaded."""
        return self.fetch is not None and self.pieces[0].source.whole

    def due(self, n: int) -> Piece | None:
        """Return the piece that follows the first ``n`` tokens or is being loaded; drops pieces that end before."""
        while self.pieces and self.fetch is None and self.pieces[0].first < n:
            self.pieces.pop(0)
        return self.pieces[0] if self.pieces and (self.fetch is not None or self.pieces[0].first == n) else None

    def note(self, eviction: Eviction) -> None:
        """Record evicted tokens."""
        self.n_evicted += eviction.end - eviction.first
        self.dropped_tokens += eviction.end - eviction.first
        self.dropped_turns += eviction.n_turn
        if self.draft is not None:
            self.draft.forget()

    def all_tokens(self, held: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return prompt and answer including evicted tokens; ``held``: the tokens of the sequence."""
        return np.concatenate([self.tokens, np.array(self.answer_tokens, np.int32)]) if self.n_evicted else held

    def may_run_on(self, slot: int) -> bool:
        """Return True if the job may run on a sequence."""
        return self.slot in (None, slot)

    def choose(self, tokens: NDArray[np.int32], row: Row) -> int | None:
        """Return the token after int32 [n], whose logits are float32 [n_vocab]; None: a criterion ends the job."""
        with self.calling():
            decide = None if self.draft is None else self.draft.decide()
            token = self.sampler.sample(process(self.processors, tokens, row), decide)
            return None if self.criteria is not None and self.criteria(tokens, row) else token

    def ends(self, model: Model, token: int) -> bool:
        """Return True if a token ends the answer without being part of it."""
        return token in self.stop_tokens or model.ends_generation(token)

    def reported_row(self, row: Row) -> Row | None:
        """Return the row for the reader with the token just sampled from these logits, float32 [n_vocab]."""
        if not self.with_rows:
            return None
        return self.sampler.logprobs(len(row)) if self.after_samplers else row.copy()

    # ---- for the reader ----

    def take(self) -> Any:
        """Wait for the next result, None when the job is complete; raises the exception that ended it."""
        result = self.results.get()
        if self.stalled:
            self.wake()
        if isinstance(result, BaseException):
            try:
                raise result
            finally:
                del result  # breaks the reference cycle with this frame
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
        """Yield tokens, with their logits if requested; tokens that are sent are appended after the last one."""
        while (result := take()) is not None:
            sent = yield result
            if sent is not None and len(sent):
                self.pending = np.concatenate([self.pending, np.asarray(sent, np.int32)])

    # ---- numbers ----

    def dropped(self) -> dict[str, int]:
        """Return the usage fields about dropped tokens; empty if none were dropped."""
        counts = {"dropped_tokens": self.dropped_tokens, "dropped_turns": self.dropped_turns}
        return counts if any(counts.values()) else {}

    def prompt_progress(self) -> dict[str, int]:
        """Return llama-server's object about the progress of a prefill."""
        return {
            "total": len(self.tokens),
            "cache": self.n_cached,
            "processed": self.n_cached + self.n_read,
            "time_ms": round(1000 * (time.monotonic() - self.started_at)),
        }

    def timings(self) -> dict[str, float]:
        """Return llama-server's object of timings of a completion."""
        return {
            "cache_n": self.n_cached,
            **_rates("prompt", self.n_read, self.n_read, self.prompt_seconds),
            # the first token is sampled from the logits of the prefill
            **_rates("predicted", self.n_generated, self.n_generated - 1, self.answer_seconds),
            **self._drafted(),
        }

    def _drafted(self) -> dict[str, int]:
        """Return the counts of draft tokens; empty if there were none."""
        if self.draft is None or not self.draft.n_drafted:
            return {}
        return {"draft_n": self.draft.n_drafted, "draft_n_accepted": self.draft.n_accepted}

    @property
    def prompt_seconds(self) -> float:
        """Time of the prefill so far."""
        now = self.prefilled_at or time.monotonic()
        return max(0.0, now - self.started_at) if self.started_at and self.n_read else 0.0

    @property
    def answer_seconds(self) -> float:
        """Time of the generation so far."""
        return max(0.0, (self.ended_at or time.monotonic()) - self.prefilled_at) if self.prefilled_at else 0.0


def _rates(name: str, n: int, n_timed: int, seconds: float) -> dict[str, float]:
    timed = n_timed > 0 and seconds > 0
    return {
        f"{name}_n": n,
        f"{name}_ms": 1000 * seconds,
        f"{name}_per_token_ms": 1000 * seconds / n_timed if timed else 0.0,
        f"{name}_per_second": n_timed / seconds if timed else 0.0,
    }
