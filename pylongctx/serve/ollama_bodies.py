"""Bodies of Ollama's requests, and their conversion for OpenAI's and llama-server's routes."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pylongctx.parallel.host import Host
from pylongctx.serve.bodies import SAMPLING, ChatBody, NativeBody
from pylongctx.serve.cards import thinks
from pylongctx.serve.errors import invalid
from pylongctx.serve.fields import Fields, Unserved, load

Object = dict[str, Any]
# request options that are fields of other APIs
OPTIONS = frozenset({*SAMPLING, "mirostat", "repeat_last_n"} - {"grammar", "mirostat_mode"})
# options about loading a model, and the equivalent command line options
LOADING = {
    "num_batch": "-b",
    "num_gpu": "-ngl",
    "main_gpu": "-mg",
    "num_thread": "-t",
    "use_mmap": "--load-mode",
    "use_mlock": "--load-mode",
}
JSON = {"type": "object"}  # meaning of format "json"
KEPT = "keep_alive has no effect: the model stays loaded until the server ends or replaces it"
CUT = "is not supported: a prompt that does not fit is refused, --overflow evict_middle evicts old turns"


class OllamaBody(Fields):
    """Common fields of /api/chat and /api/generate."""

    stream: bool | None = None
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
        for name, reason in _without_effect(self.options or {}, host.n_ctx):
            unserved.note(f"options.{name}", reason)
        if self.keep_alive is not None:
            unserved.note("keep_alive", KEPT)
        for name in ("truncate", "shift"):
            if getattr(self, name) and not host.session.evicts:
                unserved.note(name, f"{name}=true {CUT}")

    def generate(self) -> Object:
        """Return the fields that all APIs share."""
        given = self.options or {}
        found = {name: value for name, value in given.items() if name in OPTIONS}
        wanted = given.get("num_predict")
        if isinstance(wanted, int) and wanted <= 0:  # no limit
            wanted = None
        return found | {"max_tokens": wanted, "stream": self.stream is not False}

    @property
    def schema_wanted(self) -> Object | None:
        """The schema of the answer."""
        if self.format in (None, ""):
            return None
        if self.format == "json":
            return JSON
        if not isinstance(self.format, dict):
            raise invalid(f"format must be 'json' or a schema, not {json.dumps(self.format)[:60]}", "format")
        return self.format

    def chat(
        self, messages: list[Object], host: Host, unserved: Unserved, tools: list[Object] | None = None
    ) -> ChatBody:
        """Return the request for OpenAI's route of chats."""
        fields = self.generate() | {"messages": messages, "tools": tools or None, **_thinking(self.think, host)}
        if (schema := self.schema_wanted) is not None:
            fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "format", "schema": schema}}
        if self.logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        return load(ChatBody, fields, unserved)


def _without_effect(options: Mapping[str, Any], n_ctx: int) -> Iterator[tuple[str, str]]:
    for name, value in options.items():
        if value is None or name in OPTIONS or name == "num_predict":
            continue
        if name == "num_ctx":
            if isinstance(value, int) and value > n_ctx:
                more = f"more than the {n_ctx} tokens of this server's context: start it with -c {value}"
                yield name, f"options.num_ctx={value} is {more}"
        elif name in LOADING:
            yield name, f"options.{name} has no effect: it is set when the server starts, with {LOADING[name]}"
        else:
            yield name[:60], f"options.{name[:60]} has no effect here"


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
    return {"chat_template_kwargs": {"enable_thinking": bool(wanted)}}


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
    if message.get("images"):
        raise invalid(f"messages[{i}]: images are not supported, only text", "messages")
    found = {"role": str(message.get("role", "")).lower(), "content": message.get("content") or ""}
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

    def check(self) -> None:
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

    def openai_messages(self) -> list[Object]:
        """Return the equivalent conversation: the system prompt and a question."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.prompt}]

    def native(self, unserved: Unserved) -> NativeBody:
        """Return the request for llama-server's route, without its prompt."""
        fields = self.generate() | {"json_schema": self.schema_wanted}
        probabilities = {"n_probs": max(1, self.top_logprobs or 0)} if self.logprobs else {}
        return load(NativeBody, fields | probabilities, unserved)
