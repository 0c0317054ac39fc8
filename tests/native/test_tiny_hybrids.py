"""Hybrids, latent attention and models with an indexer, without a method: the recipes make what they stand for."""

import re
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from hybrid_files import make
from test_methods import assert_same_logits
from test_parity import run_llama_cpp
from tiny_hybrids import HYBRIDS
from tiny_indexed import INDEXED
from tiny_latent import LATENT

from pylongctx._lib import library_path

N = 150  # beyond the trained context
RECIPES = HYBRIDS | LATENT | INDEXED
OTHER_BASE = {"rope_freq_base": 20000.0}
UNROTATED = ("glm5-next", "granitehybrid", "jamba", "kimi-k3", "kimi-linear", "nemotron_h", "nemotron_h_moe")
RECURRENT = re.compile(r"blk\.(\d+)\.(ssm_|shortconv\.|attn_norm_2)")
SILENCED = ("attention", "recurrent")
MIXED = HYBRIDS | {name: LATENT[name] for name in ("bailingmoe3", "kimi-k3", "kimi-linear")}


def plain(folder: Path, names) -> dict[str, tuple[str, dict]]:
    """Return jobs for ``run_llama_cpp``."""
    return {name: (str(make(folder, name)), {}) for name in names}


def stock(folder: Path, tokens: list[int], names) -> dict[str, np.ndarray]:
    """Return the logits of unpatched llama.cpp of some models, and with another RoPE base under ``NAME/base``."""
    jobs = plain(folder, names)
    other = {f"{name}/base": (path, OTHER_BASE) for name, (path, _) in jobs.items()}
    return run_llama_cpp(jobs | other, tokens, folder / "logits.npz")


def other_token(tokens: list[int], at: int) -> list[int]:
    return [*tokens[:at], tokens[at] % 280 + 5, *tokens[at + 1 :]]


def silenced(source: Path, kind: str) -> Path:
    """Write a hybrid again in which the layers of one kind add nothing."""
    path = source.with_suffix(f".{kind}.gguf")
    shutil.copy(source, path)
    tensors = gguf.GGUFReader(path, "r+").tensors
    recurrent = {match[1] for tensor in tensors if (match := RECURRENT.match(tensor.name))}
    for tensor in tensors:
        _, layer, *part = [*tensor.name.split("."), "", ""]
        if part[0] == "ssm_out" or part[1] == "out_proj":
            silent = kind == "recurrent"
        else:  # what recurrent layers without these have too
            of_attention = layer not in recurrent or "falcon-h1" in source.name
            silent = part[0] == "attn_output" and kind == ("attention" if of_attention else "recurrent")
        if silent:
            tensor.data[:] = 0
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("hybrids")


@pytest.fixture(scope="module")
def stock_logits(folder, tokens) -> dict[str, np.ndarray]:
    return stock(folder, tokens[:N], RECIPES)


@pytest.fixture(scope="module")
def drop_in_logits(folder, tokens) -> dict[str, np.ndarray]:
    """Return the logits of the same program on our library."""
    where = {"LLAMA_CPP_LIB_PATH": str(library_path().parent)}
    return run_llama_cpp(plain(folder, RECIPES), tokens[:N], folder / "ours.npz", **where)


@pytest.fixture(scope="module")
def changed_logits(folder, tokens) -> dict[str, np.ndarray]:
    """Return the logits after another third token."""
    return run_llama_cpp(plain(folder, RECIPES), other_token(tokens[:N], 3), folder / "changed.npz")


@pytest.fixture(scope="module")
def changes(folder, tokens) -> dict[str, tuple[float, float]]:
    """Return how much the last logits change with an early token and with the one before.

    ``NAME/KIND`` is a hybrid whose layers of one kind add nothing.
    """
    jobs = {f"{name}/{kind}": (str(silenced(make(folder, name), kind)), {}) for name in MIXED for kind in SILENCED}
    texts = (tokens[:N], other_token(tokens[:N], 3), other_token(tokens[:N], N - 2))
    want, *others = (run_llama_cpp(jobs, text, folder / "silenced.npz") for text in texts)
    return {
        name: tuple(abs(got[name] - want[name])[-1].max() / abs(want[name]).max() for got in others) for name in jobs
    }


@pytest.mark.parametrize("name", RECIPES)
def test_without_a_method_our_library_is_llama_cpp(stock_logits, drop_in_logits, name):
    assert np.isfinite(stock_logits[name]).all()
    assert_same_logits(drop_in_logits[name], stock_logits[name], 1e-5)


@pytest.mark.parametrize("name", RECIPES)
def test_positions_matter_where_the_architecture_rotates(stock_logits, name):
    want = stock_logits[name]
    change = abs(stock_logits[f"{name}/base"] - want).max()
    assert change == 0 if name in UNROTATED else change > 0.05 * abs(want).max()


@pytest.mark.parametrize("name", RECIPES)
def test_an_earlier_token_changes_the_last_logits(stock_logits, changed_logits, name):
    got, want = changed_logits[name], stock_logits[name]
    assert_same_logits(got[:3], want[:3], 1e-5)
    assert abs(got - want)[-10:].max() > 0.02 * abs(want).max()


@pytest.mark.parametrize("name", MIXED)
def test_layers_of_each_kind_alone_carry_history(changes, name):
    """Attention from the beginning; recurrent layers may forget within a few tokens."""
    early, _ = changes[f"{name}/recurrent"]
    _, late = changes[f"{name}/attention"]
    assert min(early, late) > 1e-3
