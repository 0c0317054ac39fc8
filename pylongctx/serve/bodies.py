"""Request bodies with the fields of OpenAI and llama-server: reading their JSON, limits, and unsupported fields."""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar

from fastapi import Request
from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import from_json
from starlette.datastructures import Headers

from pylongctx.chat.conversation import is_strict, wanted_schema
from pylongctx.chat.tools import custom_grammar
from pylongctx.completions.grammar import LlamaGrammar
from pylongctx.engine.sampling.params import KEYWORDS, MAX_BREAKERS, NUMBERS, SamplingParams, sampler_name
from pylongctx.parallel import Host, MixedPrompt
from pylongctx.serve import foreign
from pylongctx.serve.content import readable
from pylongctx.serve.errors import ApiError, invalid
from pylongctx.serve.unserved import SHOWN, Unserved

OLLAMA = "/api/"  # prefix of the routes of its API
# maximum entries of lists and objects, by field
MAX_ENTRIES = {
    "messages": 8192,
    "tools": 1024,
    "functions": 1024,
    "stop": 256,
    "stop_sequences": 256,
    "logit_bias": 65536,
    "dry_sequence_breakers": MAX_BREAKERS,
    "samplers": 64,
    "input_extra": 1024,
    "response_fields": 64,
    "chat_template_kwargs": 1024,
    "tokens": 1 << 20,
    "prompt": 1 << 20,
    "input": 1 << 20,
    "documents": 1 << 20,
    "texts": 1 << 20,
}
MAX_PARTS = 65536  # total content parts and tool calls of all messages
MAX_STOP = 16384  # total characters of all stop strings
MAX_NAMED = 32  # maximum fields without effect named in a response
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
TEMPERATURE: float = SamplingParams.temp  # llama-server's default, also for chats
MAX_CHOICES = 64
MAX_PROMPTS = 1024
MAX_LOGPROBS = 100  # maximum log-probabilities per token
MAX_STOP_TOKENS = 256
NO_EFFORT = "none"  # of reasoning_effort
BUDGETS = ("reasoning_budget_tokens", "thinking_budget_tokens", "thinking_token_budget")  # llama-server's, and vLLM's
NEVER = float("-inf")


class Fields(BaseModel):
    """The body of a request."""

    def settle(self, unserved: Unserved) -> None:
        """Record and drop values without effect."""


class Open(BaseModel):
    """An object inside a body, whose unknown fields have no effect."""

    model_config = ConfigDict(extra="allow")


Body = TypeVar("Body", bound=Fields)


async def read(request: Request, body: type[Body]) -> Body:
    """Return the body of a request; ApiError when it is invalid."""
    return load(body, await json_of(request), unserved_of(request))


def unserved_of(request: Request) -> Unserved:
    """Return the record of a request's fields without effect, which the gate made."""
    unserved: Unserved = request.scope["unserved"]
    return unserved


def owner_of(request: Request) -> str | None:
    """Return the owner of a request, whom the gate knows by the API key."""
    owner: str | None = request.scope.get("owner")
    return owner


async def json_of(request: Request) -> Any:
    """Return the JSON of a request; ApiError when it is not JSON, or not declared as JSON."""
    if not is_json(request.headers, request.url.path):
        kind = request.headers.get("content-type", "")
        # pages of other sites can send other types without a CORS preflight
        raise ApiError(415, "invalid_request_error", f"send the header Content-Type: application/json, not {kind!r}")
    try:
        return from_json(await request.body())
    except ValueError as reason:
        raise invalid(f"the body is not JSON: {reason}") from None


def is_json(headers: Headers, path: str) -> bool:
    """Return True if a body is declared as JSON; clients of Ollama other than browsers may omit it."""
    said = headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"
    return said or (path.startswith(OLLAMA) and not _is_browser(headers))


def _is_browser(headers: Headers) -> bool:
    """Return True if a page may have sent a request; browsers always send one of these headers."""
    by_browser = any(name in headers for name in ("origin", "sec-fetch-site"))
    return by_browser or headers.get("user-agent", "").startswith("Mozilla/")


def load(body: type[Body], fields: Any, unserved: Unserved) -> Body:
    """Return a body from its fields; ApiError names the first unsupported one."""
    if not isinstance(fields, dict):
        raise invalid("the body must be a JSON object")
    names = names_of(body)
    known = {name: field for field, all_names in names.items() for name in all_names}
    given: dict[str, str] = {}  # the names in use, by field
    for name, value in fields.items():
        if name not in known:
            note_unknown(name, value, unserved)
        elif value is not None:
            _check_length(name, value)
            field = known[name]
            given[field] = min(given.get(field, name), name, key=names[field].index)
    for name, value in fields.items():
        first = given.get(known.get(name, ""), name)
        if name in known and value is not None and value != fields[first]:
            unserved.note(name, f"{name}={_shown(value)} has no effect together with {first}={_shown(fields[first])}")
    try:
        found = body.model_validate({name: fields[name] for name in given.values()})
    except ValidationError as reason:
        first_error = reason.errors(include_url=False, include_input=False)[0]
        # for a union, the alternative that did not match follows the field
        wrong = str(first_error["loc"][0]) if first_error["loc"] else None
        raise invalid(f"{wrong}: {first_error['msg']}" if wrong else first_error["msg"], wrong) from None
    for path in _unknown(found):
        unserved.note(path, f"{path} is not supported here")
    found.settle(unserved)
    return found


