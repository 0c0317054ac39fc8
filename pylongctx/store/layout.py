"""The layout of texts in files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pylongctx._lib import lib
from pylongctx.store.entries import KINDS

if TYPE_CHECKING:
    from pylongctx.engine.context import Context

BLOCK = 512  # tokens: a prefill step, so that later tokens are evaluated in the same steps as without the store
SPACING = 2048  # tokens between points, if points are large
MIN_TAIL = 64  # minimum tokens of a tail
ROWS, POINT, TAIL, DOCUMENT = KINDS


@dataclass(frozen=True)
class Layout:
    """The kinds of files of a text.

    A block is a file of *rows*, if the method never changes rows. A *point* is the other data at the end of some
    blocks: sliding windows and recurrent states, or the whole state if heads evict and with llama.cpp's own cache.
    The *tail* of a prompt is what follows its last whole block: rows, a point, and the last logits.

    Attributes
    ----------
    has_rows, has_points : bool
        Whether there are files of rows, and of points.
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
