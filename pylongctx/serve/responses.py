"""POST /v1/responses, OpenAI's newer API; nothing is stored."""

import json
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fastapi import APIRouter, Request, Response

from pylongctx.chat.tools import custom_function, custom_grammar, custom_input
from pylongctx.serve.blocks import Block, Blocks, Event, blocks_of
from pylongctx.serve.bodies import (
    MAX_ENTRIES,
    ChatBody,
    Dialect,
    Open,
    Reasoning,
    add_format,
    also_named,
    load,
    read,
    unserved_of,
)
from pylongctx.serve.content import joined, parts_of, text_of
from pylongctx.serve.errors import invalid
from pylongctx.serve.handler import Chunks, NamedEvents, Object
from pylongctx.serve.openai import ChatHandler, count_tokens
from pylongctx.serve.service import Service
from pylongctx.serve.unserved import Unserved

TEXTS = ("input_text", "output_text", "text")
CALLS = ("function_call", "custom_tool_call", "local_shell_call")
STORED = ("item_reference",)  # references data stored on another server
NAMES = {"thinking": "rs", "text": "msg", "call": "fc", "custom": "ctc"}
EVENTS = {"thinking": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}


@dataclass
class RequestTools:
    """The tools of a request as functions, with their original kinds."""

    functions: list[Object] = field(default_factory=list)
    custom: set[str] = field(default_factory=set)  # names of functions made from custom tools
    namespaces: dict[str, str] = field(default_factory=dict)  # by function, for those that have one

    def add(self, where: str, tool: Any, unserved: Unserved) -> None:
        """Add a tool; tools that a server would run are not supported."""
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if kind == "function":
            self._add_function({name: value for name, value in tool.items() if name != "type"})
        elif kind == "custom":
            self._add_custom(where, tool, unserved)
        elif kind == "namespace" and isinstance(tool.get("tools"), list):
            for i, one in enumerate(tool["tools"]):
                n = len(self.functions)
                self.add(f"{where}.tools[{i}]", one, unserved)
                names = [function["function"].get("name") for function in self.functions[n:]]
                self.namespaces |= dict.fromkeys(names, str(tool.get("name")))
        else:
            unserved.note(where, f"{where}: type {kind!r} is not supported, only functions and custom tools are")

    def _add_function(self, function: Object) -> None:
        self.functions.append({"type": "function", "function": function})

    def _add_custom(self, where: str, tool: Mapping[str, Any], unserved: Unserved) -> None:
        if custom_grammar(tool) is not None:
            unserved.note(f"{where}.format", f"{where}.format: the grammar is shown to the model, but not enforced")
        self.custom.add(str(tool.get("name")))
        self.functions.append(custom_function({"name": None, **tool}))


def chat_messages(instructions: str | None, items: Any, unserved: Unserved) -> Iterator[Object]:
    """Yield the messages of a chat; ApiError for unsupported items."""
    if instructions:
        yield {"role": "system", "content": instructions}
    if isinstance(items, str):
        yield {"role": "user", "content": items}
        return
    if not isinstance(items, list) or not items:
        raise invalid("input must be a text, or a list of at least one item", "input")
    if len(items) > MAX_ENTRIES["messages"]:
        raise invalid(f"input has {len(items)} items, more than {MAX_ENTRIES['messages']}", "input")
    said: list[Object] = []  # items of one message of the assistant
    for i, item in enumerate(items):
        message = _message(f"input[{i}]", item, unserved)
        if message is None:
            continue
        if message["role"] == "assistant":
            said.append(message)
            continue
        if said:
            yield _joined(said)
        said = []
        yield message
    if said:
        yield _joined(said)


def _message(where: str, item: Any, unserved: Unserved) -> Object | None:
    """Return the message of an input item, or the message that it is a part of; None if a chat has no equivalent."""
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    if kind == "message":
        return {"role": item.get("role"), "content": text_of(item.get("content"), TEXTS, where)}
    if kind in CALLS:
        return {"role": "assistant", "content": "", "tool_calls": [_call(kind, item)]}
    if kind is not None and kind.removesuffix("_output") in CALLS:
        output = text_of(item.get("output"), TEXTS, where)
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    if kind == "reasoning":
        return _thought(where, item, unserved)
    if not isinstance(kind, str) or kind in STORED:
        raise invalid(f"{where}: an item of type {kind!r} is not supported here", "input")
    unserved.note(where, f"{where}: an item of type {kind!r} is not supported here and is left out")
    return None


