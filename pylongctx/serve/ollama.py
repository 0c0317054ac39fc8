"""Ollama's API: the routes of its clients, for the one model of this server."""

import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from datetime import datetime, timezone
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.concurrency import run_in_threadpool

from pylongctx.completions.embeddings import RANK
from pylongctx.parallel import NEEDED, Host
from pylongctx.serve import native
from pylongctx.serve.blocks import Block, Blocks, Event, blocks_of
from pylongctx.serve.bodies import (
    ChatBody,
    Conversing,
    Dialect,
    Fields,
    NativeBody,
    add_format,
    load,
    names_of,
    note_unknown,
    read,
    unserved_of,
)
from pylongctx.serve.cards import FOREVER, card_of, stamp, thinks
from pylongctx.serve.content import parts_of, unread
from pylongctx.serve.errors import ApiError, invalid
from pylongctx.serve.handler import Chunks, Handler, JsonLines, Object
from pylongctx.serve.native import NativeHandler, infill_prompt
from pylongctx.serve.openai import ChatHandler, template_completer
from pylongctx.serve.service import Service
from pylongctx.serve.texts import MAX_TEXTS
from pylongctx.serve.unserved import Unserved

# request options that are fields of other APIs
SHARED_OPTIONS = frozenset(name for names in names_of(Conversing).values() for name in names)
# options about loading a model, and the equivalent command line options
LOADING_OPTIONS = {
    "num_batch": "-b",
    "num_gpu": "-ngl",
    "main_gpu": "-mg",
    "num_thread": "-t",
    "use_mmap": "--load-mode",
    "use_mlock": "--load-mode",
}
NUM_CTX = "num_ctx"
KEPT = "keep_alive has no effect: the model stays loaded until the server ends or replaces it"
CUT = "is not supported: a prompt that does not fit is refused, --overflow evict_middle evicts old turns"
NAMES = {"thinking": "thinking", "text": "content"}  # of blocks
NANO = 10**9
PER_MS = 10**6
Piece = Callable[[Mapping[str, Any]], Object]
VERSION = "0.12.11"  # version of Ollama by which clients detect features
RUNNING = "Ollama is running"  # expected by clients at /
LATEST = ":latest"  # Ollama's tag of a name without one
STORED = "the server does not manage models: download them with pylongctx get"
# routes that change Ollama's collection of models
CHANGING = (
    ("POST", "pull"),
    ("POST", "push"),
    ("POST", "create"),
    ("POST", "copy"),
    ("DELETE", "delete"),
    ("POST", "blobs/{digest}"),
)


class OllamaBody(Dialect):
    """Common fields of /api/chat and /api/generate."""

    unused = (*Dialect.unused, "timings_per_token")
    options: dict[str, Any] | None = None
    format: Any = None
    think: bool | str | None = None
    keep_alive: Any = None
    truncate: bool | None = None
    shift: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def note(self, unserved: Unserved, host: Host) -> None:
        """Record fields without effect."""
        for name, value in (self.options or {}).items():
            if reason := _why_without_effect(name, value, host.n_ctx):
                unserved.note(f"options.{name}", reason)
            elif name not in (*SHARED_OPTIONS, *LOADING_OPTIONS, NUM_CTX):
                note_unknown(name, value, unserved, "options.")
        if self.keep_alive is not None:
            unserved.note("keep_alive", KEPT)
        for name in ("truncate", "shift"):
            if getattr(self, name) and not host.session.evicts:
                unserved.note(name, f"{name}=true {CUT}")

    def common(self, unserved: Unserved) -> Object:
        """Return the fields that all APIs share; those of ``options`` come first."""
        options = {name: value for name, value in (self.options or {}).items() if name in SHARED_OPTIONS}
        wanted = options.get("num_predict")
        if isinstance(wanted, int) and wanted <= 0:  # no limit
            del options["num_predict"]
        own = load(Dialect, options, unserved).shared()
        found = self.shared()
        for name in own.keys() & found.keys():
            if own[name] != found[name]:
                unserved.note(name, f"{name} has no effect together with options.{name}")
        fields = found | own | {"stream": self.stream is not False}
        add_format(fields, "format", self._format())
        return fields

    def _format(self) -> Object | None:
        """Return ``format`` in OpenAI's form."""
        if self.format in (None, ""):
            return None
        if self.format == "json":
            return {"type": "json_object"}
        if not isinstance(self.format, dict):
            raise invalid(f"format must be 'json' or a schema, not {json.dumps(self.format)[:60]}", "format")
        return {"type": "json_schema", "json_schema": {"name": "format", "schema": self.format}}

    def chat(
        self, messages: list[Object], host: Host, unserved: Unserved, tools: list[Object] | None = None
    ) -> ChatBody:
        """Return the request for OpenAI's route of chats."""
        fields = self.common(unserved) | {"messages": messages, "tools": tools or None, **_thinking(self.think, host)}
        if self.logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        return load(ChatBody, fields, unserved)


