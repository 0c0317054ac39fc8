"""Prefill of the documents of prompts, each in its own job before the prompt."""

from collections.abc import Callable, Iterator

from pylongctx._log import LOG
from pylongctx.engine.compress import CompressionReport, compress
from pylongctx.engine.documents import Document, Documents, without
from pylongctx.engine.fetch import Fetch
from pylongctx.engine.job import Job
from pylongctx.engine.library import Library
from pylongctx.engine.session import Session
from pylongctx.errors import LctxError


class Readers:
    """The jobs that prefill documents.

    Parameters
    ----------
    documents : Documents
        Receive the rows.
    library : Library or None
        The KV store, which may contain compressed documents.
    wake : callable
        Called by other threads when the search for a document may have ended.
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
