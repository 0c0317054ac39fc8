"""The readable description of a stored text: its first words and its source."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pylongctx.engine.model import Model

MAX_CHARACTERS = 72  # characters
DECODED_TOKENS = 48  # tokens to decode for them


def first_words(model: Model, tokens: NDArray[np.int32]) -> str:
    """Return the first words of int32 [n] tokens, without special tokens such as those of a chat template."""
    return shown(model.detokenize(tokens[:DECODED_TOKENS]).decode("utf-8", "replace"))


def shown(text: str) -> str:
    """Return the beginning of a text in one line."""
    words = line(text[: 4 * MAX_CHARACTERS])
    return words if len(words) <= MAX_CHARACTERS else words[: MAX_CHARACTERS - 3] + "..."


def line(text: str) -> str:
    """Return a text as one line that is safe to print: no control characters, no change of direction."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())
