"""POST /v1/messages, the API of Anthropic's clients."""

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict

from pylongctx.engine.job import Job
from pylongctx.serve.answer import Chunks, answer
from pylongctx.serve.blocks import Block, Blocks, Event, blocks_of, text_of
from pylongctx.serve.bodies import ChatBody, Extension
from pylongctx.serve.errors import invalid
from pylongctx.serve.exchange import Exchange, NamedEvents
from pylongctx.serve.fields import load, read
from pylongctx.serve.generate import chats, count_tokens
from pylongctx.serve.service import Service

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
TEXTS = ("text",)
# fields that a chat has by the same name
SAME = ("messages", "stream", "temperature", "top_p", "top_k", "longctx", "chat_template_kwargs")


class Thinking(BaseModel):
    """Whether the model may think; its tokens are a part of ``max_tokens``."""

    model_config = ConfigDict(extra="forbid")
    type: str
    budget_tokens: int | None = None


class MessagesBody(BaseModel):
    """POST /v1/messages."""

    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    system: Any = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    longctx: Extension = Extension()

    def chat(self) -> ChatBody:
        """Return the same request for OpenAI's route."""
        fields = {name: getattr(self, name) for name in SAME if getattr(self, name) is not None}
        fields |= {"longctx": self.longctx.model_dump(), "messages": list(self._messages())}
        fields |= {"max_tokens": self.max_tokens, "stop": self.stop_sequences}
        if self.thinking is not None:
            on = self.thinking.type != "disabled"
            fields["chat_template_kwargs"] = {"enable_thinking": on, **(self.chat_template_kwargs or {})}
        if self.tools:
            fields["tools"] = [_tool(i, tool) for i, tool in enumerate(self.tools)]
        if self.tool_choice is not None:
            fields |= _choice(self.tool_choice)
        return load(ChatBody, fields)

    def _messages(self) -> Iterator[dict[str, Any]]:
        if self.system:
            yield {"role": "system", "content": text_of(self.system, TEXTS, "system")}
        for i, message in enumerate(self.messages):
            content = message.get("content")
            if message.get("role") == "assistant" and isinstance(content, list):
                yield _said(f"messages[{i}]", content)
            elif message.get("role") == "user" and isinstance(content, list):
                yield from _asked(f"messages[{i}]", content)
            else:
                yield {"role": message.get("role"), "content": content}


