"""The application: routes, errors, middleware, the page, and static files."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib import resources
from pathlib import Path, PurePath
from typing import Any

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from pylongctx import __version__
from pylongctx.serve import anthropic, facts, markup, native, ollama, openai, responses, streams, texts
from pylongctx.serve.bodies import Fields, read
from pylongctx.serve.errors import ApiError, invalid
from pylongctx.serve.gate import LOCAL, LOCAL_PAGE, Gate, Guarded, Shown, as_response
from pylongctx.serve.service import Service
from pylongctx.serve.transport import Compressed, Heads

INDEX = "index.html"
MAX_AT_ONCE = 2  # texts; the others wait, and answers of models are not slowed down
TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".webmanifest": "application/manifest+json",
}
HEADERS = {  # the page loads nothing from other sites and cannot be framed
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def add_folder(app: FastAPI, folder: Path) -> frozenset[str]:
    """Serve the files of a folder where the app has no route; returns the paths of existing files."""
    routes = {getattr(route, "path", "") for route in app.routes}
    names = {f"/{path.relative_to(folder).as_posix()}" for path in folder.rglob("*") if path.is_file()}
    pages = {name.removesuffix(INDEX) for name in names if name.endswith(f"/{INDEX}")}
    app.mount("/", StaticFiles(directory=folder, html=True), name="files")
    return frozenset((names | pages) - routes)


class Prefix:
    """Removes a prefix, such as ``/v2``, from the paths of requests; other paths are not found."""

    def __init__(self, app: ASGIApp, prefix: str, shown: Shown) -> None:
        self._app = app
        self._prefix = prefix
        self._shown = shown

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        if not path.startswith(f"{self._prefix}/"):
            reason = ApiError(
                404, "not_found_error", f"paths of this server begin with {self._prefix}: {path} does not"
            )
            await self._shown(as_response(reason, path))(scope, receive, send)
            return
        short = path.removeprefix(self._prefix)
        raw = scope["raw_path"].removeprefix(self._prefix.encode())
        await self._app({**scope, "path": short, "raw_path": raw}, receive, send)


class RenderBody(Fields):
    """POST /render."""

    text: str


def render_routes() -> APIRouter:
    """Return the route that renders Markdown for the page."""
    api = APIRouter()
    limiter: list[CapacityLimiter] = []  # made inside the loop that uses it

    @api.post("/render", summary="Markdown, formulas and code as HTML, for the page: a list of blocks")
    async def render(request: Request) -> dict[str, list[str]]:
        body = await read(request, RenderBody)
        if not limiter:
            limiter.append(CapacityLimiter(MAX_AT_ONCE))
        return {"blocks": await to_thread.run_sync(markup.blocks, body.text, limiter=limiter[0])}

    return api


def create_app(service: Service) -> FastAPI:
    """Return the ASGI application of a service; its end closes the service."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await service.streams.close()
        service.close()

    app = FastAPI(title="pylongctx", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    for module in (openai, native, anthropic, responses, ollama, facts, texts):
        app.include_router(module.routes(service))
    app.include_router(streams.routes(service.streams))
    enclose(app, service)
    return app


def enclose(app: FastAPI, service: Guarded) -> None:
    """Add the page, access control and error handling to the routes of a server."""
    settings = service.settings
    has_page = settings.page and settings.static_folder is None
    public = _add_page(app) if has_page else frozenset[str]()
    if has_page:
        app.include_router(render_routes())
    is_taken = "/" in public or (settings.static_folder is not None and (settings.static_folder / INDEX).is_file())
    if not is_taken:
        app.add_api_route("/", ollama.running, include_in_schema=False)
    if settings.static_folder is not None:
        public |= add_folder(app, settings.static_folder) | ({"/"} if is_taken else set())
    app.add_exception_handler(RequestValidationError, _on_validation)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_middleware(Compressed)
    app.add_middleware(Heads)
    cors = _cors(settings.cors_origins)
    shown: Shown = partial(CORSMiddleware, **cors) if cors else _as_it_is
    if cors:
        app.add_middleware(CORSMiddleware, **cors)
    app.add_middleware(Gate, service=service, public=public, shown=shown)  # outside, also for CORS preflights
    if settings.prefix:
        app.add_middleware(Prefix, prefix=settings.prefix, shown=shown)


def _cors(origins: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of the middleware for pages of other sites; empty if none may ask."""
    local = LOCAL_PAGE.pattern if LOCAL in origins else None
    own = {"allow_methods": ["*"], "allow_headers": ["*"], "expose_headers": ["X-Unserved-Fields", "Retry-After"]}
    return {"allow_origins": list(origins), "allow_origin_regex": local, **own} if origins else {}


def _as_it_is(app: ASGIApp) -> ASGIApp:
    return app


def _add_page(app: FastAPI) -> frozenset[str]:
    """Serve the files of the page; returns their paths, which need no key."""
    folder = resources.files("pylongctx.serve") / "page"
    names = [file.name for file in folder.iterdir() if PurePath(file.name).suffix in TYPES] if folder.is_dir() else []
    paths = {f"/{name}": name for name in names} | ({"/": INDEX} if INDEX in names else {})

    def add(path: str, name: str) -> None:
        @app.get(path, include_in_schema=False)
        def file() -> Response:
            return Response((folder / name).read_bytes(), 200, HEADERS, TYPES[PurePath(name).suffix])

    for path, name in paths.items():
        add(path, name)
    return frozenset(paths)


async def _on_http(request: Request, reason: Any) -> Response:
    kind = "not_found_error" if reason.status_code == 404 else "invalid_request_error"
    error = ApiError(reason.status_code, kind, f"{reason.detail}: {request.method} {request.url.path}")
    return as_response(error, request.url.path)


async def _on_validation(request: Request, reason: Any) -> Response:
    first = reason.errors()[0]
    return as_response(invalid(first["msg"], str(first["loc"][-1])), request.url.path)