def _why_without_effect(name: str, value: Any, n_ctx: int) -> str:
    """Return why an option about loading a model has no effect; empty if it is another one, or asks for nothing."""
    if value is None:
        return ""
    if name == NUM_CTX and isinstance(value, int) and value > n_ctx:
        more = f"more than the {n_ctx} tokens of this server's context: start it with -c {value}"
        return f"options.num_ctx={value} is {more}"
    if name in LOADING_OPTIONS:
        return f"options.{name} has no effect: it is set when the server starts, with {LOADING_OPTIONS[name]}"
    return ""


def can_think(host: Host) -> bool:
    """Return True if the chat template supports reasoning."""
    return thinks(host.templates.template.info["source"])


def _thinking(wanted: bool | str | None, host: Host) -> Object:
    """Return the fields about reasoning and its effort."""
    if wanted is None:
        return {}
    if wanted and not can_think(host):
        raise invalid(f"think={wanted!r} is not supported: the model's chat template has no reasoning", "think")
    if isinstance(wanted, str) and "reasoning_effort" in host.templates.template.info["source"]:
        return {"reasoning_effort": wanted}
    return {"enable_thinking": bool(wanted)}


class OllamaChatBody(OllamaBody):
    """POST /api/chat."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None

    def openai_messages(self) -> list[Object]:
        """Return the messages in OpenAI's form, with ids that assign tool results to calls."""
        ids: dict[str, str] = {}
        return [_message(i, message, ids) for i, message in enumerate(self.messages or ())]


def _message(i: int, message: Mapping[str, Any], ids: dict[str, str]) -> Object:
    """Return a message; ``ids`` has the last call of each function."""
    found: Object = {"role": str(message.get("role", "")).lower(), "content": message.get("content") or ""}
    if n := len(message.get("images") or ()):
        pictures = [unread("image", f"messages[{i}].images[{j}]") for j in range(n)]
        found["content"] = [*parts_of(found["content"]), *pictures]
    if message.get("thinking"):
        found["reasoning_content"] = message["thinking"]
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [_call(f"call_{i}_{j}", call, ids) for j, call in enumerate(calls)]
    if found["role"] == "tool":
        name = str(message.get("tool_name") or "")
        found["tool_call_id"] = message.get("tool_call_id") or ids.get(name) or next(reversed(ids.values()), "call")
        if name:
            found["name"] = name
    return found


def _call(id: str, call: Any, ids: dict[str, str]) -> Object:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise invalid("a tool call must have a function with name and arguments", "messages")
    name = str(function.get("name", ""))
    ids[name] = id = str(call.get("id") or id)
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}


class OllamaGenerateBody(OllamaBody):
    """POST /api/generate."""

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: list[int] | None = None
    raw: bool | None = None
    images: list[Any] | None = None

    def check(self, unserved: Unserved) -> None:
        """Raise ApiError for fields that would change the answer."""
        if self.images:
            raise invalid("images are not supported, only text", "images")
        if self.template:
            raise invalid(
                "template is not supported: the server uses the model's own, or that of --chat-template", "template"
            )
        if self.raw and (self.system or self.context):
            name = "system" if self.system else "context"
            raise invalid(f"raw=true uses the prompt unchanged, without {name}", name)
        if self.think is not None and (self.raw or self.suffix):
            unserved.note("think", f"think={self.think!r} has no effect on a prompt without a template")

    def openai_messages(self) -> list[Object]:
        """Return the equivalent conversation: the system prompt and a question."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.prompt}]

    def native(self, unserved: Unserved) -> NativeBody:
        """Return the request for llama-server's route, without its prompt."""
        fields = self.common(unserved)
        probabilities = {"n_probs": max(1, self.top_logprobs or 0)} if self.logprobs else {}
        return load(NativeBody, fields | probabilities, unserved)


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


