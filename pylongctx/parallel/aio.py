"""The class AsyncLlama: completions for asyncio, several at once on one model."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, overload

from pylongctx.chat.types import ChatChunk, ChatCompletion
from pylongctx.completions.options import Messages
from pylongctx.completions.request import Prompt, are_prompts
from pylongctx.completions.results import Completion, choices_of
from pylongctx.engine.job import Cancelled
from pylongctx.engine.thread import EngineThread
from pylongctx.parallel.host import Host
from pylongctx.parallel.ticket import Ticket

END = object()


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
        self._turn = asyncio.Semaphore(n_parallel)  # each running answer has a thread
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
        answer = await self._answer("create_completion", stream, {"prompt": prompt, **options})
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
        answer = await self._answer("create_chat_completion", stream, {"messages": messages, **options})
        return answer

    async def _answer(self, method: str, stream: bool, given: Mapping[str, Any]) -> Any:
        if self._closed:
            raise RuntimeError("this AsyncLlama is closed")
        ticket = Ticket(self._host, self._engine)
        if stream:
            return self._chunks(ticket, method, given)
        async with self._turn:
            return await self._in_thread(ticket, getattr(ticket.completer(), method), **given)

    async def _chunks(self, ticket: Ticket, method: str, given: Mapping[str, Any]) -> AsyncIterator[Any]:
        async with self._turn:
            chunks = await self._in_thread(ticket, getattr(ticket.completer(), method), stream=True, **given)
            try:
                while (chunk := await self._in_thread(ticket, next, chunks, END)) is not END:
                    yield chunk
            finally:
                ticket.cancel()

    async def _in_thread(self, ticket: Ticket, function: Any, *args: Any, **options: Any) -> Any:
        """Run a part of an answer in a thread; if the task is cancelled, wait until the thread has stopped."""
        call = asyncio.get_running_loop().run_in_executor(self._pool, lambda: function(*args, **options))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            ticket.cancel()
            await asyncio.wait([call])
            if not call.cancelled() and (reason := call.exception()) and not isinstance(reason, Cancelled):
                raise reason from None
            raise
