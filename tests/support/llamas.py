"""Llama objects on the embedded model, and what several test files do with them."""

from itertools import islice

import numpy as np

from pylongctx import Llama

METHODS = [
    "full",
    "window,n_sink=4,window=128",
    "selfextend,group_size=4,neighbor_window=128",
    "longheads,chunk_size=16,window=128,representation=attention",
]
TEXT = b"It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. "


F32 = {"type_k": "f32", "type_v": "f32"}  # for embedded_f32, whose weights are not rounded either
EXACT = 1e-5  # of the largest logit: as much as another order of its sums changes


def new(path, **kwargs):
    defaults = {"n_ctx": 512, "n_ubatch": 64, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
    return Llama(str(path), **defaults | kwargs)


def greedy(llm, tokens, n=8):
    return list(islice(llm.generate(tokens, temp=0.0), n))


def script(llm, text: str, end: bool = True):
    """Return a logits processor that makes the model say ``text``, which begins with a space, and end, or continue."""
    wanted = llm.tokenize(text[1:].encode(), add_bos=False) + [llm.token_eos()] * end
    start: list[int] = []

    def force(input_ids, logits):
        start.append(len(input_ids))
        n = len(input_ids) - start[0]
        if n >= len(wanted) and not end:
            return logits
        forced = np.full_like(logits, -np.inf)
        forced[wanted[n]] = 0
        return forced

    return force


def texts(chunks):
    return [chunk["choices"][0]["text"] for chunk in chunks]
