"""Ollama's API: the routes of its clients, for the one model of this server."""

import time
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.concurrency import run_in_threadpool

from pylongctx.completions.embeddings import RANK
from pylongctx.parallel.host import NEEDED
from pylongctx.serve import native
from pylongctx.serve.answer import Lazy, Make, answer
from pylongctx.serve.cards import FOREVER, card_of, parameters
from pylongctx.serve.errors import ApiError, invalid
from pylongctx.serve.fields import Fields, read
from pylongctx.serve.generate import chats, rendering
from pylongctx.serve.ollama_answers import NANO, OllamaForm, chat_piece, frame, generate_piece
from pylongctx.serve.ollama_bodies import KEPT, OllamaBody, OllamaChatBody, OllamaGenerateBody, can_think
from pylongctx.serve.service import Service
from pylongctx.serve.texts import MAX_TEXTS

VERSION = "0.12.11"  # version of Ollama by which clients detect features
RUNNING = "Ollama is running"  # expected by clients at /
LATEST = ":latest"  # Ollama's tag of a name without one
STORED = "the server does not manage models: download them with pylongctx get"
# routes that change Ollama's collection of models
CHANGING = (
    ("POST", "pull"),
    ("POST", "push"),
    ("POST", "create"),
    ("POST", "copy"),
    ("DELETE", "delete"),
    ("POST", "blobs/{digest}"),
)


class EmbedBody(Fields):
    """POST /api/embed, and /api/embeddings (``prompt``)."""

    input: str | list[str] | None = None
    prompt: str | None = None
    truncate: bool | None = None
    dimensions: int | None = None
    options: dict[str, Any] | None = None
    keep_alive: Any = None


