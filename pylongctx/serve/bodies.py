"""Bodies of requests: OpenAI's fields and llama-server's; fields that nobody reads are ignored."""

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from fastapi import Request
from pydantic import AliasChoices, BaseModel, Field, ValidationError, field_validator

from pylongctx.grammar import LlamaGrammar
from pylongctx.serve.errors import ApiError, invalid

# fields that create_completion and create_chat_completion take as they are
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "presence_penalty",
    "frequency_penalty",
    "repeat_penalty",
    "mirostat_mode",
    "mirostat_tau",
    "mirostat_eta",
    "seed",
    "stop",
    "grammar",
    "logit_bias",
)
CHAT = (
    "messages",
    "functions",
    "function_call",
    "tools",
    "tool_choice",
    "response_format",
    "logprobs",
    "top_logprobs",
    "parallel_tool_calls",
)
TEMPERATURE = 0.8  # llama-server's, for chat too
MOST_CHOICES = 64
MOST_LIKELIEST = 100  # tokens whose log-probabilities are told for each token

Prompt = str | list[int] | list[str | list[int]]


def _also(*names: str) -> Any:
    """Return an optional field with llama-server's name beside Llama's."""
    return Field(None, validation_alias=AliasChoices(*names))


class StreamOptions(BaseModel):
    """OpenAI's ``stream_options``."""

    include_usage: bool = False


class Extension(BaseModel):
    """Our own field ``longctx``."""

    trace: bool = False


class Generate(BaseModel):
    """What both kinds of completions share; None is the default of Llama, or the server's own."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    max_tokens: int | None = _also("max_tokens", "n_predict")
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = _also("typical_p", "typ_p")
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_penalty: float | None = None
    mirostat_mode: int | None = _also("mirostat_mode", "mirostat")
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    logit_bias: dict[int, float] | None = None
    longctx: Extension = Extension()

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _pairs(cls, value: Any) -> Any:
        """llama-server takes a list of [token, bias] too, where false forbids the token."""
        pairs = value.items() if isinstance(value, Mapping) else value
        if not isinstance(value, Mapping | list) or any(len(pair) != 2 for pair in pairs):
            return value
        return {token: float("-inf") if bias is False else bias for token, bias in pairs}

    def sampling(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of Llama that were given, by the request or by the server."""
        given = {name: getattr(self, name) for name in SAMPLING}
        if self.json_schema is not None:
            given["grammar"] = LlamaGrammar.from_json_schema(json.dumps(self.json_schema))
        return {**defaults, **{name: value for name, value in given.items() if value is not None}}


class CompletionBody(Generate):
    """POST /v1/completions."""

    prompt: Prompt = ""
    suffix: str | None = None
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MOST_LIKELIEST)

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or tokens."""
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]  # type: ignore[list-item]
        if not self.prompt:
            raise invalid("prompt is an empty list", "prompt")
        return self.prompt  # type: ignore[return-value]

    def arguments(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of ``create_completion``."""
        own = {name: getattr(self, name) for name in ("suffix", "echo", "logprobs")}
        limit = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        return {**self.sampling(defaults), **own, **limit}


class ChatBody(Generate):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LIKELIEST)
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def template_arguments(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that tell a template what to write."""
        more = {**defaults.get("chat_template_kwargs", {}), **(self.chat_template_kwargs or {})}
        thinking = bool(more.pop("enable_thinking", defaults.get("enable_thinking", True)))
        return {"enable_thinking": thinking, "chat_template_kwargs": more}

    def arguments(self, defaults: Mapping[str, Any], template: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of ``create_chat_completion``."""
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        own = {name: getattr(self, name) for name in CHAT}
        return {
            "temperature": TEMPERATURE,
            **self.sampling(defaults),
            **own,
            **self.template_arguments(template),
            "max_tokens": limit,
        }


class EmbeddingsBody(BaseModel):
    """POST /v1/embeddings."""

    input: str | list[str] | list[int] | list[list[int]]
    encoding_format: str = "float"
    dimensions: int | None = None


class TokenizeBody(BaseModel):
    """POST /tokenize, of llama-server (``content``) or of vLLM (``prompt``)."""

    content: str | None = None
    prompt: str | None = None
    add_special: bool = False
    add_special_tokens: bool = True
    parse_special: bool = True


class DetokenizeBody(BaseModel):
    """POST /detokenize."""

    tokens: list[int]


Body = TypeVar("Body", bound=BaseModel)


async def read(request: Request, body: type[Body]) -> Body:
    """Return the body of a request; ApiError when it is not what it should be."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # a page of another site can send other types without asking this server first
        raise ApiError(415, "invalid_request_error", f"send the header Content-Type: application/json, not {kind!r}")
    try:
        found: Body = body.model_validate_json(await request.body())
        return found
    except ValidationError as reason:
        first = reason.errors()[0]
        # a union names the alternative that did not fit behind the field
        field = str(first["loc"][0]) if first["loc"] else None
        raise invalid(f"{field}: {first['msg']}" if field else first["msg"], field) from None
