"""What every request passes: the limit of its size, the API key, the count of answers."""

import hmac
import logging
from traceback import clear_frames
from typing import Any

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pylongctx.serve.errors import ApiError, as_api_error
from pylongctx.serve.service import Service

PUBLIC = frozenset({"/health", "/v1/health"})
LOG = logging.getLogger("uvicorn.error")


class Gate:
    """ASGI middleware around the application, which makes answers of its exceptions.

    Parameters
    ----------
    app : ASGI application
        Answers what passes.
    service : Service
        Has the limits, the keys and the counts.
    public : frozenset of str
        Paths that need no key.
    """

    def __init__(self, app: ASGIApp, service: Service, public: frozenset[str]) -> None:
        self._app = app
        self._service = service
        self._public = public | PUBLIC
        self._keys = [key.encode() for key in service.settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or let the application answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0

        async def counting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            self._check_key(scope)
            receive = await self._with_body(Headers(scope=scope), receive)
            await self._app(scope, receive, counting)
        except Exception as reason:
            if status:
                raise
            error = as_api_error(reason)
            if error.status == 500:
                LOG.exception("%s %s", scope["method"], scope["path"])
            clear_frames(reason.__traceback__)  # they hold the request, and memory of the library
            await as_response(error)(scope, receive, counting)
        finally:
            route = scope.get("route")
            self._service.answers.add(getattr(route, "path", "other"), status)

    def _check_key(self, scope: Scope) -> None:
        if not self._keys or scope["path"] in self._public or scope["method"] == "OPTIONS":
            return
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = (key if scheme.lower() == "bearer" else headers.get("x-api-key", "")).strip().encode()
        if not any([hmac.compare_digest(given, known) for known in self._keys]):
            message = "this server needs an API key: send it as Authorization: Bearer KEY"
            raise ApiError(401, "authentication_error", message, code="invalid_api_key")

    async def _with_body(self, headers: Headers, receive: Receive) -> Receive:
        """Read the body as far as it is allowed to be; returns a function that receives it again."""
        most = self._service.settings.n_body
        size = headers.get("content-length", "0")
        parts: list[bytes] = []
        n, more = int(size) if size.isdigit() else 0, True
        while more and n <= most:
            message = await receive()
            if message["type"] != "http.request":
                return _again([message], receive)
            parts.append(message.get("body", b""))
            n, more = sum(map(len, parts)), message.get("more_body", False)
        if n > most:
            reason = f"the request is larger than {most} bytes (--max-body allows more)"
            raise ApiError(413, "invalid_request_error", reason, code="request_too_large")
        return _again([{"type": "http.request", "body": b"".join(parts), "more_body": False}], receive)


def _again(messages: list[Message], receive: Receive) -> Receive:
    async def next_message() -> Any:
        return messages.pop() if messages else await receive()

    return next_message


def as_response(reason: ApiError) -> JSONResponse:
    """Return the response of an error."""
    return JSONResponse({"error": reason.error}, reason.status, reason.headers)
