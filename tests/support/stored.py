"""Texts in a KV store: what the tests of it share."""

import logging
from pathlib import Path

import numpy as np
from tiny_gguf import Shape

from pylongctx import Llama
from pylongctx.store.layout import BLOCK

N = 2 * BLOCK + 77
SHAPE = Shape(n_embd=128, n_head=2, n_head_kv=1, n_layer=3, n_ctx_train=512)
SETTINGS = {"n_ctx": 2560, "n_threads": 1, "n_threads_batch": 1, "verbose": False}


def new(path, folder, **kwargs):
    return Llama(str(path), kv_store=folder, **SETTINGS | kwargs)


def text(n=N, seed=0):
    return np.random.default_rng(seed).integers(3, 96, n).tolist()


def read(llm, tokens):
    """Read a prompt; returns the logits after it, and how many of its tokens were evaluated."""
    before = llm.session.n_evaluated
    next(llm.generate(tokens, temp=0.0))
    return llm.session.last_logits.copy(), llm.session.n_evaluated - before


def found(llm):
    return llm.kv_store_usage()


def fill(model, folder):
    """Store a text of two blocks and a tail; returns the logits after it."""
    with new(model, folder) as llm:
        logits, n = read(llm, text())
        assert n == N
    return logits


def warnings(caplog):
    """Return what was logged for people to act on: how much more is logged depends on earlier tests of the process."""
    return [record for record in caplog.records if record.levelno >= logging.WARNING]


def files(folder, kind="*"):
    return sorted(Path(folder).glob(f"??/*.{kind}"))


def damage(path, how, rng):
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif how == "torn":
        del data[rng.randrange(len(data)) :]
    elif how == "zeros":
        data = bytearray(len(data))
    path.write_bytes(data)
