"""Access control: the names of this server, the origins of pages, API keys."""

import hashlib
import hmac
import ipaddress
import re
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from pylongctx.serve.errors import ApiError
from pylongctx.serve.service import Settings

HEALTH = frozenset({"/health", "/v1/health"})
OLLAMA = "/api/"  # prefix of the routes of its API
READING = frozenset({"GET", "HEAD", "OPTIONS"})
LOCAL = "localhost"  # the origins of all pages of this machine
LOCAL_PAGE = re.compile(r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?")
# headers that a page of another site cannot send without a CORS preflight
TELLING = ("x-requested-with", "authorization", "x-api-key")


class Access:
    """The access checks of every request.

    Parameters
    ----------
    settings : Settings
        Has the keys, the hosts and the origins.
    public : frozenset of str
        Paths that need no key.
    """

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
        if scope["method"] not in READING:
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


def is_json(headers: Headers, path: str) -> bool:
    """Return True if a body is declared as JSON; clients of Ollama other than browsers may omit it."""
    said = headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"
    return said or (path.startswith(OLLAMA) and not _is_browser(headers))


def _is_browser(headers: Headers) -> bool:
    """Return True if a page may have sent a request; browsers always send one of these headers."""
    by_browser = any(name in headers for name in ("origin", "sec-fetch-site"))
    return by_browser or headers.get("user-agent", "").startswith("Mozilla/")


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
