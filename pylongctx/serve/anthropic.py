"""POST /v1/messages, the API of Anthropic's clients."""

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from pylongctx.completions.request import stop_words
from pylongctx.serve.blocks import Block, Blocks, Event, blocks_of
from pylongctx.serve.bodies import ChatBody, Dialect, Open, add_format, also_named, load, read, unserved_of
from pylongctx.serve.content import UNREAD, Part, joined, parts_of, text, text_of, text_part, unread
from pylongctx.serve.errors import invalid
from pylongctx.serve.handler import Chunks, NamedEvents, Object
from pylongctx.serve.openai import ChatHandler, count_tokens
from pylongctx.serve.service import Service
from pylongctx.serve.unserved import Unserved

Message = dict[str, Any]
TEXTS = ("text",)
CALLS = ("tool_use", "server_tool_use", "mcp_tool_use")
ATTRIBUTION = "x-anthropic-"  # begins blocks about a client's account, as x-anthropic-billing-header does
DOCUMENT = {"type", "source", "title", "context", "citations", "cache_control"}
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
SHOWN = ("full", "summarized")  # thinking.display
DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


def chat_messages(system: Any, messages: list[Any], unserved: Unserved) -> Iterator[Message]:
    """Yield the messages of a chat; ApiError for unsupported content."""
    if instructions := text_of(_instructions(system, unserved), TEXTS, "system"):
        yield {"role": "system", "content": instructions}
    for i, message in enumerate(messages):
        where, content, role = f"messages[{i}]", message.get("content"), message.get("role")
        if not isinstance(content, list):
            yield {"role": role, "content": content}
        elif role == "assistant":
            yield from _said(where, content, unserved)
        elif role == "user":
            yield from _asked(where, content)
        else:
            yield {"role": role, "content": text_of(content, TEXTS, where)}


def _instructions(system: Any, unserved: Unserved) -> Any:
    """Return system blocks without those of the account, which change in every request: nothing would be cached.

    Empty texts take their places, so that the others keep their paths.
    """
    if not isinstance(system, list):
        return system
    dropped = [i for i, block in enumerate(system) if _is_attribution(block)]
    for i in dropped:
        unserved.tell(f"system[{i}]", f"system[{i}]: a block that begins with {ATTRIBUTION} is left out")
    return [text("") if i in dropped else block for i, block in enumerate(system)]


def _is_attribution(block: Any) -> bool:
    return _kind(block) == "text" and str(block.get("text")).startswith(ATTRIBUTION)


def _asked(where: str, parts: list[Any]) -> Iterator[Message]:
    """Yield the messages of a user's parts: texts, and each tool result as a separate message."""
    read: list[Part] = []
    for i, part in enumerate(parts):
        place = f"{where}.content[{i}]"
        if _kind(part) != "tool_result":
            read += _document(part, place) if _kind(part) == "document" else [text_part(part, TEXTS, place)]
            continue
        if read:
            yield {"role": "user", "content": joined(read)}
        read = []
        result = _result(part.get("content"), place)
        yield {"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": result}
    if read:
        yield {"role": "user", "content": joined(read)}


def _kind(part: Any) -> Any:
    return part.get("type") if isinstance(part, Mapping) else None


def _document(part: Mapping[str, Any], where: str) -> list[Part]:
    source, title = part.get("source"), part.get("title")
    if _kind(source) != "text" or not isinstance(source, Mapping) or not isinstance(source.get("data"), str):
        return [unread("document", where, title, "only documents with a source of type text can be read")]
    if unknown := part.keys() - DOCUMENT:
        return [unread("document", where, title, f"its field {min(unknown)} is not supported")]
    document = {"type": "document", "text": source["data"]}
    return [text(f"{title}\n"), document] if title else [document]


def _result(content: Any, where: str) -> str | list[Part]:
    """Return the lines of a tool's result."""
    if not isinstance(content, list):
        return text_of(content, TEXTS, where)
    lines: list[Part] = []
    for i, part in enumerate(content):
        lines += [*([text("\n")] if i else []), *_result_parts(part, f"{where}.content[{i}]")]
    return joined(lines)


def _result_parts(part: Any, where: str) -> list[Part]:
    kind = _kind(part)
    if kind == "tool_reference":
        return [text(f"tool: {part.get('tool_name')}")]
    if kind == "search_result":
        own = [text(f"{part[name]}\n") for name in ("title", "source") if part.get(name)]
        return [*own, *parts_of(text_of(part.get("content"), TEXTS, where))]
    if kind == "document":  # a result is one text
        return [one if one["type"] == UNREAD else text(one["text"]) for one in _document(part, where)]
    return [text_part(part, TEXTS, where)]


