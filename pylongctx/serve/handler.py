"""Requests for tokens: admitted, completed in threads, and answered in the form of an API."""

import asyncio
import json
import logging
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from functools import partial
from traceback import clear_frames
from typing import Any, Generic, ParamSpec, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from pylongctx.engine.job import Cancelled, Job
from pylongctx.engine.sampling.sampler import RANDOM_SEEDS
from pylongctx.parallel import EngineSource
from pylongctx.serve.bodies import Generate, owner_of
from pylongctx.serve.errors import ApiError, as_api_error, invalid
from pylongctx.serve.service import Service
from pylongctx.serve.streams import HEADERS, Reading
from pylongctx.serve.transport import READER_PATIENCE, send_part, until_gone

MAX_COMPLETIONS = 1024  # maximum completions per request
MAX_QUEUED = 64  # maximum chunks waiting for the client
CLOSED = 499  # for the log only: the client is gone
LOG = logging.getLogger("uvicorn.error")

Object = dict[str, Any]  # JSON
Chunks = AsyncIterator[tuple[int, Any]]  # (completion, chunk); (-1, None) after a pause
Body = TypeVar("Body", bound=Generate)
Result = TypeVar("Result")
Given = ParamSpec("Given")


class Feed:
    """Passes chunks from threads to the event loop, and holds the threads back while the client is slow."""

    def __init__(self, n_threads: int) -> None:
        self._n_threads = n_threads
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        self._room = threading.Semaphore(MAX_QUEUED)
        self._closed = False

    def put(self, index: int, item: Any) -> None:
        """Add an item to the stream. Thread-safe."""
        with suppress(RuntimeError):  # the loop is closed, the server has ended
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, item))

    def put_progress(self, index: int, timed: bool, job: Job) -> None:
        """Add the progress of a prefill, unless earlier items are still unread."""
        if self._queue.qsize() < MAX_QUEUED or not job.is_reading:
            timings = {"timings": job.timings()} if timed else {}
            self.put(index, {"prompt_progress": job.prompt_progress(), **timings})

    def put_all(self, index: int, chunks: Iterator[Any]) -> None:
        """Put chunks, blocking while too many wait for a slow client, and their end or exception."""
        try:
            for chunk in chunks:
                self._room.acquire()
                if self._closed:
                    return
                self.put(index, chunk)
            self.put(index, None)
        except BaseException as reason:
            self.put(index, reason)

    async def chunks(self, n: int, patience: float | None) -> Chunks:
        """Yield (completion, chunk) of ``n`` completions as they come, (-1, None) after ``patience`` idle seconds."""
        while n:
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
            n -= item is None
            if item is None:
                continue
            if "prompt_progress" not in item:
                self._room.release()
            yield index, item

    def close(self) -> None:
        """Wake the threads that wait in ``put_all``, which then end."""
        self._closed = True
        self._room.release(max(self._n_threads, 1))


class EventStream(Response):
    """The events of a handler as server-sent events, followed by ``[DONE]``; None is sent as a keep-alive comment.

    The completions are cancelled when the client disconnects, and closed at the end in any case.
    """

    media_type = "text/event-stream"
    end = "data: [DONE]\n\n"

    def __init__(self, handler: "Handler[Any]", events: AsyncIterator[Object | None]) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._handler = handler
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; sending to a disconnected client is not an error.

        A client that does not read for too long counts as disconnected.
        """
        watching = asyncio.ensure_future(self._watch(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for part in self.parts():
                await send_part(send, part)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            LOG.warning("a client did not read its stream for %g s", READER_PATIENCE)
            raise
        finally:
            watching.cancel()
            self._handler.close()

    async def _watch(self, receive: Receive) -> None:
        await until_gone(receive)
        self._handler.feed.put(-1, Cancelled("the client went away"))

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the bytes of all events and of the end."""
        try:
            async for event in self._events:
                yield b": still working\n\n" if event is None else self.line(event).encode()
        except Exception as reason:  # too late for a status
            yield self.line(self.failure(as_api_error(reason))).encode()
            clear_frames(reason.__traceback__)
        if self.end:
            yield self.end.encode()

    def line(self, event: Object) -> str:
        """Return the text of an event."""
        return f"data: {json.dumps(event)}\n\n"

    def failure(self, reason: ApiError) -> Object:
        """Return the event of an error."""
        return {"error": reason.error}


