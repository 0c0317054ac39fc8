"""Perplexity of the end of a text, in memory that does not grow with it."""

import math
from collections.abc import Sequence

import numpy as np

from pylongctx.llama import Llama


def mean_nll(llm: Llama, tokens: Sequence[int], last: int) -> float:
    """Return the mean negative log-likelihood of the last ``last`` tokens, each given all tokens before it.

    The window is evaluated from an empty cache.

    Raises
    ------
    ValueError
        When ``last`` is not from 1 to ``len(tokens) - 1``.
    """
    if not 1 <= last < len(tokens):
        raise ValueError(f"last must be from 1 to {len(tokens) - 1}, not {last}")
    n_head = len(tokens) - last - 1
    llm.reset()
    if n_head:
        llm.eval(tokens[:n_head])
    targets = np.asarray(tokens[n_head + 1 :])
    total, done = 0.0, 0
    for logits in llm.eval_rows(tokens[n_head:-1]):
        logprobs = llm.logits_to_logprobs(logits)
        total -= float(logprobs[np.arange(len(logits)), targets[done : done + len(logits)]].sum(dtype=np.float64))
        done += len(logits)
    return total / last


def perplexity(llm: Llama, tokens: Sequence[int], last: int) -> float:
    """Return ``exp(mean_nll(llm, tokens, last))``."""
    return math.exp(mean_nll(llm, tokens, last))
