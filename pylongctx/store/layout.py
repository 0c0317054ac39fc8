"""How a text is stored: the names of its blocks, its files, and its readable description."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pylongctx._lib import lib
from pylongctx.store.folder import KINDS

if TYPE_CHECKING:
    from pylongctx.engine.context import Context
    from pylongctx.engine.model import Model

DIGEST = 20  # bytes, enough to avoid collisions
MAX_CHARACTERS = 72  # characters
DECODED_TOKENS = 48  # tokens to decode for them
BLOCK = 512  # tokens: a prefill step, so that later tokens are evaluated in the same steps as without the store
SPACING = 2048  # tokens between points, if points are large
MIN_TAIL = 64  # minimum tokens of a tail
ROWS, POINT, TAIL, DOCUMENT = KINDS


def chain(identity: Mapping[str, Any], tokens: NDArray[np.int32], block: int) -> list[str]:
    """Return the names of the whole blocks of a text.

    The name of block i is a hash of the identity (model, method, settings and adapters) and of all tokens before
    ``(i + 1) * block``. Tokens after the last whole block get no name.
    """
    name = hashlib.blake2b(json.dumps(dict(identity), sort_keys=True).encode(), digest_size=DIGEST).digest()
    names = []
    for start in range(0, len(tokens) // block * block, block):
        part = np.ascontiguousarray(tokens[start : start + block], "<i4")
        name = hashlib.blake2b(part.tobytes(), key=name, digest_size=DIGEST).digest()
        names.append(name.hex())
    return names


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


@dataclass(frozen=True)
class Layout:
    """The kinds of files of a text.

    A block is a file of *rows*, if the method never changes rows. A *point* is the other data at the end of some
    blocks: sliding windows and recurrent states, or the whole state if heads evict and with llama.cpp's own cache.
    The *tail* of a prompt is what follows its last whole block: rows, a point, and the last logits.
    """

    has_rows: bool
    has_points: bool

    @classmethod
    def of(cls, context: Context) -> Layout:
        """Return the layout of a context's sequences."""
        whole = context.cut_before(BLOCK) != BLOCK  # blocks end inside chunks
        kind = lib.LCTX_SLICES_NONE if whole else context.slice_kind
        return cls(kind != lib.LCTX_SLICES_NONE, kind != lib.LCTX_SLICES_ROWS)

    def is_point(self, end: int, text_end: int) -> bool:
        """Return True if there is a point after ``end`` tokens of a text that ends at ``text_end``."""
        if not self.has_points or end % BLOCK:
            return False
        number, rest = divmod(end, SPACING)
        regular = rest == 0 and (self.has_rows or number & (number - 1) == 0)  # whole states: at doubled lengths
        return regular or end == text_end // BLOCK * BLOCK
