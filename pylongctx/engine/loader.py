"""Loading the cached parts of a prompt into a sequence, and prefilling its documents before it."""

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from pylongctx._log import LOG
from pylongctx.engine.compress import CompressionReport, compress
from pylongctx.engine.documents import Document, Documents, placed_up_to, without
from pylongctx.engine.job import Counters, Job
from pylongctx.engine.parked import Parked
from pylongctx.engine.reuse import Fetch, Held, Library, Now, Piece, Source, apply, hold, n_cached, plan, without_gaps
from pylongctx.engine.session import NO_ROWS, Session
from pylongctx.engine.slots import Slot
from pylongctx.errors import LctxError

PAUSE_FACTOR = 9  # pause between loads, as a multiple of the time of a load


class Loader:
    """Plans prompts, and loads their pieces between steps.

    Its sources are the sequences of the slots, the ``library`` (the KV store), ``states``, and ``parked`` sequences.
    The thread of a source calls ``wake`` when it has data to load.
    """

    def __init__(
        self,
        slots: list[Slot],
        counters: Counters,
        library: Library | None,
        states: Sequence[Source],
        parked: Parked,
        wake: Callable[[], None],
    ) -> None:
        self._slots, self._counters = slots, counters
        self._library, self._states, self._parked, self._wake = library, states, parked, wake

    def prepare(self, job: Job, slot: Slot, other: Slot) -> None:
        """Cut a sequence, or a copy of another one, to its common prefix with a prompt, and plan the rest.

        A sequence that loses more than it keeps is parked.
        """
        session = slot.session
        if job.follows:
            job.pending = np.concatenate([session.mend(), job.tokens])
            return
        kept = slot.saved(job) if other is slot and not job.every_row else 0
        if session.n_tokens > 2 * kept:
            self._parked.park(session)
        shared = max(slot.shared(job) for slot in self._slots)
        if other.session is not session and (piece := other.cached_piece(job)) is not None:
            _copy(other.session, session, piece.end)
        if session.owner != job.owner or not job.reuses or job.every_row:
            session.clear()
        session.owner = job.owner
        session.checkpoints.request(shared)
        if job.reuses and not job.every_row:
            states = [*self._states, *self._parked.sources(session, job.owner, job.min_chunk)]
            job.sources = [] if job.limit is None else states
            job.sources += [] if self._library is None else [self._library.finder(job.owner)]
        self._plan(job, session)

    def load(self, job: Job, session: Session) -> bool:
        """Load the next pieces of a prompt, one load of each slow source at a time.

        Returns whether the pending tokens can be evaluated; else a source is still reading.
        """
        while job.is_reading and (piece := job.due(session.n_tokens)) is not None:
            if job.fetch is None:
                items = piece.source.fetch(piece)
                job.fetch = Fetch(items, self._wake) if piece.source.slow else Now(items)
            if not job.fetch.ready or not self._load(job, session, piece):
                return False
        if job.is_reading and not len(job.pending) and not session.has_logits:
            session.rewind(session.n_tokens - 1)  # one token is evaluated again for its logits
            self._note(job, session, session.n_tokens - len(job.tokens))
        return True

    def stop(self, job: Job, session: Session) -> None:
        """Stop loading a piece, and discard parts that are unusable alone."""
        if job.fetch is not None:
            job.fetch.cancel()
            job.fetch = None
            if job.pieces.pop(0).source.whole:
                session.clear()

    def _plan(self, job: Job, session: Session) -> None:
        """Plan a prompt before its evaluation; the sequence is cut to its common prefix with it."""
        own = Held(session, job.placed, job.min_chunk)
        job.pieces = plan(job.tokens, [own, *job.sources], job.placed)
        if job.pieces and not job.pieces[0].exact and 2 * job.pieces[0].end < len(job.tokens):
            exact = Held(session, job.placed)
            other = plan(job.tokens, [exact, *job.sources], job.placed)
            if n_cached(other) > n_cached(job.pieces):  # such as a parked sequence that has all of it
                own, job.pieces = exact, other
        first = job.pieces[0] if job.pieces else None
        if first is None or first.exact:
            beginning = job.tokens[: job.placed[0].first] if job.placed else job.tokens
            for source in job.sources:
                source.planned(beginning, job.pieces)
        hold(session, job.pieces.pop(0) if first is not None and first.source is own else None)
        self._note(job, session, session.n_tokens - job.n_cached)

    def _load(self, job: Job, session: Session, piece: Piece) -> bool:
        """Apply the next load of a piece; returns whether another one may follow at once."""
        assert job.fetch is not None
        before, started = session.n_tokens, time.monotonic()
        try:
            load = job.fetch.take()
            if load is not None:
                apply(session, load)
                job.fetch.go_on(self._rest(session, time.monotonic() - started))
        except Exception as reason:  # an I/O error, no memory, or bytes that do not fit
            self.stop(job, session)
            if piece.source.fail(piece, reason):
                self._plan(job, session)
            return True
        if load is None:
            self._end(job, session, piece)
        self._note(job, session, session.n_tokens - before)
        return load is None or not piece.source.slow

    def _rest(self, session: Session, seconds: float) -> float:
        """Return the pause after a load that took ``seconds``: 0 if no other job is delayed."""
        rest, now = PAUSE_FACTOR * seconds, time.monotonic()
        for slot in self._slots:
            evaluates = slot.job is not None and slot.job.fetch is None
            if slot.session is not session and (
                evaluates or (slot.last is not None and now - slot.last.ended_at < rest)
            ):
                return rest
        return 0.0

    def _end(self, job: Job, session: Session, piece: Piece) -> None:
        """Cut the sequence at the end of a loaded piece, and before rows with another prefix."""
        job.pieces.pop(0)
        job.fetch = None
        end = without_gaps(session, piece)
        if session.seam is not None and not job.min_chunk:
            end = min(end, session.seam)
        if session.n_tokens > end:
            session.rewind(end)
        if piece.source.slow:
            job.n_stored += session.n_tokens - piece.first
        session.log(f"{session.n_tokens - piece.first} tokens come from {piece.source.name}")

    def _note(self, job: Job, session: Session, n: int) -> None:
        """Record that ``n`` more tokens of a prompt were reused."""
        job.n_cached += n
        self._counters.cached_tokens += n
        job.pending = job.tokens[session.n_tokens :]


