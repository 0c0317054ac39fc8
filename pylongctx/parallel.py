"""Several answers at once on one model, for asyncio and the server."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any, Literal, overload

from pylongctx._arguments import has_gpu
from pylongctx._lib import lib
from pylongctx.chat.answer import ChatChunk, ChatCompletion
from pylongctx.chat.template import Templates
from pylongctx.completer import Completer
from pylongctx.completions.request import Messages, Prompt, are_prompts
from pylongctx.completions.results import Completion, choices_of
from pylongctx.engine.documents import Document
from pylongctx.engine.drafting import Drafting, DraftModel
from pylongctx.engine.job import Cancelled, Drawn, Job, Row
from pylongctx.engine.overflow import most_tokens
from pylongctx.engine.sampling.sampler import Sampler
from pylongctx.engine.source import SessionSource
from pylongctx.engine.thread import EngineThread
from pylongctx.engine.tracer import chunked
from pylongctx.llama import Llama
from pylongctx.loading import OpenedModel

MixedPrompt = str | list[int | str]  # a text, or tokens with texts between them
# fill-in-the-middle tokens: GGUF's names, and their texts in known vocabularies
FILL = {
    "fim_pre": ("prefix", ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<PRE>", "<|code_prefix|>", "[PREFIX]")),
    "fim_suf": ("suffix", ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<SUF>", "<|code_suffix|>", "[SUFFIX]")),
    "fim_mid": ("middle", ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<MID>", "<|code_middle|>", "[MIDDLE]")),
    "fim_rep": ("", ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<reponame>")),
    "fim_sep": ("", ("<|file_sep|>", "<file_sep>")),
}
NEEDED = ("fim_pre", "fim_suf", "fim_mid")  # required to fill in
END = object()  # of a stream
Create = Callable[..., Any]  # a method of Completer that creates an answer


class Host:
    """A model whose context has ``n_seq`` sequences of ``n_ctx`` tokens each; its arguments are those of ``Llama``."""

    def __init__(self, model_path: str, n_seq: int, **arguments: Any) -> None:
        if n_seq < 1:
            raise ValueError(f"a server needs at least 1 sequence, not {n_seq}: set -np")
        defaults = Llama.__init__.__kwdefaults__ or {}
        if unknown := arguments.keys() - defaults.keys():
            raise TypeError(f"Llama has no argument {', '.join(sorted(unknown))}")
        given = {**defaults, **arguments, "model_path": model_path}
        self._opened = OpenedModel(given, n_seq)
        self.n_seq = n_seq
        self.name = self.model_path = self._opened.path
        self.model = self._opened.model
        self.sessions = self._opened.sessions
        self.session = self.sessions[0]
        self.n_ctx = self.session.n_ctx  # of a sequence
        self.method = self.session.method
        self.store, self.library = self._opened.store, self._opened.library
        self.metadata = self.model.metadata()
        self.templates = Templates(self.model, given["chat_format"])
        self.seed: int = given["seed"]
        self.verbose = self._opened.verbose
        self.last_n_tokens_size: int = given["last_n_tokens_size"]
        self.penalizes_prompt = False  # whether penalties of all answers count the tokens of the prompt
        self.draft_model: DraftModel | None = self._opened.draft_model
        if not self._opened.verbose:
            lib.lctx_log_set_level(0)  # llama.cpp logs disconnected clients as errors; other errors become exceptions

    @property
    def identity(self) -> Mapping[str, Any]:
        """The identity of saved states, see ``OpenedModel.identity``."""
        return self._opened.identity

    @property
    def share_on_devices(self) -> float:
        """The fraction of layers on devices, including the output layer."""
        n_layers = self.model.info.n_layer + 1
        return min(self._opened.n_gpu_layers, n_layers) / n_layers if has_gpu() else 0.0

    @cached_property
    def fill_tokens(self) -> dict[str, int]:
        """The tokens of ``FILL`` that the model has."""
        found = {}
        for name, (old, texts) in FILL.items():
            keys = (f"tokenizer.ggml.{name}_token_id", f"tokenizer.ggml.{old}_token_id")
            known = next((int(self.metadata[key]) for key in keys if key in self.metadata), None)
            spelled = (self.model.tokenize(text.encode(), False, True) for text in texts)
            alone = (tokens[0] for tokens in spelled if len(tokens) == 1)
            token = known if known is not None else next(alone, None)
            if token is not None:
                found[name] = token
        return found

    def tokens(self, text: str, special: bool = True) -> list[int]:
        """Return the tokens of a text after other tokens; PromptTooLong if it cannot fit with any tokenization."""
        self.session.check_size(len(text.encode()))
        return self.model.tokenize(text.encode(), False, special)

    def plain(self, prompt: MixedPrompt) -> str | list[int]:
        """Return a prompt as a text or as tokens; a text at the beginning is preceded by the BOS token of the model."""
        if isinstance(prompt, str):
            return prompt
        found = self.model.start if prompt and isinstance(prompt[0], str) else []
        for part in prompt:
            found += self.tokens(part) if isinstance(part, str) else [part]
            if len(found) > self.n_ctx:
                raise self.session.too_long(len(found), "at least ")
        return found

    def biases(self, pairs: Iterable[tuple[int | str, float]]) -> dict[int, float]:
        """Return the bias of each token; the bias of a text applies to all its tokens."""
        found: dict[int, float] = {}
        for key, bias in pairs:
            found |= dict.fromkeys(self.tokens(key, False) if isinstance(key, str) else [key], bias)
        return found

    def kv_bytes(self) -> int:
        """Return the bytes of KV memory in use, 0 with llama.cpp's own cache, which does not report it."""
        return self.session.context.kv_usage().bytes if self.method else 0

    def add_lora(self, path: str, scale: float = 1.0) -> None:
        """Use a LoRA adapter; must be called before the first request."""
        self._opened.adapters.add(self.session, path, scale)

    def close(self) -> None:
        """Free model and context."""
        self._opened.close()