def names_of(body: type[BaseModel]) -> dict[str, list[str]]:
    """Return the names of each field of a body in order of precedence."""
    found = {}
    for name, field in body.model_fields.items():
        choices = getattr(field.validation_alias, "choices", ())
        found[name] = [*map(str, choices), name]
    return found


def _unknown(found: BaseModel, path: str = "") -> Iterator[str]:
    """Yield the paths of unknown fields in the objects of a body."""
    for name, value in found.model_extra.items() if found.model_extra else ():
        if value is not None:
            yield path + name
    for name in type(found).model_fields:
        value = getattr(found, name)
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, BaseModel):
                yield from _unknown(one, f"{path}{name}.")


def note_unknown(name: str, value: Any, unserved: Unserved, path: str = "") -> None:
    """Record an unknown field, unless its value requests the existing behavior; ApiError if it changes the answer.

    ``path`` is that of the object which has the field, with a point at its end.
    """
    if value is None or name in foreign.LABELS:
        return
    usual = foreign.USUAL.get(name)
    if _is_one_of(value, usual) if usual else not value:
        return
    if name in foreign.REFUSED:
        reason = f"{path}{name}={_shown(value)} is not supported here: {foreign.REFUSED[name]}"
        raise invalid(reason, f"{path}{name}")
    unserved.note(f"{path}{name}", f"the field {path + name[:SHOWN]!r} is not supported")


def _is_one_of(value: Any, usual: tuple[Any, ...]) -> bool:
    """Return True if a value is among others; false is not 0."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in usual)


def _check_length(name: str, value: Any) -> None:
    most = MAX_ENTRIES.get(name)
    if most is not None and isinstance(value, list | dict) and len(value) > most:
        raise invalid(f"{name} has {len(value)} entries, more than {most}", name)
    if name in ("stop", "stop_sequences") and isinstance(value, list):
        n = sum(len(one) for one in value if isinstance(one, str))
        if n > MAX_STOP:
            raise invalid(f"{name} has {n} characters, more than {MAX_STOP}", name)
    if name in ("messages", "input") and isinstance(value, list):
        n = sum(_n_parts(message) for message in value)
        if n > MAX_PARTS:
            raise invalid(f"{name}: {n} parts and calls, more than {MAX_PARTS}", name)


def _n_parts(message: Any) -> int:
    """Return how many parts a message has, including nested ones."""
    lists = [value for value in message.values() if isinstance(value, list)] if isinstance(message, Mapping) else []
    return sum(len(value) + sum(map(_n_parts, value)) for value in lists)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def also_named(*names: str, **limits: Any) -> Any:
    """Return an optional field that also accepts other programs' names."""
    return Field(None, validation_alias=AliasChoices(*names), **limits)


class StructuredOutputs(Open):
    """vLLM's ``structured_outputs``."""

    json_: dict[str, Any] | bool | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None


class Shape(NamedTuple):
    """What constrains an answer: ``kind`` is schema, regex, choice or grammar, ``field`` the one that has it."""

    field: str
    kind: str
    value: Any
    strict: bool = True  # whether a schema that cannot be fully enforced is refused


class Shaped(Fields):
    """Fields that constrain an answer, of which at most one may be set."""

    grammar: str | None = also_named("grammar", "grammar_string")
    json_schema: dict[str, Any] | bool | None = None
    response_format: dict[str, Any] | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None

    def wanted(self) -> Shape | None:
        """Return what constrains the answer; ApiError when several fields do, or one is invalid."""
        inner = self.structured_outputs or StructuredOutputs()
        if inner.structural_tag is not None:
            reason = "structured_outputs.structural_tag is not supported: use a schema, a regex, a choice or a grammar"
            raise invalid(reason, "structured_outputs")
        anything = {"type": "object"} if inner.json_object or None else None
        given = [
            Shape("grammar", "grammar", self.grammar),
            Shape("json_schema", "schema", self.json_schema),
            Shape("response_format", "schema", self._schema(), is_strict(self.response_format)),
            Shape("guided_json", "schema", self.guided_json),
            Shape("guided_regex", "regex", self.guided_regex),
            Shape("guided_choice", "choice", self.guided_choice),
            Shape("guided_grammar", "grammar", self.guided_grammar),
            Shape("structured_outputs.json", "schema", inner.json_),
            Shape("structured_outputs.regex", "regex", inner.regex),
            Shape("structured_outputs.choice", "choice", inner.choice),
            Shape("structured_outputs.grammar", "grammar", inner.grammar),
            Shape("structured_outputs.json_object", "schema", anything),
        ]
        found = [one for one in given if one.value is not None]
        if len(found) > 1:
            first, second = found[0].field, found[1].field
            raise invalid(f"{first} and {second} cannot be combined", second.split(".")[0])
        return found[0] if found else None

    def _schema(self) -> Any:
        """Return the schema of ``response_format``."""
        try:
            return wanted_schema(self.response_format)
        except ValueError as reason:
            raise invalid(str(reason), "response_format") from None