def _call(kind: str, item: Mapping[str, Any]) -> Object:
    name, arguments = item.get("name"), item.get("arguments") or "{}"
    if kind == "custom_tool_call":
        arguments = json.dumps({"input": item.get("input") or ""})
    elif kind == "local_shell_call":
        name, arguments = "local_shell", json.dumps(item.get("action") or {})
    return {"id": item.get("call_id"), "type": "function", "function": {"name": name, "arguments": arguments}}


def _thought(where: str, item: Mapping[str, Any], unserved: Unserved) -> Object | None:
    said = text_of(item.get("content"), ("reasoning_text",), where)
    said = said or text_of(item.get("summary"), ("summary_text",), where)
    thought = "".join(part.get("text", "") for part in parts_of(said))
    if thought:
        return {"role": "assistant", "content": "", "reasoning_content": thought}
    if item.get("encrypted_content"):
        reason = f"{where}: reasoning encrypted by another server is left out"
        unserved.note(f"{where}.encrypted_content", reason)
    return None


def _joined(parts: list[Object]) -> Object:
    """Return one message of the assistant from its reasoning, text and calls."""
    content = joined(one for part in parts for one in parts_of(part["content"]))
    whole: Object = {"role": "assistant", "content": content}
    if thoughts := [part["reasoning_content"] for part in parts if "reasoning_content" in part]:
        whole["reasoning_content"] = "".join(thoughts)
    if calls := [call for part in parts for call in part.get("tool_calls", ())]:
        whole["tool_calls"] = calls
    return whole