class EngineSource(SessionSource):
    """A ``TokenSource`` for one completion, whose job runs in the thread of an engine.

    ``limit`` is the default of ``max_tokens``, None: as many as fit. Of ``last_n_tokens_size`` -1 is the whole context,
    and None the host's setting. ``prefills`` is as for ``Completer``; the keywords are fields of its ``Job``.
    """

    def __init__(
        self,
        host: Host,
        engine: EngineThread,
        limit: int | None = None,
        last_n_tokens_size: int | None = None,
        prefills: bool = True,
        *,
        id: str = "",
        traced: bool = False,
        progress: Callable[[Job], None] | None = None,
        owner: str | None = None,
        slot: int | None = None,
        reuses: bool = True,
        cache_reuse: int | None = None,
    ) -> None:
        if traced and chunked(host.method) is None:
            raise ValueError(f"method {str(host.method)!r} does not read chunks, so there is nothing to trace")
        super().__init__(host.session)
        self.host = host
        self._last_n = host.last_n_tokens_size if last_n_tokens_size is None else last_n_tokens_size
        self._prefills = prefills
        self._engine = engine
        self._limit = limit
        self._owner = owner
        least = host.session.cache_reuse if cache_reuse is None else cache_reuse
        self._job = partial(
            Job, id=id, traced=traced, progress=progress, owner=owner, slot=slot, reuses=reuses, cache_reuse=least
        )
        self._cancelled = False
        self.current: Job | None = None

    def completer(self) -> Completer:
        """Return a Completer that takes its tokens from here."""
        host, last_n = self.host, self.host.n_ctx if self._last_n < 0 else self._last_n
        return Completer(
            host.model,
            self,
            host.name,
            host.templates,
            host.seed,
            last_n,
            prefills=self._prefills,
            penalizes_prompt=host.penalizes_prompt,
        )

    def cancel(self) -> None:
        """Cancel the job, since the reader is gone."""
        self._cancelled = True
        if self.current is not None:
            self._engine.cancel(self.current)

    # ---- TokenSource ----

    def lock(self) -> AbstractContextManager[Any]:
        """Return a no-op lock, since only the engine's thread uses the context."""
        return nullcontext()

    def document(self, text: str | None, name: str | None) -> Document:
        """Register a document of the owner, or return the one with a name."""
        return self._engine.documents.of_request(text, name, self._owner)

    def job(
        self, tokens: Sequence[int], sampler: Sampler, max_tokens: int | None, text: str = "", **fields: Any
    ) -> Job:
        """Return a job with at most ``max_tokens``; None or < 0: the server's default."""
        room = self.room_after(tokens)
        wanted = self._limit if max_tokens is None or max_tokens < 0 else max_tokens
        limit = most_tokens(wanted, room, fields.get("evictions"))
        ids = self.model.check_tokens(tokens)
        placed = self._engine.documents.find(ids, self._owner, text)
        model = self.host.draft_model
        draft = None if model is None else Drafting(model)
        self.current = self._job(ids, sampler, limit=limit, placed=placed, draft=draft, **fields)
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


