"""The tokens of a chat prompt, which depend only on its text and not on the KV cache."""

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np

from pylongctx.chat.marks import Span, split
from pylongctx.engine.model import Model
from pylongctx.engine.prefix import longest_prefix


def prompt_tokens(model: Model, prompt: str, plain: Sequence[Span] = ()) -> list[int]:
    """Return the tokens of a rendered conversation.

    Parameters
    ----------
    model : Model
        Has the vocabulary.
    prompt : str
        The text.
    plain : sequence of (int, int)
        Positions of texts of special tokens that are plain text, ascending.
    """
    parts = split(prompt, plain, model.special_texts if plain else frozenset())
    tokens = (model.tokenize(text.encode(), False, special) for text, special in parts)
    return [*model.start, *chain.from_iterable(tokens)]


def left_out(model: Model, tokens: Sequence[int], shorter: Sequence[int]) -> tuple[int, int] | None:
    """Return the run of tokens to remove from a prompt to get a shorter prompt; None if no single run is enough.

    Among several such runs, the one that begins with a special token is a whole turn.
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
    """Return the tokens of those texts that are a single token."""
    found = (model.tokenize(text.encode(), False, True) for text in texts)
    return frozenset(tokens[0] for tokens in found if len(tokens) == 1)