def _said(where: str, parts: list[Any], unserved: Unserved) -> Iterator[Message]:
    """Yield the messages of an assistant's parts; a result of a server tool ends a message."""
    own: list[Any] = []
    for part in parts:
        kind = str(_kind(part))
        if kind == "redacted_thinking":
            unserved.note(f"{where}.redacted_thinking", f"{where}: redacted thinking is encrypted and left out")
        elif kind.endswith("_tool_result"):
            yield _answer(where, own)
            own = []
            content = json.dumps(_readable(part.get("content")), ensure_ascii=False)
            yield {"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": content}
        else:
            own.append(part)
    if own or not parts:
        yield _answer(where, own)


def _readable(content: Any) -> Any:
    """Return the content of a result without encrypted parts."""
    if isinstance(content, Mapping):
        return {name: _readable(value) for name, value in content.items() if not name.startswith("encrypted")}
    return [_readable(one) for one in content] if isinstance(content, list) else content


def _answer(where: str, parts: list[Any]) -> Message:
    """Return one message of an assistant."""
    thoughts = [part for part in parts if _kind(part) == "thinking"]
    calls = [part for part in parts if _kind(part) in CALLS]
    texts = [part for part in parts if _kind(part) not in ("thinking", *CALLS)]
    message: Message = {"role": "assistant", "content": text_of(texts, TEXTS, where)}
    if thoughts:
        message["reasoning_content"] = "".join(str(part.get("thinking", "")) for part in thoughts)
    if calls:
        message["tool_calls"] = [_call(part) for part in calls]
    return message


def _call(part: Mapping[str, Any]) -> Message:
    function = {"name": part.get("name"), "arguments": json.dumps(part.get("input") or {})}
    return {"id": part.get("id"), "type": "function", "function": function}


def chat_tools(tools: list[Any], unserved: Unserved) -> list[Message]:
    """Return the tools with a schema; others are built into Anthropic's API and unknown to the model."""
    return [_tool(tool) for i, tool in enumerate(tools) if _is_served(i, tool, unserved)]


def _is_served(i: int, tool: Mapping[str, Any], unserved: Unserved) -> bool:
    kind = tool.get("type") or "custom"
    if kind != "custom":
        unserved.note(f"tools[{i}]", f"tools[{i}]: type {kind!r} is not supported, only custom tools are")
    return bool(kind == "custom")


def _tool(tool: Mapping[str, Any]) -> Message:
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def chat_choice(choice: Mapping[str, Any]) -> Message:
    """Return the fields of a chat for a choice of tools."""
    kind = choice.get("type")
    named = {"type": "function", "function": {"name": choice.get("name")}}
    words: dict[Any, Any] = {"auto": "auto", "any": "required", "none": "none", "tool": named}
    if kind not in words:
        raise invalid(f"tool_choice must have type auto, any, tool or none, not {kind!r}", "tool_choice")
    alone = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    return {"tool_choice": words[kind], **alone}


class Thinking(Open):
    """Whether the model may reason, and for how many tokens at most; these count towards ``max_tokens``."""

    type: str
    budget_tokens: int | None = Field(None, ge=0)
    display: str = "full"  # reasoning is always shown in full


class OutputConfig(Open):
    """The form of the answer."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class MessagesBody(Dialect):
    """POST /v1/messages."""

    messages: list[dict[str, Any]]
    system: Any = None
    stop: str | list[str] | None = also_named("stop_sequences", "stop", "stopping_strings", "stop_sequence")
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    output_format: dict[str, Any] | None = None

    def chat(self, unserved: Unserved) -> ChatBody:
        """Return the equivalent request for OpenAI's route."""
        fields = self.shared()
        fields["messages"] = list(chat_messages(self.system, self.messages, unserved))
        if self.output_config.effort is not None:
            fields["reasoning_effort"] = self.output_config.effort
        add_format(fields, "output_config.format" if self.output_config.format else "output_format", self._format())
        if self.thinking is not None:
            fields["enable_thinking"] = self.thinking.type != "disabled"
            if self.thinking.budget_tokens is not None:
                fields["reasoning_budget_tokens"] = self.thinking.budget_tokens
            if (display := self.thinking.display) not in SHOWN:
                unserved.note("thinking.display", f"thinking.display={display!r} is not supported: reasoning is shown")
        if self.tools:
            fields["tools"] = chat_tools(self.tools, unserved)
        if self.tool_choice is not None:
            fields |= chat_choice(self.tool_choice)
        return load(ChatBody, fields, unserved)

    def _format(self) -> dict[str, Any] | None:
        wanted = self.output_config.format or self.output_format
        if wanted is None:
            return None
        if wanted.get("type") != "json_schema" or "schema" not in wanted:
            raise invalid("the format of an answer must have type json_schema and a schema", "output_config")
        return {"type": "json_schema", "json_schema": {"schema": wanted["schema"]}}