class TextConfig(Open):
    """The form of the answer."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesBody(Dialect):
    """POST /v1/responses."""

    input: Any
    instructions: str | None = None
    max_tokens: int | None = also_named("max_output_tokens", "max_tokens", "n_predict", "max_new_tokens", ge=-2)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    text: TextConfig = TextConfig()
    reasoning: Reasoning = Reasoning()

    @cached_property
    def functions(self) -> RequestTools:
        """The tools as functions, set by ``chat``."""
        return RequestTools()

    def chat(self, unserved: Unserved) -> ChatBody:
        """Return the equivalent request for the route of chats."""
        fields = self.shared()
        fields["messages"] = list(chat_messages(self.instructions, self.input, unserved))
        add_format(fields, "text.format", self._format())
        fields["reasoning"] = self.reasoning.model_dump(exclude_none=True)
        for i, tool in enumerate(self.tools or ()):
            self.functions.add(f"tools[{i}]", tool, unserved)
        fields["tool_choice"] = self.tool_choice
        fields["tools"] = self.functions.functions or None
        if self.text.verbosity not in (None, "medium"):
            reason = f"text.verbosity={self.text.verbosity!r} is not supported: the prompt does not contain it"
            unserved.note("text.verbosity", reason)
        return load(ChatBody, fields, unserved)

    def _format(self) -> Any:
        wanted = self.text.format
        if wanted is None or wanted.get("type") == "text":
            return None
        if wanted.get("type") != "json_schema":
            return wanted
        return {"type": "json_schema", "json_schema": {k: v for k, v in wanted.items() if k != "type"}}


def routes(service: Service) -> APIRouter:
    """Return the routes."""
    api = APIRouter()

    @api.post("/v1/responses", summary="Answer a conversation, in the form of OpenAI's Responses API")
    @api.post("/responses", include_in_schema=False)
    async def responses(request: Request) -> Response:
        return await ResponsesHandler(service, request, await read(request, ResponsesBody)).answer()

    @api.post("/v1/responses/input_tokens", summary="Count the tokens of such a conversation")
    async def count(request: Request) -> dict[str, Any]:
        body = await read(request, ResponsesBody)
        return {
            "object": "response.input_tokens",
            **await count_tokens(service, request, body.chat(unserved_of(request))),
        }

    return api


class ResponsesHandler(ChatHandler):
    """Answers a conversation in the form of OpenAI's Responses API."""

    prefix = "resp_"
    response = NamedEvents

    def __init__(self, service: Service, request: Request, asked: ResponsesBody) -> None:
        super().__init__(service, request, asked.chat(unserved_of(request)))
        self._asked = asked
        self._created = int(time.time())

    def whole(self, found: list[Object]) -> Object:
        """Return a response."""
        (choice,) = found[0]["choices"]
        names = OutputBlocks(self._asked.functions)
        output = [names.item(block) for block in blocks_of(choice["message"], choice["finish_reason"] == "length")]
        whole = self._response(output, choice["finish_reason"], found[0]["usage"])
        return whole | {"timings": self.timings(0)}

    async def events(self, chunks: Chunks) -> AsyncIterator[Object | None]:
        """Yield the numbered events of a response."""
        n = 0
        async for event in self._events(chunks):
            yield None if event is None else {**event, "sequence_number": n}
            n += event is not None

    async def _events(self, chunks: Chunks) -> AsyncIterator[Object | None]:
        blocks, reason, usage = OutputBlocks(self._asked.functions), None, None
        for name in ("created", "in_progress"):
            yield {"type": f"response.{name}", "response": self._response([], None, None)}
        async for _, chunk in chunks:
            if chunk is None:
                yield None
                continue
            if "prompt_progress" in chunk:
                started = self._response([], None, None)
                yield {"type": "response.in_progress", "response": started, **chunk}
                continue
            (choice,) = chunk["choices"]
            for event in blocks.feed(choice["delta"]):
                timed = event["type"] == "response.output_text.delta" and self._asked.timings_per_token
                yield event | {"timings": self.timings(0)} if timed else event
            reason, usage = choice["finish_reason"] or reason, chunk.get("usage", usage)
        for event in blocks.finish(cut=reason == "length"):
            yield event
        response = self._response([blocks.item(block) for block in blocks.blocks], reason, usage)
        yield {"type": f"response.{response['status']}", "response": response, "timings": self.timings(0)}

    def _response(self, output: list[Any], reason: str | None, usage: Any) -> Object:
        """Return a response; ``reason`` None: it is still in progress."""
        asked, cut, job = self._asked, reason == "length", self.job
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": "in_progress" if reason is None else "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "error": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_tokens,
            "model": self.service.settings.alias,
            "output": output,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": asked.temperature,
            "text": {"format": asked.text.format or {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "top_p": asked.top_p,
            "metadata": {},
            "usage": usage
            and {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": job.n_cached, **job.dropped()}
                if job
                else {"cached_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0} | usage.get("completion_tokens_details", {}),
                "total_tokens": usage["total_tokens"],
            },
        }


class OutputBlocks(Blocks):
    """The events of the items of a response's output."""

    def __init__(self, tools: RequestTools) -> None:
        super().__init__()
        self._tools = tools
        self._names: dict[int, str] = {}

    def item(self, block: Block, done: bool = True) -> dict[str, Any]:
        """Return a block as an item of the output."""
        kind = "custom" if self._is_custom(block) else block.kind
        name = self._names.setdefault(block.index, f"{NAMES[kind]}_{uuid.uuid4().hex}")
        status = "incomplete" if block.cut else "completed" if done else "in_progress"
        if kind == "custom":
            call = {"call_id": block.id, "name": block.name, "input": custom_input(block.text) if done else ""}
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
            yield self._event("custom_tool_call_input.delta", block) | {"delta": custom_input(block.text)}
        if not (block.kind == "call" and block.cut):  # clients run a call whose arguments are done
            yield self._done(block)
        if block.kind != "call":
            yield self._event("content_part.done", block) | {"part": self._part(block)}
        yield {"type": "response.output_item.done", "output_index": block.index, "item": self.item(block)}

    def _done(self, block: Block) -> Event:
        if self._is_custom(block):
            return self._event("custom_tool_call_input.done", block) | {"input": custom_input(block.text)}
        said = {"arguments": block.text} if block.kind == "call" else {"text": block.text}
        return self._event(f"{EVENTS[block.kind]}.done", block) | said

    def _event(self, kind: str, block: Block) -> Event:
        place = {} if block.kind == "call" else {"content_index": 0}
        logprobs: Event = {"logprobs": []} if kind.startswith("output_text") else {}
        where = {"output_index": block.index, "item_id": self.item(block)["id"]}
        return {"type": f"response.{kind}", **where, **place, **logprobs}

    def _part(self, block: Block) -> dict[str, Any]:
        if block.kind == "thinking":
            return {"type": "reasoning_text", "text": block.text}
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
