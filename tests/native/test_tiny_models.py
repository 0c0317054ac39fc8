"""The recipes: upstream loads what they write, we change nothing without a method, and every peculiarity has weight."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import random_model
import tiny_plain
from cases import N_CTX_TRAIN
from test_methods import assert_same_logits, evaluate
from test_parity import run_llama_cpp
from tiny_gguf import Shape, make_model
from tiny_models import RECIPES
from tiny_nextn import NEXTN
from tiny_plain import FIXED_BASE, PLAIN_MORE
from tiny_sections import NOPE, SECTIONS
from tiny_windows import FIXED_WINDOWS, WINDOWS

N = 150
SHAPE = Shape(n_embd=128, n_ctx_train=N_CTX_TRAIN)
KINDS = {"windows": WINDOWS, "sections": SECTIONS, "nope": NOPE, "plain": PLAIN_MORE, "nextn": NEXTN}
CASES = {name: kind for kind, recipes in KINDS.items() for name in recipes}
UNROTATED = ["granite-nope", *tiny_plain.OTHER_POSITIONS]  # a base means nothing to them
ROTATED = [name for name in CASES if name not in (*UNROTATED, *FIXED_BASE)]
SWA_BASE = "rope.freq_base_swa"
# What a file says otherwise, and must change its logits.
OTHERWISE = {
    "gemma2": {"attn_logit_softcapping": 50.0},
    "gemma3": {"rope.scaling.factor": 1.0},
    "gemma4": {"final_logit_softcapping": 5.0},
    "gpt-oss": {"rope.scaling.factor": 2.0},
    "granite_swa": {"attention.rope_pattern": [1, 1, 1, 1, 1]},
    "graniteswitch": {"adapters.token_ids_activate": [71, 151]},
    "grok": {"attn_logit_softcapping": 50.0},
    "laguna": {"rope.scaling.factor": 2.0},
    "maple": {"rope.dimension_count_swa": 32},
    "mellum": {"rope.scaling.factor": 2.0},
    "mimo2": {"attention.value_scale": 1.0},
    "olmo2-window": {"rope.scaling.factor": 2.0},
    "qwen3vl": {"rope.dimension_sections": [6, 5, 5, 0]},
    "qwen3vlmoe": {"rope.dimension_sections": [6, 5, 5, 0]},
    "spark2_5": {"rope.dimension_count_swa": 12},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("recipes")


@pytest.fixture(scope="module")
def stock(folder, tokens):
    """Return a function: logits of each model of a kind from unpatched llama.cpp, and from our library in its place."""
    from pylongctx._lib import library_path

    ours = {"LLAMA_CPP_LIB_PATH": str(library_path().parent)}

    @cache
    def run(kind: str) -> list[dict[str, np.ndarray]]:
        jobs = {name: (str(make(folder, name)), {}) for name in KINDS[kind]}
        return [run_llama_cpp(jobs, tokens[:N], folder / f"{kind}.npz", **where) for where in ({}, ours)]

    return run


def make(folder: Path, name: str) -> Path:
    path = folder / f"{name}.gguf"
    return path if path.is_file() else make_model(path, SHAPE, arch=name, seed=1)


@pytest.fixture
def logits(tmp_path, tokens):
    """Return a function: logits without a method of a model, or of one whose file says something else."""

    def run(name: str, freq_base: float = 0.0, **meta) -> np.ndarray:
        recipe = RECIPES[name]
        shape = replace(SHAPE, **recipe.shape | ({"freq_base": freq_base} if freq_base else {}))
        recipe = replace(recipe, arch=recipe.arch or name, meta=recipe.meta | meta)
        path = random_model.write_model(tmp_path / "model.gguf", recipe, shape, seed=1)
        return usual(name, evaluate(path, None, tokens[:N], n_batch=256, n_ubatch=256))

    return run


def usual(name: str, logits: np.ndarray) -> np.ndarray:
    """Return logits without those of tokens that are parts of a picture, which the first row of chameleon excludes."""
    return logits[1:] if name == "chameleon" else logits


def apart(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the largest difference of each token, relative to the largest logit of all."""
    return abs(a - b).max(1) / abs(b).max()


# ---- equality ----


@pytest.mark.parametrize("name", CASES)
def test_without_a_method_our_library_is_llama_cpp(stock, name):
    want, got = (usual(name, logits[name]) for logits in stock(CASES[name]))
    assert np.isfinite(want).all()
    assert 0.1 < want.std() < 5
    assert_same_logits(got, want, 1e-5)


# ---- positions ----


@pytest.mark.parametrize("name", ROTATED)
def test_another_rope_base_gives_other_logits(logits, name):
    swa = RECIPES[name].meta.get(SWA_BASE)
    base = logits(name)
    assert apart(logits(name, freq_base=20000.0, **({SWA_BASE: 2 * swa} if swa else {})), base).max() > 0.05


@pytest.mark.parametrize("name", UNROTATED)
def test_models_that_do_not_rotate_ignore_the_rope_base(logits, name):
    assert apart(logits(name, freq_base=20000.0), logits(name)).max() == 0


UNROTATED_FULL = ("afmoe", "maple", "muse-glimmer", "smallthinker")


@pytest.mark.parametrize("name", [name for name in WINDOWS if SWA_BASE in WINDOWS[name].meta])
def test_sliding_layers_have_a_base_of_their_own(logits, name):
    """And full layers have theirs, if they rotate at all."""
    base, swa = logits(name), WINDOWS[name].meta[SWA_BASE]
    assert apart(logits(name, **{SWA_BASE: 2 * swa}), base).max() > 0.05
    of_full = apart(logits(name, freq_base=20000.0), base).max()
    assert of_full == 0 if name in UNROTATED_FULL else of_full > 0.05


# ---- windows ----


@pytest.mark.parametrize("name", [name for name in WINDOWS if name not in FIXED_WINDOWS])
def test_a_wider_window_changes_tokens_beyond_the_window_only(logits, name):
    window = WINDOWS[name].meta["attention.sliding_window"]
    difference = apart(logits(name, **{"attention.sliding_window": 256}), logits(name))
    assert difference[:window].max() < 1e-5  # these see all tokens before them either way
    assert difference[window] > 1e-3
    assert difference.max() > 0.05


def test_llama_cpp_turns_the_window_of_phi3_off(logits):
    assert apart(logits("phi3-window", **{"attention.sliding_window": 256}), logits("phi3-window")).max() == 0


# ---- other peculiarities ----


@pytest.mark.parametrize("name", ["gpt-oss", "granite_swa", "mimo2"])
def test_sinks_change_the_logits(logits, monkeypatch, name):
    base = logits(name)
    monkeypatch.setitem(random_model.MEANS, "attn_sinks", (-100.0, 0.1))  # as if there were none
    assert apart(logits(name), base).max() > 0.05


@pytest.mark.parametrize("name", OTHERWISE)
def test_other_metadata_gives_other_logits(logits, name):
    assert apart(logits(name, **OTHERWISE[name]), logits(name)).max() > 1e-3


def test_another_number_of_loops_gives_other_logits(logits):
    assert apart(logits("nanbeige", num_loops=1), logits("nanbeige")).max() > 0.05
