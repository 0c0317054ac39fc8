"""Answers to conversations: OpenAI's dicts, the parser of the text, and the stream of chunks."""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from pylongctx._lib import error, ffi, lib, take_text, text
from pylongctx.chat.tools import custom_input
from pylongctx.completions.results import CompletionUsage, Generation, StopFilter, TokenEntry
from pylongctx.errors import LctxError

if TYPE_CHECKING:
    from typing_extensions import NotRequired

Message = dict[str, Any]  # a message of a request: role, content, tool_calls, ...
FinishReason = Literal["stop", "length", "tool_calls", "function_call"]


class TopLogprob(TypedDict):
    """One of the most likely tokens."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """The tokens of an answer, including markers of tool calls."""

    content: list[TokenLogprob] | None
    refusal: list[TokenLogprob] | None


class FunctionCall(TypedDict):
    """A function and its arguments as JSON text."""

    name: str
    arguments: str


class CustomCall(TypedDict):
    """A custom tool and its input."""

    name: NotRequired[str]  # of a part only in the first one
    input: str


class ToolCall(TypedDict):
    """A tool call, of a function or a custom tool."""

    id: str
    type: Literal["function", "custom"]
    function: NotRequired[FunctionCall]
    custom: NotRequired[CustomCall]


class AnswerMessage(TypedDict):
    """The message of an answer."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]
    function_call: NotRequired[FunctionCall]


class ChatChoice(TypedDict):
    """One choice of an answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletion(TypedDict):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage


class FunctionCallDelta(TypedDict):
    """A part of a function call: only the first one has the name."""

    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """A part of a tool call; only the first one has the id and the type."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function", "custom"]]
    function: NotRequired[FunctionCallDelta]
    custom: NotRequired[CustomCall]


