"""Choosing the next token: the sampler chain, processors and criteria."""

import json
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pylongctx._closed import closed
from pylongctx._lib import error, ffi, in_buffer, lib, out_buffer, text
from pylongctx.engine.model import Model, freed_before
from pylongctx.engine.sampling.guide import Guide
from pylongctx.engine.sampling.params import SamplingParams

LogitsProcessor = Callable[[NDArray[np.int32], NDArray[np.float32]], NDArray[np.float32]]
Processors = LogitsProcessor | list[LogitsProcessor] | None
StoppingCriteria = Callable[[NDArray[np.int32], NDArray[np.float32]], bool]
Decide = Callable[[NDArray[np.float32]], int]  # from the probabilities of all tokens, float32 [n_vocab]

RANDOM_SEEDS = (-1, 0xFFFFFFFF)
TOO_SLOW = -2  # of lctx_sampler_sample


class LogitsProcessorList(list[LogitsProcessor]):
    """Processors that are applied in order to the logits of the next token, float32 [n_vocab].

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
    """Criteria to stop, any of which is enough.

    Examples
    --------
    >>> stop = StoppingCriteriaList([lambda input_ids, logits: len(input_ids) >= 40])
    >>> stop(np.zeros(40, np.int32), np.zeros(3, np.float32))
    True
    """

    def __call__(self, input_ids: NDArray[np.int32], logits: NDArray[np.float32]) -> bool:
        """Return True if one of the criteria is met."""
        return any(criterion(input_ids, logits) for criterion in self)


class MinTokensLogitsProcessor:
    """Forbid the end-of-sequence token, or all tokens of an array, until ``min_tokens`` tokens are generated.

    Examples
    --------
    >>> longer = MinTokensLogitsProcessor(min_tokens=8, token_eos=llm.token_eos())
    >>> answer = llm("The thief is", logits_processor=LogitsProcessorList([longer]), max_tokens=8)
    >>> answer["usage"]["completion_tokens"]
    8
    """

    def __init__(self, min_tokens: int, token_eos: int | NDArray[np.int32]) -> None:
        self.min_tokens = min_tokens
        self.token_eos = token_eos
        self.prompt_tokens: int | None = None

    def __call__(self, input_ids: NDArray[np.int32], scores: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the logits, with the end-of-sequence token forbidden while the answer is too short."""
        if self.prompt_tokens is None:
            self.prompt_tokens = len(input_ids)
        if len(input_ids) - self.prompt_tokens < self.min_tokens:
            scores[self.token_eos] = -np.inf
        return scores


class Sampler:
    """Owner of one ``lctx_sampler``: llama.cpp's sampler chain on plain logits rows.

    It is closed with its model. The constraint is a grammar in the form of ``lctx_sampler_constrain`` or, with
    ``schemas``, of ``Guide``. DRY also searches repetitions in ``before``, the tokens of the text so far; with
    ``penalizes_before``, penalties count them too, as in llama-server. Raises InvalidInput when the grammar cannot be
    used.
    """

    def __init__(
        self,
        model: Model,
        params: SamplingParams,
        constraint: str | None = None,
        before: Sequence[int] | NDArray[np.int32] = (),
        penalizes_before: bool = False,
    ) -> None:
        settings = _numbers(params)
        searched = () if penalizes_before else before
        # lctx_sampler_create copies what these hold
        held = _order(settings, params), _repetitions(settings, params, model, searched), _bias(settings, params, model)
        of_model = model.lend(self)
        handle = lib.lctx_sampler_create(of_model, settings)
        del held
        if not handle:
            raise MemoryError("the sampler cannot be created")
        owned = freed_before(of_model, handle, lib.lctx_sampler_free)
        self._handle: Any = owned
        self.model, self.params = model, params
        if penalizes_before:
            self._show(model, before[-max(params.penalty_last_n, params.dry_penalty_last_n, 1) :])
        self._masks_first = params.mirostat_mode != 0  # Mirostat adapts to every choice
        self._guide: Guide | None = None
        if constraint and '"schemas"' in constraint and "schemas" in (spec := json.loads(constraint)):
            self._guide = Guide(model, spec)
        elif constraint and lib.lctx_sampler_constrain(owned, constraint.encode()) != lib.LCTX_OK:
            raise error(lib.LCTX_INVALID, text(lib.lctx_sampler_error(owned)))
        # llama.cpp's grammar chooses together with the chain, and allows no other choice
        own_choice = not constraint or self._guide is not None
        self.takes_proposals = own_choice and params.has_fixed_odds and not params.repeatable

    def _show(self, model: Model, tokens: Sequence[int] | NDArray[np.int32]) -> None:
        """Let the chain count tokens that it did not choose; the grammar is not part of it."""
        for token in model.check_tokens(tokens, allow_empty=True).tolist():
            lib.lctx_sampler_accept(self._sampler, token)

    @property
    def _sampler(self) -> Any:
        """The ``lctx_sampler *``; RuntimeError when closed."""
        if self._handle is None:
            raise closed()
        return self._handle

    def close(self) -> None:
        """Free the sampler once calls in other threads have returned."""
        self._handle, self._guide = None, None

    def sample(self, logits: NDArray[np.float32], decide: Decide | None = None) -> int:
        """Choose a token from float32 [n_vocab] and remember it for the penalties.

        ``decide`` chooses it by the probabilities of the chain, if it ``takes_proposals``. Raises InvalidInput when the
        grammar exceeds its CPU budget of a second, LctxError when no token can be sampled.
        """
        if self._guide is not None:
            return self._guided(self._guide, logits, decide)
        if decide is None:
            return self._chosen(lib.lctx_sampler_sample, logits)
        token = self.choose(logits, decide)
        lib.lctx_sampler_accept(self._sampler, token)
        return token

    def choose(self, logits: NDArray[np.float32], decide: Decide | None = None) -> int:
        """Choose a token from float32 [n_vocab] without the grammar, and without remembering it."""
        token = self._chosen(lib.lctx_sampler_choose, logits)
        return token if decide is None else decide(self.probs(len(logits)))

    def _guided(self, guide: Guide, logits: NDArray[np.float32], decide: Decide | None) -> int:
        """Choose a token; the chain's choice is checked first, since a mask of all tokens is slow."""
        token = -1 if self._masks_first else self.choose(logits, decide)
        if token < 0 or not guide.allows(token):
            mask = guide.mask()
            if not mask.any():
                raise error(lib.LCTX_FAILED, "no token can be sampled: the grammar allows none")
            token = self.choose(np.where(mask, logits, np.float32(-np.inf)))
            if not mask[token]:
                raise error(lib.LCTX_FAILED, "no token can be sampled: logit_bias forbids all that the grammar allows")
        guide.accept(token)
        lib.lctx_sampler_accept(self._sampler, token)
        return token

    def _chosen(self, choose: Callable[..., int], logits: NDArray[np.float32]) -> int:
        handle = self._sampler
        token = choose(handle, in_buffer("logits", logits, np.float32), len(logits))
        if token < 0:
            status = lib.LCTX_INVALID if token == TOO_SLOW else lib.LCTX_FAILED
            raise error(status, text(lib.lctx_sampler_error(handle)))
        return token

    def probs(self, n_vocab: int) -> NDArray[np.float32]:
        """Return the probabilities, float32 [n_vocab], from which the last token was chosen."""
        probs = np.empty(n_vocab, np.float32)
        status = lib.lctx_sampler_probs(self._sampler, out_buffer("probs", probs, np.float32), n_vocab)
        if status != lib.LCTX_OK:
            raise error(status, "no token was sampled yet")
        return probs

    def logprobs(self, n_vocab: int) -> NDArray[np.float32]:
        """Return the log-probabilities, float32 [n_vocab], from which the last token was sampled; -inf: removed."""
        with np.errstate(divide="ignore"):
            return np.log(self.probs(n_vocab))