def _asked(where: str, parts: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield the messages of a user's parts: texts, and each result of a tool as a message of its own."""
    texts: list[Any] = []
    for part in parts:
        if not (isinstance(part, Mapping) and part.get("type") == "tool_result"):
            texts.append(part)
            continue
        if texts:
            yield {"role": "user", "content": _read(texts, where)}
        texts = []
        result = text_of(part.get("content"), TEXTS, where)
        yield {"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": result}
    if texts:
        yield {"role": "user", "content": _read(texts, where)}


def _read(parts: list[Any], where: str) -> str | list[dict[str, Any]]:
    """Return texts as one, or where there are documents the parts of a chat."""
    if not any(isinstance(part, Mapping) and part.get("type") == "document" for part in parts):
        return text_of(parts, TEXTS, where)
    found: list[dict[str, Any]] = []
    for part in parts:
        if part.get("type") == "document":
            found += _document(part, where)
        else:
            found.append({"type": "text", "text": text_of([part], TEXTS, where)})
    return found


def _document(part: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    source, title = part.get("source"), part.get("title")
    if not isinstance(source, Mapping) or source.get("type") != "text" or not isinstance(source.get("data"), str):
        raise invalid(f"{where}: of documents only those with a source of type text can be read", "messages")
    if unknown := part.keys() - {"type", "source", "title", "cache_control"}:
        raise invalid(f"{where}: {min(unknown)} of a document is not served", "messages")
    document = {"type": "document", "text": source["data"]}
    return [{"type": "text", "text": f"{title}\n"}, document] if title else [document]


def _said(where: str, parts: list[Any]) -> dict[str, Any]:
    """Return the message of an assistant's parts."""
    kinds: dict[str, list[Any]] = {"thinking": [], "tool_use": [], "": []}
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else ""
        kinds[kind if kind in kinds else ""].append(part)
    message: dict[str, Any] = {"role": "assistant", "content": text_of(kinds[""], TEXTS, where)}
    if kinds["thinking"]:
        message["reasoning_content"] = "".join(str(part.get("thinking", "")) for part in kinds["thinking"])
    if kinds["tool_use"]:
        message["tool_calls"] = [
            {
                "id": part.get("id"),
                "type": "function",
                "function": {"name": part.get("name"), "arguments": json.dumps(part.get("input") or {})},
            }
            for part in kinds["tool_use"]
        ]
    return message


def _tool(i: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        raise invalid(f"tools[{i}]: type {tool['type']!r} is not served, only custom tools are", "tools")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    kind = choice.get("type")
    named = {"type": "function", "function": {"name": choice.get("name")}}
    words: dict[Any, Any] = {"auto": "auto", "any": "required", "none": "none", "tool": named}
    if kind not in words:
        raise invalid(f"tool_choice has type auto, any, tool or none, not {kind!r}", "tool_choice")
    alone = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    return {"tool_choice": words[kind], **alone}


def routes(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter()

    @router.post("/v1/messages", summary="Answer a conversation, as Anthropic's clients ask")
    async def messages(request: Request) -> Response:
        body = await read(request, MessagesBody)
        if body.max_tokens is None:
            raise invalid("max_tokens: Field required", "max_tokens")
        chat = body.chat()
        return await answer(service, request, chat, chats(service, chat), MessagesForm(service, body))

    @router.post("/v1/messages/count_tokens", summary="The tokens of such a conversation")
    async def count(request: Request) -> dict[str, int]:
        return await count_tokens(service, request, (await read(request, MessagesBody)).chat())

    return router


class MessagesForm:
    """Answers as Anthropic writes them.

    Parameters
    ----------
    service : Service
        Has the model's name.
    body : MessagesBody
        What was asked.
    """

    prefix = "msg_"
    frames = NamedEvents

    def __init__(self, service: Service, body: MessagesBody) -> None:
        self._model = service.settings.alias
        self._stops = body.stop_sequences or ()

    def whole(self, exchange: Exchange, found: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a message."""
        (choice,) = found[0]["choices"]
        end = self._end(exchange, choice["finish_reason"])
        content = [_content(block) for block in blocks_of(choice["message"])]
        usage = _usage(exchange) | {"output_tokens": found[0]["usage"]["completion_tokens"], **_dropped(exchange)}
        return self._message(exchange) | end | {"content": content, "usage": usage}

    async def events(self, exchange: Exchange, chunks: Chunks) -> AsyncIterator[Event | None]:
        """Yield the events of a message."""
        blocks, begun, reason, n_tokens = MessageBlocks(), False, "stop", 0
        async for _, chunk in chunks:
            if chunk is None:
                yield {"type": "ping"}
                continue
            (choice,) = chunk["choices"]
            if "role" in choice["delta"]:
                continue  # the prompt has not been looked at yet
            if not begun:
                begun = True
                yield {"type": "message_start", "message": self._message(exchange)}
            for event in blocks.feed(choice["delta"]):
                yield event
            reason = choice["finish_reason"] or reason
            n_tokens = chunk.get("usage", {}).get("completion_tokens", n_tokens)
        for event in blocks.finish():
            yield event
        usage = {"output_tokens": n_tokens, **_dropped(exchange)}
        yield {"type": "message_delta", "delta": self._end(exchange, reason), "usage": usage}
        yield {"type": "message_stop"}

    def _message(self, exchange: Exchange) -> dict[str, Any]:
        return {
            "id": exchange.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(exchange),
        }

    def _end(self, exchange: Exchange, reason: str) -> dict[str, Any]:
        job = _job(exchange)
        word = job.stop_word if job is not None and job.stop_word in self._stops else None
        return {"stop_reason": "stop_sequence" if word else REASONS[reason], "stop_sequence": word}


class MessageBlocks(Blocks):
    """The events of Anthropic's content blocks."""

    def _opened(self, block: Block) -> Iterator[Event]:
        yield {"type": "content_block_start", "index": block.index, "content_block": _content(block)}

    def _grown(self, block: Block, text: str) -> Event:
        kind, name = DELTAS[block.kind]
        return {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, name: text}}

    def _closed(self, block: Block) -> Iterator[Event]:
        if block.kind == "thinking":
            signature = {"type": "signature_delta", "signature": ""}
            yield {"type": "content_block_delta", "index": block.index, "delta": signature}
        yield {"type": "content_block_stop", "index": block.index}


DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


def _content(block: Block) -> dict[str, Any]:
    if block.kind == "thinking":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": block.arguments}


def _job(exchange: Exchange) -> Job | None:
    """Return the job of the one answer."""
    return exchange.parts[0][0].current


def _usage(exchange: Exchange) -> dict[str, int]:
    job = _job(exchange)
    n_prompt, n_cached = (0, 0) if job is None else (len(job.tokens), job.n_cached)
    return {
        "input_tokens": n_prompt - n_cached,
        "cache_read_input_tokens": n_cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": 0,
    }


def _dropped(exchange: Exchange) -> dict[str, int]:
    """Return the counts of what left, beside Anthropic's; none where nothing did."""
    job = _job(exchange)
    return {} if job is None else job.dropped()
