"""Where a Completer's tokens come from."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Protocol

from pylongctx.engine.documents import Document
from pylongctx.engine.job import Drawn, Job, Row
from pylongctx.engine.model import Model
from pylongctx.sampling import Sampler


class TokenSource(Protocol):
    """An engine, as the maker of one answer sees it."""

    @property
    def model(self) -> Model:
        """The model, for its vocabulary."""

    @property
    def n_ctx(self) -> int:
        """The context window in tokens."""

    @property
    def evicts(self) -> bool:
        """Whether tokens may leave a text that does not fit."""

    def turn(self) -> AbstractContextManager[Any]:
        """Return what is held while a part of an answer is made."""

    def check_size(self, n_bytes: int) -> None:
        """Raise PromptTooLong for a text that cannot fit, whatever its tokens are."""

    def job(
        self, tokens: Sequence[int], sampler: Sampler, max_tokens: int | None, text: str = "", **fields: Any
    ) -> Job:
        """Return a job that begins with its first token; PromptTooLong when nothing can follow the prompt.

        ``text`` is what the prompt is made of: documents that are in it and cannot be placed are named in the log.
        """

    def rows(self, job: Job) -> Iterator[Row]:
        """Yield the logits after the tokens of the prompt, float32 [k, n_vocab] per step."""

    def drawn(self, job: Job) -> Drawn:
        """Yield tokens, with the logits that they were chosen from when the job asks for them."""

    def finish(self, job: Job) -> None:
        """Take note that nothing more is wanted of a job."""

    def document(self, text: str | None, name: str | None) -> Document:
        """Take note of a text that is read by itself, or with None return the one of a name; ValueError for none."""

    def say(self, message: str) -> None:
        """Tell the user."""


class NoTokens:
    """The source of a model without a context.

    Parameters
    ----------
    model : Model
        The model.
    reason : str
        Why there is none, for the RuntimeError.
    """

    def __init__(self, model: Model, reason: str) -> None:
        self.model = model
        self.reason = reason

    def refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise RuntimeError."""
        raise RuntimeError(self.reason)

    def check_size(self, n_bytes: int) -> None:
        """Let every text be rendered: there is no context that it could not fit into."""

    n_ctx = 0
    evicts = False
    turn = job = document = rows = drawn = finish = say = refuse
