"""A server of several models, which loads the model of a request and forwards the request to it."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from pylongctx import __version__
from pylongctx._log import LOG
from pylongctx.serve import ollama, streams
from pylongctx.serve.app import INDEX, enclose
from pylongctx.serve.bodies import json_of, read
from pylongctx.serve.cards import MODALITIES
from pylongctx.serve.children import Child, Children, ModelSource, OneModel, Shelf
from pylongctx.serve.errors import ApiError, invalid
from pylongctx.serve.metrics import TYPE, Answers, merged
from pylongctx.serve.ollama import chat_piece, frame, generate_piece
from pylongctx.serve.service import Settings, fingerprint
from pylongctx.serve.transport import send_part, while_connected

Object = dict[str, Any]
# hop-by-hop headers, and those that every server writes itself
HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade expect".split()
)
OWN = HOP | {b"date", b"server"}
ASKED = HOP | {b"content-length"}  # of requests, whose bodies are sent as a whole
ENDS = {"/api/chat": ("messages", chat_piece), "/api/generate": ("prompt", generate_piece)}
QUIET = frozenset({"/metrics", "/props"})  # ask about a model, and do not keep it awake
AT_ONCE = frozenset({"0", "0.0", "0s", "0m", "0h"})  # values of Ollama's keep_alive that unload a model


@dataclass
class Router:
    """The parts of a server of several models."""

    shelf: Shelf | OneModel
    children: Children
    settings: Settings
    autoload: bool = True  # whether a request loads its model
    first: Collection[str] = ()  # names of models that are loaded before the first request
    answers: Answers = field(default_factory=Answers)
    started: int = field(default_factory=lambda: int(time.time()))

    def source(self, name: Any) -> ModelSource:
        """Return the model of a name, or the only one without a name; ApiError when there is none."""
        if isinstance(self.shelf, OneModel):
            return self.shelf.only
        sources = self.shelf.sources()
        if name in (None, "") and len(sources) == 1:
            return next(iter(sources.values()))
        known = ", ".join(map(repr, list(sources)[:8]))
        if not isinstance(name, str) or not name:
            raise invalid(f"the request has no field model: this server has {known}", "model")
        found = sources.get(name) or sources.get(name.removesuffix(ollama.LATEST))
        if found is None:
            reason = f"there is no model {name[:60]!r}: this server has {known}"
            raise ApiError(404, "not_found_error", reason, "model", "model_not_found")
        return found

    @property
    def sleeps(self) -> bool:
        """Whether models are unloaded when they are idle."""
        return self.children.limits.idle < math.inf

    def sleep(self) -> Object:
        """Return what ``/health`` says about the sleep of the only model; empty for a server of several."""
        if not self.sleeps or not isinstance(self.shelf, OneModel):
            return {}
        return {"is_sleeping": self.children.of(self.shelf.only).is_sleeping}

    def entry(self, source: ModelSource) -> Object:
        """Return a model in the form of OpenAI's and llama-server's clients."""
        child = self.children.of(source)
        status: Object = {"value": "sleeping" if child.is_sleeping else child.status}
        if child.status != "unloaded" or child.exit_code is not None:
            status["args"] = child.words
        if child.exit_code is not None:
            status |= {"failed": True, "exit_code": child.exit_code}
        own = {"id": source.name, "object": "model", "created": self.started, "owned_by": "pylongctx"}
        own["architecture"] = MODALITIES
        return own | child.info | {"path": source.path, "status": status}


def create_app(router: Router) -> FastAPI:
    """Return the ASGI application of a server of several models."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        for source in (router.source(name) for name in router.first):
            try:
                async with router.children.using(source):
                    pass
            except ApiError as reason:
                LOG.error("error: %s; the next request tries again", reason)
        watch = asyncio.ensure_future(router.children.sleep_when_idle()) if router.sleeps else None
        yield
        if watch is not None:
            watch.cancel()
        await router.children.close()

    app = FastAPI(title="pylongctx", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    _add_models(app, router)
    _add_ollama(app, router)
    _add_streams(app, router)

    @app.get("/health")
    @app.get("/v1/health")
    async def health() -> Object:
        return {"status": "ok", **router.sleep()}

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        if "model" in request.query_params or isinstance(router.shelf, OneModel):
            source = router.source(request.query_params.get("model"))
            if router.children.of(source).is_sleeping:
                return Response(merged(router.answers, {}), media_type=TYPE)
            return await _forward(router, request)
        children = router.children.loaded()
        pages = await asyncio.gather(*(child.ask("/metrics") for child in children))
        texts = {child.source.name: page.text for child, page in zip(children, pages, strict=True)}
        return Response(merged(router.answers, texts), media_type=TYPE)

    async def forward(request: Request) -> Response:
        return await _forward(router, request)

    enclose(app, router)  # adds the page before the routes that are forwarded
    folder = router.settings.static_folder
    last = len(app.router.routes) - (folder is not None)  # static files come last, since they match every path
    app.router.routes.insert(last, PassedOn(forward, folder))
    return app


class PassedOn(Route):
    """The route of all requests for models: every path except those of files in the folder."""

    def __init__(self, endpoint: Callable[[Request], Awaitable[Response]], folder: Path | None) -> None:
        super().__init__("/{path:path}", endpoint, methods=["GET", "POST", "PUT", "DELETE", "PATCH"])
        self._folder = folder

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Return whether a request is for a model."""
        if self._folder is not None and scope["type"] == "http":
            path = self._folder / scope["path"].lstrip("/")
            if path.is_file() or (path / INDEX).is_file():
                return Match.NONE, {}
        match, found = super().matches(scope)
        return match, {**found, "route": self}  # for the count of answers


def _add_models(app: FastAPI, router: Router) -> None:
    """Add llama-server's routes about models."""

    @app.get("/v1/models")
    @app.get("/models")
    async def models() -> Object:
        return {"object": "list", "data": list(map(router.entry, router.shelf.sources().values()))}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Object:
        return router.entry(router.source(name))

    @app.post("/models/load")
    async def load(request: Request) -> Object:
        async with router.children.using(await _named(router, request)):
            return {"success": True}

    @app.post("/models/unload")
    async def unload(request: Request) -> Object:
        await router.children.unload(await _named(router, request))
        return {"success": True}

    @app.get("/props")
    async def props(request: Request) -> Response:
        if "model" in request.query_params or isinstance(router.shelf, OneModel):
            source = router.source(request.query_params.get("model"))
            if router.children.of(source).is_sleeping:
                card = {"model_alias": source.name, "model_path": source.path, "is_sleeping": True}
                return JSONResponse(card | {"build_info": fingerprint()})
            return await _forward(router, request)
        found = {"role": "router", "max_instances": router.children.limits.n, "models_autoload": router.autoload}
        return JSONResponse(found | {"build_info": fingerprint()})


def _add_ollama(app: FastAPI, router: Router) -> None:
    """Add Ollama's routes about models."""

    @app.get("/api/tags")
    def tags() -> Object:
        return {"models": list(_cards(router))}

    @app.get("/api/ps")
    async def ps() -> Object:
        answers = await asyncio.gather(*(child.ask("/api/ps") for child in router.children.loaded()))
        return {"models": [model for answer in answers for model in answer.json()["models"]]}

    @app.post("/api/show")
    async def show(request: Request) -> Response:
        source = await _named(router, request)
        card = await run_in_threadpool(lambda: source.card)
        if router.children.of(source).status == "loaded" or card is None:
            return await _forward(router, request)
        return JSONResponse(card.shown(source.path, {}))

    @app.get("/api/version")
    async def version() -> Object:
        return {"version": ollama.VERSION}

    for method, path in ollama.CHANGING:
        app.add_api_route(f"/api/{path}", ollama.refuse, methods=[method])


def _add_streams(app: FastAPI, router: Router) -> None:
    """Add the routes of streams that are read again; a stream has its model in its name, as in llama-server's page."""

    @app.api_route("/v1/stream", methods=["GET", "DELETE"])
    async def stream(request: Request) -> Response:
        _, name = streams.key_of(request)
        source = router.source(request.query_params.get("model") or name.partition(streams.VARIANT)[2])
        if router.children.of(source).status == "loaded":
            return Forwarded(router.children, source, b"")
        if request.method == "DELETE":
            return Response(status_code=204)
        raise streams.missing()

    @app.post("/v1/streams/lookup")
    async def lookup(request: Request) -> list[Object]:
        body = await read(request, streams.LookupBody)
        key = {name: value for name in ("authorization", "x-api-key") if (value := request.headers.get(name))}
        children, names = router.children.loaded(), body.model_dump()
        asked = (child.http.post(request.url.path, json=names, headers=key) for child in children)
        return [entry for answer in await asyncio.gather(*asked) for entry in answer.json()]


def _cards(router: Router) -> Iterator[Object]:
    for source in router.shelf.sources().values():
        if (card := source.card) is not None:
            yield card.entry(source.name)


# ---- requests for one model ----


async def _fields(request: Request) -> Mapping[str, Any]:
    """Return the fields of a request's body; empty without one."""
    if request.method == "GET" or not await request.body():
        return {}
    fields = await json_of(request)
    return fields if isinstance(fields, dict) else {}


async def _named(router: Router, request: Request) -> ModelSource:
    """Return the model named in a request's body, or else in its URL."""
    fields = await _fields(request)
    name = fields.get("model") or fields.get("name") or request.query_params.get("model")
    return router.source(name)


async def _forward(router: Router, request: Request) -> Response:
    """Return the response from the process of a request's model."""
    source = await _named(router, request)
    if (response := await _ended(router, source, request)) is not None:
        return response
    wanted = request.query_params.get("autoload")
    loads = router.autoload if wanted is None else wanted in ("true", "1")
    if not loads and router.children.of(source).status != "loaded":
        raise invalid(f"the model {source.name!r} is not loaded: load it with POST /models/load", "model")
    quiet = request.method == "GET" and request.url.path in QUIET
    return Forwarded(router.children, source, await request.body(), quiet)


async def _ended(router: Router, source: ModelSource, request: Request) -> Response | None:
    """Unload a model on request of Ollama's clients: without a prompt and with keep_alive 0."""
    field, piece = ENDS.get(request.url.path, ("", None))
    fields = await _fields(request) if piece else {}
    if piece is None or fields.get(field) or str(fields.get("keep_alive")) not in AT_ONCE:
        return None
    await router.children.unload(source)
    return JSONResponse(frame(source.name) | piece({}) | {"done": True, "done_reason": "unload"})


class Forwarded(Response):
    """The forwarded response of a child."""

    def __init__(self, children: Children, source: ModelSource, body: bytes, quiet: bool = False) -> None:
        super().__init__()
        self._quiet = quiet
        self._children = children
        self._source = source
        self._sent = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward request and response; a disconnected client cancels its answer at once."""
        await while_connected(receive, self._pass(scope, send))

    async def _pass(self, scope: Scope, send: Send) -> None:
        async with self._children.using(self._source, self._quiet) as child:
            headers = [(name, value) for name, value in scope["headers"] if name not in ASKED]
            path = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
            url = httpx.URL("http://localhost").copy_with(raw_path=path)
            request = httpx.Request(scope["method"], url, headers=headers, content=self._sent)
            await self._relay(child, request, send)

    async def _relay(self, child: Child, request: httpx.Request, send: Send) -> None:
        begun = False
        try:
            async with aclosing(await child.http.send(request, stream=True)) as response:
                headers = [(name, value) for name, value in response.headers.raw if name.lower() not in OWN]
                await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
                begun = True
                async for part in response.aiter_raw():
                    await send_part(send, part)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except httpx.TransportError:
            reason = await child.lost()
            if begun:  # too late for a status: close the connection before the end of the response
                raise RuntimeError(str(reason)) from None
            raise reason from None
