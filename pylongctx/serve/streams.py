"""Streams that a client can rejoin after it lost its connection, by llama-server's header ``X-Conversation-Id``."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.types import Receive, Scope, Send

from pylongctx.serve.bodies import Fields, owner_of, read
from pylongctx.serve.errors import ApiError, invalid
from pylongctx.serve.transport import send_part, while_connected

HEADER = "x-conversation-id"
MAX_NAME = 256  # characters
MAX_NAMES = 1024  # in one question
MAX_BYTES = 4 << 20  # of a stream; its first bytes are dropped then
MAX_ENDED = 64 << 20  # bytes of all streams that have ended
VARIANT = "::"  # in llama-server's page a name of a model follows
Key = tuple[str | None, str]  # owner and name
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Stream:
    """The bytes of one streamed answer, which any number of readers follow.

    It expires ``keep`` seconds after its end, or while it is written after as long without a reader.
    """

    def __init__(
        self, key: Key, media_type: str, keep: float, cancel: Callable[[], None], expire: Callable[["Stream"], None]
    ) -> None:
        self.key = key
        self.media_type = media_type
        self.started = int(time.time())
        self.completed = 0  # seconds since the epoch; 0: it is being written
        self.n_dropped = 0
        self._kept = bytearray()
        self._keep = keep
        self._cancel = cancel
        self._expire = expire
        self._n_readers = 0
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None  # what waits for a reader, or after the end

    @property
    def n_kept(self) -> int:
        """The bytes in memory."""
        return len(self._kept)

    def add(self, part: bytes) -> None:
        """Append bytes, and drop the first ones of a stream that is too long."""
        self._kept += part
        n_over = max(0, len(self._kept) - MAX_BYTES)
        del self._kept[:n_over]
        self.n_dropped += n_over
        self._wake()

    def rest(self) -> None:
        """Begin the time after which the stream expires."""
        self._go_on()
        self._timer = asyncio.get_running_loop().call_later(self._keep, self._expire, self)

    def end(self) -> None:
        """Let readers end; nothing is added after this."""
        self.completed = int(time.time())
        self.rest()
        self._wake()

    def leave(self) -> None:
        """Cancel the answer if it is being written."""
        self._go_on()
        if not self.completed:
            self._cancel()

    async def read(self, at: int) -> AsyncGenerator[bytes, None]:
        """Yield what follows the first ``at`` bytes, up to the end; ApiError when that was dropped."""
        self._n_readers += 1
        if not self.completed:
            self._go_on()
        try:
            while True:
                if at < self.n_dropped:
                    raise lost(at, self.n_dropped)
                if part := bytes(self._kept[at - self.n_dropped :]):
                    at += len(part)
                    yield part
                elif self.completed:
                    return
                else:
                    await self._changed.wait()
        finally:
            self._n_readers -= 1
            if not (self.completed or self._n_readers):
                self.rest()

    def entry(self) -> dict[str, Any]:
        """Return the object of a lookup."""
        return {
            "conversation_id": self.key[1],
            "is_done": self.completed > 0,
            "total_bytes": self.n_dropped + self.n_kept,
            "started_at": self.started,
            "completed_at": self.completed,
        }

    def _go_on(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class Streams:
    """All streams that can be rejoined, by the owner of their request and by name."""

    def __init__(self, keep: float) -> None:
        self._keep = keep
        self._known: dict[Key, Stream] = {}
        self._filling: set[asyncio.Task[None]] = set()

    def begin(self, request: Request, media_type: str, cancel: Callable[[], None]) -> Stream | None:
        """Return a new stream if a request has a name for one, instead of an earlier one of this name."""
        name = request.headers.get(HEADER, "")
        if not name or not self._keep:
            return None
        if len(name) > MAX_NAME:
            raise invalid(f"X-Conversation-Id has {len(name)} characters, at most {MAX_NAME} are possible")
        key = owner_of(request), name
        self.remove(key)
        self._known[key] = Stream(key, media_type, self._keep, cancel, self._expire)
        return self._known[key]

    def fill(self, stream: Stream, parts: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        """Write a stream from now on, whoever reads it; ``close`` follows its end."""
        stream.rest()
        task = asyncio.ensure_future(self._fill(stream, parts, close))
        self._filling.add(task)
        task.add_done_callback(self._filling.discard)

    def drop(self, stream: Stream) -> None:
        """Forget a stream that will not be filled."""
        self._expire(stream)
        stream.end()

    def find(self, key: Key) -> Stream:
        """Return a stream; ApiError when there is none."""
        if key not in self._known:
            raise missing()
        return self._known[key]

    def lookup(self, owner: str | None, names: list[str]) -> list[Stream]:
        """Return the streams with one of some names, or with one of them and a model's."""
        own = {name: stream for (of, name), stream in self._known.items() if of == owner}
        wanted, begins = set(names), tuple(name + VARIANT for name in names)
        return [stream for name, stream in own.items() if name in wanted or name.startswith(begins)]

    def remove(self, key: Key) -> None:
        """Forget a stream, and cancel it if it is being written; without one, do nothing."""
        stream = self._known.pop(key, None)
        if stream is not None:
            stream.leave()

    async def close(self) -> None:
        """Cancel everything."""
        for key in list(self._known):
            self.remove(key)
        for task in self._filling:
            task.cancel()
        await asyncio.gather(*self._filling, return_exceptions=True)

    def _expire(self, stream: Stream) -> None:
        if self._known.get(stream.key) is stream:
            self.remove(stream.key)

    async def _fill(self, stream: Stream, parts: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        try:
            async for part in parts:
                stream.add(part)
        finally:
            close()
            stream.end()
            self._make_room()

    def _make_room(self) -> None:
        """Forget the oldest streams that have ended, until all others together are small enough."""
        ended = sorted((one for one in self._known.values() if one.completed), key=lambda one: one.completed)
        n = sum(one.n_kept for one in ended)
        for stream in ended:
            if n <= MAX_ENDED:
                return
            n -= stream.n_kept
            self.remove(stream.key)


class Reading(Response):
    """The response of a reader, who can go away and come back."""

    def __init__(self, stream: Stream, at: int = 0) -> None:
        super().__init__(headers=HEADERS, media_type=stream.media_type)
        del self.headers["content-length"]
        self._parts = stream.read(at)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the bytes, until the stream ends or the client is gone."""
        try:
            await while_connected(receive, self._send(send))
        finally:
            await self._parts.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for part in self._parts:
            await send_part(send, part)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def missing() -> ApiError:
    """Return the error for an unknown stream."""
    reason = "there is no such stream: it has expired, or was not begun with the header X-Conversation-Id and this key"
    return ApiError(404, "not_found_error", reason, "conv_id")


def lost(at: int, n_dropped: int) -> ApiError:
    """Return the error for bytes that are not kept any more."""
    return invalid(f"the first {n_dropped} bytes of this stream are not kept any more: it was read from {at}", "from")


class LookupBody(Fields):
    """POST /v1/streams/lookup."""

    conversation_ids: list[str] = []


def routes(streams: Streams) -> APIRouter:
    """Return llama-server's routes."""
    api = APIRouter()

    @api.get("/v1/stream", summary="Read a stream again, from a byte on")
    async def rejoin(request: Request) -> Response:
        stream = streams.find(key_of(request))
        at = request.query_params.get("from") or "0"
        if not (at.isascii() and at.isdigit()):
            raise invalid(f"from must be a number of bytes, not {at[:20]!r}", "from")
        if int(at) < stream.n_dropped:
            raise lost(int(at), stream.n_dropped)
        return Reading(stream, int(at))

    @api.delete("/v1/stream", summary="Stop the answer of a stream, and forget it", status_code=204)
    async def stop(request: Request) -> Response:
        streams.remove(key_of(request))
        return Response(status_code=204)

    @api.post("/v1/streams/lookup", summary="Which of some streams there are")
    async def lookup(request: Request) -> list[dict[str, Any]]:
        body = await read(request, LookupBody)
        if len(body.conversation_ids) > MAX_NAMES:
            raise invalid(f"at most {MAX_NAMES} conversation_ids in one request", "conversation_ids")
        return [one.entry() for one in streams.lookup(owner_of(request), body.conversation_ids)]

    return api


def key_of(request: Request) -> Key:
    """Return the key of the stream that a request is for; ApiError without a name."""
    name = request.query_params.get("conv_id", "")
    if not name:
        raise invalid("name the stream: conv_id is the X-Conversation-Id of its request", "conv_id")
    return owner_of(request), name
