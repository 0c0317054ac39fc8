"""Where the evaluation of a text pauses, so that the sequence can come back there."""

from pylongctx._log import LOG
from pylongctx.engine.context import Context

SPACING = 2048  # tokens between two places, wherever the text differs next time
TAIL = 8  # tokens at the end of a prompt that the next one may lack: what templates add for an answer that is to come


class Checkpoints:
    """The checkpoints of one sequence, where the cache cannot go back by itself; else this does nothing.

    Sliding windows and recurrent states come back to checkpoints only, and a checkpoint is made where a step ends. The
    next prompt of a conversation begins as the last one, and differs from some place on. So checkpoints are made

    - where a prompt begins to be evaluated: the last answer ends there, and a message that is edited begins,
    - ``TAIL`` tokens before it ends: templates render the place where the answer begins anew, and a retry goes there,
    - where an earlier prompt was known to differ: others may share as much with it,
    - every ``SPACING`` tokens,

    or at the last place before from which the method can go on.

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
        self._places: set[int] = set()

    def wish(self, pos: int) -> None:
        """Make one at ``pos`` when the evaluation comes there."""
        if self.needed:
            self._places.add(self._context.place(pos))

    def begin(self, pos: int, n: int) -> None:
        """Take note that a text of ``n`` tokens follows position ``pos``; a short one makes none."""
        if not self.needed:
            return
        tail = self._context.place(max(pos, pos + n - TAIL))
        self._places = {place for place in self._places if pos < place < tail}
        if n > TAIL:
            self._places |= {tail, self._context.place(pos)}
            self.reach(pos, pos)

    def cut(self, pos: int, n: int) -> int:
        """Return how many of ``n`` tokens from ``pos`` on a step may take: it ends where a checkpoint is made."""
        if not self.needed:
            return n
        return min(n, *(place - pos for place in (*self._places, self._next(pos)) if place > pos))

    def reach(self, start: int, pos: int) -> None:
        """Make the one at ``pos``, the end of the sequence, if one is wanted there."""
        if self.needed and pos and (pos in self._places or pos == self._next(pos - 1)):
            self._places.discard(pos)
            if refusal := self._context.checkpoint(self._seq):
                LOG.warning("no checkpoint after %d tokens: %s", pos, refusal)

    def _next(self, pos: int) -> int:
        """Return the first of the regular places after ``pos``."""
        number = pos // SPACING + 1
        place = self._context.place(number * SPACING)
        return place if place > pos else self._context.place((number + 1) * SPACING)
