"""Choosing the next token: parameters, the sampler chain, processors and criteria."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pylongctx._lib import error, ffi, in_buffer, lib, text
from pylongctx.engine.model import Model

LogitsProcessor = Callable[[NDArray[np.int32], NDArray[np.float32]], NDArray[np.float32]]
Processors = LogitsProcessor | list[LogitsProcessor] | None
StoppingCriteria = Callable[[NDArray[np.int32], NDArray[np.float32]], bool]

RANDOM_SEEDS = (-1, 0xFFFFFFFF)
TOO_SLOW = -2  # of lctx_sampler_sample


class LogitsProcessorList(list[LogitsProcessor]):
    """Processors applied one after the other to the logits of the next token, float32 [n_vocab].

    Examples
    --------
    >>> def forbid_first(input_ids, scores):
    ...     scores[0] = -np.inf
    ...     return scores
    >>> twice = LogitsProcessorList([forbid_first, forbid_first])
    >>> twice(np.array([1], np.int32), np.zeros(3, np.float32))
    array([-inf,   0.,   0.], dtype=float32)
    """

    def __call__(self, input_ids: NDArray[np.int32], scores: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the logits after the last processor."""
        for processor in self:
            scores = processor(input_ids, scores)
        return scores


class StoppingCriteriaList(list[StoppingCriteria]):
    """Criteria of which one is enough to stop.

    Examples
    --------
    >>> stop = StoppingCriteriaList([lambda input_ids, logits: len(input_ids) >= 40])
    >>> stop(np.zeros(40, np.int32), np.zeros(3, np.float32))
    True
    """

    def __call__(self, input_ids: NDArray[np.int32], logits: NDArray[np.float32]) -> bool:
        """Return whether one of the criteria holds."""
        return any(criterion(input_ids, logits) for criterion in self)


class MinTokensLogitsProcessor:
    """Forbid the end-of-sequence token until ``min_tokens`` tokens were generated.

    Examples
    --------
    >>> longer = MinTokensLogitsProcessor(min_tokens=8, token_eos=llm.token_eos())
    >>> answer = llm("The thief is", logits_processor=LogitsProcessorList([longer]), max_tokens=8)
    >>> answer["usage"]["completion_tokens"]
    8
    """

    def __init__(self, min_tokens: int, token_eos: int) -> None:
        self.min_tokens = min_tokens
        self.token_eos = token_eos
        self.prompt_tokens: int | None = None

    def __call__(self, input_ids: NDArray[np.int32], scores: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the logits, the end-of-sequence token forbidden while it is too early."""
        if self.prompt_tokens is None:
            self.prompt_tokens = len(input_ids)
        if len(input_ids) - self.prompt_tokens < self.min_tokens:
            scores[self.token_eos] = -np.inf
        return scores


@dataclass(frozen=True)
class SamplingParams:
    """The settings of one sampler chain; ``temp`` 0 is greedy. Penalties see generated tokens only.

    Examples
    --------
    >>> SamplingParams(seed=1, temp=0.0).settings()["temp"]
    0.0
    """

    seed: int
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    temp: float = 0.8
    penalty_last_n: int = 64
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    mirostat_mode: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, value in self.settings().items():
            if not math.isfinite(value):
                raise ValueError(f"{key} must be a finite number, not {value}")
        if self.repeat_penalty <= 0:
            raise ValueError(f"repeat_penalty must be above 0 (1 is none), not {self.repeat_penalty}")
        if self.mirostat_mode not in (0, 1, 2):
            raise ValueError(f"mirostat_mode must be 0, 1 or 2, not {self.mirostat_mode}")

    def settings(self) -> dict[str, Any]:
        """Return the fields of ``lctx_sampler_params`` that are plain numbers."""
        return {key: value for key, value in asdict(self).items() if key != "logit_bias"}


class Sampler:
    """Owner of one ``lctx_sampler``: llama.cpp's sampler chain on plain logits rows.

    Parameters
    ----------
    model : Model
        Must outlive the sampler.
    params : SamplingParams
        The chain's settings.
    constraint : str or None
        A grammar, as ``lctx_sampler_constrain`` reads it.

    Raises
    ------
    InvalidInput
        When the grammar cannot be used.
    """

    def __init__(self, model: Model, params: SamplingParams, constraint: str | None = None) -> None:
        settings = ffi.new("lctx_sampler_params *")
        lib.lctx_sampler_params_default(settings)
        for key, value in params.settings().items():
            setattr(settings, key, value)
        # These two arrays must live until lctx_sampler_create has copied them.
        tokens = model.check_tokens((int(token) for token in params.logit_bias), allow_empty=True)
        values = np.array([float(bias) for bias in params.logit_bias.values()], np.float32)
        if len(tokens):
            settings.n_logit_bias = len(tokens)
            settings.logit_bias_tokens = in_buffer("logit_bias", tokens, np.int32)
            settings.logit_bias_values = in_buffer("logit_bias", values, np.float32)
        handle = lib.lctx_sampler_create(model.handle, settings)
        if not handle:
            raise MemoryError("the sampler cannot be created")
        self._handle = ffi.gc(handle, lib.lctx_sampler_free)
        if constraint and lib.lctx_sampler_constrain(self._handle, constraint.encode()) != lib.LCTX_OK:
            raise error(lib.LCTX_INVALID, text(lib.lctx_sampler_error(self._handle)))

    def sample(self, logits: NDArray[np.float32]) -> int:
        """Choose a token from float32 [n_vocab] and remember it for the penalties.

        Raises
        ------
        InvalidInput
            When the grammar takes more than a second of the processor.
        LctxError
            When no token can be chosen.
        """
        token: int = lib.lctx_sampler_sample(self._handle, in_buffer("logits", logits, np.float32), len(logits))
        if token < 0:
            status = lib.LCTX_INVALID if token == TOO_SLOW else lib.LCTX_FAILED
            raise error(status, text(lib.lctx_sampler_error(self._handle)))
        return token


def process(
    processors: Processors,
    input_ids: NDArray[np.int32],
    logits: NDArray[np.float32],
) -> NDArray[np.float32]:
    """Return what the processors make of a copy of ``logits``, float32 [n_vocab].

    Raises
    ------
    LctxError
        When a logit of the model is NaN or infinite.
    """
    check_logits(logits)
    if processors is None:
        return logits
    apply = processors if callable(processors) else LogitsProcessorList(processors)
    result = np.ascontiguousarray(apply(input_ids, logits.copy()), np.float32)
    if result.shape != logits.shape:
        raise ValueError(f"logits_processor must return shape {logits.shape}, not {result.shape}")
    return result


def check_logits(rows: NDArray[np.float32]) -> None:
    """Raise LctxError when one of the logits of a model, float32 [.., n_vocab], is NaN or infinite."""
    wrong = np.flatnonzero(~np.isfinite(rows))
    if len(wrong):
        token, value = wrong[0] % rows.shape[-1], rows.reshape(-1)[wrong[0]]
        cause = "the model is damaged, or its numbers overflow"
        raise error(lib.LCTX_FAILED, f"no token can be sampled: the logit of token {token} is {value}; {cause}")


def seed_sequence(seed: int | None) -> Iterator[int]:
    """Yield the seed itself, then numbers derived from it; without a seed, random numbers."""
    if seed is not None and seed not in RANDOM_SEEDS:
        seed = int(seed) % 2**32
        yield seed
    else:
        seed = None
    random = Random(seed)
    while True:
        yield random.getrandbits(32)