class Delta(TypedDict, total=False):
    """The additions of a chunk to the message."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str
    tool_calls: list[ToolCallDelta]
    function_call: FunctionCallDelta


class ChunkChoice(TypedDict):
    """A part of a choice."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunk(TypedDict):
    """A chunk of a stream; only the last one has ``usage``."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: NotRequired[CompletionUsage]


class AnswerParser:
    """Owner of one ``lctx_parser``, which parses answers by the ``syntax`` of a ``Rendered``."""

    def __init__(self, syntax: str) -> None:
        handle = lib.lctx_parser_create(syntax.encode())
        self._handle = ffi.gc(handle, lib.lctx_parser_free)
        self.failure = ""  # why the complete answer does not follow the template
        if failure := text(lib.lctx_parser_error(handle)):
            raise error(lib.LCTX_INVALID, failure)

    def feed(self, piece: str) -> list[dict[str, Any]]:
        """Parse the next piece of the answer and return its ``content``, ``reasoning_content`` and ``tool_call`` parts.

        If a piece continues the current text, only the piece is parsed. Text that may still become a marker of the
        template is held back.
        """
        data = piece.encode("utf-8", "replace")
        try:
            return _deltas(lib.lctx_parser_feed(self._handle, data, len(data)))
        except LctxError:
            return []  # more characters may complete it

    def end(self, complete: bool) -> list[dict[str, Any]]:
        """Return the text held back of an answer that is complete or was cut off.

        If the answer does not follow the template, the parsed part is kept and ``failure`` has the reason.
        """
        try:
            return _deltas(lib.lctx_parser_end(self._handle, complete))
        except LctxError as reason:
            if not complete:
                return []
            self.failure = str(reason)
            return self.end(complete=False)

    @property
    def n_parsed(self) -> int:
        """Return how many bytes were parsed so far, counting repeated parsing."""
        return int(lib.lctx_parser_parsed(self._handle))


def _deltas(found: Any) -> list[dict[str, Any]]:
    deltas: list[dict[str, Any]] = json.loads(take_text(found))
    return deltas


@dataclass
class ChatAnswer:
    """A running answer; ``stops`` are strings that end its text, but not its reasoning or its calls."""

    generation: Generation
    parser: AnswerParser
    model_name: str
    stops: Sequence[str] = ()
    legacy: bool = False  # whether calls are OpenAI's older function calls
    usage_chunk: bool = False  # whether a stream ends with a separate usage chunk, as with OpenAI's include_usage
    one_call: bool = False  # whether the answer ends after the first tool call
    custom: frozenset[str] = frozenset()  # names of custom tools
    entries: list[TokenEntry] = field(default_factory=list)  # not sent in a chunk yet
    called: bool = False
    n_thought: int = 0  # tokens of the reasoning, with the mark before it
    n_counted: int = 0  # tokens whose text was parsed
    n_said: int = 0  # characters that were parsed
    inputs: dict[int, str] = field(default_factory=dict)  # arguments of calls of custom tools, by index

    def __post_init__(self) -> None:
        self._filter = StopFilter(list(self.stops))

    def stream(self) -> Iterator[ChatChunk]:
        """Yield a chunk with the role, chunks of the message, and one with the finish reason and the usage."""
        answer_id, created = f"chatcmpl-{uuid.uuid4()}", int(time.time())

        def chunk(delta: Delta, reason: FinishReason | None = None) -> ChatChunk:
            choice: Any = {"index": 0, "delta": delta, "logprobs": self._logprobs(), "finish_reason": reason}
            return {
                "id": answer_id,
                "object": "chat.completion.chunk",
                "created": created,
                "model": self.model_name,
                "choices": [choice],
            }

        yield chunk({"role": "assistant"})
        for delta in self._deltas():
            if delta:
                yield chunk(delta)
        for index, arguments in self.inputs.items():
            yield chunk({"tool_calls": [{"index": index, "custom": {"input": custom_input(arguments)}}]})
        self.generation.finish()
        last = chunk({}, self._reason())
        if self.usage_chunk:
            yield last
            last = chunk({})
            last["choices"] = []
        last["usage"] = self.generation.usage()
        if self.n_thought:
            last["usage"]["completion_tokens_details"] = {"reasoning_tokens": self.n_thought}
        yield last

    def _deltas(self) -> Iterator[Delta]:
        for found in self._parsed():
            if self._is_another_call(found):
                return
            yield from self._before_stop(found)
            if self._filter.stopped:
                self.generation.end_at(self._filter.word)
                return
        if rest := self._filter.feed(b"", final=True):
            yield {"content": rest}
        if self.parser.failure:
            self.generation.source.log(f"the answer does not follow the chat template: {self.parser.failure}")

    def _parsed(self) -> Iterator[dict[str, Any]]:
        for said, entries in self.generation.parts():
            self.entries += entries
            self.n_said += len(said)
            yield from self.parser.feed(said) if said else ()
        yield from self.parser.end(complete=self.generation.reason == "stop")

    def _before_stop(self, found: dict[str, Any]) -> Iterator[Delta]:
        """Yield a part of the answer up to a stop string; text that may begin one is held back."""
        if "content" in found:
            found = {**found, "content": self._filter.feed(found["content"].encode("utf-8", "replace"))}
        elif rest := self._filter.feed(b"", final=True):  # a stop string does not go across a call
            yield {"content": rest}
        delta = self._delta(found)
        if delta != {"content": ""}:
            yield delta

    def _is_another_call(self, found: dict[str, Any]) -> bool:
        return self.one_call and found.get("tool_call", {"index": 0})["index"] > 0

    def _delta(self, found: dict[str, Any]) -> Delta:
        delta: Delta = {}
        before, self.n_counted = self.n_counted, self.generation.n_tokens
        if "reasoning_content" in found:
            self.n_thought += self.n_counted - before
            delta["reasoning_content"] = found["reasoning_content"]
        if "content" in found:
            delta["content"] = found["content"]
        if "tool_call" not in found:
            return delta
        self.called = True
        call = found["tool_call"]
        if call["name"] in self.custom or call["index"] in self.inputs:
            return delta | self._custom(call)
        named = {"name": call["name"]} if call["name"] else {}
        function: Any = {**named, "arguments": call["arguments"]}
        if self.legacy:
            delta["function_call"] = function
        else:
            first = {"id": call["id"], "type": "function"} if call["id"] else {}
            delta["tool_calls"] = [{"index": call["index"], **first, "function": function}]  # type: ignore[typeddict-item]
        return delta

    def _custom(self, call: dict[str, Any]) -> Delta:
        """Return the beginning of a custom tool's call; its input is only known when the JSON around it is complete."""
        index, begins = call["index"], call["index"] not in self.inputs
        self.inputs[index] = self.inputs.get(index, "") + call["arguments"]
        own: CustomCall = {"name": call["name"], "input": ""}
        return {"tool_calls": [{"index": index, "id": call["id"], "type": "custom", "custom": own}]} if begins else {}

    def _reason(self) -> FinishReason:
        if self.generation.reason == "stop" and self.called:
            return "function_call" if self.legacy else "tool_calls"
        return self.generation.reason

    def _logprobs(self) -> ChatLogprobs | None:
        end = self.n_said - self._filter.n_held if self._filter.n_held else math.inf
        entries = [entry for entry in self.entries if entry.offset < end]
        self.entries = [entry for entry in self.entries if entry.offset >= end]
        if not self.generation.scorer or not entries:
            return None
        content: list[Any] = [
            _token(entry.piece, entry.logprob or 0.0) | {"top_logprobs": [_token(*pair) for pair in entry.top or []]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}


def collect(chunks: Iterator[ChatChunk], with_logprobs: bool) -> ChatCompletion:
    """Combine the chunks of a stream without a usage chunk into a whole answer."""
    message: AnswerMessage = {"role": "assistant", "content": None}
    logprobs: Any = {"content": [], "refusal": None} if with_logprobs else None
    for chunk in chunks:
        choice = chunk["choices"][0]
        _add(message, choice["delta"])
        if choice["logprobs"]:
            logprobs["content"] += choice["logprobs"]["content"]
    if message["content"] is None and not message.keys() & {"tool_calls", "function_call"}:
        message["content"] = ""
    return {
        "id": chunk["id"],
        "object": "chat.completion",
        "created": chunk["created"],
        "model": chunk["model"],
        "choices": [{"index": 0, "message": message, "logprobs": logprobs, "finish_reason": choice["finish_reason"]}],
        "usage": chunk["usage"],
    }


def _add(message: AnswerMessage, delta: Delta) -> None:
    if delta.get("content"):
        message["content"] = (message["content"] or "") + str(delta["content"])
    if "reasoning_content" in delta:
        message["reasoning_content"] = message.get("reasoning_content", "") + delta["reasoning_content"]
    if "function_call" in delta:
        _add_call(message.setdefault("function_call", {"name": "", "arguments": ""}), delta["function_call"])
    for call in delta.get("tool_calls", []):
        calls: list[Any] = message.setdefault("tool_calls", [])
        kind, text = ("custom", "input") if "custom" in call else ("function", "arguments")
        if call["index"] == len(calls):
            calls.append({"id": call.get("id", ""), "type": kind, kind: {"name": "", text: ""}})
        _add_call(calls[call["index"]][kind], call[kind], text)  # type: ignore[literal-required]


def _add_call(called: Any, delta: Any, text: str = "arguments") -> None:
    called["name"] = delta.get("name", called["name"])
    called[text] += delta[text]


def _token(piece: bytes, logprob: float) -> TopLogprob:
    return {"token": piece.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(piece)}
