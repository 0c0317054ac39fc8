"""POST /v1/responses, OpenAI's newer API; nothing is stored."""

import time
import uuid
from collections.abc import AsyncIterator, Iterator
from functools import cached_property
from typing import Any

from fastapi import APIRouter, Request, Response

from pylongctx.serve.answer import Chunks, answer
from pylongctx.serve.blocks import Block, Blocks, Event, blocks_of
from pylongctx.serve.bodies import ChatBody, Extension
from pylongctx.serve.exchange import Exchange, NamedEvents
from pylongctx.serve.fields import Fields, Open, Unserved, load, read
from pylongctx.serve.generate import chats, count_tokens
from pylongctx.serve.items import RequestTools, chat_messages
from pylongctx.serve.service import Service

NAMES = {"thinking": "rs", "text": "msg", "call": "fc", "custom": "ctc"}
# fields that a chat has by the same name
SAME = (
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "parallel_tool_calls",
    "return_progress",
    "timings_per_token",
    "longctx",
    "chat_template_kwargs",
)


class TextConfig(Open):
    """The form of the answer."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class Reasoning(Open):
    """Whether the model reasons; its reasoning is returned as content, not as a summary."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesBody(Fields):
    """POST /v1/responses."""

    input: Any
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig = TextConfig()
    reasoning: Reasoning = Reasoning()
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    longctx: Extension = Extension()

    @cached_property
    def functions(self) -> RequestTools:
        """The tools as functions, set by ``chat``."""
        return RequestTools()

    def chat(self, unserved: Unserved) -> ChatBody:
        """Return the equivalent request for the route of chats."""
        fields = {name: getattr(self, name) for name in SAME if getattr(self, name) is not None}
        fields["longctx"] = self.longctx.model_dump()
        fields["messages"] = list(chat_messages(self.instructions, self.input, unserved))
        fields |= {"max_tokens": self.max_output_tokens, "response_format": self._format()}
        fields["reasoning_effort"] = self.reasoning.effort
        for i, tool in enumerate(self.tools or ()):
            self.functions.add(f"tools[{i}]", tool, unserved)
        fields["tool_choice"] = self.functions.choose(self.tool_choice)
        fields["tools"] = self.functions.functions or None
        if self.text.verbosity not in (None, "medium"):
            reason = f"text.verbosity={self.text.verbosity!r} is not supported: the prompt does not contain it"
            unserved.note("text.verbosity", reason)
        return load(ChatBody, fields, unserved)

    def _format(self) -> Any:
        wanted = self.text.format
        if wanted is None or wanted.get("type") != "json_schema":
            return wanted
        return {"type": "json_schema", "json_schema": {k: v for k, v in wanted.items() if k != "type"}}


