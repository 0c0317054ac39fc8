"""Whatever was reused, the logits after a text are those of an object that evaluated it from nothing.

Steps are random requests, edits, rewinds, restores, documents, aborted evaluations and lost files of the store, see
``random_requests.py``. ``LCTX_REUSE_STEPS=3000 LCTX_REUSE_SEED=7`` in the environment asks for thousands of others.
"""

import os
from pathlib import Path

import pytest
from hybrid_files import path_of
from random_jobs import Served, ServedDrafting, ServedReading
from random_requests import Drafting, Reading, Requests, Tiled, small_blocks
from thinning import few

STEPS = int(os.environ.get("LCTX_REUSE_STEPS", few(80)))
SEED = int(os.environ.get("LCTX_REUSE_SEED", 0))
STORED, CACHED = {"folder": True}, {"cached": True}
CORM = "corm,window=8,recent=24,evict_every=16"
LONGHEADS = "longheads,chunk_size=16,window=64"
TILES = {"n_ubatch": 128}  # two; 32 tokens, as in the other cases, are none

CASES = {
    "full": (Requests, "llama", "full", STORED),
    "states": (Requests, "llama", "full", STORED | CACHED),
    "drafts": (Drafting, "llama", "full", CACHED),
    "drafts, sliding": (Drafting, "gemma3", "full", STORED | CACHED),
    "drafts, recurrent": (Drafting, "qwen3next", "full", STORED | CACHED),
    "own cache": (Requests, "llama", None, STORED | CACHED),
    "chunks": (Requests, "llama", LONGHEADS, STORED),
    "tiles": (Tiled, "llama", LONGHEADS, STORED | CACHED | TILES),
    "sliding tiles": (Tiled, "gemma3", LONGHEADS, STORED | TILES),
    "attention": (Requests, "llama", "longheads,chunk_size=48,window=192,representation=attention", STORED),
    "window": (Requests, "llama", "window,n_sink=4,window=40", CACHED),
    "groups": (Requests, "llama", "selfextend,group_size=8,neighbor_window=64", STORED | CACHED),
    "evicting": (Requests, "llama", CORM, STORED | CACHED),
    "h2o": (Requests, "llama", "h2o,budget=40", STORED),
    "sliding": (Requests, "gemma3", "full", STORED | CACHED),
    "sliding chunks": (Requests, "gemma3", LONGHEADS, STORED),
    "sliding, own cache": (Requests, "gemma3", None, STORED),
    "recurrent": (Requests, "qwen3next", "full", STORED | CACHED),
    "recurrent, own cache": (Requests, "qwen3next", None, STORED | CACHED),
    "recurrent, evicting": (Requests, "lfm2", CORM, STORED),
    "documents": (Reading, "llama", "full,spans=3", STORED | CACHED),
}
SERVED = {
    "full": (Served, "llama", "full", {}),
    "little room": (Served, "llama", "full", {"kv_limit": 5 << 20}),
    "chunks": (Served, "llama", LONGHEADS, {}),
    "own cache": (Served, "llama", None, {}),
    "evicting": (Served, "llama", CORM, {}),
    "sliding": (Served, "gemma3", "full", {}),
    "recurrent": (Served, "qwen3next", "full", {}),
    "drafts": (ServedDrafting, "llama", "full", {}),
    "drafts, little room": (ServedDrafting, "llama", "full", {"kv_limit": 5 << 20}),
    "drafts, chunks": (ServedDrafting, "llama", LONGHEADS, {}),
    "drafts, sliding": (ServedDrafting, "gemma3", "full", {}),
    "drafts, recurrent": (ServedDrafting, "qwen3next", "full", {}),
    "documents": (ServedReading, "llama", "full,spans=3", {}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def open_random(monkeypatch, folder, tmp_path, embedded_f32):
    """Return a function from a kind of random requests, a model and a method to an open one."""
    small_blocks(monkeypatch)
    opened = []

    def open_random(kind, model, method, **more):
        path = embedded_f32 if model == "llama" else path_of(folder, model)
        more = {"folder": None, **more}
        opened.append(kind(path, method, SEED, **more | {"folder": str(tmp_path) if more["folder"] else None}))
        return opened[-1]

    yield open_random
    for one in opened:
        one.close()


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_a_text_that_is_evaluated_from_nothing(open_random, case):
    kind, model, method, more = CASES[case]
    asked = open_random(kind, model, method, **more)
    asked.run(STEPS)
    assert asked.n_reused


@pytest.mark.parametrize("case", SERVED)
def test_sequences_asked_together_have_the_logits_of_texts_evaluated_from_nothing(open_random, case):
    kind, model, method, more = SERVED[case]
    asked = open_random(kind, model, method, **STORED | more)
    asked.run(5 + STEPS // 6)
    assert asked.n_reused