def routes(service: Service) -> APIRouter:
    """Return the routes."""
    api = APIRouter()

    @api.post("/v1/messages", summary="Answer a conversation, in Anthropic's form")
    async def messages(request: Request) -> Response:
        body = await read(request, MessagesBody)
        if body.max_tokens is None:
            raise invalid("max_tokens: Field required", "max_tokens")
        return await MessagesHandler(service, request, body).answer()

    @api.post("/v1/messages/count_tokens", summary="Count the tokens of such a conversation")
    async def count(request: Request) -> dict[str, int]:
        body = await read(request, MessagesBody)
        return await count_tokens(service, request, body.chat(unserved_of(request)))

    return api


class MessagesHandler(ChatHandler):
    """Answers a conversation in Anthropic's form."""

    prefix = "msg_"
    response = NamedEvents

    def __init__(self, service: Service, request: Request, asked: MessagesBody) -> None:
        super().__init__(service, request, asked.chat(unserved_of(request)))
        self._stops = stop_words(asked.stop)

    def whole(self, found: list[Object]) -> Object:
        """Return a message."""
        (choice,) = found[0]["choices"]
        end = self._end(choice["finish_reason"])
        content = [_content(block) for block in blocks_of(choice["message"])]
        usage = self._prompt_usage() | {"output_tokens": found[0]["usage"]["completion_tokens"], **self._dropped()}
        return self._message() | end | {"content": content, "usage": usage}

    async def events(self, chunks: Chunks) -> AsyncIterator[Object | None]:
        """Yield the events of a message."""
        blocks, begun, reason, n_tokens = MessageBlocks(), False, "stop", 0
        async for _, chunk in chunks:
            if chunk is None or "prompt_progress" in chunk:
                yield {"type": "ping", **(chunk or {})}
                continue
            (choice,) = chunk["choices"]
            if "role" in choice["delta"]:
                continue  # the prompt is not tokenized yet
            if not begun:
                begun = True
                yield {"type": "message_start", "message": self._message()}
            for event in blocks.feed(choice["delta"]):
                timed = event["type"] == "content_block_delta" and self.body.timings_per_token
                yield event | {"timings": self.timings(0)} if timed else event
            reason = choice["finish_reason"] or reason
            n_tokens = chunk.get("usage", {}).get("completion_tokens", n_tokens)
        for event in blocks.finish():
            yield event
        usage = {"output_tokens": n_tokens, **self._dropped()}
        yield {"type": "message_delta", "delta": self._end(reason), "usage": usage}
        yield {"type": "message_stop"}

    def _message(self) -> Object:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.service.settings.alias,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._prompt_usage(),
        }

    def _end(self, reason: str) -> Object:
        word = self.job.stop_word if self.job is not None and self.job.stop_word in self._stops else None
        return {"stop_reason": "stop_sequence" if word else REASONS[reason], "stop_sequence": word}

    def _prompt_usage(self) -> dict[str, int]:
        n_prompt, n_cached = (0, 0) if self.job is None else (len(self.job.tokens), self.job.n_cached)
        return {
            "input_tokens": n_prompt - n_cached,
            "cache_read_input_tokens": n_cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": 0,
        }

    def _dropped(self) -> dict[str, int]:
        """Return additional counts of dropped tokens and turns; empty if there are none."""
        return {} if self.job is None else self.job.dropped()


class MessageBlocks(Blocks):
    """The events of Anthropic's content blocks."""

    def _opened(self, block: Block) -> Iterator[Event]:
        yield {"type": "content_block_start", "index": block.index, "content_block": _content(block)}

    def _grown(self, block: Block, text: str) -> Iterator[Event]:
        kind, name = DELTAS[block.kind]
        yield {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, name: text}}

    def _closed(self, block: Block) -> Iterator[Event]:
        if block.kind == "thinking":
            signature = {"type": "signature_delta", "signature": ""}
            yield {"type": "content_block_delta", "index": block.index, "delta": signature}
        yield {"type": "content_block_stop", "index": block.index}


def _content(block: Block) -> dict[str, Any]:
    if block.kind == "thinking":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": block.arguments}
