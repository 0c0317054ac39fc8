"""A request becomes tokens, the parameters of its sampler, and a job."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pylongctx._arguments import check_count
from pylongctx.engine.sampling.params import KEYWORDS, NUMBERS, SamplingParams
from pylongctx.engine.sampling.sampler import MinTokensLogitsProcessor, Sampler, SeedSequence

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pylongctx.engine.job import Job
    from pylongctx.engine.model import Model
    from pylongctx.engine.sampling.sampler import Processors
    from pylongctx.engine.source import TokenSource

Prompt = str | Sequence[int]  # a text, or tokens

# fields of SamplingParams by argument of the public methods, of which ``sample`` and ``generate`` have ``temp``
FIELDS = {one.keyword: one.name for one in NUMBERS if one.keyword in KEYWORDS}
FIELDS |= {name: name for name in ("temp", "dry_sequence_breakers", "samplers")}


def are_prompts(prompt: Any) -> bool:
    """Return True if a prompt is a list of prompts: of texts, or of lists of tokens.

    Raises
    ------
    TypeError
        When it is neither that nor a prompt.
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

    Raises
    ------
    ValueError
        When it has no tokens, or a text cannot fit into the context (PromptTooLong).
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
    return SamplingParams(
        seed=next(seeds if seed is None else SeedSequence(seed)),
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
    others = [] if processors is None else [processors] if callable(processors) else list(processors)
    return [*others, MinTokensLogitsProcessor(n, ends)]