class OllamaHandler(Handler[Any]):
    """Writes a completion in OpenAI's or llama-server's form in Ollama's form."""

    prefix = "ollama-"
    response = JsonLines

    def _write_as(self, piece: Piece, with_context: bool) -> None:
        """Set how a part is written, and whether the end has the tokens of prompt and answer in ``context``."""
        self._piece, self._with_context = piece, with_context
        self._model = self.service.settings.alias
        self._began = time.monotonic()

    def whole(self, found: list[Object]) -> Object:
        """Return one object."""
        said, logprobs, reason = _parts_of(found[0])
        fields: Object = {}
        for block in blocks_of(said):
            name, value = _field(block)
            fields[name] = fields[name] + value if name in fields else value
        end = self._end(reason, fields.get("content", ""))
        return frame(self._model) | self._piece(fields) | _logprobs(logprobs) | end

    async def events(self, chunks: Chunks) -> AsyncIterator[Object | None]:
        """Yield the objects; an empty piece keeps the connection alive."""
        pieces, pending, reason, text = Pieces(), list[Any](), "", ""
        async for _, chunk in chunks:
            if chunk is None or "prompt_progress" in chunk:
                yield self._part({}, []) | (chunk or {})
                continue
            delta, logprobs, end = _parts_of(chunk)
            reason, pending = end or reason, pending + list(logprobs)
            for fields in pieces.feed(delta):
                text += fields.get("content", "")
                yield self._part(fields, pending)
                pending = []
        for fields in pieces.finish():
            yield self._part(fields, [])
        yield frame(self._model) | self._piece({}) | _logprobs(pending) | self._end(reason, text)

    def _part(self, fields: Mapping[str, Any], logprobs: list[Any]) -> Object:
        return frame(self._model) | self._piece(fields) | _logprobs(logprobs) | {"done": False}

    def _end(self, reason: str, text: str) -> Object:
        job, timings = self.job, self.timings(0)
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
        if self._with_context:
            end["context"] = [*job.tokens.tolist(), *self.host.tokens(text, special=False)]
        return end


class OllamaChatHandler(OllamaHandler, ChatHandler):
    """Answers a conversation, or a prompt as one."""

    def __init__(
        self, service: Service, request: Request, body: ChatBody, piece: Piece, with_context: bool = False
    ) -> None:
        super().__init__(service, request, body)
        self._write_as(piece, with_context)


class OllamaGenerateHandler(OllamaHandler, NativeHandler):
    """Continues a prompt unchanged (``raw``), after an earlier context, or up to a suffix."""

    def __init__(self, service: Service, request: Request, asked: OllamaGenerateBody) -> None:
        super().__init__(service, request, asked.native(unserved_of(request)), [asked.prompt])
        self._asked = asked
        self._tokens: str | list[int] = asked.prompt
        self._write_as(generate_piece, with_context=bool(asked.context))

    def prepare(self) -> None:
        """Compute the sampling arguments and the prompt."""
        super().prepare()
        asked = self._asked
        if asked.suffix:
            spm = self.service.settings.spm_infill
            self._tokens = infill_prompt(self.host, asked.prompt, asked.suffix, suffix_first=spm)
        elif asked.context:
            self._tokens = [*asked.context, *self._next_tokens(asked)]

    def prompt(self, index: int) -> str | list[int]:
        """Return the prompt."""
        return self._tokens

    def _next_tokens(self, asked: OllamaGenerateBody) -> list[int]:
        """Return the tokens of a prompt that follows an earlier context."""
        host, start = self.host, self.host.model.start
        chat = asked.chat(asked.openai_messages(), host, unserved_of(self.request))
        completer = template_completer(self.service, self.request, chat)
        tokens = completer.chat_tokens(chat.messages, **chat.template(self.service.settings.template, host))
        return tokens[len(start) :] if tokens[: len(start)] == start else tokens


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


def _parts_of(made: Mapping[str, Any]) -> tuple[Object, list[Any], str]:
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


class EmbedBody(Fields):
    """POST /api/embed, and /api/embeddings (``prompt``)."""

    input: str | list[str] | None = None
    prompt: str | None = None
    truncate: bool | None = None
    dimensions: int | None = None
    options: dict[str, Any] | None = None
    keep_alive: Any = None


