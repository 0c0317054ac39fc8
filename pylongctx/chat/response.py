"""Converting the text of an answer to OpenAI's chat chunks, and these to a whole answer."""

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pylongctx.chat.parser import AnswerParser
from pylongctx.chat.types import AnswerMessage, ChatChunk, ChatCompletion, ChatLogprobs, Delta, FinishReason, TopLogprob
from pylongctx.completions.logprobs import TokenEntry
from pylongctx.completions.results import Generation


@dataclass
class ChatAnswer:
    """A running answer.

    Attributes
    ----------
    generation : Generation
        The generation of the text.
    parser : AnswerParser
        Parses the text.
    legacy : bool
        Whether calls are OpenAI's older function calls.
    usage_chunk : bool
        Whether a stream ends with a separate usage chunk, as with OpenAI's ``stream_options.include_usage``.
    one_call : bool
        Whether the answer ends after the first tool call.
    model_name : str
        The model's name in the chunks.
    """

    generation: Generation
    parser: AnswerParser
    model_name: str
    legacy: bool = False
    usage_chunk: bool = False
    one_call: bool = False
    entries: list[TokenEntry] = field(default_factory=list)  # not sent in a chunk yet
    called: bool = False

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
            yield chunk(delta)
        self.generation.finish()
        last = chunk({}, self._reason())
        if self.usage_chunk:
            yield last
            last = chunk({})
            last["choices"] = []
        last["usage"] = self.generation.usage()
        yield last

    def _deltas(self) -> Iterator[Delta]:
        for text, entries in self.generation.parts():
            self.entries += entries
            for found in self.parser.feed(text) if text else ():
                if self._is_another_call(found):
                    return
                yield self._delta(found)
        for found in self.parser.end(complete=self.generation.reason == "stop"):
            if not self._is_another_call(found):
                yield self._delta(found)
        if self.parser.failure:
            self.generation.source.log(f"the answer does not follow the chat template: {self.parser.failure}")

    def _is_another_call(self, found: dict[str, Any]) -> bool:
        return self.one_call and found.get("tool_call", {"index": 0})["index"] > 0

    def _delta(self, found: dict[str, Any]) -> Delta:
        delta: Delta = {}
        if "reasoning_content" in found:
            delta["reasoning_content"] = found["reasoning_content"]
        if "content" in found:
            delta["content"] = found["content"]
        if "tool_call" not in found:
            return delta
        self.called = True
        call = found["tool_call"]
        named = {"name": call["name"]} if call["name"] else {}
        function: Any = {**named, "arguments": call["arguments"]}
        if self.legacy:
            delta["function_call"] = function
        else:
            first = {"id": call["id"], "type": "function"} if call["id"] else {}
            delta["tool_calls"] = [{"index": call["index"], **first, "function": function}]  # type: ignore[typeddict-item]
        return delta

    def _reason(self) -> FinishReason:
        if self.generation.reason == "stop" and self.called:
            return "function_call" if self.legacy else "tool_calls"
        return self.generation.reason

    def _logprobs(self) -> ChatLogprobs | None:
        entries, self.entries = self.entries, []
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
        calls = message.setdefault("tool_calls", [])
        if call["index"] == len(calls):
            calls.append({"id": call.get("id", ""), "type": "function", "function": {"name": "", "arguments": ""}})
        _add_call(calls[call["index"]]["function"], call["function"])


def _add_call(function: Any, delta: Any) -> None:
    function["name"] = delta.get("name", function["name"])
    function["arguments"] += delta["arguments"]


def _token(piece: bytes, logprob: float) -> TopLogprob:
    return {"token": piece.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(piece)}