def _numbers(params: SamplingParams) -> Any:
    """Return a ``lctx_sampler_params`` with all plain numbers."""
    settings = ffi.new("lctx_sampler_params *")
    lib.lctx_sampler_params_default(settings)
    for key, value in params.settings().items():
        try:
            setattr(settings, key, value)
        except (TypeError, OverflowError) as reason:
            raise type(reason)(f"{key}: {reason}") from None
    return settings


def _order(settings: Any, params: SamplingParams) -> Any:
    """Set the samplers that run; returns what the settings point to."""
    letters = ffi.NULL if params.letters is None else ffi.new("char[]", params.letters.encode())
    settings.samplers = letters
    return letters


def _repetitions(
    settings: Any, params: SamplingParams, model: Model, before: Sequence[int] | NDArray[np.int32]
) -> tuple[Any, ...]:
    """Set what DRY searches, and its breakers; returns what the settings point to."""
    if not (params.dry_multiplier and params.dry_penalty_last_n):
        return ()
    texts = [ffi.new("char[]", one.encode()) for one in params.dry_sequence_breakers]
    breakers = ffi.new("char *[]", texts)
    settings.n_dry_breakers, settings.dry_breakers = len(texts), breakers
    seen = model.check_tokens(before[-params.dry_penalty_last_n :], allow_empty=True)
    settings.n_before = len(seen)
    settings.before = in_buffer("before", seen, np.int32) if len(seen) else ffi.NULL
    return texts, breakers, seen


def _bias(settings: Any, params: SamplingParams, model: Model) -> tuple[Any, ...]:
    """Set the bias of tokens; returns what the settings point to."""
    tokens = model.check_tokens((int(token) for token in params.logit_bias), allow_empty=True)
    values = np.array([float(bias) for bias in params.logit_bias.values()], np.float32)
    if len(tokens):
        settings.n_logit_bias = len(tokens)
        settings.logit_bias_tokens = in_buffer("logit_bias", tokens, np.int32)
        settings.logit_bias_values = in_buffer("logit_bias", values, np.float32)
    return tokens, values


def process(
    processors: Processors,
    input_ids: NDArray[np.int32],
    logits: NDArray[np.float32],
) -> NDArray[np.float32]:
    """Apply the processors to a copy of ``logits``, float32 [n_vocab].

    Raises LctxError when a logit of the model is NaN or infinite.
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
    finite = np.isfinite(rows)
    if not finite.all():
        wrong = int(np.flatnonzero(~finite)[0])
        token, value = wrong % rows.shape[-1], rows.reshape(-1)[wrong]
        cause = "the model is damaged, or its activations overflow"
        raise error(lib.LCTX_FAILED, f"no token can be sampled: the logit of token {token} is {value}; {cause}")


class SeedSequence(Iterator[int]):
    """Yields the seed itself, then numbers derived from it; without a seed, random numbers. Thread-safe."""

    def __init__(self, seed: int | None) -> None:
        own = None if seed is None or seed in RANDOM_SEEDS else int(seed) % 2**32
        self.is_given = own is not None
        self._own = [] if own is None else [own]
        self._random = Random(own)

    def __next__(self) -> int:
        try:
            return self._own.pop()
        except IndexError:
            return self._random.getrandbits(32)
