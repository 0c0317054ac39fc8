"""Files of tiny models whose states need checkpoints: recurrent layers, or layers that slide."""

from dataclasses import replace
from pathlib import Path

from cases import N_CTX_TRAIN
from random_model import write_model
from tiny_gguf import Shape, make_model
from tiny_models import RECIPES

SHAPE = Shape(n_embd=128, n_ctx_train=N_CTX_TRAIN)
WINDOWS = ["gemma2", "gemma3"]


def make(folder: Path, name: str) -> Path:
    """Return the file of a model, written on first use."""
    path = folder / f"{name}.gguf"
    return path if path.is_file() else make_model(path, SHAPE, arch=name, seed=1)


def path_of(folder: Path, name: str) -> Path:
    """Return the file of a model; one with windows has six layers, of which some do not slide."""
    if name not in WINDOWS:
        return make(folder, name)
    path = folder / f"{name}.gguf"
    if not path.is_file():
        write_model(path, replace(RECIPES[name], arch=name), replace(SHAPE, n_layer=6), seed=1)
    return path
