"""Checkpoints of a sequence, at which its evaluation pauses so that it can be rewound."""

from pylongctx._log import LOG
from pylongctx.engine.context import Context

SPACING = 2048  # tokens between two regular checkpoints
TAIL = 8  # tokens at the end of a prompt that may differ in the next one: the template's generation prompt


class Checkpoints:
    """The checkpoints of one sequence, if its cache cannot be truncated anywhere; else this does nothing.

    Sliding windows and recurrent states can only be rewound to checkpoints, which are taken at the end of a step. The
    next prompt of a conversation shares a prefix with the last one. So checkpoints are taken

    - where the evaluation of a prompt begins: the last answer ends there, and an edited message begins,
    - ``TAIL`` tokens before its end: the generation prompt may change there, and a retry rewinds there,
    - where an earlier prompt differed: other prompts may share the same prefix,
    - every ``SPACING`` tokens,

    or at the last earlier position from which the method can continue.

    Parameters
    ----------
    context : Context
        The context.
    seq : int
        The sequence.
    """

    def __init__(self, context: Context, seq: int) -> None:
        self.needed = context.keeps_checkpoints
        self._context = context
        self._seq = seq
        self._positions: set[int] = set()

    def request(self, pos: int) -> None:
        """Request a checkpoint at ``pos``."""
        if self.needed:
            self._positions.add(self._context.cut_before(pos))

    def begin(self, pos: int, n: int) -> None:
        """Record that a text of ``n`` tokens follows position ``pos``; a short one gets no checkpoints."""
        if not self.needed:
            return
        tail = self._context.cut_before(max(pos, pos + n - TAIL))
        self._positions = {position for position in self._positions if pos < position < tail}
        if n > TAIL:
            self._positions |= {tail, self._context.cut_before(pos)}
            self.reach(pos, pos)

    def cut(self, pos: int, n: int) -> int:
        """Return how many of ``n`` tokens from ``pos`` a step may evaluate: it ends at a checkpoint."""
        if not self.needed:
            return n
        return min(n, *(position - pos for position in (*self._positions, self._next(pos)) if position > pos))

    def reach(self, start: int, pos: int) -> None:
        """Take the checkpoint at ``pos``, the end of the sequence, if one is requested there."""
        if self.needed and pos and (pos in self._positions or pos == self._next(pos - 1)):
            self._positions.discard(pos)
            if refusal := self._context.checkpoint(self._seq):
                LOG.warning("no checkpoint after %d tokens: %s", pos, refusal)

    def _next(self, pos: int) -> int:
        """Return the first regular position after ``pos``."""
        number = pos // SPACING + 1
        position = self._context.cut_before(number * SPACING)
        return position if position > pos else self._context.cut_before((number + 1) * SPACING)
