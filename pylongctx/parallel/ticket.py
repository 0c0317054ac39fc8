"""One completion of the server: a Completer with the engine as token source."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from pylongctx.completer import Completer
from pylongctx.engine.documents import Document
from pylongctx.engine.drafting import Drafting
from pylongctx.engine.job import Cancelled, Drawn, Job, Row
from pylongctx.engine.model import Model
from pylongctx.engine.overflow import most_tokens
from pylongctx.engine.sampling.sampler import Sampler
from pylongctx.engine.thread import EngineThread
from pylongctx.engine.tracer import chunked
from pylongctx.parallel.host import Host


class Ticket:
    """The one job of a completion, as a ``TokenSource``.

    Parameters
    ----------
    host : Host
        The model.
    engine : EngineThread
        Generates the tokens.
    limit : int or None
        Default maximum tokens; None: as many as fit.
    last_n_tokens_size : int or None
        Number of last tokens that penalties consider; -1: the whole context; None: the host's setting.
    prefills : bool
        Whether an answer continues a last message of the assistant.
    fields : dict
        Additional fields of the job: ``id``, ``traced``, ``progress``, ``owner``, ``slot``, ``reuses``.
    """

    def __init__(
        self,
        host: Host,
        engine: EngineThread,
        limit: int | None = None,
        last_n_tokens_size: int | None = None,
        prefills: bool = True,
        **fields: Any,
    ) -> None:
        if fields.get("traced") and chunked(host.method) is None:
            raise ValueError(f"method {str(host.method)!r} does not read chunks, so there is nothing to trace")
        self.host = host
        self._last_n = host.last_n_tokens_size if last_n_tokens_size is None else last_n_tokens_size
        self._prefills = prefills
        self._engine = engine
        self._limit = limit
        self._fields = fields
        self._cancelled = False
        self.current: Job | None = None

    @property
    def model(self) -> Model:
        """The model."""
        return self.host.model

    def completer(self) -> Completer:
        """Return a Completer that uses the tokens of this ticket."""
        host, last_n = self.host, self.host.n_ctx if self._last_n < 0 else self._last_n
        return Completer(host.model, self, host.name, host.templates, host.seed, last_n, prefills=self._prefills)

    def cancel(self) -> None:
        """Cancel the job, since the reader is gone."""
        self._cancelled = True
        if self.current is not None:
            self._engine.cancel(self.current)

    # ---- TokenSource ----

    def turn(self) -> AbstractContextManager[Any]:
        """Return a no-op lock, since only the engine's thread uses the context."""
        return nullcontext()

    def check_size(self, n_bytes: int) -> None:
        """Raise PromptTooLong for a text that cannot fit with any tokenization."""
        self.host.session.check_size(n_bytes)

    @property
    def n_ctx(self) -> int:
        """The context window of a sequence in tokens."""
        return self.host.n_ctx

    @property
    def evicts(self) -> bool:
        """True if tokens may be evicted from a text that does not fit."""
        return self.host.session.evicts

    def document(self, text: str | None, name: str | None) -> Document:
        """Register a document of the owner, or return the one with a name."""
        return self._engine.documents.of_request(text, name, self._fields.get("owner"))

    def log(self, message: str) -> None:
        """Write to the log if verbose."""
        self.host.session.log(message)

    def job(
        self, tokens: Sequence[int], sampler: Sampler, max_tokens: int | None, text: str = "", **fields: Any
    ) -> Job:
        """Return a job with at most ``max_tokens``; None or < 0: the server's default."""
        room = self.host.n_ctx - len(tokens)
        if room <= 0:
            raise self.host.session.too_long(len(tokens))
        wanted = self._limit if max_tokens is None or max_tokens < 0 else max_tokens
        limit = most_tokens(wanted, room, fields.get("cuts"))
        ids = self.model.check_tokens(tokens)
        placed = self._engine.documents.find(ids, self._fields.get("owner"), text)
        model = self.host.draft_model
        draft = None if model is None else Drafting(model)
        self.current = Job(ids, sampler, limit=limit, placed=placed, draft=draft, **self._fields, **fields)
        if self._cancelled:
            raise Cancelled("cancelled")
        return self.current

    def rows(self, job: Job) -> Iterator[Row]:
        """Yield the logits after the tokens of the prompt, float32 [k, n_vocab] per step."""
        self._engine.submit(job)
        return job.rows(job.take)

    def drawn(self, job: Job) -> Drawn:
        """Yield tokens, with the logits that they were sampled from if the job requests them."""
        self._engine.submit(job)
        return job.drawn(job.take)

    def finish(self, job: Job) -> None:
        """End the job, since a stop string may end the answer before the engine does."""
        self._engine.cancel(job, reader_done=True)
