"""POST /v1/messages, the API of Anthropic's clients."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi import APIRouter, Request, Response

from pylongctx.engine.job import Job
from pylongctx.serve import anthropic
from pylongctx.serve.answer import Chunks, answer
from pylongctx.serve.blocks import Block, Blocks, Event, blocks_of
from pylongctx.serve.bodies import ChatBody, Extension
from pylongctx.serve.errors import invalid
from pylongctx.serve.exchange import Exchange, NamedEvents
from pylongctx.serve.fields import Fields, Open, Unserved, load, read
from pylongctx.serve.generate import chats, count_tokens
from pylongctx.serve.service import Service

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
SHOWN = ("full", "summarized")  # thinking.display
# fields that a chat has by the same name
SAME = ("stream", "temperature", "top_p", "top_k", "longctx", "chat_template_kwargs")


class Thinking(Open):
    """Whether the model may reason; these tokens count towards ``max_tokens``."""

    type: str
    budget_tokens: int | None = None
    display: str = "full"  # reasoning is always shown in full


class OutputConfig(Open):
    """The form of the answer."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class MessagesBody(Fields):
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
    output_config: OutputConfig = OutputConfig()
    output_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    longctx: Extension = Extension()

    def chat(self, unserved: Unserved) -> ChatBody:
        """Return the equivalent request for OpenAI's route."""
        fields = {name: getattr(self, name) for name in SAME if getattr(self, name) is not None}
        fields |= {"longctx": self.longctx.model_dump(), "max_tokens": self.max_tokens, "stop": self.stop_sequences}
        fields["messages"] = list(anthropic.chat_messages(self.system, self.messages, unserved))
        fields["reasoning_effort"] = self.output_config.effort
        fields["response_format"] = self._format()
        if self.thinking is not None:
            fields["enable_thinking"] = self.thinking.type != "disabled"
            if (display := self.thinking.display) not in SHOWN:
                unserved.note("thinking.display", f"thinking.display={display!r} is not supported: reasoning is shown")
        if self.tools:
            fields["tools"] = anthropic.chat_tools(self.tools, unserved)
        if self.tool_choice is not None:
            fields |= anthropic.chat_choice(self.tool_choice)
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
    router = APIRouter()

    @router.post("/v1/messages", summary="Answer a conversation, in Anthropic's form")
    async def messages(request: Request) -> Response:
        body = await read(request, MessagesBody)
        if body.max_tokens is None:
            raise invalid("max_tokens: Field required", "max_tokens")
        chat = body.chat(request.scope["unserved"])
        return await answer(service, request, chat, chats(service, request, chat), MessagesForm(service, body))

    @router.post("/v1/messages/count_tokens", summary="Count the tokens of such a conversation")
    async def count(request: Request) -> dict[str, int]:
        body = await read(request, MessagesBody)
        return await count_tokens(service, request, body.chat(request.scope["unserved"]))

    return router


class MessagesForm:
    """Answers in Anthropic's form.

    Parameters
    ----------
    service : Service
        Has the model's name.
    body : MessagesBody
        The request.
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
                continue  # the prompt is not tokenized yet
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

    def _grown(self, block: Block, text: str) -> Iterator[Event]:
        kind, name = DELTAS[block.kind]
        yield {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, name: text}}

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
    """Return the job of the only answer."""
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
    """Return additional counts of dropped tokens and turns; empty if there are none."""
    job = _job(exchange)
    return {} if job is None else job.dropped()
