"""Passing results from worker threads, which run Llama's generators, to the event loop and the client."""

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor
from contextlib import suppress
from traceback import clear_frames
from typing import Any

from fastapi import Response
from starlette.types import Receive, Scope, Send

from pylongctx.engine.job import Cancelled, Job
from pylongctx.parallel.ticket import Ticket
from pylongctx.serve.errors import ApiError, as_api_error

MAX_QUEUED = 64  # maximum chunks waiting for the client
READER_PATIENCE = 60.0  # seconds for a client to read what is sent
LOG = logging.getLogger("uvicorn.error")

Part = tuple[Ticket, Callable[[], Any]]  # a completion, and the call that creates it


class Exchange:
    """The completions of one HTTP request.

    Parameters
    ----------
    id : str
        The id of the answer.
    pool : Executor
        Threads that wait for the engine.
    n_threads : int
        How many of them it may use concurrently.
    """

    def __init__(self, id: str, pool: Executor, n_threads: int) -> None:
        self.id = id
        self._pool = pool
        self._n_threads = n_threads
        self._turn = asyncio.Semaphore(n_threads)
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        self._room = threading.Semaphore(MAX_QUEUED)
        self._closed = False
        self.parts: list[Part] = []

    def cancel(self) -> None:
        """Cancel all completions."""
        for ticket, _ in self.parts:
            ticket.cancel()

    def close(self) -> None:
        """Cancel and release all completions, which refer to this object and hold memory of the library."""
        self.cancel()
        self.parts, self._closed = [], True
        self._room.release(max(self._n_threads, 1))  # wakes threads that wait in put

    def put(self, index: int, item: Any) -> None:
        """Add an item to the stream. Thread-safe."""
        with suppress(RuntimeError):  # the loop is closed, the server has ended
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, item))

    def put_progress(self, index: int, timed: bool) -> Callable[[Job], None]:
        """Return a function that adds the progress of a prefill, unless earlier items are still unread."""

        def add(job: Job) -> None:
            if self._queue.qsize() < MAX_QUEUED or not job.is_reading:
                timings = {"timings": job.timings()} if timed else {}
                self.put(index, {"prompt_progress": job.prompt_progress(), **timings})

        return add

    def timings(self, index: int) -> dict[str, float]:
        """Return llama-server's object about the speed of a completion."""
        job = self.parts[index][0].current
        return job.timings() if job else {}

    async def results(self, receive: Receive) -> list[Any] | None:
        """Run all calls and return their results; None if the client disconnected.

        The first failure cancels the other calls.
        """
        work = asyncio.gather(*(self._run(call) for _, call in self.parts), return_exceptions=True)
        gone: asyncio.Future[Any] = asyncio.ensure_future(until_gone(receive))
        waited: set[asyncio.Future[Any]] = {work, gone}
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            whole = work.done()
            if not whole:
                self.cancel()
        found = await work
        failures = [one for one in found if isinstance(one, BaseException)]
        failures.sort(key=lambda one: isinstance(one, Cancelled))  # prefer the original failure
        try:
            if failures and whole:
                raise failures[0]
        finally:
            del work, waited, failures  # breaks the reference cycle with this frame
        return found if whole else None

    async def chunks(self, iterators: list[Iterator[Any]], patience: float | None) -> AsyncIterator[tuple[int, Any]]:
        """Yield (part, chunk) of all parts as they come, (-1, None) after ``patience`` seconds without one."""
        feeds = [asyncio.ensure_future(self._run(self._feed, i, chunks)) for i, chunks in enumerate(iterators)]
        left = len(feeds)
        while left:
            try:
                index, item = await asyncio.wait_for(self._queue.get(), patience)
            except asyncio.TimeoutError:
                yield -1, None
                continue
            if isinstance(item, BaseException):
                try:
                    raise item
                finally:
                    del item  # breaks the reference cycle with this frame
            left -= item is None
            if item is None:
                continue
            if "prompt_progress" not in item:
                self._room.release()
            yield index, item

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        async with self._turn:
            try:
                return await self._loop.run_in_executor(self._pool, function, *args)
            except Exception:
                self.cancel()
                raise

    def _feed(self, index: int, chunks: Iterator[Any]) -> None:
        """Put chunks, blocking while too many wait for a slow client."""
        try:
            for chunk in chunks:
                self._room.acquire()
                if self._closed:
                    return
                self.put(index, chunk)
            self.put(index, None)
        except BaseException as reason:
            self.put(index, reason)


async def until_gone(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """The chunks of an exchange as server-sent events, followed by ``[DONE]``.

    Parameters
    ----------
    exchange : Exchange
        Cancelled when the client disconnects.
    events : async iterator
        Objects to send as JSON; None is sent as a keep-alive comment.
    close : callable
        Called at the end in any case.
    """

    media_type = "text/event-stream"
    end = "data: [DONE]\n\n"

    def __init__(self, exchange: Exchange, events: AsyncIterator[Any], close: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._exchange = exchange
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; sending to a disconnected client is not an error.

        A client that does not read for too long counts as disconnected.
        """
        watching = asyncio.ensure_future(self._watch(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for text in self._lines():
                sending = send({"type": "http.response.body", "body": text.encode(), "more_body": True})
                await asyncio.wait_for(sending, READER_PATIENCE)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except asyncio.TimeoutError:
            LOG.warning("a client did not read its stream for %g s", READER_PATIENCE)
            raise
        finally:
            watching.cancel()
            self._close()

    async def _watch(self, receive: Receive) -> None:
        await until_gone(receive)
        self._exchange.put(-1, Cancelled("the client went away"))

    async def _lines(self) -> AsyncIterator[str]:
        try:
            async for event in self._events:
                yield ": still working\n\n" if event is None else self.line(event)
        except Exception as reason:  # too late for a status
            yield self.line(self.failure(as_api_error(reason)))
            clear_frames(reason.__traceback__)
        if self.end:
            yield self.end

    def line(self, event: dict[str, Any]) -> str:
        """Return the text of an event."""
        return f"data: {json.dumps(event)}\n\n"

    def failure(self, reason: ApiError) -> dict[str, Any]:
        """Return the event of an error."""
        return {"error": reason.error}


class NamedEvents(EventStream):
    """Events sent with their ``type`` as name, as in Anthropic's API."""

    end = ""

    def line(self, event: dict[str, Any]) -> str:
        """Return an event preceded by its name."""
        return f"event: {event['type']}\n{super().line(event)}"

    def failure(self, reason: ApiError) -> dict[str, Any]:
        """Return the event of an error, which also has a type."""
        return {"type": "error"} | super().failure(reason)


class JsonLines(EventStream):
    """One object per line, as in Ollama's API, without comments, so that events are never None."""

    media_type = "application/x-ndjson"
    end = ""

    def line(self, event: dict[str, Any]) -> str:
        """Return a line."""
        return f"{json.dumps(event)}\n"

    def failure(self, reason: ApiError) -> dict[str, Any]:
        """Return the object of an error, with the reason as text."""
        return {"error": reason.error["message"]}
