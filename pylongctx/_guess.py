"""What somebody may have meant who has mistyped a name."""

import difflib
from collections.abc import Iterable


def guess(word: str, known: Iterable[str]) -> str:
    """Return the question for the name that is most like a word, to put after an error; empty when none is.

    Examples
    --------
    >>> guess("longhead", ["longheads", "corm"])
    "; did you mean 'longheads'?"
    >>> guess("something", ["longheads", "corm"])
    ''
    """
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)
    return f"; did you mean {near[0]!r}?" if near else ""
