"""KoboldAI's text API in KoboldCpp's form."""

from collections.abc import AsyncIterator
from functools import partial

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool

from pylongctx.serve.bodies import Fields, NativeBody, read
from pylongctx.serve.errors import ApiError
from pylongctx.serve.handler import Chunks, NamedEvents, Object
from pylongctx.serve.native import NativeHandler
from pylongctx.serve.service import Service

API, PROGRAM = "1.2.5", "1.100"  # versions of KoboldAI and KoboldCpp by which clients detect features
MAX_LENGTH = 256  # default tokens of an answer
REASONS = {"eos": "stop", "word": "stop", "limit": "length"}


class KoboldBody(NativeBody):
    """POST /api/v1/generate and /api/extra/generate/stream."""

    prompt: str = ""
    memory: str = ""
    genkey: str | None = None  # for /api/extra/abort and check, replaced by closing the connection

    @property
    def text(self) -> str:
        """The prompt to continue."""
        return self.memory + self.prompt


class CountBody(Fields):
    """POST /api/extra/tokencount."""

    prompt: str


def routes(service: Service) -> APIRouter:
    """Return the routes."""
    api = APIRouter(prefix="/api")
    host = service.host

    async def complete(request: Request, stream: bool) -> Response:
        body = await read(request, KoboldBody)
        body.stream, body.n = stream, 1
        body.max_tokens = MAX_LENGTH if body.max_tokens is None else body.max_tokens
        return await KoboldHandler(service, request, body, [body.text]).answer()

    @api.post("/v1/generate", summary="Continue a text, in KoboldAI's form")
    @api.post("/latest/generate", include_in_schema=False)
    async def generate(request: Request) -> Response:
        return await complete(request, False)

    @api.post("/extra/generate/stream", summary="Continue a text as a stream")
    async def stream(request: Request) -> Response:
        return await complete(request, True)

    @api.post("/extra/generate/check", include_in_schema=False)
    @api.get("/extra/generate/check", include_in_schema=False)
    @api.post("/extra/abort", include_in_schema=False)
    async def refuse(request: Request) -> Response:
        way_out = "use /api/extra/generate/stream, and close the connection to end an answer"
        raise ApiError(501, "not_supported_error", f"{request.url.path} is not supported: {way_out}")

    @api.post("/extra/tokencount", include_in_schema=False)
    async def count(request: Request) -> Object:
        body = await read(request, CountBody)
        with service.admitted():
            tokens = [*host.model.start, *await run_in_threadpool(host.tokens, body.prompt)]
        return {"value": len(tokens), "ids": tokens}

    facts: dict[str, Object] = {
        "/v1/model": {"result": service.settings.alias},
        "/v1/info/version": {"result": API},
        "/extra/version": {"result": "KoboldCpp", "version": PROGRAM},
        "/v1/config/max_context_length": {"value": host.n_ctx},
        "/extra/true_max_context_length": {"value": host.n_ctx},
        "/v1/config/max_length": {"value": MAX_LENGTH},
    }
    for path, fact in facts.items():
        api.add_api_route(path, partial(_fact, fact), methods=["GET"], include_in_schema=False)
    return api


async def _fact(fact: Object) -> Object:
    return fact


class KoboldHandler(NativeHandler):
    """Continues a text in KoboldCpp's form."""

    prefix = "kobold-"
    response = NamedEvents

    def whole(self, found: list[Object]) -> Object:
        """Return one object."""
        (made,) = found
        counts = {"prompt_tokens": made["tokens_evaluated"], "completion_tokens": made["tokens_predicted"]}
        return {"results": [{"text": made["content"], "finish_reason": REASONS[made["stop_type"]], **counts}]}

    async def events(self, chunks: Chunks) -> AsyncIterator[Object | None]:
        """Yield a token, or the reason for the end."""
        async for _, chunk in chunks:
            if chunk is None or "content" not in chunk:
                yield None
            else:
                reason = REASONS.get(chunk.get("stop_type", ""))
                yield {"type": "message", "token": chunk["content"], "finish_reason": reason}
