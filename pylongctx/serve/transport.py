"""What HTTP does with requests and answers on their way: HEAD, compression in both directions, lost connections."""

import asyncio
import zlib
from collections.abc import Coroutine
from typing import Any

from anyio import fail_after, to_thread
from starlette.datastructures import Headers
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pylongctx.serve.errors import ApiError, invalid

GZIP = ("gzip", "x-gzip")
LEVEL = 5  # of the compression of answers
WRAPPED = 16 + zlib.MAX_WBITS  # zlib's number for gzip
READER_PATIENCE = 60.0  # seconds for a client to read what is sent


class Heads:
    """Answers HEAD as GET; the server underneath leaves out the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope.get("method") != "HEAD":
            await self._app(scope, receive, send)
            return
        asked = {**scope, "method": "GET"}  # a copy, since the server reads the method of its own
        try:
            await self._app(asked, receive, send)
        finally:
            scope["route"] = asked.get("route")  # for the count of answers


class Compressed:
    """Compresses answers for clients that accept gzip, but no streams, whose parts must come at once."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start: Message | None = None

        async def sending(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start" and "content-length" in Headers(raw=message["headers"]):
                start = message
                return
            begun, start = start, None
            if begun is not None and not message.get("more_body", False):
                await GZipMiddleware(_answer(begun, message), compresslevel=LEVEL)(scope, receive, send)
                return
            if begun is not None:
                await send(begun)
            await send(message)

        await self._app(scope, receive, sending)


def _answer(*messages: Message) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)

    return app


async def send_part(send: Send, part: bytes) -> None:
    """Send a part of a body; TimeoutError when the client does not read for too long."""
    with fail_after(READER_PATIENCE):  # asyncio.wait_for may lose a cancellation when the part was just sent
        await send({"type": "http.response.body", "body": part, "more_body": True})


async def until_gone(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run ``work`` to its end, and raise what it raises; a client that goes away cancels it."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(until_gone(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        gone.cancel()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


async def unpacked(body: bytes, encoding: str, most: int) -> bytes:
    """Return a body without its compression; ApiError when that is unknown or damaged, or for more than ``most``."""
    if encoding in ("", "identity"):
        return body
    if encoding not in GZIP:
        reason = f"bodies with Content-Encoding {encoding!r} are not read: send gzip, or no compression"
        raise ApiError(415, "invalid_request_error", reason)
    found = await to_thread.run_sync(_inflated, body, most)
    if len(found) > most:
        raise too_large(most, "unpacked ")
    return found


def _inflated(body: bytes, most: int) -> bytes:
    """Return an unpacked body, cut after ``most`` bytes and one more."""
    unpacking = zlib.decompressobj(WRAPPED)
    try:
        found = unpacking.decompress(body, most + 1)
    except zlib.error as reason:
        raise invalid(f"the body is not gzip as its Content-Encoding says: {reason}") from None
    if len(found) <= most and (not unpacking.eof or unpacking.unused_data):
        raise invalid("the body is not one whole gzip member as its Content-Encoding says: it ends early or late")
    return found


def too_large(most: int, what: str = "") -> ApiError:
    """Return the error for a body of more than ``most`` bytes."""
    reason = f"the {what}request is larger than {most} bytes (--max-body sets the limit)"
    return ApiError(413, "invalid_request_error", reason, code="request_too_large")
