"""An engine without a thread, which runs a step when its reader requests a token."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from pylongctx.engine.compress import CompressionReport
from pylongctx.engine.documents import Document
from pylongctx.engine.drafting import Drafting, DraftModel
from pylongctx.engine.engine import Engine
from pylongctx.engine.job import Drawn, Job, Row
from pylongctx.engine.overflow import most_tokens
from pylongctx.engine.reuse import Library
from pylongctx.engine.sampling.params import SamplingParams
from pylongctx.engine.sampling.sampler import Sampler
from pylongctx.engine.session import Session
from pylongctx.engine.source import SessionSource
from pylongctx.engine.states import States

FIRST_SEQUENCE = 0  # the sequence of ``Llama.session``


class Solo(SessionSource):
    """The token source of a Llama, see ``TokenSource``; calls from several threads wait for each other.

    A job runs alone on the first sequence; jobs of ``start`` run concurrently on all sequences.

    Prompts of the first sequence can continue from ``states``, and all from the ``library``, the KV store.
    """

    def __init__(
        self,
        sessions: list[Session],
        states: States,
        draft_model: DraftModel | None = None,
        library: Library | None = None,
    ) -> None:
        super().__init__(sessions[0])
        self.states = states
        self.draft_model = draft_model
        self._woken = threading.Event()
        self.engine = Engine(sessions, library, [states], self._woken.set)
        self._last: tuple[Job | None, int] = (None, 0)  # the running job, and ``changes`` at its last token

    def lock(self) -> AbstractContextManager[Any]:
        """Return the lock of the session."""
        return self.session.lock

    def job(
        self, tokens: Sequence[int], sampler: Sampler, max_tokens: int | None, text: str = "", **fields: Any
    ) -> Job:
        """Return a job with at most ``max_tokens``; None or <= 0: until the context is full, see ``most_tokens``."""
        wanted = max_tokens if max_tokens and max_tokens > 0 else None
        limit = most_tokens(wanted, self.room_after(tokens), fields.get("evictions"))
        return self.endless(tokens, sampler, limit, text=text, **fields)

    def endless(
        self,
        tokens: Sequence[int],
        sampler: Sampler,
        limit: int | None = None,
        follows: bool = False,
        text: str = "",
        **fields: Any,
    ) -> Job:
        """Return a job that only ends at ``limit``, if given."""
        ids = self.model.check_tokens(tokens, allow_empty=follows and self.session.has_logits)
        draft = None if self.draft_model is None else Drafting(self.draft_model)
        if draft is not None:
            draft.calling = self.session.lock.calling
        placed = () if follows or "reads" in fields else self.engine.documents.find(ids, text=text)
        own: dict[str, Any] = {"slot": FIRST_SEQUENCE, "progress": self._tell, "draft": draft, "placed": placed}
        own["cache_reuse"] = 0 if "reads" in fields else self.session.cache_reuse
        return Job(ids, sampler, limit=limit, follows=follows, calling=self.session.lock.calling, **own | fields)

    def start(self, job: Job) -> None:
        """Start a job on any sequence, concurrently with other started jobs."""
        self.session.check_room(len(job.tokens))
        job.slot, job.progress, job.together, job.submitted = None, None, True, True
        self.engine.waiting.append(job)

    def prefill(self, tokens: Sequence[int], **fields: Any) -> None:
        """Evaluate a prompt without an answer; ``fields`` are those of its job."""
        sampler = Sampler(self.model, SamplingParams(seed=0), None, ())
        for _ in self.drawn(self.endless(tokens, sampler, limit=0, **fields)):
            pass

    def compress(self, ratio: float) -> CompressionReport:
        """Evict most KV entries of the first sequence; an answer whose reader stopped early ends."""
        with self.session.lock:
            self.release()
            return self.engine.idle.compress(ratio)

    def document(self, text: str | None, name: str | None) -> Document:
        """Register a document, or return the one with a name."""
        return self.engine.documents.of_request(text, name)

    def rows(self, job: Job) -> Iterator[Row]:
        """Yield the logits after the tokens of the prompt, float32 [k, n_vocab] per step."""
        return job.rows(partial(self._take, job))

    def drawn(self, job: Job) -> Drawn:
        """Yield tokens, with the logits that they were sampled from if the job requests them."""
        return job.drawn(partial(self._take, job))

    def finish(self, job: Job) -> None:
        """End a job, and add the state of the first sequence to the cache, if there is one."""
        self.engine.release(job)
        if not job.together:
            self.states.remember()

    def step(self) -> None:
        """Run a step of all jobs; an exception ends them."""
        try:
            self._woken.clear()
            if self.engine.waiting and self.engine.assign_waiting():
                return  # a fully cached prompt already has its first token
            if not (self.engine.step() or self.engine.can_assign()):
                self._woken.wait()  # waits for a thread that reads the store
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Release all jobs."""
        for job in self.engine.jobs:
            self.engine.release(job)

    # ---- the reader's thread ----

    def _take(self, job: Job) -> Any:
        """Return the next result of a job."""
        with self.session.lock:
            if not job.submitted:
                self._begin(job)
            elif not job.together and self._last != (job, self.session.changes):
                raise RuntimeError("another call used this Llama while this generation waited; use one object for each")
            while job.results.empty():
                self.step()
            self._last = job, self.session.changes
            return job.take()

    def _begin(self, job: Job) -> None:
        self.release()
        self.session.context.abort = False
        if not job.follows:
            self.session.check_room(len(job.tokens))
        job.submitted = True
        self.engine.waiting.append(job)

    def _tell(self, job: Job) -> None:
        """Report the progress of a prefill to the user's callback."""
        n_read = len(job.tokens) - job.n_cached
        if self.session.progress is not None and job.n_read and n_read > 1:
            with self.session.lock.calling():
                self.session.progress(self.session.n_tokens, self.session.n_tokens - job.n_read + n_read)
