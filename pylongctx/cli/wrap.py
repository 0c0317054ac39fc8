"""Word wrap of streamed text at the width of a terminal."""

import re
from collections.abc import Callable

from rich.cells import cell_len

PIECES = re.compile(r"\n|[^\S\n]+|\S+")
FENCE = "```"  # delimits code, which is not wrapped


class Wrapper:
    """Inserts line breaks before words that do not fit.

    A word is held back until it is complete. Code between fences stays as it is.

    Parameters
    ----------
    width : callable
        Returns the number of columns of the terminal.

    Examples
    --------
    >>> wrapper = Wrapper(lambda: 10)
    >>> wrapper.feed("one two thr") + wrapper.feed("ee four") + wrapper.flush()
    'one two\\nthree four'
    """

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._held = ""  # spaces and the beginning of the next word
        self._column = 0
        self._in_code = False

    def feed(self, text: str) -> str:
        """Return the part of the text that can be shown now."""
        pieces = PIECES.findall(self._held + text)
        n = 0 if not pieces or pieces[-1] == "\n" else 2 if len(pieces) > 1 and pieces[-2].isspace() else 1
        ready, self._held = pieces[: len(pieces) - n], "".join(pieces[len(pieces) - n :])
        return self._wrapped(ready)

    def flush(self) -> str:
        """Return the text that was held back."""
        ready, self._held = PIECES.findall(self._held), ""
        return self._wrapped(ready)

    def _wrapped(self, pieces: list[str]) -> str:
        shown, space = "", ""
        for piece in pieces:
            if piece == "\n":
                shown, space, self._column = shown + space + piece, "", 0
            elif piece.isspace():
                space = piece
            else:
                shown += self._word(space, piece)
                space = ""
        self._column += cell_len(space)
        return shown + space

    def _word(self, space: str, word: str) -> str:
        self._in_code ^= word.startswith(FENCE) and self._column + len(space) == 0
        n = cell_len(word)
        overflows = self._column + len(space) + n > self._width()
        if space and self._column and overflows and not self._in_code:
            self._column = n
            return f"\n{word}"
        self._column += cell_len(space) + n
        return space + word
