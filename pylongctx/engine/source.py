"""The interface between a Completer and its engine."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Protocol

from pylongctx.engine.documents import Document
from pylongctx.engine.job import Drawn, Job, Row
from pylongctx.engine.model import Model
from pylongctx.engine.sampling.sampler import Sampler
from pylongctx.engine.session import Session


class TokenSource(Protocol):
    """An engine from the view of one answer."""

    @property
    def model(self) -> Model:
        """The model, for its vocabulary."""

    @property
    def n_ctx(self) -> int:
        """The context window in tokens."""

    @property
    def evicts(self) -> bool:
        """True if tokens may be evicted from a text that does not fit."""

    def lock(self) -> AbstractContextManager[Any]:
        """Return the lock to hold while a part of an answer is generated."""

    def check_size(self, n_bytes: int) -> None:
        """Raise PromptTooLong for a text that cannot fit with any tokenization."""

    def job(
        self, tokens: Sequence[int], sampler: Sampler, max_tokens: int | None, text: str = "", **fields: Any
    ) -> Job:
        """Return a job for an answer; PromptTooLong when there is no room after the prompt.

        ``text`` is the text of the prompt: documents in it that cannot be placed are logged.
        """

    def rows(self, job: Job) -> Iterator[Row]:
        """Yield the logits after the tokens of the prompt, float32 [k, n_vocab] per step."""

    def drawn(self, job: Job) -> Drawn:
        """Yield tokens, with the logits that they were sampled from if the job requests them."""

    def finish(self, job: Job) -> None:
        """Release a job that needs no more tokens."""

    def document(self, text: str | None, name: str | None) -> Document:
        """Register a document, or for None return the one with a name; ValueError when there is none."""

    def log(self, message: str) -> None:
        """Report a message to the user."""


class SessionSource:
    """What a ``TokenSource`` knows from a sequence."""

    def __init__(self, session: Session) -> None:
        self.session = session

    @property
    def model(self) -> Model:
        """The model."""
        return self.session.model

    @property
    def n_ctx(self) -> int:
        """The context window in tokens."""
        return self.session.n_ctx

    @property
    def evicts(self) -> bool:
        """True if tokens may be evicted from a text that does not fit."""
        return self.session.evicts

    def check_size(self, n_bytes: int) -> None:
        """Raise PromptTooLong for a text that cannot fit with any tokenization."""
        self.session.check_size(n_bytes)

    def room_after(self, tokens: Sequence[int]) -> int:
        """Return how many tokens fit after a prompt; PromptTooLong for none."""
        if len(tokens) >= self.n_ctx:
            raise self.session.too_long(len(tokens))
        return self.n_ctx - len(tokens)

    def log(self, message: str) -> None:
        """Write to the log if verbose."""
        self.session.log(message)


class NoTokens:
    """The source of a model without a context."""

    def __init__(self, model: Model, reason: str) -> None:
        self.model = model
        self.reason = reason

    def refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise RuntimeError."""
        raise RuntimeError(self.reason)

    def check_size(self, n_bytes: int) -> None:
        """Accept every text, since there is no context that it must fit into."""

    n_ctx = 0
    evicts = False
    lock = job = document = rows = drawn = finish = log = refuse
