"""Answering requests for tokens, shared by all routes."""

import threading
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from pylongctx.engine.sampling.sampler import RANDOM_SEEDS
from pylongctx.parallel.ticket import Ticket
from pylongctx.serve.bodies import Generate
from pylongctx.serve.errors import invalid
from pylongctx.serve.exchange import EventStream, Exchange
from pylongctx.serve.service import Service

MAX_PARTS = 1024  # maximum completions per request
CLOSED = 499  # for the log only: the client is gone

Make = Callable[..., Any]
Chunks = AsyncIterator[tuple[int, Any]]  # (part, chunk); (-1, None) after a pause


class Form(Protocol):
    """The form of an API's responses.

    Attributes
    ----------
    prefix : str
        Prefix of the ids of answers.
    """

    prefix: str

    @property
    def frames(self) -> type[EventStream]:
        """The response class that sends the events of a stream."""

    def whole(self, exchange: Exchange, found: list[Any]) -> Any:
        """Return the response from the results of the completions."""

    def events(self, exchange: Exchange, chunks: Chunks) -> AsyncIterator[dict[str, Any] | None]:
        """Yield the events of a stream; None: still working."""


class Lazy:
    """A value that several threads need and one of them creates.

    Parameters
    ----------
    make : callable
        Creates it.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: Future[Any] = Future()

    def __call__(self) -> Any:
        """Return the value, or raise the exception of its creation."""
        with self._lock:
            if not self._made.done():
                try:
                    self._made.set_result(self._make())
                except Exception as reason:
                    self._made.set_exception(reason)
        return self._made.result()


async def answer(service: Service, request: Request, body: Generate, makes: Sequence[Make], form: Form) -> Response:
    """Answer with the completions of ``makes``, each called with its ticket."""
    if len(makes) > MAX_PARTS:
        raise invalid(f"one request may have at most {MAX_PARTS} completions, not {len(makes)}", "prompt")
    if body.id_slot is not None and not -1 <= body.id_slot < service.host.n_seq:
        raise invalid(f"id_slot must be from 0 to {service.host.n_seq - 1}, or -1 for any", "id_slot")
    service.admit()
    exchange, handed_over = Exchange(f"{form.prefix}{uuid.uuid4()}", service.pool, service.host.n_seq), False
    try:
        owner = request.scope.get("owner")
        for index, make in enumerate(makes):
            ticket = _ticket(service, exchange, body, index, owner)
            exchange.parts.append((ticket, partial(make, ticket, stream=bool(body.stream))))
        found = await exchange.results(request.receive)
        if found is None:
            return Response(status_code=CLOSED)
        if not body.stream:
            return JSONResponse(form.whole(exchange, found))
        handed_over = True
        events = form.events(exchange, exchange.chunks(found, service.settings.patience))
        return form.frames(exchange, events, partial(_close, service, exchange))
    finally:
        if not handed_over:
            _close(service, exchange)


def _close(service: Service, exchange: Exchange) -> None:
    for ticket, _ in exchange.parts:
        if ticket.current is not None:
            service.answers.add_job(ticket.current)
    exchange.close()
    service.leave()


def _ticket(service: Service, exchange: Exchange, body: Generate, index: int, owner: str | None) -> Ticket:
    progress = exchange.put_progress(index, bool(body.timings_per_token))
    return Ticket(
        service.host,
        service.engine,
        service.settings.n_predict,
        body.repeat_last_n,
        id=exchange.id,
        traced=bool(body.longctx.trace),
        progress=progress if body.stream and body.return_progress else None,
        owner=owner,
        slot=None if body.id_slot in (None, -1) else body.id_slot,
        reuses=service.settings.cache_prompt if body.cache_prompt is None else body.cache_prompt,
        prefills=service.prefills(getattr(body, "continue_final_message", None)),
    )


def seeded(given: dict[str, Any], index: int, default: int) -> dict[str, Any]:
    """Return the arguments of a choice; several choices with one seed get different seeds."""
    seed = given.get("seed", default)
    return {**given, "seed": seed + index} if index and seed not in RANDOM_SEEDS else given


class OpenAIForm:
    """Completions and chat completions in OpenAI's form, with llama-server's additions.

    Parameters
    ----------
    service : Service
        Has the names.
    body : Generate
        The request.
    chat : bool
        Whether it is a chat.
    """

    frames = EventStream

    def __init__(self, service: Service, body: Generate, chat: bool) -> None:
        self.prefix = "chatcmpl-" if chat else "cmpl-"
        self._body = body
        self._chat = chat
        self._model = service.settings.alias
        self._vocabulary = service.host.model
        self._verbose = service.host.verbose if body.verbose is None else body.verbose
        self._fingerprint = service.fingerprint

    def whole(self, exchange: Exchange, found: list[dict[str, Any]]) -> dict[str, Any]:
        """Return one answer with the choices of all completions."""
        whole = found[0]
        whole["choices"] = [{**choice, "index": i} for i, one in enumerate(found) for choice in one["choices"]]
        usage = self._usage(exchange, {i: one["usage"] for i, one in enumerate(found)})
        named = {"id": exchange.id, "model": self._model, "system_fingerprint": self._fingerprint}
        return whole | named | {"usage": usage, "timings": exchange.timings(0)} | self._details(exchange, 0)

    async def events(self, exchange: Exchange, chunks: Chunks) -> AsyncIterator[dict[str, Any] | None]:
        """Yield the chunks of all completions; with ``include_usage``, the usage is in a separate chunk."""
        apart = self._body.stream_options is not None and self._body.stream_options.include_usage
        frame = {
            "id": exchange.id,
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": int(time.time()),
            "model": self._model,
            "system_fingerprint": self._fingerprint,
        }
        usages: dict[int, dict[str, int]] = {}
        async for index, chunk in chunks:
            if chunk is None:
                yield None
                continue
            if "prompt_progress" in chunk:
                yield {**frame, "choices": [self._empty_choice(index)], **chunk}
                continue
            (choice,) = chunk["choices"]
            choice["index"] = index
            if self._chat and "role" in choice["delta"]:
                choice["delta"].setdefault("content", None)
            elif self._body.timings_per_token:
                chunk["timings"] = exchange.timings(index)
            usage = chunk.pop("usage", None)
            if usage is not None:
                usages[index] = usage
                chunk |= {"timings": exchange.timings(index)} | self._details(exchange, index)
                if not apart:
                    chunk["usage"] = self._usage(exchange, {index: usage})
            yield {**chunk, **frame}
        if apart:
            yield {**frame, "choices": [], "usage": self._usage(exchange, usages), "timings": exchange.timings(0)}

    def _details(self, exchange: Exchange, index: int) -> dict[str, Any]:
        """Return llama-server's debug object with the rendered prompt."""
        job = exchange.parts[index][0].current
        if not (self._verbose and job):
            return {}
        prompt = self._vocabulary.detokenize(job.tokens.tolist(), True).decode("utf-8", "replace")
        counts = {"tokens_evaluated": len(job.tokens), "tokens_predicted": job.n_generated, "id_slot": job.ran_on}
        return {"__verbose": {"prompt": prompt, **counts, "timings": job.timings()}}

    def _empty_choice(self, index: int) -> dict[str, Any]:
        empty: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        return {"index": index, "finish_reason": None, "logprobs": None} | empty

    def _usage(self, exchange: Exchange, usages: Mapping[int, Mapping[str, int]]) -> dict[str, Any]:
        """Return the sum; the prompt of several choices counts once."""
        readers = [i for i in usages if i % (self._body.n or 1) == 0] or list(usages)
        n_prompt = sum(usages[i]["prompt_tokens"] for i in readers)
        n_answer = sum(usage["completion_tokens"] for usage in usages.values())
        jobs = [job for i in readers if (job := exchange.parts[i][0].current)]
        dropped = Counter[str]()
        for job in jobs:
            dropped.update(job.dropped())
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_answer,
            "total_tokens": n_prompt + n_answer,
            "prompt_tokens_details": {"cached_tokens": sum(job.n_cached for job in jobs), **dropped},
        }
