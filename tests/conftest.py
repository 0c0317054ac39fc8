"""Fixtures: the native library, tiny models written once per session."""

from pathlib import Path

import numpy as np
import pytest
import tiny_gguf
from cases import N_CTX_TRAIN
from tiny_gguf import Shape, make_llama

BASE = Shape(n_ctx_train=N_CTX_TRAIN)
MODELS = {
    "llama": lambda path: make_llama(path, BASE),
    "llama-mha": lambda path: make_llama(path, Shape(n_head_kv=4, n_ctx_train=N_CTX_TRAIN), seed=1),
    "llama-wide": lambda path: make_llama(path, Shape(n_embd=128, n_head=2, n_head_kv=1, n_layer=3), seed=2),
    "llama-freqs": lambda path: make_llama(path, BASE, rope_freqs=True, seed=3),
    "llama-linear": lambda path: make_llama(path, BASE, rope_scaling=("linear", 4.0, 64), seed=4),
    "llama-yarn": lambda path: make_llama(path, BASE, rope_scaling=("yarn", 4.0, 64), seed=5),
    "qwen2": lambda path: make_llama(path, BASE, arch="qwen2", seed=6),
    "qwen2vl": lambda path: make_llama(path, BASE, arch="qwen2vl", rope_sections=[4, 2, 2, 0]),
    "gemma2": tiny_gguf.make_gemma2,
    "gpt2": tiny_gguf.make_gpt2,
    "mamba": tiny_gguf.make_mamba,
    "bert": tiny_gguf.make_bert,
}


@pytest.fixture(scope="session")
def ffi():
    from pylongctx._lib import ffi

    return ffi


@pytest.fixture(scope="session")
def lib():
    from pylongctx._lib import lib

    return lib


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    """Return a function from a name in ``MODELS`` to its file, written on first use."""
    folder, made = tmp_path_factory.mktemp("models"), {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = MODELS[name](folder / f"{name}.gguf")
        return made[name]

    return get


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    from pylongctx.models import embedded_model

    return Path(embedded_model())


@pytest.fixture(scope="session")
def tokens() -> list[int]:
    """Return 256 random ordinary tokens of the tiny vocabulary."""
    return np.random.default_rng(0).integers(3, BASE.n_vocab, 256).tolist()
