"""Tiny GGUF files with random weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from tiny_models import RECIPES

from pylongctx.bench.random_model import Shape, write_model

TINY = Shape()


def make_model(path: Path | str, shape: Shape = TINY, *, arch: str = "llama", **options: Any) -> Path:
    """Write a model of the recipe named ``arch`` (see ``tiny_models.py``); options are those of ``write_model``."""
    recipe = RECIPES[arch]
    return write_model(path, replace(recipe, arch=recipe.arch or arch), replace(shape, **recipe.shape), **options)
