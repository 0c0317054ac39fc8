"""What every request passes: who may ask, the limits of its size and its time, the count of answers."""

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
from pylongctx.serve.fields import MOST_NAMED, Unserved
from pylongctx.serve.metrics import Answers
from pylongctx.serve.service import Settings

CLOSE = {"Connection": "close"}  # the rest of the body is not waited for
BODIES = 8  # largest bodies that all requests together may hold
UNSERVED = b"x-unserved-fields"
MOST_WARNED = 256  # fields in the log
SLOWEST = 64 << 10  # bytes a second that a body must come with, after the first seconds
LOG = logging.getLogger("uvicorn.error")


class Guarded(Protocol):
    """A server behind a gate.

    Attributes
    ----------
    settings : Settings
        Who may ask, and the limits of requests.
    answers : Answers
        Counts them.
    """

    settings: Settings
    answers: Answers


class Gate:
    """ASGI middleware around the application, which makes answers of its exceptions.

    Parameters
    ----------
    app : ASGI application
        Answers what passes.
    service : Guarded
        Has the limits, the keys and the counts.
    public : frozenset of str
        Paths that need no key.
    """

    def __init__(self, app: ASGIApp, service: Guarded, public: frozenset[str]) -> None:
        self._app = app
        self._service = service
        self._access = Access(service.settings, public)
        self._n_held = 0  # bytes of bodies of all requests
        self._warned: set[str] = set()  # fields that the log names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or let the application answer it; ``scope["owner"]`` is who asks."""
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
            clear_frames(reason.__traceback__)  # they hold the request, and memory of the library
            await as_response(error, scope["path"])(scope, receive, counting)
        finally:
            self._n_held -= held[0]
            route = getattr(scope.get("route"), "path", "other")
            self._service.answers.add(route, status, time.monotonic() - began)

    def _names(self, unserved: dict[str, str]) -> bytes:
        """Return the names of fields that have no effect, and write each to the log the first time."""
        names = list(unserved)[:MOST_NAMED]
        new = [name for name in names if name not in self._warned]
        if new and len(self._warned) < MOST_WARNED:
            self._warned |= set(new)
            NOTES.warning("requests have fields without effect: %s", "; ".join(unserved[name] for name in new))
        return ", ".join(quote(name, safe=" ._-[]") for name in names).encode()

    async def _with_body(self, headers: Headers, receive: Receive, held: list[int]) -> Receive:
        """Read the body as far as it is allowed to be; returns a function that receives it again.

        ``held`` gets the bytes, of which all requests together may hold as many as some bodies have.
        """
        most, patience = self._service.settings.n_body, self._service.settings.body_patience
        size = headers.get("content-length", "0")
        parts: list[bytes] = []
        n, more, began = int(size) if size.isdigit() else 0, True, time.monotonic()
        while more and n <= most:
            left = began + patience + held[0] / SLOWEST - time.monotonic()
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
                raise unavailable("the requests of all clients together are too large now")
        if n > most:
            reason = f"the request is larger than {most} bytes (--max-body allows more)"
            raise ApiError(413, "invalid_request_error", reason, code="request_too_large")
        return _again([{"type": "http.request", "body": b"".join(parts), "more_body": False}], receive)


def _again(messages: list[Message], receive: Receive) -> Receive:
    async def next_message() -> Any:
        return messages.pop() if messages else await receive()

    return next_message


def as_response(reason: ApiError, path: str) -> JSONResponse:
    """Return the response of an error, as the clients of a path read it: those of Ollama want a text."""
    told = reason.error["message"] if path.startswith(OLLAMA) else reason.error
    return JSONResponse({"error": told}, reason.status, reason.headers)
