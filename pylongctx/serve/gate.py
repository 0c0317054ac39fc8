"""Middleware for all requests: access control, limits of size and time, and counts."""

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import re
import time
from collections.abc import Callable
from traceback import clear_frames
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pylongctx._log import LOG as NOTES
from pylongctx.serve.bodies import MAX_NAMED, OLLAMA, is_json
from pylongctx.serve.errors import ApiError, as_api_error, unavailable
from pylongctx.serve.metrics import Answers
from pylongctx.serve.service import Settings
from pylongctx.serve.transport import too_large, unpacked
from pylongctx.serve.unserved import Unserved

HEALTH = frozenset({"/health", "/v1/health"})
READING = frozenset({"GET", "HEAD", "OPTIONS"})
LOCAL = "localhost"  # the origins of all pages of this machine
LOCAL_PAGE = re.compile(r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?")
# headers that a page of another site cannot send without a CORS preflight
TELLING = ("x-requested-with", "authorization", "x-api-key")
CLOSE = {"Connection": "close"}  # the rest of the body is not read
BODIES = 8  # total size of all bodies, in multiples of the largest one
UNSERVED = b"x-unserved-fields"
MAX_WARNED = 256  # maximum different fields in the log
MIN_BYTES_PER_SECOND = 64 << 10  # minimum bytes per second of a body, after the first seconds
LOG = logging.getLogger("uvicorn.error")
Shown = Callable[[ASGIApp], ASGIApp]  # adds the headers with which pages of other sites can read a response


class Access:
    """The access checks of every request; the ``public`` paths need no key."""

    def __init__(self, settings: Settings, public: frozenset[str]) -> None:
        self._public = public | HEALTH
        self._keys = [key.encode() for key in settings.api_keys]
        self._hosts = frozenset(name.lower() for name in settings.hosts)
        self._origins = frozenset(settings.cors_origins)

    def check(self, scope: Scope) -> str | None:
        """Return the owner of a request, None if all share one key or need none; ApiError when it is refused."""
        headers = Headers(scope=scope)
        if scope["path"] not in HEALTH:
            self._check_host(headers)
        self._check_origin(headers)
        if scope["method"] not in READING and scope["method"] != "DELETE":  # needs a CORS preflight itself
            _check_intent(headers, scope["path"])
        if not self._keys or scope["path"] in self._public or scope["method"] == "OPTIONS":
            return None
        key = self._key(headers)
        return hashlib.sha256(key).hexdigest()[:16] if len(self._keys) > 1 else None

    def _check_host(self, headers: Headers) -> None:
        """Refuse unknown Host names, since DNS rebinding could give a foreign page the same origin."""
        host = headers.get("host")
        if host is None or "*" in self._hosts:
            return
        name = _name(host)
        if not (_is_address(name) or name == "localhost" or name.endswith(".localhost") or name in self._hosts):
            reason = f"this server does not accept the host name {name!r}; allow it with --allowed-hosts {name}"
            raise ApiError(403, "permission_error", reason, code="host_not_allowed")

    def _check_origin(self, headers: Headers) -> None:
        origin = headers.get("origin")
        if origin is None or origin in self._origins or "*" in self._origins:
            return
        if LOCAL in self._origins and LOCAL_PAGE.fullmatch(origin):
            return
        if urlsplit(origin).netloc != headers.get("host"):
            reason = f"pages of {origin} may not use this server; allow them with --cors-origin {origin}"
            raise ApiError(403, "permission_error", reason, code="origin_not_allowed")

    def _key(self, headers: Headers) -> bytes:
        """Return the API key of a request, which must be a known one."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = (key if scheme.lower() == "bearer" else headers.get("x-api-key", "")).strip().encode()
        if not any([hmac.compare_digest(given, known) for known in self._keys]):
            message = "this server needs an API key: send it as Authorization: Bearer KEY"
            raise ApiError(401, "authentication_error", message, code="invalid_api_key")
        return given


def _check_intent(headers: Headers, path: str) -> None:
    """Refuse requests that a form or a page of another site can send without a CORS preflight."""
    if not (is_json(headers, path) or any(name in headers for name in TELLING)):
        kind = headers.get("content-type", "")
        reason = f"send the header Content-Type: application/json, not {kind!r}, or X-Requested-With"
        raise ApiError(415, "invalid_request_error", reason)


def _name(host: str) -> str:
    """Return the host of a Host header, without its port."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return host


def _is_address(name: str) -> bool:
    """Return True if a host is an IP address, which cannot be used for DNS rebinding."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Guarded(Protocol):
    """A server protected by a gate."""

    settings: Settings
    answers: Answers


class Gate:
    """ASGI middleware around the application, which also turns its exceptions into responses, ``shown`` to pages."""

    def __init__(self, app: ASGIApp, service: Guarded, public: frozenset[str], shown: Shown) -> None:
        self._app = app
        self._shown = shown
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
        settings = self._service.settings
        unserved = scope["unserved"] = Unserved(settings.unknown_fields, settings.unknown_content == "note")

        async def counting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if unserved.found and unserved.policy == "warn":
                    message["headers"] = [*message["headers"], (UNSERVED, self._names(unserved.found))]
            await send(message)

        try:
            scope["owner"] = self._access.check(scope)
            receive = await self._with_body(scope, receive, held)
            await self._app(scope, receive, counting)
        except Exception as reason:
            if status:
                raise
            error = as_api_error(reason)
            if error.status == 500:
                LOG.exception("%s %s", scope["method"], scope["path"])
            clear_frames(reason.__traceback__)  # frees the request, and memory of the library
            answer: ASGIApp = as_response(error, scope["path"])
            if scope["method"] != "OPTIONS":  # a preflight that was refused stays so
                answer = self._shown(answer)
            await answer(scope, receive, counting)
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

    async def _with_body(self, scope: Scope, receive: Receive, held: list[int]) -> Receive:
        """Read the body up to its limit; returns a function that replays it.

        ``held`` counts the bytes, whose total over all requests is limited.
        """
        most, patience = self._service.settings.n_body, self._service.settings.body_patience
        size = Headers(scope=scope).get("content-length", "0")
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
            self._hold(len(parts[-1]), held)
            n, more = held[0], message.get("more_body", False)
        if n > most:
            raise too_large(most)
        body = await self._unpacked(scope, b"".join(parts), held)
        return _again([{"type": "http.request", "body": body, "more_body": False}], receive)

    def _hold(self, n: int, held: list[int]) -> None:
        """Count more bytes of a request; ApiError when all requests have too many."""
        held[0] += n
        self._n_held += n
        if self._n_held > BODIES * self._service.settings.n_body:
            raise unavailable("the requests of all clients together are too large now, try again later")

    async def _unpacked(self, scope: Scope, body: bytes, held: list[int]) -> bytes:
        """Return a body without its compression, of which the application sees nothing."""
        encoding = Headers(scope=scope).get("content-encoding", "").strip().lower()
        if not body or not encoding:
            return body
        found = await unpacked(body, encoding, self._service.settings.n_body)
        self._hold(len(found), held)
        scope["headers"] = [(name, value) for name, value in scope["headers"] if name != b"content-encoding"]
        return found


def _again(messages: list[Message], receive: Receive) -> Receive:
    async def next_message() -> Any:
        return messages.pop() if messages else await receive()

    return next_message


def as_response(reason: ApiError, path: str) -> JSONResponse:
    """Return the response of an error in the form of the path's API; Ollama's clients expect a text."""
    shown = reason.error["message"] if path.startswith(OLLAMA) else reason.error
    return JSONResponse({"error": shown}, reason.status, reason.headers)