class ShowBody(Fields):
    """POST /api/show."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


def routes(service: Service) -> APIRouter:
    """Return the routes."""
    api = APIRouter(prefix="/api")
    alias = service.settings.alias

    @api.post("/chat", summary="Answer a conversation, in Ollama's form")
    async def chat(request: Request) -> Response:
        body = await _read(service, request, OllamaChatBody)
        if not body.messages:
            return _loaded(alias, chat_piece({}))
        wanted = body.chat(body.openai_messages(), service.host, unserved_of(request), body.tools)
        return await OllamaChatHandler(service, request, wanted, chat_piece).answer()

    @api.post("/generate", summary="Answer a prompt, continue it (raw), or fill in (suffix)")
    async def generate(request: Request) -> Response:
        body = await _read(service, request, OllamaGenerateBody)
        body.check(unserved_of(request))
        if not (body.prompt or body.suffix):
            return _loaded(alias, generate_piece({}))
        if body.raw or body.suffix or body.context:
            return await OllamaGenerateHandler(service, request, body).answer()
        wanted = body.chat(body.openai_messages(), service.host, unserved_of(request))
        return await OllamaChatHandler(service, request, wanted, generate_piece, with_context=True).answer()

    @api.post("/embed", summary="Vectors of texts, with --embeddings")
    async def embed(request: Request) -> Response:
        body, began = await _read(service, request, EmbedBody), time.monotonic()
        texts = [body.input] if isinstance(body.input, str) else body.input or []
        vectors, n_tokens = await _embed(service, body, texts, True)
        took = {"total_duration": round(NANO * (time.monotonic() - began)), "load_duration": 0}
        return JSONResponse({"model": alias, "embeddings": vectors, **took, "prompt_eval_count": n_tokens})

    @api.post("/embeddings", include_in_schema=False)
    async def embeddings(request: Request) -> Response:
        body = await _read(service, request, EmbedBody)
        vectors, _ = await _embed(service, body, [body.prompt] if body.prompt else [], False)
        return JSONResponse({"embedding": vectors[0] if vectors else []})

    @api.get("/tags", summary="The models, in Ollama's form")
    def tags() -> dict[str, Any]:
        return {"models": [_entry(service) | {"capabilities": _capabilities(service)}]}

    @api.get("/ps", summary="The loaded models, in Ollama's form")
    def ps() -> dict[str, Any]:
        entry = _entry(service)
        loaded = {"expires_at": FOREVER, "size_vram": round(entry["size"] * service.host.share_on_devices)}
        return {"models": [entry | loaded | {"context_length": service.host.n_ctx}]}

    @api.post("/show", summary="A model's metadata, template and capabilities")
    async def show(request: Request) -> dict[str, Any]:
        body = await read(request, ShowBody)
        check_name(service, body.model or body.name or "")
        return await run_in_threadpool(_shown, service)

    @api.get("/version", summary="The version of Ollama's API")
    async def version() -> dict[str, str]:
        return {"version": VERSION}

    for method, path in CHANGING:
        api.add_api_route(f"/{path}", refuse, methods=[method], include_in_schema=False)
    return api


async def refuse(request: Request) -> Response:
    """Refuse changes of the models."""
    raise ApiError(501, "not_supported_error", f"{request.url.path} is not supported: {STORED}")


async def running() -> Response:
    """Return the text that clients of Ollama expect at /."""
    return PlainTextResponse(RUNNING)


async def _read(service: Service, request: Request, kind: Any) -> Any:
    """Return a body, after recording its fields without effect."""
    body = await read(request, kind)
    if isinstance(body, OllamaBody):
        body.note(unserved_of(request), service.host)
    elif body.keep_alive is not None:
        unserved_of(request).note("keep_alive", KEPT)
    return body


def _loaded(alias: str, piece: dict[str, Any]) -> Response:
    """Return the answer to a request without a prompt, which clients use to load a model."""
    return JSONResponse(frame(alias) | piece | {"done": True, "done_reason": "load"})


async def _embed(service: Service, body: EmbedBody, texts: list[str], normalize: bool) -> tuple[list[Any], int]:
    """Return the vectors of texts, and the number of their tokens."""
    embedder = service.vectors()
    if len(texts) > MAX_TEXTS:
        raise invalid(f"one request may have at most {MAX_TEXTS} texts, not {len(texts)}", "input")
    if not texts:
        return [], 0
    more = {"normalize": normalize, "truncate": body.truncate is not False}
    found: Any = await service.threaded(embedder.response, texts, "", body.dimensions, **more)
    return [one["embedding"] for one in found["data"]], found["usage"]["prompt_tokens"]


def check_name(service: Service, name: str) -> None:
    """Raise ApiError for a name that is not the model's."""
    known = (service.settings.alias, *service.settings.aliases)
    if name not in known and name.removesuffix(LATEST) not in known:
        raise ApiError(404, "not_found_error", f"model {name[:60]!r} not found: this server has {known[0]!r}", "model")


def _entry(service: Service) -> dict[str, Any]:
    return card_of(service.host.model_path).entry(service.settings.alias)


def _capabilities(service: Service) -> list[str]:
    host = service.host
    caps = host.templates.template.info["caps"]
    can = {
        "completion": True,
        "tools": caps["supports_tools"] and caps["supports_tool_calls"],
        "thinking": can_think(host),
        "insert": all(name in host.fill_tokens for name in NEEDED),
        "embedding": service.embedder is not None and service.embedder.pooling != RANK,
    }
    return [name for name, able in can.items() if able]


def _shown(service: Service) -> dict[str, Any]:
    host, settings = service.host, native.settings(service.sampling_params())
    sampling = {name: settings[name] for name in ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")}
    own = {"template": host.templates.template.info["source"], "capabilities": _capabilities(service)}
    return card_of(host.model_path).shown(host.model_path, {"num_ctx": host.n_ctx} | sampling) | own
