"""Request bodies with the fields of OpenAI and llama-server."""

import json
import math
from collections.abc import Mapping
from typing import Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, create_model, field_validator, model_validator

from pylongctx.engine.sampling.params import KEYWORDS, NUMBERS
from pylongctx.engine.sampling.samplers import sampler_name
from pylongctx.parallel.host import Host, Prompt
from pylongctx.serve.errors import invalid
from pylongctx.serve.fields import Fields, Open, Unserved
from pylongctx.serve.shape import Shaped, as_schema, grammar_of

# fields passed unchanged to create_completion and create_chat_completion
SAMPLING = (
    *KEYWORDS,
    "dry_sequence_breakers",
    "samplers",
    "seed",
    "stop",
    "grammar",
    "min_tokens",
    "stop_token_ids",
)
# fields passed to templates
TEMPLATE = ("functions", "function_call", "tools", "tool_choice", "response_format", "parallel_tool_calls")
CHAT = ("messages", "logprobs", "top_logprobs", *TEMPLATE)
TEMPERATURE = 0.8  # llama-server's default, also for chats
MAX_CHOICES = 64
MAX_PROMPTS = 1024
MAX_LOGPROBS = 100  # maximum log-probabilities per token
MAX_STOP_TOKENS = 256
NO_EFFORT = "none"  # of reasoning_effort
NEVER = float("-inf")


def _also(*names: str, **limits: Any) -> Any:
    """Return an optional field that also accepts other programs' names."""
    return Field(None, validation_alias=AliasChoices(*names), **limits)


class StreamOptionsBody(Open):
    """OpenAI's ``stream_options``."""

    include_usage: bool = False
    include_obfuscation: bool = False  # accepted, there is no obfuscation


class Extension(BaseModel):
    """The field ``longctx``, specific to this server."""

    model_config = ConfigDict(extra="forbid")
    trace: bool = False


NUMBER_FIELDS: Any = {
    one.keyword: (one.kind | None, _also(one.keyword, *one.aliases, **one.request)) for one in NUMBERS
}
Sampled: Any = create_model("Sampled", __base__=Shaped, **NUMBER_FIELDS)


class Generate(Sampled):
    """Fields of all kinds of completions; None is the default of Llama or of the server."""

    stream: bool | None = None
    stream_options: StreamOptionsBody | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    # llama-server's -1 and -2: no limit
    max_tokens: int | None = _also("max_tokens", "n_predict", "max_new_tokens", "num_predict", "max_length", ge=-2)
    dry_sequence_breakers: list[str] | None = None
    samplers: str | list[str] | None = None
    seed: int | None = _also("seed", "sampler_seed")
    stop: str | list[str] | None = _also("stop", "stopping_strings", "stop_sequence")
    stop_token_ids: list[int] | None = Field(None, max_length=MAX_STOP_TOKENS)
    min_tokens: int | None = _also("min_tokens", "min_length", ge=0)
    logit_bias: Any = None
    ignore_eos: bool | None = _also("ignore_eos", "ban_eos_token")
    id_slot: int | None = None
    cache_prompt: bool | None = None
    verbose: bool | None = None
    longctx: Extension = Extension()

    def settle(self, unserved: Unserved) -> None:
        """Ignore samplers unknown to llama.cpp, as llama-server does."""
        if isinstance(self.samplers, list):
            names = {one: sampler_name(one) for one in self.samplers}
            if missing := [one for one, name in names.items() if name is None]:
                unserved.note("samplers", f"samplers: llama.cpp has no {', '.join(missing)[:200]}")
            self.samplers = list(dict.fromkeys(name for name in names.values() if name))

    @field_validator("grammar", mode="before")
    @classmethod
    def _held(cls, value: Any) -> Any:
        """Treat an empty grammar as none, since some clients always send the field."""
        return None if value == "" else value

    @field_validator("dry_sequence_breakers", mode="before")
    @classmethod
    def _breakers(cls, value: Any) -> Any:
        """Parse a list in JSON text, which text-generation-webui's clients send."""
        try:
            return json.loads(value) if isinstance(value, str) else value
        except ValueError:
            raise ValueError("must be a list of strings, or such a list as JSON text") from None

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _pairs(cls, value: Any) -> Any:
        """Accept OpenAI's object and llama-server's list of [token or text, bias], where false forbids the token."""
        pairs = value.items() if isinstance(value, Mapping) else value
        if pairs is None:
            return None
        if not isinstance(value, Mapping | list):
            raise ValueError("must be an object or a list")
        return [_bias(pair) for pair in pairs]

    def sampling(self, defaults: Mapping[str, Any], host: Host) -> dict[str, Any]:
        """Return the arguments of Llama set by the request or the server."""
        given = {name: getattr(self, name) for name in SAMPLING}
        if (shape := self.wanted()) is not None:
            given["grammar"] = grammar_of(*shape)
        bias = dict(defaults.get("logit_bias", {})) | host.biases(self.logit_bias or ())
        if self.ignore_eos:
            bias |= dict.fromkeys(host.model.end_tokens.tolist(), NEVER)
        return {
            **defaults,
            **{name: value for name, value in given.items() if value is not None},
            **({"logit_bias": bias} if bias else {}),
        }