class AsyncLlama:
    """A GGUF model that serves several coroutines concurrently; the engine of ``pylongctx serve`` without HTTP.

    Cancelling a task or closing a stream stops its answer. Answers beyond ``n_parallel`` wait.

    Parameters
    ----------
    model_path : str
        GGUF file, or a name of the catalogue.
    n_parallel : int
        Sequences of ``n_ctx`` tokens each.
    **arguments
        Other arguments of ``Llama``.

    Raises
    ------
    ValueError, NotImplementedError, MemoryError
        As for ``Llama``.

    Examples
    --------
    >>> import asyncio
    >>> async def main():
    ...     async with AsyncLlama("model.gguf", n_parallel=2, n_ctx=512, verbose=False) as llm:
    ...         prompts = ["It was the best", "It was the worst"]
    ...         calls = [llm.create_completion(prompt, max_tokens=2, temperature=0) for prompt in prompts]
    ...         return [answer["usage"]["completion_tokens"] for answer in await asyncio.gather(*calls)]
    >>> asyncio.run(main())
    [2, 2]
    """

    def __init__(self, model_path: str, *, n_parallel: int = 4, **arguments: Any) -> None:
        self._host = Host(model_path, n_parallel, **arguments)
        self._engine = EngineThread(self._host.sessions, self._host.library)
        self._pool = ThreadPoolExecutor(n_parallel, "pylongctx-answer")
        self._threads = asyncio.Semaphore(n_parallel)  # each running answer has a thread
        self._closed = False

    async def __aenter__(self) -> "AsyncLlama":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop all answers and free the model."""
        if not self._closed:
            self._closed = True
            await asyncio.to_thread(self._engine.close)
            await asyncio.to_thread(self._pool.shutdown)
            self._host.close()

    @overload
    async def create_completion(
        self, prompt: Prompt | Sequence[Prompt], *, stream: Literal[False] = False, **options: Any
    ) -> Completion: ...
    @overload
    async def create_completion(
        self, prompt: Prompt, *, stream: Literal[True], **options: Any
    ) -> AsyncIterator[Completion]: ...

    async def create_completion(
        self, prompt: Prompt | Sequence[Prompt], *, stream: bool = False, **options: Any
    ) -> Completion | AsyncIterator[Completion]:
        """Complete a prompt, or several as choices of one completion; see ``Llama.create_completion``.

        With ``stream``, returns an async iterator of chunks.
        """
        if are_prompts(prompt) and not stream:
            prompts: Iterable[Any] = prompt
            return choices_of(await asyncio.gather(*(self.create_completion(one, **options) for one in prompts)))
        answer: Completion | AsyncIterator[Completion]
        answer = await self._answer(Completer.create_completion, stream, {"prompt": prompt, **options})
        return answer

    @overload
    async def create_chat_completion(
        self, messages: Messages, *, stream: Literal[False] = False, **options: Any
    ) -> ChatCompletion: ...
    @overload
    async def create_chat_completion(
        self, messages: Messages, *, stream: Literal[True], **options: Any
    ) -> AsyncIterator[ChatChunk]: ...

    async def create_chat_completion(
        self, messages: Messages, *, stream: bool = False, **options: Any
    ) -> ChatCompletion | AsyncIterator[ChatChunk]:
        """Answer a conversation; see ``Llama.create_chat_completion``. With ``stream``, returns an async iterator."""
        answer: ChatCompletion | AsyncIterator[ChatChunk]
        answer = await self._answer(Completer.create_chat_completion, stream, {"messages": messages, **options})
        return answer

    async def _answer(self, create: Create, stream: bool, given: Mapping[str, Any]) -> Any:
        if self._closed:
            raise RuntimeError("this AsyncLlama is closed")
        self._engine.refuse_nested()
        source = EngineSource(self._host, self._engine)
        if stream:
            return self._chunks(source, create, given)
        async with self._threads:
            return await self._in_thread(source, create, source.completer(), **given)

    async def _chunks(self, source: EngineSource, create: Create, given: Mapping[str, Any]) -> AsyncIterator[Any]:
        async with self._threads:
            chunks = await self._in_thread(source, create, source.completer(), stream=True, **given)
            try:
                while (chunk := await self._in_thread(source, next, chunks, END)) is not END:
                    yield chunk
            finally:
                source.cancel()

    async def _in_thread(self, source: EngineSource, function: Any, *args: Any, **options: Any) -> Any:
        """Run a part of an answer in a thread; if the task is cancelled, wait until the thread has stopped."""
        call = asyncio.get_running_loop().run_in_executor(self._pool, lambda: function(*args, **options))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            source.cancel()
            await asyncio.wait([call])
            if not call.cancelled() and (reason := call.exception()) and not isinstance(reason, Cancelled):
                raise reason from None
            raise