def routes(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter()

    @router.post("/v1/responses", summary="Answer a conversation, in the form of OpenAI's Responses API")
    @router.post("/responses", include_in_schema=False)
    async def responses(request: Request) -> Response:
        body = await read(request, ResponsesBody)
        chat = body.chat(request.scope["unserved"])
        return await answer(service, request, chat, chats(service, request, chat), ResponsesForm(service, body))

    @router.post("/v1/responses/input_tokens", summary="Count the tokens of such a conversation")
    async def count(request: Request) -> dict[str, Any]:
        body = await read(request, ResponsesBody)
        return {
            "object": "response.input_tokens",
            **await count_tokens(service, request, body.chat(request.scope["unserved"])),
        }

    return router


class ResponsesForm:
    """Answers in the form of OpenAI's Responses API.

    Parameters
    ----------
    service : Service
        Has the model's name.
    body : ResponsesBody
        The request.
    """

    prefix = "resp_"
    frames = NamedEvents

    def __init__(self, service: Service, body: ResponsesBody) -> None:
        self._body = body
        self._model = service.settings.alias
        self._created = int(time.time())

    def whole(self, exchange: Exchange, found: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a response."""
        (choice,) = found[0]["choices"]
        names = OutputBlocks(self._body.functions)
        output = [names.item(block) for block in blocks_of(choice["message"])]
        whole = self._response(exchange, output, choice["finish_reason"], found[0]["usage"])
        return whole | {"timings": exchange.timings(0)}

    async def events(self, exchange: Exchange, chunks: Chunks) -> AsyncIterator[Event | None]:
        """Yield the numbered events of a response."""
        n = 0
        async for event in self._events(exchange, chunks):
            yield None if event is None else {**event, "sequence_number": n}
            n += event is not None

    async def _events(self, exchange: Exchange, chunks: Chunks) -> AsyncIterator[Event | None]:
        blocks, reason, usage = OutputBlocks(self._body.functions), None, None
        for name in ("created", "in_progress"):
            yield {"type": f"response.{name}", "response": self._response(exchange, [], None, None)}
        async for _, chunk in chunks:
            if chunk is None:
                yield None
                continue
            if "prompt_progress" in chunk:
                started = self._response(exchange, [], None, None)
                yield {"type": "response.in_progress", "response": started, **chunk}
                continue
            (choice,) = chunk["choices"]
            for event in blocks.feed(choice["delta"]):
                timed = event["type"] == "response.output_text.delta" and self._body.timings_per_token
                yield event | {"timings": exchange.timings(0)} if timed else event
            reason, usage = choice["finish_reason"] or reason, chunk.get("usage", usage)
        for event in blocks.finish():
            yield event
        response = self._response(exchange, [blocks.item(block) for block in blocks.blocks], reason, usage)
        yield {"type": f"response.{response['status']}", "response": response, "timings": exchange.timings(0)}

    def _response(self, exchange: Exchange, output: list[Any], reason: str | None, usage: Any) -> dict[str, Any]:
        """Return a response; ``reason`` None: it is still in progress."""
        body, cut = self._body, reason == "length"
        job = exchange.parts[0][0].current
        return {
            "id": exchange.id,
            "object": "response",
            "created_at": self._created,
            "status": "in_progress" if reason is None else "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "error": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": body.temperature,
            "text": {"format": body.text.format or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": body.top_p,
            "metadata": {},
            "usage": usage
            and {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": job.n_cached, **job.dropped()}
                if job
                else {"cached_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }


class OutputBlocks(Blocks):
    """The events of the items of a response's output.

    Parameters
    ----------
    tools : RequestTools
        The original kinds of the functions that the model may call.
    """

    def __init__(self, tools: RequestTools) -> None:
        super().__init__()
        self._tools = tools
        self._names: dict[int, str] = {}

    def item(self, block: Block, done: bool = True) -> dict[str, Any]:
        """Return a block as an item of the output."""
        kind = "custom" if self._is_custom(block) else block.kind
        name = self._names.setdefault(block.index, f"{NAMES[kind]}_{uuid.uuid4().hex}")
        status = "completed" if done else "in_progress"
        if kind == "custom":
            call = {"call_id": block.id, "name": block.name, "input": _input(block) if done else ""}
            return {"type": "custom_tool_call", "id": name, "status": status, **call}
        if kind == "call":
            space = self._tools.namespaces.get(block.name)
            call = {"call_id": block.id, "name": block.name, "arguments": block.text}
            return {"type": "function_call", "id": name, "status": status, **call} | (
                {"namespace": space} if space else {}
            )
        content = [self._part(block)] if done else []
        if kind == "thinking":
            return {"type": "reasoning", "id": name, "summary": [], "content": content, "status": status}
        return {"type": "message", "id": name, "role": "assistant", "status": status, "content": content}

    def _is_custom(self, block: Block) -> bool:
        return block.kind == "call" and block.name in self._tools.custom

    def _opened(self, block: Block) -> Iterator[Event]:
        item = self.item(block, done=False)
        yield {"type": "response.output_item.added", "output_index": block.index, "item": item}
        if block.kind != "call":
            yield self._event("content_part.added", block) | {"part": self._part(block)}

    def _grown(self, block: Block, text: str) -> Iterator[Event]:
        if not self._is_custom(block):  # its text is only known when the surrounding JSON is complete
            yield self._event(f"{EVENTS[block.kind]}.delta", block) | {"delta": text}

    def _closed(self, block: Block) -> Iterator[Event]:
        if self._is_custom(block):
            yield self._event("custom_tool_call_input.delta", block) | {"delta": _input(block)}
            yield self._event("custom_tool_call_input.done", block) | {"input": _input(block)}
        else:
            said = {"arguments": block.text} if block.kind == "call" else {"text": block.text}
            yield self._event(f"{EVENTS[block.kind]}.done", block) | said
        if block.kind != "call":
            yield self._event("content_part.done", block) | {"part": self._part(block)}
        yield {"type": "response.output_item.done", "output_index": block.index, "item": self.item(block)}

    def _event(self, kind: str, block: Block) -> Event:
        place = {} if block.kind == "call" else {"content_index": 0}
        logprobs: Event = {"logprobs": []} if kind.startswith("output_text") else {}
        where = {"output_index": block.index, "item_id": self.item(block)["id"]}
        return {"type": f"response.{kind}", **where, **place, **logprobs}

    def _part(self, block: Block) -> dict[str, Any]:
        if block.kind == "thinking":
            return {"type": "reasoning_text", "text": block.text}
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _input(block: Block) -> str:
    """Return the input text of a custom tool; incomplete if the answer was cut off."""
    arguments = block.arguments
    return str(arguments.get("input", block.text)) if isinstance(arguments, dict) else block.text


EVENTS = {"thinking": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}
