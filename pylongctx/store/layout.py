"""How texts are cut into files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pylongctx._lib import lib
from pylongctx.store.entries import KINDS

if TYPE_CHECKING:
    from pylongctx.engine.context import Context

BLOCK = 512  # tokens: a step of a prompt, so that what follows a stored block is evaluated in the steps that it was
SPACING = 2048  # tokens between two points, where points are large
LEAST = 64  # tokens of a tail that is worth a file
ROWS, POINT, TAIL, DOCUMENT = KINDS


@dataclass(frozen=True)
class Layout:
    """What the files of a text hold.

    A block is a file of *rows* where rows stay as they were stored. A *point* is what else is known at the end of some
    blocks: sliding windows and recurrent states, or the whole state where heads evict and with llama.cpp's own cache.
    What follows the last whole block of a prompt is its *tail*: rows, a point, and the logits after it.

    Attributes
    ----------
    has_rows, has_points : bool
        Which of them there are.
    """

    has_rows: bool
    has_points: bool

    @classmethod
    def of(cls, context: Context) -> Layout:
        """Return the layout of a context's sequences."""
        whole = context.place(BLOCK) != BLOCK  # blocks end within chunks
        kind = lib.LCTX_PARTS_NONE if whole else context.part_kind
        return cls(kind != lib.LCTX_PARTS_NONE, kind != lib.LCTX_PARTS_ROWS)

    def is_point(self, end: int, text_end: int) -> bool:
        """Return whether there is a point after ``end`` tokens of a text that ends at ``text_end``."""
        if not self.has_points or end % BLOCK:
            return False
        number, rest = divmod(end, SPACING)
        regular = rest == 0 and (self.has_rows or number & (number - 1) == 0)  # whole states: at doubled lengths
        return regular or end == text_end // BLOCK * BLOCK