def _bias(pair: Any) -> tuple[int | str, float]:
    """Return a token or a text, and its bias."""
    if not isinstance(pair, list | tuple) or len(pair) != 2 or not (_is_token(pair[0]) or isinstance(pair[0], str)):
        raise ValueError("must be pairs of a token or a text and a number")
    key, bias = pair
    if bias is False:
        bias = NEVER
    if isinstance(bias, bool) or not isinstance(bias, int | float) or not bias < math.inf:
        raise ValueError("a bias must be a number, or false")
    return int(key) if isinstance(key, str) and key.isdecimal() and key.isascii() else key, float(bias)


def as_prompts(value: Any, most: int = MAX_PROMPTS, name: str = "prompt") -> tuple[list[Prompt], bool]:
    """Return the prompts of llama-server's field, each a text or a list of tokens and texts, and whether it was one.

    Raises
    ------
    ApiError
        When it has another form.
    """
    if isinstance(value, str | Mapping) or (isinstance(value, list) and any(_is_token(one) for one in value)):
        return [_one_prompt(value, name)], True
    if not isinstance(value, list) or not value:
        raise invalid("a prompt must be a text, a list of tokens, or a list of these, and not empty", name)
    if len(value) > most:
        raise invalid(f"one request may have at most {most} prompts, not {len(value)}", name)
    return [_one_prompt(one, name) for one in value], False


def _one_prompt(value: Any, name: str) -> Prompt:
    if isinstance(value, Mapping):
        extra = {key for key, given in value.items() if key not in ("prompt_string", "content") and given}
        if extra:
            raise invalid(f"a prompt's {', '.join(sorted(extra))} is not supported, only text", name)
        value = value.get("prompt_string", _text_of(value.get("content")))
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(_is_token(one) or isinstance(one, str) for one in value):
        return value
    raise invalid("a prompt must be a text, or a list of tokens and texts", name)


def _text_of(content: Any) -> str | None:
    """Return the text of content parts; None for other values."""
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    if len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
        return None
    return "".join(map(str, texts))


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class CompletionBody(Generate):
    """POST /v1/completions."""

    prompt: Any = ""
    suffix: str | None = None
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts, each a text or tokens and texts."""
        return as_prompts(self.prompt)[0]

    def arguments(self, defaults: Mapping[str, Any], host: Host) -> dict[str, Any]:
        """Return the keyword arguments of ``create_completion``."""
        own = {name: getattr(self, name) for name in ("suffix", "echo", "logprobs")}
        wanted = self.max_tokens if self.max_tokens is not None else defaults.get("max_tokens")
        limit = {} if wanted is None else {"max_tokens": wanted}
        return {**self.sampling(defaults, host), **own, **limit}


class NativeBody(Generate):
    """POST /completion, of llama-server."""

    prompt: Any = ""
    n_probs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, validation_alias=AliasChoices("n_probs", "logprobs"))
    post_sampling_probs: bool = False
    n_keep: int | None = Field(None, ge=-1, lt=2**31)
    return_tokens: bool | None = None
    response_fields: list[str] | None = None


class InfillBody(NativeBody):
    """POST /infill, of llama-server: the model writes the text between two texts."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list["Chunk"] | None = None
    prompt: str = ""