def _copy(source: Session, target: Session, n: int) -> None:
    """Copy the prefix of another sequence, if the method supports it."""
    target.clear()
    target.owner = source.owner
    if source.context.copy(source.seq, target.seq, n):
        target.placed = placed_up_to(source.placed, n)
        whole = source.n_tokens == n and source.has_logits
        target.advance(source.tokens[:n], source.last_logits[np.newaxis] if whole else NO_ROWS)


class Readers:
    """The jobs that prefill documents; the KV store may contain those that were compressed.

    Other threads call ``wake`` when the search for a document may have ended.
    """

    def __init__(self, documents: Documents, library: Library | None, wake: Callable[[], None]) -> None:
        self._documents, self._library, self._wake = documents, library, wake
        self._jobs: dict[Document, Job] = {}

    def before(self, job: Job, others: list[Job]) -> Iterator[Job]:
        """Yield new jobs for the documents of a prompt; ``others`` are the engine's jobs."""
        if job.every_row:
            job.placed = ()  # prefill all tokens of the document
        for document in [place.document for place in job.placed]:
            if document is None or not is_missing(document):
                continue
            reader = self._jobs.get(document)
            if reader is not None and reader.ended_at:
                LOG.warning("document %r could not be prefilled: prompts with it are prefilled normally", document.name)
                del self._jobs[document]
                job.placed = without(job.placed, document)
            elif reader not in others and not job.cancelled:
                self._jobs[document] = Job(
                    document.prompt, job.sampler, owner=job.owner, reads=document, submitted=True
                )
                yield self._jobs[document]

    def find(self, job: Job) -> bool:
        """Return whether the store had the document of a job with the requested ratio."""
        document = job.reads
        if document is None or document.ratio is None or self._library is None:
            return False
        if not job.searched:
            job.searched, job.search = True, Fetch(self._library.find(document), self._wake)
        if job.search is None or not job.search.ready:
            return False
        rows, job.search = job.search.take(), None
        if rows is None:
            return False
        LOG.info("%d tokens of %r come from the KV store", len(document.tokens), document.name[:40])
        self._jobs.pop(document, None)
        self._documents.keep(document, rows)
        return True

    def keep(self, job: Job, session: Session) -> Exception | None:
        """Keep the rows of a prefilled document; returns why that is impossible."""
        document = job.reads
        if document is None:
            return None
        try:
            if document.ratio is not None:
                _warn(document, compress(session, document.ratio))
            self._documents.keep(document, session.context.slice(0, session.n_tokens, session.seq))
        except (LctxError, MemoryError) as reason:
            return reason
        self._jobs.pop(document, None)
        if document.ratio is not None:
            if self._library is not None:
                self._library.keep(document)
            session.clear()  # the compressed rows are only valid for prompts with the document
        return None


def _warn(document: Document, report: CompressionReport) -> None:
    if report.drifts:
        change = f"predictions in {document.name[:40]!r} changed by {report.divergence:.2f} nats"
        LOG.warning("%s with ratio %g: answers may be wrong; keep more", change, document.ratio)


def is_missing(document: Document | None) -> bool:
    """Return True if a document is not prefilled yet; False for None."""
    return document is not None and document.rows is None
