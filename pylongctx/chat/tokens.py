"""The tokens of a chat prompt: those of its text, whatever was evaluated before."""

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np

from pylongctx.engine.model import Model
from pylongctx.engine.prefix import longest_prefix

BEGIN = 3  # characters by which marks are looked for


def prompt_tokens(model: Model, prompt: str, plain: Iterable[str] = ()) -> list[int]:
    """Return the tokens of a rendered conversation.

    Parameters
    ----------
    model : Model
        Has the vocabulary.
    prompt : str
        The text.
    plain : iterable of str
        Documents in it: the text of a special token is text there, as where a document is read by itself.
    """
    parts = [model.tokenize(text.encode(), False, special) for text, special in _parts(model, prompt, set(plain))]
    return [*model.start, *chain.from_iterable(parts)]


def _parts(model: Model, prompt: str, plain: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Yield the prompt in parts, and whether special tokens are read in them.

    A part without them reaches from one special token to the next, so that words are cut as in a document alone.
    """
    within = np.zeros(len(prompt), bool)
    for text in plain:
        for start in _all(prompt, text.strip()):
            within[start : start + len(text.strip())] = True
    marks = list(_marks(prompt, model.special_texts)) if within.any() else []
    spelled = [first for first, end in marks if within[first:end].any()]
    read = [(first, end) for first, end in marks if not within[first:end].any()]
    done = start = 0
    for first, end in [*read, (len(prompt), len(prompt))] if spelled else ():
        i = bisect_left(spelled, start)
        if i < len(spelled) and spelled[i] < first:
            yield prompt[done:start], True
            yield prompt[start:first], False
            done = first
        start = end
    yield prompt[done:], True


def _marks(text: str, marks: frozenset[str]) -> Iterator[tuple[int, int]]:
    """Yield where marks are in a text, from left to right, at each place the longest."""
    sizes, done = sorted({len(mark) for mark in marks}, reverse=True), 0
    begins = "|".join({re.escape(mark[:BEGIN]) for mark in marks})  # vocabularies have up to 6000
    for found in re.finditer(f"(?={begins})", text) if marks else ():
        start = found.start()
        mark = next((part for n in sizes if (part := text[start : start + n]) in marks), "")
        if mark and start >= done:
            done = start + len(mark)
            yield start, done


def _all(text: str, part: str) -> Iterator[int]:
    """Yield where a part is found in a text."""
    start = text.find(part) if part else -1
    while start >= 0:
        yield start
        start = text.find(part, start + len(part))


def left_out(model: Model, tokens: Sequence[int], shorter: Sequence[int]) -> tuple[int, int] | None:
    """Return the run of a prompt's tokens without which they are a shorter prompt; None when no run of tokens is it.

    Where several runs are, the one that begins with a special token is a whole turn.
    """
    long, short = np.asarray(tokens), np.asarray(shorter)
    n, most = len(long) - len(short), longest_prefix(long, short)
    least = len(short) - longest_prefix(long[::-1], short[::-1])
    if n <= 0 or least > most:
        return None
    special = (i for i in range(most, least - 1, -1) if model.is_special(int(long[i])))
    first = next(special, most)
    return first, first + n


def tokens_of(model: Model, texts: Iterable[str]) -> frozenset[int]:
    """Return the tokens that stand for a whole text each."""
    found = (model.tokenize(text.encode(), False, True) for text in texts)
    return frozenset(tokens[0] for tokens in found if len(tokens) == 1)