class ShowBody(Fields):
    """POST /api/show."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


def routes(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter(prefix="/api")
    alias = service.settings.alias

    @router.post("/chat", summary="Answer a conversation, in Ollama's form")
    async def chat(request: Request) -> Response:
        body = await _read(service, request, OllamaChatBody)
        if not body.messages:
            return _loaded(alias, chat_piece({}))
        wanted = body.chat(body.openai_messages(), service.host, request.scope["unserved"], body.tools)
        return await answer(service, request, wanted, chats(service, request, wanted), OllamaForm(alias, chat_piece))

    @router.post("/generate", summary="Answer a prompt, continue it (raw), or fill in (suffix)")
    async def generate(request: Request) -> Response:
        body = await _read(service, request, OllamaGenerateBody)
        body.check()
        if not (body.prompt or body.suffix):
            return _loaded(alias, generate_piece({}))
        return await _generate(service, request, body)

    @router.post("/embed", summary="Vectors of texts, with --embeddings")
    async def embed(request: Request) -> Response:
        body, began = await _read(service, request, EmbedBody), time.monotonic()
        texts = [body.input] if isinstance(body.input, str) else body.input or []
        vectors, n_tokens = await _embed(service, body, texts, True)
        took = {"total_duration": round(NANO * (time.monotonic() - began)), "load_duration": 0}
        return JSONResponse({"model": alias, "embeddings": vectors, **took, "prompt_eval_count": n_tokens})

    @router.post("/embeddings", include_in_schema=False)
    async def embeddings(request: Request) -> Response:
        body = await _read(service, request, EmbedBody)
        vectors, _ = await _embed(service, body, [body.prompt] if body.prompt else [], False)
        return JSONResponse({"embedding": vectors[0] if vectors else []})

    @router.get("/tags", summary="The models, in Ollama's form")
    @router.head("/tags", include_in_schema=False)
    def tags() -> dict[str, Any]:
        return {"models": [_entry(service) | {"capabilities": _capabilities(service)}]}

    @router.get("/ps", summary="The loaded models, in Ollama's form")
    def ps() -> dict[str, Any]:
        entry = _entry(service)
        loaded = {"expires_at": FOREVER, "size_vram": round(entry["size"] * service.host.share_on_devices)}
        return {"models": [entry | loaded | {"context_length": service.host.n_ctx}]}

    @router.post("/show", summary="A model's metadata, template and capabilities")
    async def show(request: Request) -> dict[str, Any]:
        body = await read(request, ShowBody)
        check_name(service, body.model or body.name or "")
        return await run_in_threadpool(_shown, service)

    @router.get("/version", summary="The version of Ollama's API")
    @router.head("/version", include_in_schema=False)
    async def version() -> dict[str, str]:
        return {"version": VERSION}

    for method, path in CHANGING:
        router.add_api_route(f"/{path}", refuse, methods=[method], include_in_schema=False)
    return router


async def refuse(request: Request) -> Response:
    """Refuse changes of the models."""
    raise ApiError(501, "not_supported_error", f"{request.url.path} is not supported: {STORED}")


async def running() -> Response:
    """Return the text that clients of Ollama expect at /."""
    return PlainTextResponse(RUNNING)


async def _read(service: Service, request: Request, kind: Any) -> Any:
    """Return a body, after recording its fields without effect."""
    body = await read(request, kind)
    if isinstance(body, OllamaBody):
        body.note(request.scope["unserved"], service.host)
    elif body.keep_alive is not None:
        request.scope["unserved"].note("keep_alive", KEPT)
    return body


def _loaded(alias: str, piece: dict[str, Any]) -> Response:
    """Return the answer to a request without a prompt, which clients use to load a model."""
    return JSONResponse(frame(alias) | piece | {"done": True, "done_reason": "load"})


async def _generate(service: Service, request: Request, body: OllamaGenerateBody) -> Response:
    """Answer a prompt as a conversation, or unchanged."""
    host, alias, unserved = service.host, service.settings.alias, request.scope["unserved"]
    if not (body.raw or body.suffix or body.context):
        wanted = body.chat(body.openai_messages(), host, unserved)
        form = OllamaForm(alias, generate_piece, partial(host.tokens, special=False))
        return await answer(service, request, wanted, chats(service, request, wanted), form)
    made = body.native(unserved)
    prompt = Lazy(partial(_prompt, service, request, body))
    given = Lazy(partial(made.sampling, service.settings.sampling, host))
    context = partial(host.tokens, special=False) if body.context else None
    make: Make = partial(native.fill, made, prompt, given, 0)
    return await answer(service, request, made, [make], OllamaForm(alias, generate_piece, context))


def _prompt(service: Service, request: Request, body: OllamaGenerateBody) -> str | list[int]:
    """Answer a raw prompt, a prompt with a suffix, or a prompt that follows an earlier context."""
    host = service.host
    if body.suffix:
        return native.infill_prompt(host, body.prompt, body.suffix, suffix_first=service.settings.spm_infill)
    if not body.context:
        return body.prompt
    chat = body.chat(body.openai_messages(), host, request.scope["unserved"])
    completer = rendering(service, request, chat).completer()
    tokens = completer.chat_tokens(chat.messages, **chat.template(service.settings.template, host))
    start = host.model.start
    return [*body.context, *(tokens[len(start) :] if tokens[: len(start)] == start else tokens)]


async def _embed(service: Service, body: EmbedBody, texts: list[str], normalize: bool) -> tuple[list[Any], int]:
    """Return the vectors of texts, and the number of their tokens."""
    embedder = service.vectors()
    if len(texts) > MAX_TEXTS:
        raise invalid(f"one request may have at most {MAX_TEXTS} texts, not {len(texts)}", "input")
    if not texts:
        return [], 0
    more = {"normalize": normalize, "truncate": body.truncate is not False}
    found: Any = await service.threaded(partial(embedder.response, texts, "", body.dimensions, **more))
    return [one["embedding"] for one in found["data"]], found["usage"]["prompt_tokens"]


def check_name(service: Service, name: str) -> None:
    """Raise ApiError for a name that is not the model's."""
    known = (service.settings.alias, *service.settings.aliases)
    if name not in known and name.removesuffix(LATEST) not in known:
        raise ApiError(404, "not_found_error", f"model {name[:60]!r} not found: this server has {known[0]!r}", "model")


def _entry(service: Service) -> dict[str, Any]:
    return card_of(service.host.model_path).entry(service.settings.alias)


def _capabilities(service: Service) -> list[str]:
    host = service.host
    caps = host.templates.template.info["caps"]
    can = {
        "completion": True,
        "tools": caps["supports_tools"] and caps["supports_tool_calls"],
        "thinking": can_think(host),
        "insert": all(name in host.fill_tokens for name in NEEDED),
        "embedding": service.embedder is not None and service.embedder.pooling != RANK,
    }
    return [name for name, able in can.items() if able]


def _shown(service: Service) -> dict[str, Any]:
    card, host = card_of(service.host.model_path), service.host
    settings = native.settings(service.sampling_params())
    sampling = {name: settings[name] for name in ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")}
    return {
        "license": card.info.get("general.license") or "",
        "modelfile": f"FROM {host.model_path}\n",
        "parameters": parameters({"num_ctx": host.n_ctx} | sampling),
        "template": host.templates.template.info["source"],
        "details": card.details,
        "model_info": card.info,
        "capabilities": _capabilities(service),
        "modified_at": card.modified,
    }
