"""The application: routes, errors, middleware and the page."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import resources
from pathlib import PurePath
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from pylongctx import __version__
from pylongctx.serve import facts, generate, kobold, messages, ollama, render, rerank, responses, texts
from pylongctx.serve.access import LOCAL, LOCAL_PAGE
from pylongctx.serve.errors import ApiError, invalid
from pylongctx.serve.gate import Gate, Guarded, as_response
from pylongctx.serve.service import Service
from pylongctx.serve.web import INDEX, Prefix, add_folder

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


def create_app(service: Service) -> FastAPI:
    """Return the ASGI application of a service; its end closes the service."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(title="pylongctx", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.include_router(generate.routes(service))
    app.include_router(messages.routes(service))
    app.include_router(responses.routes(service))
    app.include_router(ollama.routes(service))
    app.include_router(kobold.routes(service))
    app.include_router(facts.routes(service))
    app.include_router(texts.routes(service))
    app.include_router(rerank.routes(service))
    enclose(app, service)
    return app


def enclose(app: FastAPI, service: Guarded) -> None:
    """Add the page, access control and error handling to the routes of a server."""
    settings = service.settings
    has_page = settings.page and settings.static_folder is None
    public = _add_page(app) if has_page else frozenset[str]()
    if has_page:
        app.include_router(render.routes())
    is_taken = "/" in public or (settings.static_folder is not None and (settings.static_folder / INDEX).is_file())
    methods = ["HEAD"] if is_taken else ["GET", "HEAD"]
    app.add_api_route("/", ollama.running, methods=methods, include_in_schema=False)
    if settings.static_folder is not None:
        public |= add_folder(app, settings.static_folder) | ({"/"} if is_taken else set())
    app.add_exception_handler(RequestValidationError, _on_validation)
    app.add_exception_handler(HTTPException, _on_http)
    if settings.cors_origins:
        origins = list(settings.cors_origins)
        local = LOCAL_PAGE.pattern if LOCAL in origins else None
        more: dict[str, Any] = {"allow_methods": ["*"], "allow_headers": ["*"]}
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_origin_regex=local, **more)
    app.add_middleware(Gate, service=service, public=public)
    if settings.prefix:
        app.add_middleware(Prefix, prefix=settings.prefix)


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
