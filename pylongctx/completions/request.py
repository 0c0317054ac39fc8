"""Requests for completions: their options, and how they become tokens, the parameters of a sampler, and a job."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

import numpy as np

from pylongctx._arguments import check_count
from pylongctx._guess import guess
from pylongctx.completions.grammar import LlamaGrammar
from pylongctx.engine.sampling.params import KEYWORDS, NUMBERS, SamplingParams
from pylongctx.engine.sampling.sampler import (
    LogitsProcessor,
    MinTokensLogitsProcessor,
    Processors,
    Sampler,
    SeedSequence,
    StoppingCriteria,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pylongctx.engine.job import Job
    from pylongctx.engine.model import Model
    from pylongctx.engine.source import TokenSource

# A message of a conversation: role, content, and other fields that the chat template reads.
Message = Mapping[str, Any]
Messages = Sequence[Message]
Prompt = str | Sequence[int]  # a text, or tokens
# fields of SamplingParams by argument of the public methods, of which ``sample`` and ``generate`` have ``temp``
FIELDS = {one.keyword: one.name for one in NUMBERS if one.keyword in KEYWORDS}
FIELDS |= {name: name for name in ("temp", "dry_sequence_breakers", "samplers")}


class Constrained(Protocol):
    """A grammar object of pylongctx or llama_cpp."""

    _grammar: str


Grammar = LlamaGrammar | Constrained | str
ToolChoice = str | Mapping[str, Any]  # OpenAI's ``tool_choice`` and its older form ``function_call``


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

    functions: Sequence[Mapping[str, Any]] | None
    function_call: ToolChoice | None
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: ToolChoice | None
    response_format: Mapping[str, Any] | None
    max_tokens: int | None
    logprobs: bool | None
    top_logprobs: int | None
    stream_options: Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    enable_thinking: bool
    reasoning_budget: int | None
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


def are_prompts(prompt: Any) -> bool:
    """Return True if a prompt is a list of prompts: of texts, or of lists of tokens.

    Raises TypeError when it is neither that nor a prompt.
    """
    if isinstance(prompt, str):
        return False
    if isinstance(prompt, bytes) or not hasattr(prompt, "__getitem__"):
        raise TypeError(f"a prompt must be a str or a list of tokens, not {type(prompt).__name__}")
    several = len(prompt) > 0 and not isinstance(prompt[0], int | np.integer)
    for one in prompt if several else ():
        if isinstance(one, bytes) or not hasattr(one, "__getitem__"):
            raise TypeError(f"each prompt of a list must be a str or a list of tokens, not {type(one).__name__}")
    return several


def prompt_tokens(source: TokenSource, prompt: Prompt) -> list[int]:
    """Return the tokens of a prompt with those that the model adds.

    Raises ValueError when it has no tokens, or a text cannot fit into the context (PromptTooLong).
    """
    model = source.model
    if not isinstance(prompt, str):
        return [int(token) for token in model.check_tokens(prompt)]
    source.check_size(len(prompt.encode()))
    info = model.info
    last = info.token_eos if info.token_sep < 0 else info.token_sep
    tokens = model.tokenize(prompt.encode(), False, True) if prompt else []
    tokens = [*model.start, *tokens]
    if info.add_eos or info.token_sep >= 0:
        tokens = [*tokens, last]
    if not tokens:
        raise ValueError("the prompt is empty, and this model has no BOS token to start from")
    if tokens[:2] == [info.token_bos] * 2:
        warnings.warn(
            "the prompt begins with a BOS token, and one is added: leave it out", RuntimeWarning, stacklevel=3
        )
    return tokens


def sampling_params(given: Mapping[str, Any], seeds: SeedSequence, penalty_last_n: int) -> SamplingParams:
    """Return the parameters of a sampler from the arguments of a public method; ``seeds`` are used without a seed."""
    if given["tfs_z"] != 1.0 or not given.get("penalize_nl", True):
        warnings.warn("tfs_z and penalize_nl have no effect: llama.cpp removed them", RuntimeWarning, stacklevel=3)
    seed = given.get("seed")
    used = seeds if seed is None else SeedSequence(seed)
    return SamplingParams(
        seed=next(used),
        repeatable=used.is_given,
        penalty_last_n=penalty_last_n,
        logit_bias=given.get("logit_bias") or {},
        **{field: given[name] for name, field in FIELDS.items() if name in given},
    )


def stop_words(given: str | Sequence[str] | None) -> list[str]:
    """Return the argument ``stop`` of a public method as a list."""
    return [given] if isinstance(given, str) else list(given or [])


def job_of(
    source: TokenSource,
    tokens: Sequence[int],
    sampler: Sampler,
    given: Mapping[str, Any],
    with_rows: bool,
    **fields: Any,
) -> Job:
    """Return the job of an answer from the arguments shared by completions and chats."""
    stops = source.model.check_tokens(given.get("stop_token_ids") or (), allow_empty=True)
    return source.job(
        tokens,
        sampler,
        given["max_tokens"],
        processors=_processors(source.model, given, stops),
        criteria=given["stopping_criteria"],
        with_rows=with_rows,
        stop_tokens=frozenset(stops.tolist()),
        **fields,
    )


def _processors(model: Model, given: Mapping[str, Any], stops: NDArray[np.int32]) -> Processors:
    """Return the logits processors, including that of ``min_tokens``."""
    processors: Processors = given["logits_processor"]
    n = check_count("min_tokens", given.get("min_tokens") or 0, 0)
    if n == 0:
        return processors
    ends = np.union1d(model.end_tokens, stops)
    return joined(processors, MinTokensLogitsProcessor(n, ends))


def joined(processors: Processors, last: LogitsProcessor) -> list[LogitsProcessor]:
    """Return logits processors with one more behind them."""
    others = [] if processors is None else [processors] if callable(processors) else list(processors)
    return [*others, last]
