"""Answers in Ollama's form: a line of JSON for each piece, with durations in the last one."""

import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from datetime import datetime, timezone
from typing import Any

from pylongctx.serve.answer import Chunks
from pylongctx.serve.blocks import Block, Blocks, Event, blocks_of
from pylongctx.serve.cards import stamp
from pylongctx.serve.exchange import Exchange, JsonLines

Object = dict[str, Any]
NAMES = {"thinking": "thinking", "text": "content"}  # of blocks
NANO = 10**9
PER_MS = 10**6


def frame(model: str) -> Object:
    """Return the common fields of all objects."""
    return {"model": model, "created_at": stamp(datetime.now(timezone.utc))}


def chat_piece(fields: Mapping[str, Any]) -> Object:
    """Return a piece of a chat's answer."""
    return {"message": {"role": "assistant", "content": "", **fields}}


def generate_piece(fields: Mapping[str, Any]) -> Object:
    """Return a piece of the answer to a prompt."""
    more = {name: value for name, value in fields.items() if name != "content"}
    return {"response": fields.get("content", "")} | more


Piece = Callable[[Mapping[str, Any]], Object]


class OllamaForm:
    """Answers of one completion from OpenAI's or llama-server's route.

    Parameters
    ----------
    model : str
        The model's name.
    piece : callable
        Formats a part of the answer: ``chat_piece`` or ``generate_piece``.
    context : callable or None
        Returns the tokens of a text, for the field ``context`` at the end; None: there is none.
    """

    prefix = "ollama-"
    frames = JsonLines

    def __init__(self, model: str, piece: Piece, context: Callable[[str], list[int]] | None = None) -> None:
        self._model = model
        self._piece = piece
        self._context = context
        self._began = time.monotonic()

    def whole(self, exchange: Exchange, found: list[Object]) -> Object:
        """Return one object."""
        said, logprobs, reason = _read(found[0])
        fields: Object = {}
        for block in blocks_of(said):
            name, value = _field(block)
            fields[name] = fields[name] + value if name in fields else value
        end = self._end(exchange, reason, fields.get("content", ""))
        return frame(self._model) | self._piece(fields) | _logprobs(logprobs) | end

    async def events(self, exchange: Exchange, chunks: Chunks) -> AsyncIterator[Object]:
        """Yield the objects; an empty piece keeps the connection alive."""
        pieces, pending, reason, text = Pieces(), list[Any](), "", ""
        async for _, chunk in chunks:
            if chunk is None:
                yield self._part({}, [])
                continue
            delta, logprobs, end = _read(chunk)
            reason, pending = end or reason, pending + list(logprobs)
            for fields in pieces.feed(delta):
                text += fields.get("content", "")
                yield self._part(fields, pending)
                pending = []
        for fields in pieces.finish():
            yield self._part(fields, [])
        yield frame(self._model) | self._piece({}) | _logprobs(pending) | self._end(exchange, reason, text)

    def _part(self, fields: Mapping[str, Any], logprobs: list[Any]) -> Object:
        return frame(self._model) | self._piece(fields) | _logprobs(logprobs) | {"done": False}

    def _end(self, exchange: Exchange, reason: str, text: str) -> Object:
        job, timings = exchange.parts[0][0].current, exchange.timings(0)
        assert job is not None
        end: Object = {
            "done": True,
            "done_reason": "length" if reason == "length" else "stop",
            "total_duration": round(NANO * (time.monotonic() - self._began)),
            "load_duration": 0,
            "prompt_eval_count": len(job.tokens),
            "prompt_eval_duration": round(PER_MS * timings["prompt_ms"]),
            "eval_count": job.n_generated,
            "eval_duration": round(PER_MS * timings["predicted_ms"]),
        }
        return end if self._context is None else end | {"context": [*job.tokens.tolist(), *self._context(text)]}


class Pieces(Blocks):
    """The fields of a stream's objects; a tool call is sent once it is complete."""

    def _opened(self, block: Block) -> Iterator[Event]:
        return iter(())

    def _grown(self, block: Block, text: str) -> Iterator[Event]:
        if block.kind in NAMES:
            yield {NAMES[block.kind]: text}

    def _closed(self, block: Block) -> Iterator[Event]:
        if block.kind not in NAMES:
            yield dict([_field(block)])


def _field(block: Block) -> tuple[str, Any]:
    """Return the field of a block and its content."""
    if block.kind in NAMES:
        return NAMES[block.kind], block.text
    call = {"name": block.name, "arguments": block.arguments}
    return "tool_calls", [{"id": block.id, "function": call}]


def _read(made: Mapping[str, Any]) -> tuple[Object, list[Any], str]:
    """Return the message of a chunk or a whole answer, its log-probabilities, and its finish reason."""
    if "choices" not in made:  # llama-server's form
        kind = made.get("stop_type", "")
        reason = kind and ("length" if kind == "limit" else "stop")
        return {"content": made["content"]}, made.get("completion_probabilities", []), reason
    (choice,) = made["choices"]
    said = choice["message"] if "message" in choice else choice["delta"]
    return said, (choice["logprobs"] or {}).get("content", []), choice["finish_reason"] or ""


def _logprobs(entries: list[Any]) -> Object:
    if not entries:
        return {}
    return {"logprobs": [_token(one) | {"top_logprobs": list(map(_token, one["top_logprobs"]))} for one in entries]}


def _token(one: Mapping[str, Any]) -> Object:
    return {name: one[name] for name in ("token", "logprob", "bytes")}
