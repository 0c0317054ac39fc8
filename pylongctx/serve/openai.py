"""OpenAI's routes for completions and chats, with llama-server's additions."""

import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, TypeVar, cast

from fastapi import APIRouter, Request, Response

from pylongctx.completer import Completer
from pylongctx.parallel import EngineSource
from pylongctx.serve.bodies import ChatBody, CompletionBody, Generate, owner_of, read, unserved_of
from pylongctx.serve.errors import invalid
from pylongctx.serve.handler import Chunks, Handler, Object
from pylongctx.serve.native import infill_prompt
from pylongctx.serve.service import Service

Body = TypeVar("Body", bound=Generate)


def routes(service: Service) -> APIRouter:
    """Return the routes."""
    api = APIRouter()

    @api.post("/v1/completions", summary="Continue a text or several")
    async def complete(request: Request) -> Response:
        return await CompletionHandler(service, request, await read(request, CompletionBody)).answer()

    @api.post("/v1/chat/completions", summary="Answer a conversation")
    @api.post("/chat/completions", include_in_schema=False)
    async def chat(request: Request) -> Response:
        return await ChatHandler(service, request, await read(request, ChatBody)).answer()

    @api.post("/v1/chat/completions/input_tokens", summary="Count the tokens of a conversation")
    @api.post("/chat/completions/input_tokens", include_in_schema=False)
    async def count(request: Request) -> dict[str, int]:
        return await count_tokens(service, request, await read(request, ChatBody))

    return api


async def count_tokens(service: Service, request: Request, body: ChatBody) -> dict[str, int]:
    """Return how many tokens the prompt of a chat has."""
    completer = template_completer(service, request, body)

    def count() -> int:
        given = body.template(service.settings.template, service.host)
        return len(completer.chat_tokens(body.messages, **given))

    return {"input_tokens": await service.threaded(count)}


def template_completer(service: Service, request: Request, body: ChatBody) -> Completer:
    """Return a Completer that renders the prompt of a chat without answering it."""
    prefills = service.prefills(body.continue_final_message)
    return EngineSource(service.host, service.engine, prefills=prefills, owner=owner_of(request)).completer()


class OpenAIHandler(Handler[Body]):
    """Writes completions and chats in OpenAI's form."""

    kind: str  # of a chunk

    def __init__(self, service: Service, request: Request, body: Body, n: int = 1) -> None:
        super().__init__(service, request, body, n)
        self._verbose = service.host.verbose if body.verbose is None else body.verbose

    def whole(self, found: list[Object]) -> Object:
        """Return one answer with the choices of all completions."""
        whole = found[0]
        whole["choices"] = [{**choice, "index": i} for i, one in enumerate(found) for choice in one["choices"]]
        usage = self._usage({i: one["usage"] for i, one in enumerate(found)})
        names = {"id": self.id, "model": self.service.settings.alias, "system_fingerprint": self.service.fingerprint}
        return whole | names | {"usage": usage, "timings": self.timings(0)} | self._details(0)

    async def events(self, chunks: Chunks) -> AsyncIterator[Object | None]:
        """Yield the chunks of all completions; with ``include_usage``, the usage is in a separate chunk."""
        apart = self.body.stream_options is not None and self.body.stream_options.include_usage
        frame = {
            "id": self.id,
            "object": self.kind,
            "created": int(time.time()),
            "model": self.service.settings.alias,
            "system_fingerprint": self.service.fingerprint,
        }
        usages: dict[int, Object] = {}
        async for index, chunk in chunks:
            if chunk is None:
                yield None
                continue
            if "prompt_progress" in chunk:
                empty = {"index": index, "finish_reason": None, "logprobs": None, **self.empty_choice()}
                yield {**frame, "choices": [empty], **chunk}
                continue
            (choice,) = chunk["choices"]
            choice["index"] = index
            if "role" in choice.get("delta", ()):
                choice["delta"].setdefault("content", None)
            elif self.body.timings_per_token:
                chunk["timings"] = self.timings(index)
            usage = chunk.pop("usage", None)
            if usage is not None:
                usages[index] = usage
                chunk |= {"timings": self.timings(index)} | self._details(index)
                if not apart:
                    chunk["usage"] = self._usage({index: usage})
            yield {**chunk, **frame}
        if apart:
            yield {**frame, "choices": [], "usage": self._usage(usages), "timings": self.timings(0)}

    def empty_choice(self) -> Object:
        """Return the field of a choice without text."""
        return {"text": ""}

    def _details(self, index: int) -> Object:
        """Return llama-server's debug object with the rendered prompt."""
        job = self.sources[index].current
        if not (self._verbose and job):
            return {}
        prompt = self.host.model.detokenize(job.tokens.tolist(), True).decode("utf-8", "replace")
        counts = {"tokens_evaluated": len(job.tokens), "tokens_predicted": job.n_generated, "id_slot": job.ran_on}
        return {"__verbose": {"prompt": prompt, **counts, "timings": job.timings()}}

    def _usage(self, usages: Mapping[int, Mapping[str, Any]]) -> Object:
        """Return the sum; the prompt of several choices counts once."""
        readers = [i for i in usages if i % (self.body.n or 1) == 0] or list(usages)
        n_prompt = sum(usages[i]["prompt_tokens"] for i in readers)
        n_answer = sum(usage["completion_tokens"] for usage in usages.values())
        jobs = [job for i in readers if (job := self.sources[i].current)]
        dropped, thought = Counter[str](), Counter[str]()
        for job in jobs:
            dropped.update(job.dropped())
        for usage in usages.values():
            thought.update(usage.get("completion_tokens_details", {}))
        details = {"completion_tokens_details": dict(thought)} if thought else {}
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_answer,
            "total_tokens": n_prompt + n_answer,
            "prompt_tokens_details": {"cached_tokens": sum(job.n_cached for job in jobs), **dropped},
            **details,
        }


