"""The routes that generate tokens."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from pylongctx.parallel.host import Host, Prompt
from pylongctx.parallel.ticket import Ticket
from pylongctx.serve import native
from pylongctx.serve.answer import Lazy, Make, OpenAIForm, answer, seeded
from pylongctx.serve.bodies import ChatBody, CompletionBody, InfillBody, NativeBody, as_prompts
from pylongctx.serve.errors import invalid
from pylongctx.serve.fields import read
from pylongctx.serve.service import Service

Given = Callable[[], dict[str, Any]]


def routes(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter()
    host, settings = service.host, service.settings

    @router.post("/v1/completions", summary="Continue a text or several")
    async def complete(request: Request) -> Response:
        body = await read(request, CompletionBody)
        limit = {"max_tokens": settings.n_predict} if settings.n_predict else {}
        given = Lazy(partial(body.arguments, settings.sampling | limit, host))
        spm = settings.spm_infill
        makes = [partial(_complete, prompt, given, i, spm) for prompt in body.prompts for i in range(body.n or 1)]
        return await answer(service, request, body, makes, OpenAIForm(service, body, chat=False))

    @router.post("/v1/chat/completions", summary="Answer a conversation")
    @router.post("/chat/completions", include_in_schema=False)
    async def chat(request: Request) -> Response:
        body = await read(request, ChatBody)
        return await answer(service, request, body, chats(service, request, body), OpenAIForm(service, body, chat=True))

    @router.post("/v1/chat/completions/input_tokens", summary="Count the tokens of a conversation")
    @router.post("/chat/completions/input_tokens", include_in_schema=False)
    async def count(request: Request) -> dict[str, int]:
        return await count_tokens(service, request, await read(request, ChatBody))

    @router.post("/completion", summary="Continue a text or several, in llama-server's form")
    @router.post("/completions", include_in_schema=False)
    async def continue_(request: Request) -> Response:
        body = await read(request, NativeBody)
        prompts, single = as_prompts(body.prompt)
        given = Lazy(partial(body.sampling, settings.sampling, host))
        makes: list[Make] = [
            partial(native.complete, body, prompt, given, i) for prompt in prompts for i in range(body.n or 1)
        ]
        return await answer(service, request, body, makes, native.NativeForm(service, body, single))

    @router.post("/infill", summary="Fill in the text between two texts, for models trained for it")
    async def infill(request: Request) -> Response:
        body = await read(request, InfillBody)
        given = Lazy(partial(body.sampling, settings.sampling, host))
        texts = body.input_prefix, body.input_suffix, body.prompt
        prompt = Lazy(partial(native.infill_prompt, host, *texts, body.input_extra, settings.spm_infill))
        makes: list[Make] = [partial(native.fill, body, prompt, given, i) for i in range(body.n or 1)]
        return await answer(service, request, body, makes, native.NativeForm(service, body, single=True))

    return router


def chats(service: Service, request: Request, body: ChatBody) -> list[Make]:
    """Return the function that generates the answers of a chat."""
    if not body.effort_is_read(service.host):
        reason = f"reasoning_effort={body.reasoning_effort!r} is not supported by the model's chat template"
        request.scope["unserved"].note("reasoning_effort", reason)
    arguments = partial(body.arguments, service.settings.sampling, service.settings.template, service.host)
    given = Lazy(arguments)
    return [partial(_chat, given, i) for i in range(body.n or 1)]


async def count_tokens(service: Service, request: Request, body: ChatBody) -> dict[str, int]:
    """Return how many tokens the prompt of a chat has."""
    completer = rendering(service, request, body).completer()

    def count() -> int:
        given = body.template(service.settings.template, service.host)
        return len(completer.chat_tokens(body.messages, **given))

    return {"input_tokens": await service.threaded(count)}


def rendering(service: Service, request: Request, body: ChatBody) -> Ticket:
    """Return the function that renders the prompt of a chat."""
    prefills, owner = service.prefills(body.continue_final_message), request.scope.get("owner")
    return Ticket(service.host, service.engine, prefills=prefills, owner=owner)


def _complete(prompt: Prompt, given: Given, index: int, suffix_first: bool, ticket: Ticket, stream: bool) -> Any:
    wanted = seeded(given(), index, ticket.host.seed)
    read = _filled(ticket.host, prompt, wanted, suffix_first) if wanted["suffix"] else ticket.host.plain(prompt)
    return ticket.completer().create_completion(read, **wanted | {"suffix": None}, stream=stream)


def _filled(host: Host, prompt: Prompt, wanted: Mapping[str, Any], suffix_first: bool) -> list[int]:
    """Return the prompt of a fill-in request."""
    if not isinstance(prompt, str) or wanted["echo"]:
        raise invalid("with a suffix the prompt must be a text, and echo is not supported", "suffix")
    return native.infill_prompt(host, prompt, wanted["suffix"], suffix_first=suffix_first)


def _chat(given: Given, index: int, ticket: Ticket, stream: bool) -> Any:
    return ticket.completer().create_chat_completion(**seeded(given(), index, ticket.host.seed), stream=stream)