def as_schema(value: Any) -> Any:
    """Return a schema, which may be given as JSON text."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as reason:
        raise ValueError(f"the JSON schema is not JSON: {reason}") from None


def grammar_of(shape: Shape) -> LlamaGrammar | str:
    """Return the grammar of what constrains an answer; ApiError names its field."""
    try:
        if shape.kind == "schema":
            return LlamaGrammar.from_json_schema(shape.value, strict=shape.strict)
        if shape.kind == "regex":
            return LlamaGrammar.from_regex(shape.value)
        return LlamaGrammar.from_choice(shape.value) if shape.kind == "choice" else str(shape.value)
    except ValueError as reason:
        raise invalid(str(reason), shape.field.split(".")[0]) from None


def add_format(fields: dict[str, Any], name: str, form: Any) -> None:
    """Add the form of an answer that an API has under another name; ApiError if ``response_format`` has one, too."""
    if form is None:
        return
    if fields.get("response_format") is not None:
        raise invalid(f"{name} and response_format cannot be combined", name)
    fields["response_format"] = form


class StreamOptionsBody(Open):
    """OpenAI's ``stream_options``."""

    include_usage: bool = False
    include_obfuscation: bool = False  # accepted, there is no obfuscation


class Extension(BaseModel):
    """The field ``longctx``, specific to this server."""

    model_config = ConfigDict(extra="forbid")
    trace: bool = False


