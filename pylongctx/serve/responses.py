"""POST /v1/responses, OpenAI's newer API; nothing is stored."""

import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from pylongctx.serve.answer import Chunks, answer
from pylongctx.serve.blocks import Block, Blocks, Event, blocks_of, text_of
from pylongctx.serve.bodies import ChatBody, Extension
from pylongctx.serve.errors import invalid
from pylongctx.serve.exchange import Exchange, NamedEvents
from pylongctx.serve.fields import MOST, load, read
from pylongctx.serve.generate import chats, count_tokens
from pylongctx.serve.service import Service

USUAL = (("verbosity", "medium"), ("summary", "auto"))  # what is done anyway
TEXTS = ("input_text", "output_text", "text")
NAMES = {"thinking": "rs", "text": "msg", "call": "fc"}
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


class ResponsesBody(BaseModel):
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
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    longctx: Extension = Extension()

    def chat(self) -> ChatBody:
        """Return the same request for the route of chats."""
        fields = {name: getattr(self, name) for name in SAME if getattr(self, name) is not None}
        fields |= {"longctx": self.longctx.model_dump(), "messages": list(self._messages())}
        fields |= {"max_tokens": self.max_output_tokens, "response_format": self._format()}
        fields["reasoning_effort"] = _only(self.reasoning, "reasoning", "effort").get("effort")
        if self.tools:
            fields["tools"] = [_tool(i, tool) for i, tool in enumerate(self.tools)]
        choice = self.tool_choice
        fields["tool_choice"] = {"type": "function", "function": choice} if isinstance(choice, dict) else choice
        return load(ChatBody, fields)

    def _format(self) -> Any:
        wanted = _only(self.text, "text", "format").get("format")
        if not isinstance(wanted, Mapping) or wanted.get("type") != "json_schema":
            return wanted
        return {"type": "json_schema", "json_schema": {k: v for k, v in wanted.items() if k != "type"}}

    def _messages(self) -> Iterator[dict[str, Any]]:
        if self.instructions:
            yield {"role": "system", "content": self.instructions}
        if isinstance(self.input, str):
            yield {"role": "user", "content": self.input}
            return
        if not isinstance(self.input, list) or not self.input:
            raise invalid("input must be a text, or a list of at least one item", "input")
        if len(self.input) > MOST["messages"]:
            raise invalid(f"input has {len(self.input)} items, more than {MOST['messages']}", "input")
        said: list[dict[str, Any]] = []  # a message of the assistant, which has several items
        for i, item in enumerate(self.input):
            message = _message(f"input[{i}]", item)
            if message["role"] == "assistant":
                said.append(message)
                continue
            if said:
                yield _joined(said)
            said = []
            yield message
        if said:
            yield _joined(said)


def _only(given: Mapping[str, Any] | None, where: str, *names: str) -> Mapping[str, Any]:
    """Return an object whose other fields have no value."""
    for name, value in (given or {}).items():
        if name not in names and value is not None and (name, value) not in USUAL:
            raise invalid(f"{where}.{name} is not served here", where)
    return given or {}


def _message(where: str, item: Any) -> dict[str, Any]:
    """Return the message that an item of the input is, or is a part of."""
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    if kind == "message":
        return {"role": item.get("role"), "content": text_of(item.get("content"), TEXTS, where)}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        output = text_of(item.get("output"), TEXTS, where)
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    if kind == "reasoning":
        thought = text_of(item.get("content"), ("reasoning_text",), where)
        return {"role": "assistant", "content": "", "reasoning_content": thought}
    raise invalid(f"{where}: an item of type {kind!r} is not served here", "input")


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one message of the assistant from what it thought, said and called."""
    joined: dict[str, Any] = {"role": "assistant", "content": "".join(part["content"] for part in parts)}
    if thoughts := [part["reasoning_content"] for part in parts if "reasoning_content" in part]:
        joined["reasoning_content"] = "".join(thoughts)
    if calls := [call for part in parts for call in part.get("tool_calls", ())]:
        joined["tool_calls"] = calls
    return joined


def _tool(i: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise invalid(f"tools[{i}]: type {tool.get('type')!r} is not served, only functions are", "tools")
    return {"type": "function", "function": {k: v for k, v in tool.items() if k not in ("type", "strict")}}


def routes(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter()

    @router.post("/v1/responses", summary="Answer a conversation, as OpenAI's newer clients ask")
    @router.post("/responses", include_in_schema=False)
    async def responses(request: Request) -> Response:
        body = await read(request, ResponsesBody)
        chat = body.chat()
        return await answer(service, request, chat, chats(service, chat), ResponsesForm(service, body))

    @router.post("/v1/responses/input_tokens", summary="The tokens of such a conversation")
    async def count(request: Request) -> dict[str, Any]:
        body = await read(request, ResponsesBody)
        return {"object": "response.input_tokens", **await count_tokens(service, request, body.chat())}

    return router


class ResponsesForm:
    """Answers as OpenAI's newer API writes them.

    Parameters
    ----------
    service : Service
        Has the model's name.
    body : ResponsesBody
        What was asked.
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
        names = OutputBlocks()
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
        blocks, reason, usage = OutputBlocks(), None, None
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
        """Return a response; ``reason`` None: it is still being made."""
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
            "text": body.text or {"format": {"type": "text"}},
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
    """The events of the items of a response's output."""

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[int, str] = {}

    def item(self, block: Block, done: bool = True) -> dict[str, Any]:
        """Return a block as an item of the output."""
        name = self._names.setdefault(block.index, f"{NAMES[block.kind]}_{uuid.uuid4().hex}")
        status = "completed" if done else "in_progress"
        if block.kind == "call":
            call = {"call_id": block.id, "name": block.name, "arguments": block.text}
            return {"type": "function_call", "id": name, "status": status, **call}
        content = [self._part(block)] if done else []
        if block.kind == "thinking":
            return {"type": "reasoning", "id": name, "summary": [], "content": content, "status": status}
        return {"type": "message", "id": name, "role": "assistant", "status": status, "content": content}

    def _opened(self, block: Block) -> Iterator[Event]:
        item = self.item(block, done=False)
        yield {"type": "response.output_item.added", "output_index": block.index, "item": item}
        if block.kind != "call":
            yield self._event("content_part.added", block) | {"part": self._part(block)}

    def _grown(self, block: Block, text: str) -> Event:
        return self._event(f"{EVENTS[block.kind]}.delta", block) | {"delta": text}

    def _closed(self, block: Block) -> Iterator[Event]:
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


EVENTS = {"thinking": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}
