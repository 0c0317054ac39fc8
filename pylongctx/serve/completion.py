"""One completion of the server: Llama's own request logic, with tokens that come from the engine."""

import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from pylongctx._lib import ContextFull, lib
from pylongctx.chat.completion import Chat
from pylongctx.chat.history import closest, prompt_tokens
from pylongctx.chat.template import Rendered
from pylongctx.generation import Criteria, Processors
from pylongctx.logprobs import Entry, Scorer
from pylongctx.sampling import Sampler, seed_sequence
from pylongctx.serve.engine import Engine
from pylongctx.serve.host import Host
from pylongctx.serve.job import Cancelled, Job

Value = TypeVar("Value")

_TEMPLATE = threading.Lock()  # a template renders one conversation at a time


class Overflow(ContextFull):
    """A prompt that does not fit the context."""

    def __init__(self, message: str, n_prompt: int, n_ctx: int) -> None:
        super().__init__(message, lib.LCTX_NO_SLOT)
        self.n_prompt = n_prompt
        self.n_ctx = n_ctx


class Served(Chat):
    """``create_completion`` and ``create_chat_completion`` of one request.

    Parameters
    ----------
    host : Host
        The model.
    engine : Engine
        Makes the tokens.
    with_rows : bool
        Log-probabilities will be asked for.
    limit : int or None
        Most tokens that anyone may ask for.
    traced : str or None
        Record which chunks are read, under this id.
    progress : callable or None
        Called by the engine's thread as the prompt is read.
    """

    def __init__(
        self,
        host: Host,
        engine: Engine,
        with_rows: bool = False,
        limit: int | None = None,
        traced: str | None = None,
        progress: Callable[[Job], None] | None = None,
    ) -> None:
        if traced is not None and host.chunked is None:
            raise ValueError(f"method {str(host.method)!r} reads no chunks, there is nothing to trace")
        self._model, self._loaded, self._arguments = host._model, host.session, host._arguments
        self.model_path, self.metadata, self.verbose = host.model_path, host.metadata, host.verbose
        self.chat_format, self.chat_handler, self.draft_model = host.chat_format, None, None
        self.last_n_tokens_size = host.last_n_tokens_size
        self._template = host.chat_template
        self._seeds = seed_sequence(self._arguments["seed"])
        self._engine = engine
        self._limit = limit
        self._settings: dict[str, Any] = {"with_rows": with_rows, "traced": traced, "progress": progress}
        self._cancelled = False
        self.job: Job | None = None

    def cancel(self) -> None:
        """Nobody waits for the answer any more."""
        self._cancelled = True
        if self.job is not None:
            self._engine.cancel(self.job)

    def _generate(
        self, tokens: Sequence[int], sampler: Sampler, reset: bool, processors: Processors, criteria: Criteria
    ) -> Generator[int, Sequence[int] | None, None]:
        self.job = Job(self._model.check_tokens(tokens), sampler, **self._settings)
        if self._cancelled:
            raise Cancelled("cancelled")
        return self._tokens(self.job)

    def _tokens(self, job: Job) -> Generator[int, Sequence[int] | None, None]:
        self._engine.submit(job)
        for token, self._row in job.generated():
            yield token

    def _room(self, n_prompt: int, max_tokens: int | None) -> int:
        assert self.job is not None
        try:
            room = super()._room(n_prompt, None)
        except ContextFull as reason:
            n_ctx = self._session.context.n_ctx
            message = f"{reason}; the request exceeds the available context size ({n_ctx} tokens)"
            raise Overflow(message, n_prompt, n_ctx) from None
        limits = (room, self._limit, max_tokens if max_tokens is None or max_tokens >= 0 else None)
        self.job.limit = min(limit for limit in limits if limit is not None)
        return self.job.limit

    def _echo(self, tokens: list[int], text: str, special: bool, scorer: Scorer | None) -> tuple[str, list[Entry]]:
        if scorer is None or self.job is None:
            return text, []
        self.job.every_row = True
        self._engine.submit(self.job)
        entries = scorer.prompt(self.job.rows(), np.array(tokens, np.int32), text, special)
        missing = 0 if special else len(tokens) - len(entries)  # who sends tokens counts on an entry for each
        return text, [Entry(b"", 0, None, None)] * missing + entries

    def _score(self, scorer: Scorer, token: int, offset: int) -> Entry:
        assert self._row is not None
        return scorer.entry(token, self._row, offset)

    def _remember(self) -> None:
        if self.job is not None:
            self._engine.cancel(self.job, satisfied=True)  # a stop string may have come before the engine's end

    def _conversation(self, prompt: str) -> list[int]:
        # Tokens that the engine changes meanwhile do no harm: they are used as far as they spell the prompt.
        held = [slot.session.tokens.tolist() for slot in self._engine.slots]
        return prompt_tokens(self._model, prompt, closest(self._model, prompt, held))

    def _render(self, given: Mapping[str, Any], messages: Any) -> Rendered:
        with _TEMPLATE:
            return super()._render(given, messages)

    def _locked(self, run: Callable[[], Value]) -> Value:
        return run()

    def _locked_steps(self, chunks: Iterator[Value]) -> Iterator[Value]:
        return chunks