class CompletionHandler(OpenAIHandler[CompletionBody]):
    """Continues a text, or several with ``n`` choices for each."""

    prefix = "cmpl-"
    kind = "text_completion"

    def __init__(self, service: Service, request: Request, body: CompletionBody) -> None:
        self._prompts = body.prompts
        self._arguments: Object = {}
        super().__init__(service, request, body, len(self._prompts) * (body.n or 1))

    def prepare(self) -> None:
        """Compute the arguments of ``create_completion``, without the prompt."""
        settings = self.service.settings
        limit = {"max_tokens": settings.n_predict} if settings.n_predict else {}
        self._arguments = self.body.arguments(settings.sampling | limit, self.host)

    def complete(self, index: int, source: EngineSource) -> Object:
        """Return a completion."""
        return cast(Object, source.completer().create_completion(**self._given(index)))

    def stream(self, index: int, source: EngineSource) -> Iterator[Object]:
        """Return the chunks of a completion."""
        chunks = source.completer().create_completion(**self._given(index), stream=True)
        return cast(Iterator[Object], chunks)

    def _given(self, index: int) -> Object:
        """Return the arguments of a completion."""
        i_prompt, choice = divmod(index, self.body.n or 1)
        given, prompt = self.seeded(self._arguments, choice), self._prompts[i_prompt]
        if not given["suffix"]:
            return given | {"prompt": self.host.plain(prompt), "suffix": None}
        if not isinstance(prompt, str) or given["echo"]:
            raise invalid("with a suffix the prompt must be a text, and echo is not supported", "suffix")
        spm = self.service.settings.spm_infill
        tokens = infill_prompt(self.host, prompt, given["suffix"], suffix_first=spm)
        return given | {"prompt": tokens, "suffix": None}


class ChatHandler(OpenAIHandler[ChatBody]):
    """Answers a conversation; the handlers of other APIs convert their conversations to this one."""

    prefix = "chatcmpl-"
    kind = "chat.completion.chunk"

    def __init__(self, service: Service, request: Request, body: ChatBody) -> None:
        self._arguments: Object = {}
        super().__init__(service, request, body, body.n or 1)
        if not body.effort_is_read(service.host):
            reason = f"reasoning_effort={body.reasoning_effort!r} is not supported by the model's chat template"
            unserved_of(request).note("reasoning_effort", reason)

    def prepare(self) -> None:
        """Compute the arguments of ``create_chat_completion``."""
        settings = self.service.settings
        self._arguments = self.body.arguments(settings.sampling, settings.template, self.host)

    def complete(self, index: int, source: EngineSource) -> Object:
        """Return an answer."""
        given = self.seeded(self._arguments, index)
        return cast(Object, source.completer().create_chat_completion(**given))

    def stream(self, index: int, source: EngineSource) -> Iterator[Object]:
        """Return the chunks of an answer."""
        given = self.seeded(self._arguments, index)
        return cast(Iterator[Object], source.completer().create_chat_completion(**given, stream=True))

    def empty_choice(self) -> Object:
        """Return the field of a choice without text."""
        return {"delta": {}}