class Chunk(Open):
    """A piece of another file, for ``input_extra``."""

    text: str
    filename: str = "tmp"


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
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    parse_special: bool | None = None

    def effort_is_read(self, host: Host) -> bool:
        """Return True if the template supports the effort; ``none`` turns reasoning off for every template."""
        known = "reasoning_effort" in host.templates.template.info["source"]
        return self.reasoning_effort in (None, NO_EFFORT) or known

    def template_arguments(self, defaults: Mapping[str, Any], host: Host) -> dict[str, Any]:
        """Return the arguments for the template."""
        more = {**defaults.get("chat_template_kwargs", {}), **(self.chat_template_kwargs or {})}
        if self.reasoning_effort not in (None, NO_EFFORT) and self.effort_is_read(host):
            more["reasoning_effort"] = self.reasoning_effort
        usual = defaults.get("enable_thinking", True) if self.enable_thinking is None else self.enable_thinking
        thinking = bool(more.pop("enable_thinking", usual)) and self.reasoning_effort != NO_EFFORT
        special = defaults.get("parse_special", False) if self.parse_special is None else self.parse_special
        return {"enable_thinking": thinking, "chat_template_kwargs": more, "parse_special": special}

    @model_validator(mode="after")
    def _schema_as_format(self) -> "ChatBody":
        """Treat a schema as ``response_format``, so that a model may reason before its answer."""
        shape = self.wanted()
        if shape is None or shape[0] != "schema":
            return self
        if self.response_format is not None:
            raise ValueError("response_format cannot be combined with another schema")
        self.response_format = {"type": "json_schema", "json_schema": {"schema": as_schema(shape[1])}}
        self.json_schema = self.guided_json = self.structured_outputs = None
        return self

    @model_validator(mode="after")
    def _one_end(self) -> "ChatBody":
        """Refuse two fields that exclude each other."""
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError("add_generation_prompt and continue_final_message cannot both be true")
        return self

    def template(self, defaults: Mapping[str, Any], host: Host) -> dict[str, Any]:
        """Return the keyword arguments of ``apply_template``."""
        end = self.add_generation_prompt is not False or bool(self.continue_final_message)
        given = {name: getattr(self, name) for name in TEMPLATE}
        return given | self.template_arguments(defaults, host) | {"add_generation_prompt": end}

    def arguments(self, defaults: Mapping[str, Any], template: Mapping[str, Any], host: Host) -> dict[str, Any]:
        """Return the keyword arguments of ``create_chat_completion``."""
        if self.add_generation_prompt is False and not self.continue_final_message:
            raise invalid("an answer needs add_generation_prompt", "add_generation_prompt")
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        own = {name: getattr(self, name) for name in CHAT}
        return {
            "temperature": TEMPERATURE,
            **self.sampling(defaults, host),
            **own,
            **self.template_arguments(template, host),
            "max_tokens": limit,
        }


class EmbeddingsBody(Fields):
    """POST /v1/embeddings, and /embedding of llama-server (``content``)."""

    input: Any = _also("input", "content")
    encoding_format: str = "float"
    dimensions: int | None = None
    embd_normalize: int = 2


class TokenizeBody(Fields):
    """POST /tokenize, of llama-server (``content``) or of vLLM (``prompt``)."""

    content: str | None = None
    prompt: str | None = None
    add_special: bool = False
    add_special_tokens: bool = True
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeBody(Fields):
    """POST /detokenize."""

    tokens: Any

    @field_validator("tokens")
    @classmethod
    def _tokens(cls, value: Any) -> Any:
        """Check a list that may be long."""
        if not isinstance(value, list) or not all(_is_token(one) for one in value):
            raise ValueError("must be a list of tokens")
        return value


class SlotBody(Fields):
    """POST /slots/{seq}."""

    filename: str | None = None
    ratio: float | None = None
    answer: str = ""