NUMBER_FIELDS: Any = {
    one.keyword: (one.kind | None, also_named(one.keyword, *one.aliases, **one.request)) for one in NUMBERS
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
    max_tokens: int | None = also_named("max_tokens", "n_predict", "max_new_tokens", "num_predict", "max_length", ge=-2)
    dry_sequence_breakers: list[str] | None = None
    samplers: str | list[str] | None = None
    seed: int | None = also_named("seed", "sampler_seed")
    stop: str | list[str] | None = also_named("stop", "stopping_strings", "stop_sequence")
    stop_token_ids: list[int] | None = Field(None, max_length=MAX_STOP_TOKENS)
    min_tokens: int | None = also_named("min_tokens", "min_length", ge=0)
    logit_bias: Any = None
    ignore_eos: bool | None = also_named("ignore_eos", "ban_eos_token")
    id_slot: int | None = None
    cache_prompt: bool | None = None
    n_cache_reuse: int | None = Field(None, ge=0)
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

    def held(self) -> LlamaGrammar | str | None:
        """Return the grammar of the answer."""
        shape = self.wanted()
        return None if shape is None else grammar_of(shape)

    def sampling(self, defaults: Mapping[str, Any], host: Host) -> dict[str, Any]:
        """Return the arguments of Llama set by the request or the server."""
        given = {name: getattr(self, name) for name in SAMPLING} | {"grammar": self.held()}
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


def as_prompts(value: Any, most: int = MAX_PROMPTS, name: str = "prompt") -> tuple[list[MixedPrompt], bool]:
    """Return the prompts of llama-server's field, each a text or a list of tokens and texts, and whether it was one."""
    if isinstance(value, str | Mapping) or (isinstance(value, list) and any(_is_token(one) for one in value)):
        return [_one_prompt(value, name)], True
    if not isinstance(value, list) or not value:
        raise invalid("a prompt must be a text, a list of tokens, or a list of these, and not empty", name)
    if len(value) > most:
        raise invalid(f"one request may have at most {most} prompts, not {len(value)}", name)
    return [_one_prompt(one, name) for one in value], False


def _one_prompt(value: Any, name: str) -> MixedPrompt:
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
    def prompts(self) -> list[MixedPrompt]:
        """The prompts, each a text or tokens and texts."""
        return as_prompts(self.prompt)[0]

    def arguments(self, defaults: Mapping[str, Any], host: Host) -> dict[str, Any]:
        """Return the keyword arguments of ``create_completion``."""
        own = {name: getattr(self, name) for name in ("suffix", "echo", "logprobs")}
        limit = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
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


class Reasoning(Open):
    """Whether and for how long the model reasons, in OpenAI's form or OpenRouter's; summaries are never returned."""

    effort: str | None = None
    max_tokens: int | None = Field(default=None, ge=0)
    enabled: bool | None = None
    summary: str | None = None
    generate_summary: str | None = None

    def fields(self) -> dict[str, tuple[str, Any]]:
        """Return the fields of conversations for those that were given, with their own names."""
        pairs = {
            "reasoning_effort": ("effort", self.effort),
            "reasoning_budget_tokens": ("max_tokens", self.max_tokens),
            "enable_thinking": ("enabled", self.enabled),
        }
        return {name: pair for name, pair in pairs.items() if pair[1] is not None}


class Conversing(Generate):
    """Fields of conversations in all APIs."""

    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    reasoning_budget_tokens: int | None = also_named(*BUDGETS, ge=-1)
    enable_thinking: bool | None = None
    parse_special: bool | None = None


class Dialect(Conversing):
    """A conversation in another API than OpenAI's, whose answers are single and have no ``unused`` details."""

    unused: ClassVar[tuple[str, ...]] = ("verbose", "stream_options")

    def settle(self, unserved: Unserved) -> None:
        """Record fields without effect; ApiError for several answers."""
        super().settle(unserved)
        if self.n not in (None, 1):
            raise invalid(f"n={self.n} is not supported: an answer of this API is one message, send n requests", "n")
        for name in self.unused:
            if getattr(self, name):
                unserved.note(name, f"{name} has no effect here: answers of this API have no field for it")

    def shared(self) -> dict[str, Any]:
        """Return the fields of all conversations that were given, in the form of a request."""
        names = set(Conversing.model_fields) - set(self.unused)
        return self.model_dump(include=names, exclude_unset=True, by_alias=True)


class ChatBody(Conversing):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    reasoning: Reasoning = Reasoning()

    def effort_is_read(self, host: Host) -> bool:
        """Return True if the template supports the effort; ``none`` turns reasoning off for every template."""
        known = "reasoning_effort" in host.templates.template.info["source"]
        return self.reasoning_effort in (None, NO_EFFORT) or known

    def template_arguments(self, defaults: Mapping[str, Any], host: Host) -> dict[str, Any]:
        """Return the arguments for the template."""
        own = self.chat_template_kwargs or {}
        more = {**defaults.get("chat_template_kwargs", {}), **own}
        if self.reasoning_effort not in (None, NO_EFFORT) and self.effort_is_read(host):
            more["reasoning_effort"] = self.reasoning_effort
        usual = more.pop("enable_thinking", defaults.get("enable_thinking", True))
        asked = None if "enable_thinking" in own else self.enable_thinking
        thinking = bool(usual if asked is None else asked) and self.reasoning_effort != NO_EFFORT
        special = defaults.get("parse_special", False) if self.parse_special is None else self.parse_special
        return {"enable_thinking": thinking, "chat_template_kwargs": more, "parse_special": special}

    def settle(self, unserved: Unserved) -> None:
        """Record what is not supported, and let a schema be ``response_format``, so that a model may reason first."""
        super().settle(unserved)
        self._take_reasoning(unserved)
        self.messages = readable(self.messages, unserved)
        for i, tool in enumerate(self.tools or ()):
            if tool.get("type") == "custom" and custom_grammar(tool) is not None:
                where = f"tools[{i}].custom.format"
                unserved.note(where, f"{where}: the grammar is shown to the model, but not enforced")
        shape = self.wanted()
        if shape is None or shape.kind != "schema" or shape.field == "response_format":
            return
        try:
            schema = as_schema(shape.value)
        except ValueError as reason:
            raise invalid(str(reason), shape.field.split(".")[0]) from None
        self.response_format = {"type": "json_schema", "json_schema": {"schema": schema}}
        self.json_schema = self.guided_json = self.structured_outputs = None

    def _take_reasoning(self, unserved: Unserved) -> None:
        """Take fields of ``reasoning`` where those of the request do not say otherwise."""
        for name, (inner, value) in self.reasoning.fields().items():
            own = getattr(self, name)
            if own is None:
                setattr(self, name, value)
            elif own != value:
                path = f"reasoning.{inner}"
                unserved.note(path, f"{path}={_shown(value)} has no effect together with {name}={_shown(own)}")

    def held(self) -> LlamaGrammar | str | None:
        """Return the grammar of the answer; a schema is enforced by the template instead."""
        shape = self.wanted()
        return None if shape is None or shape.kind == "schema" else grammar_of(shape)

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
            "reasoning_budget": self.reasoning_budget_tokens,
            "max_tokens": limit,
        }


class EmbeddingsBody(Fields):
    """POST /v1/embeddings, and /embedding of llama-server (``content``)."""

    input: Any = also_named("input", "content")
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
