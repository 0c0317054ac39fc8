"""Middleware for all requests: access control, limits of size and time, and counts."""

import asyncio
import logging
import time
from traceback import clear_frames
from typing import Any, Protocol
from urllib.parse import quote

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pylongctx._log import LOG as NOTES
from pylongctx.serve.access import OLLAMA, Access
from pylongctx.serve.errors import ApiError, as_api_error, unavailable
from pylongctx.serve.fields import MAX_NAMED, Unserved
from pylongctx.serve.metrics import Answers
from pylongctx.serve.service import Settings

CLOSE = {"Connection": "close"}  # the rest of the body is not read
BODIES = 8  # total size of all bodies, in multiples of the largest one
UNSERVED = b"x-unserved-fields"
MAX_WARNED = 256  # maximum different fields in the log
MIN_BYTES_PER_SECOND = 64 << 10  # minimum bytes per second of a body, after the first seconds
LOG = logging.getLogger("uvicorn.error")


class Guarded(Protocol):
    """A server protected by a gate.

    Attributes
    ----------
    settings : Settings
        Access control and limits of requests.
    answers : Answers
        Counts answers.
    """

    settings: Settings
    answers: Answers


class Gate:
    """ASGI middleware around the application, which also turns its exceptions into responses.

    Parameters
    ----------
    app : ASGI application
        Handles accepted requests.
    service : Guarded
        Has the limits, the keys and the counts.
    public : frozenset of str
        Paths that need no key.
    """

    def __init__(self, app: ASGIApp, service: Guarded, public: frozenset[str]) -> None:
        self._app = app
        self._service = service
        self._access = Access(service.settings, public)
        self._n_held = 0  # total bytes of request bodies
        self._warned: set[str] = set()  # fields that were logged

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it to the application; ``scope["owner"]`` is its owner."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, began, held = 0, time.monotonic(), [0]
        unserved = scope["unserved"] = Unserved(self._service.settings.unknown_fields)

        async def counting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if unserved.found and unserved.policy == "warn":
                    message["headers"] = [*message["headers"], (UNSERVED, self._names(unserved.found))]
            await send(message)

        try:
            scope["owner"] = self._access.check(scope)
            receive = await self._with_body(Headers(scope=scope), receive, held)
            await self._app(scope, receive, counting)
        except Exception as reason:
            if status:
                raise
            error = as_api_error(reason)
            if error.status == 500:
                LOG.exception("%s %s", scope["method"], scope["path"])
            clear_frames(reason.__traceback__)  # frees the request, and memory of the library
            await as_response(error, scope["path"])(scope, receive, counting)
        finally:
            self._n_held -= held[0]
            route = getattr(scope.get("route"), "path", "other")
            self._service.answers.add(route, status, time.monotonic() - began)

    def _names(self, unserved: dict[str, str]) -> bytes:
        """Return the names of fields without effect, and log each of them once."""
        names = list(unserved)[:MAX_NAMED]
        new = [name for name in names if name not in self._warned]
        if new and len(self._warned) < MAX_WARNED:
            self._warned |= set(new)
            NOTES.warning("requests have fields without effect: %s", "; ".join(unserved[name] for name in new))
        return ", ".join(quote(name, safe=" ._-[]") for name in names).encode()

    async def _with_body(self, headers: Headers, receive: Receive, held: list[int]) -> Receive:
        """Read the body up to its limit; returns a function that replays it.

        ``held`` counts the bytes, whose total over all requests is limited.
        """
        most, patience = self._service.settings.n_body, self._service.settings.body_patience
        size = headers.get("content-length", "0")
        parts: list[bytes] = []
        n, more, began = int(size) if size.isdigit() else 0, True, time.monotonic()
        while more and n <= most:
            left = began + patience + held[0] / MIN_BYTES_PER_SECOND - time.monotonic()
            try:
                message = await asyncio.wait_for(receive(), left)
            except asyncio.TimeoutError:
                reason = f"the body of the request did not come within {patience:g} s"
                raise ApiError(408, "invalid_request_error", reason, code="request_timeout", headers=CLOSE) from None
            if message["type"] != "http.request":
                return _again([message], receive)
            parts.append(message.get("body", b""))
            held[0] += len(parts[-1])
            self._n_held += len(parts[-1])
            n, more = held[0], message.get("more_body", False)
            if self._n_held > BODIES * most:
                raise unavailable("the requests of all clients together are too large now, try again later")
        if n > most:
            reason = f"the request is larger than {most} bytes (--max-body sets the limit)"
            raise ApiError(413, "invalid_request_error", reason, code="request_too_large")
        return _again([{"type": "http.request", "body": b"".join(parts), "more_body": False}], receive)


def _again(messages: list[Message], receive: Receive) -> Receive:
    async def next_message() -> Any:
        return messages.pop() if messages else await receive()

    return next_message


def as_response(reason: ApiError, path: str) -> JSONResponse:
    """Return the response of an error in the form of the path's API; Ollama's clients expect a text."""
    shown = reason.error["message"] if path.startswith(OLLAMA) else reason.error
    return JSONResponse({"error": shown}, reason.status, reason.headers)
