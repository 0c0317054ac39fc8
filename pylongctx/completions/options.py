"""Types of request options; defaults are those of ``SamplingParams`` and in the signatures of ``Completer``."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, TypedDict

from pylongctx._guess import guess
from pylongctx.completions.grammar import LlamaGrammar
from pylongctx.engine.sampling.sampler import Processors, StoppingCriteria

# A message of a conversation: role, content, and other fields that the chat template reads.
Message = Mapping[str, Any]
# A JSON schema.
Schema = Mapping[str, Any]


class Constrained(Protocol):
    """A grammar object of pylongctx or llama_cpp."""

    _grammar: str


Grammar = LlamaGrammar | Constrained | str


class Function(TypedDict, total=False):
    """A function that the model may call."""

    name: str
    description: str
    parameters: Schema


class Tool(TypedDict):
    """A tool in OpenAI's form."""

    type: Literal["function"]
    function: Function


class FunctionName(TypedDict):
    """A function by name."""

    name: str


class NamedTool(TypedDict):
    """A tool by name."""

    type: Literal["function"]
    function: FunctionName


class StreamOptions(TypedDict, total=False):
    """OpenAI's ``stream_options``."""

    include_usage: bool


ToolChoice = str | NamedTool | Mapping[str, Any]
FunctionChoice = str | FunctionName | Mapping[str, Any]
Messages = Sequence[Message]


class SamplerOptions(TypedDict, total=False):
    """Samplers of llama.cpp that llama_cpp's methods lack: fields of ``SamplingParams``."""

    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    dynatemp_range: float
    dynatemp_exponent: float
    adaptive_target: float
    adaptive_decay: float
    min_keep: int
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: Sequence[str]
    samplers: str | Sequence[str] | None


class AnswerOptions(SamplerOptions, total=False):
    """Sampler options, and conditions for the end of an answer as in vLLM's ``SamplingParams``."""

    min_tokens: int
    stop_token_ids: Sequence[int] | None


class SamplingOptions(AnswerOptions, total=False):
    """Options of sampling, and of the end of an answer."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    typical_p: float
    stop: str | list[str] | None
    seed: int | None
    presence_penalty: float
    frequency_penalty: float
    repeat_penalty: float
    tfs_z: float
    mirostat_mode: int
    mirostat_tau: float
    mirostat_eta: float
    model: str | None
    logits_processor: Processors
    stopping_criteria: StoppingCriteria | None
    grammar: Grammar | None
    logit_bias: Mapping[int, float] | None


class CompletionOptions(SamplingOptions, total=False):
    """The keywords of ``create_completion``, except ``stream``."""

    suffix: str | None
    max_tokens: int | None
    logprobs: int | None
    echo: bool


class ChatOptions(SamplingOptions, total=False):
    """The keywords of ``create_chat_completion``, except ``stream``."""

    functions: Sequence[Function | Mapping[str, Any]] | None
    function_call: FunctionChoice | None
    tools: Sequence[Tool | Mapping[str, Any]] | None
    tool_choice: ToolChoice | None
    response_format: Mapping[str, Any] | None
    max_tokens: int | None
    logprobs: bool | None
    top_logprobs: int | None
    stream_options: StreamOptions | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    enable_thinking: bool
    chat_template_kwargs: Mapping[str, Any] | None
    parse_special: bool


def flattened(arguments: Mapping[str, Any], *but: str, more_of: type = SamplerOptions) -> dict[str, Any]:
    """Return the arguments of a method by name, including those of its ``**more: SamplerOptions``."""
    more = arguments["more"]
    if unknown := more.keys() - more_of.__annotations__.keys():
        name = min(unknown)
        raise TypeError(f"there is no argument {name!r}{guess(name, [*arguments, *more_of.__annotations__])}")
    left_out = ("self", "more", *but)
    return {name: value for name, value in (dict(arguments) | more).items() if name not in left_out}
