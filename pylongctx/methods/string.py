"""STRING: exact distances nearby, and distances that are frequent in training for everything far away."""

from dataclasses import dataclass

from pylongctx.methods.base import Method
from pylongctx.methods.checks import check_int


@dataclass(frozen=True)
class ShiftedRotary(Method):
    """Read every token; distances from ``shift_offset`` on are reduced by ``shift_offset - local_window``.

    STRING (ShifTed Rotary position embeddING), arXiv 2410.18745, section 4.1, equation 4. Large distances are rare in
    training, so inside the trained context they are replaced by smaller ones. The first ``shift_offset`` tokens are
    read as in full attention. The maximum length is twice the trained context minus the local window.

    Parameters
    ----------
    shift_offset : int or None
        Distances below it stay exact; at most the trained context. None: a third of the trained context, the paper's
        setting, or more if ``n_ctx`` requires it.
    local_window : int or None
        The distance that replaces ``shift_offset``, so that the nearest tokens stay the nearest. At most
        ``shift_offset``, with which all distances are exact. None: 128, the paper's setting, or a sixteenth of the
        trained context if that is less.

    Raises
    ------
    TypeError, ValueError
        When an option is not an integer or is too small, or the window is larger than the shift offset.

    Examples
    --------
    >>> from pylongctx import Llama
    >>> with Llama("model.gguf", method=ShiftedRotary(), n_ctx=768, verbose=False) as chosen:
    ...     chosen.method
    ShiftedRotary(shift_offset=288, local_window=32)
    """

    shift_offset: int | None = None
    local_window: int | None = None

    name = "string"
    role = "base"
    reads_all = True

    def __post_init__(self) -> None:
        check_int("shift_offset", self.shift_offset, 1)
        check_int("local_window", self.local_window, 1, self.shift_offset)
