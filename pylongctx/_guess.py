"""Suggestions for mistyped names."""

import difflib
from collections.abc import Iterable


def guess(word: str, known: Iterable[str]) -> str:
    """Return a suggestion of the most similar name, to append to an error; empty when none is similar.

    Examples
    --------
    >>> guess("longhead", ["longheads", "corm"])
    "; did you mean 'longheads'?"
    >>> guess("something", ["longheads", "corm"])
    ''
    """
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)
    return f"; did you mean {near[0]!r}?" if near else ""