class NamedEvents(EventStream):
    """Events sent with their ``type`` as name, as in Anthropic's API."""

    end = ""

    def line(self, event: Object) -> str:
        """Return an event preceded by its name."""
        return f"event: {event['type']}\n{super().line(event)}"

    def failure(self, reason: ApiError) -> Object:
        """Return the event of an error, which also has a type."""
        return {"type": "error"} | super().failure(reason)


class JsonLines(EventStream):
    """One object per line, as in Ollama's API, without comments, so that events are never None."""

    media_type = "application/x-ndjson"
    end = ""

    def line(self, event: Object) -> str:
        """Return a line."""
        return f"{json.dumps(event)}\n"

    def failure(self, reason: ApiError) -> Object:
        """Return the object of an error, with the reason as text."""
        return {"error": reason.error["message"]}


class Handler(ABC, Generic[Body]):
    """Answers one HTTP request for tokens; there is a subclass for each API.

    A subclass says how a completion is generated (``prepare``, ``complete``, ``stream``), and how the response is
    written (``whole``, ``events``). The first three run in threads, of which each completion has one.
    """

    prefix: str  # of the ids of answers
    response: type[EventStream] = EventStream

    def __init__(self, service: Service, request: Request, body: Body, n: int = 1) -> None:
        if n > MAX_COMPLETIONS:
            raise invalid(f"one request may have at most {MAX_COMPLETIONS} completions, not {n}", "prompt")
        self.id = f"{self.prefix}{uuid.uuid4()}"
        self.service = service
        self.host = service.host
        self.body = body
        self.sources: list[EngineSource] = []  # of each completion, from answer() to close()
        self.feed = Feed(service.host.n_seq)
        self.request = request
        self._n = n
        self._threads = asyncio.Semaphore(service.host.n_seq)

    # ---- what an API defines ----

    @abstractmethod
    def prepare(self) -> None:
        """Compute what all completions share, before the first of them."""

    @abstractmethod
    def complete(self, index: int, source: EngineSource) -> Object:
        """Return a whole completion."""

    @abstractmethod
    def stream(self, index: int, source: EngineSource) -> Iterator[Object]:
        """Start a completion and return an iterator of its chunks."""

    @abstractmethod
    def whole(self, found: list[Object]) -> Any:
        """Return the response from the results of all completions."""

    @abstractmethod
    def events(self, chunks: Chunks) -> AsyncIterator[Object | None]:
        """Yield the events of a stream; None: still working."""

    # ---- the request ----

    async def answer(self) -> Response:
        """Run the completions and return the response, which closes the handler if it is a stream."""
        slot = self.body.id_slot
        if slot is not None and not -1 <= slot < self.host.n_seq:
            raise invalid(f"id_slot must be from 0 to {self.host.n_seq - 1}, or -1 for any", "id_slot")
        self.service.admit()
        handed_over, kept, streams = False, None, self.service.streams
        try:
            self.sources = [self._source(index) for index in range(self._n)]
            if self.body.stream:
                kept = streams.begin(self.request, str(self.response.media_type), self.stop)
            found = await self._results(self.stream if self.body.stream else self.complete, kept is None)
            if found is None:
                return Response(status_code=CLOSED)
            if not self.body.stream:
                return JSONResponse(self.whole(found))
            handed_over = True
            response = self.response(self, self.events(self._chunks(found)))
            if kept is None:
                return response
            streams.fill(kept, response.parts(), self.close)
            return Reading(kept)
        finally:
            if not handed_over:
                if kept is not None:
                    streams.drop(kept)
                self.close()

    def stop(self) -> None:
        """Cancel all completions, and end the stream with the reason."""
        self.cancel()
        self.feed.put(-1, Cancelled("the stream was stopped"))

    def cancel(self) -> None:
        """Cancel all completions."""
        for source in self.sources:
            source.cancel()

    def close(self) -> None:
        """Cancel and release all completions, which hold memory of the library."""
        for source in self.sources:
            if source.current is not None:
                self.service.answers.add_job(source.current)
        self.cancel()
        self.sources = []
        self.feed.close()
        self.service.leave()

    @property
    def job(self) -> Job | None:
        """The job of the first completion, once it has started."""
        return self.sources[0].current

    def timings(self, index: int) -> dict[str, float]:
        """Return llama-server's object about the speed of a completion."""
        job = self.sources[index].current
        return job.timings() if job else {}

    def seeded(self, given: Object, choice: int) -> Object:
        """Return the arguments of a choice; several choices with one seed get different seeds."""
        seed = given.get("seed", self.host.seed)
        return {**given, "seed": seed + choice} if choice and seed not in RANDOM_SEEDS else given

    # ---- threads ----

    def _source(self, index: int) -> EngineSource:
        """Return where the tokens of a completion come from."""
        body, settings = self.body, self.service.settings
        progress = partial(self.feed.put_progress, index, bool(body.timings_per_token))
        return EngineSource(
            self.host,
            self.service.engine,
            settings.n_predict,
            body.repeat_last_n,
            id=self.id,
            traced=bool(body.longctx.trace),
            progress=progress if body.stream and body.return_progress else None,
            owner=owner_of(self.request),
            slot=None if body.id_slot in (None, -1) else body.id_slot,
            reuses=settings.cache_prompt if body.cache_prompt is None else body.cache_prompt,
            cache_reuse=self._cache_reuse(),
            prefills=self.service.prefills(getattr(body, "continue_final_message", None)),
        )

    def _cache_reuse(self) -> int | None:
        """Return the request's minimum of tokens after a gap; ApiError if the server's sequences cannot have gaps."""
        wanted = self.body.n_cache_reuse
        if wanted and self.host.session.spans == 1:
            reason = f"n_cache_reuse={wanted} is not supported here, start the server with --cache-reuse {wanted}"
            raise invalid(reason, "n_cache_reuse")
        return wanted

    async def _results(self, begin: Callable[[int, EngineSource], Any], ends: bool) -> list[Any] | None:
        """Begin all completions and return their results; None if the client disconnected and that ``ends`` them.

        The first failure cancels the other completions.
        """
        work = asyncio.ensure_future(self._begin_all(begin))
        gone: asyncio.Future[Any] = asyncio.ensure_future(until_gone(self.request.receive))
        waited: set[asyncio.Future[Any]] = {work, gone} if ends else {work}
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

    async def _begin_all(self, begin: Callable[[int, EngineSource], Any]) -> list[Any]:
        """Return the result or exception of each completion, or the exception of ``prepare``."""
        try:
            await self._run(self.prepare)
        except Exception as reason:
            return [reason]
        running = (self._run(begin, index, source) for index, source in enumerate(self.sources))
        return await asyncio.gather(*running, return_exceptions=True)

    async def _chunks(self, streams: list[Iterator[Object]]) -> Chunks:
        """Yield (completion, chunk) of all completions."""
        feeding = [asyncio.ensure_future(self._run(self.feed.put_all, i, chunks)) for i, chunks in enumerate(streams)]
        async for chunk in self.feed.chunks(len(feeding), self.service.settings.patience):
            yield chunk

    async def _run(self, function: Callable[Given, Result], *args: Given.args, **options: Given.kwargs) -> Result:
        """Run a function in a thread; a request has as many as there are sequences."""
        async with self._threads:
            try:
                return await self.service.in_thread(function, *args, **options)
            except Exception:
                self.cancel()
                raise
