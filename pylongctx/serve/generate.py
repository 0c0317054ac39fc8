"""POST /v1/completions and /v1/chat/completions."""

import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from pylongctx.serve.bodies import ChatBody, CompletionBody, Generate, read
from pylongctx.serve.errors import invalid
from pylongctx.serve.exchange import EventStream, Exchange
from pylongctx.serve.service import Service
from pylongctx.serve.ticket import Ticket

MOST_PARTS = 1024  # completions that one request may ask for
CLOSED = 499  # nobody is there to read this status; it is for the log

Make = Callable[..., Any]


def routes(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter()

    @router.post("/v1/completions", summary="Continue a text or several")
    @router.post("/completions", include_in_schema=False)
    async def complete(request: Request) -> Response:
        body = await read(request, CompletionBody)
        given = body.arguments(service.settings.sampling)
        makes = [partial(_complete, prompt, given) for prompt in body.prompts for _ in range(body.n or 1)]
        return await _answer(service, request, body, makes)

    @router.post("/v1/chat/completions", summary="Answer a conversation")
    @router.post("/chat/completions", include_in_schema=False)
    async def chat(request: Request) -> Response:
        body = await read(request, ChatBody)
        given = body.arguments(service.settings.sampling, service.settings.template)
        makes = [partial(_chat, given)] * (body.n or 1)
        return await _answer(service, request, body, makes)

    return router


def _complete(prompt: str | list[int], given: dict[str, Any], ticket: Ticket, **more: Any) -> Any:
    return ticket.completer().create_completion(prompt, **given, **more)


def _chat(given: dict[str, Any], ticket: Ticket, **more: Any) -> Any:
    return ticket.completer().create_chat_completion(**given, **more)


async def _answer(service: Service, request: Request, body: Generate, makes: Sequence[Make]) -> Response:
    if len(makes) > MOST_PARTS:
        raise invalid(f"one request may ask for {MOST_PARTS} completions, not {len(makes)}", "prompt")
    service.admit()
    name = f"{'chatcmpl' if isinstance(body, ChatBody) else 'cmpl'}-{uuid.uuid4()}"
    exchange, handed_over = Exchange(name, service.pool, service.host.n_seq), False
    try:
        for index, make in enumerate(makes):
            ticket = _ticket(service, exchange, body, index)
            more = {"stream": bool(body.stream), "model": service.settings.alias}
            exchange.parts.append((ticket, partial(make, ticket, **more)))
        found = await exchange.results(request.receive)
        if found is None:
            return Response(status_code=CLOSED)
        if not body.stream:
            return JSONResponse(_whole(exchange, body, found))
        handed_over = True
        return EventStream(exchange, _events(service, exchange, body, found), partial(_close, service, exchange))
    finally:
        if not handed_over:
            _close(service, exchange)


def _close(service: Service, exchange: Exchange) -> None:
    exchange.close()
    service.leave()


def _ticket(service: Service, exchange: Exchange, body: Generate, index: int) -> Ticket:
    progress = exchange.put_progress(index) if body.stream and body.return_progress else None
    traced = exchange.id if body.longctx.trace else None
    return Ticket(service.host, service.engine, service.settings.n_predict, traced=traced, progress=progress)


def _whole(exchange: Exchange, body: Generate, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one answer with the choices of all completions."""
    whole = found[0]
    whole["choices"] = [{**choice, "index": i} for i, one in enumerate(found) for choice in one["choices"]]
    usage = _usage(exchange, body, {i: one["usage"] for i, one in enumerate(found)})
    return whole | {"id": exchange.id, "usage": usage, "timings": _timings(exchange, 0)}


async def _events(
    service: Service, exchange: Exchange, body: Generate, iterators: list[Iterator[Any]]
) -> AsyncIterator[dict[str, Any] | None]:
    """Yield the chunks of all completions; with ``include_usage``, the usage in a chunk of its own."""
    apart = body.stream_options is not None and body.stream_options.include_usage
    chat = isinstance(body, ChatBody)
    frame = {
        "id": exchange.id,
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": int(time.time()),
        "model": service.settings.alias,
    }
    usages: dict[int, dict[str, int]] = {}
    async for index, chunk in exchange.chunks(iterators, service.settings.patience):
        if chunk is None:
            yield None
        elif "prompt_progress" in chunk:
            empty: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
            choice = {"index": index, "finish_reason": None, "logprobs": None}
            yield {**frame, "choices": [choice | empty], **chunk}
        else:
            chunk["choices"][0]["index"] = index
            usage = chunk.pop("usage", None)
            if usage is not None:
                usages[index] = usage
                chunk["timings"] = _timings(exchange, index)
                if not apart:
                    chunk["usage"] = _usage(exchange, body, {index: usage})
            yield {**chunk, **frame}
    if apart:
        yield {**frame, "choices": [], "usage": _usage(exchange, body, usages), "timings": _timings(exchange, 0)}


def _usage(exchange: Exchange, body: Generate, usages: Mapping[int, Mapping[str, int]]) -> dict[str, Any]:
    """Return the sum; of several choices for one prompt, the first one has read it."""
    readers = [i for i in usages if i % (body.n or 1) == 0] or list(usages)
    n_prompt = sum(usages[i]["prompt_tokens"] for i in readers)
    n_answer = sum(usage["completion_tokens"] for usage in usages.values())
    jobs = [exchange.parts[i][0].current for i in readers]
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_answer,
        "total_tokens": n_prompt + n_answer,
        "prompt_tokens_details": {"cached_tokens": sum(job.n_cached for job in jobs if job)},
    }


def _timings(exchange: Exchange, index: int) -> dict[str, float]:
    job = exchange.parts[index][0].current
    return job.timings() if job else {}
