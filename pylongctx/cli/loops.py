"""Detecting an answer that repeats itself endlessly."""

from collections.abc import Sequence

MIN_TOKENS, MIN_TIMES = 64, 4  # minimum length of a loop
MAX_PERIOD = 128  # tokens


def is_loop(tokens: Sequence[int]) -> bool:
    """Return True if an answer ends in a loop: one piece of tokens, repeated.

    The piece has at most 128 tokens and is repeated at least four times, over at least 64 tokens.

    Examples
    --------
    >>> is_loop([5, 6, 7] * 22)
    True
    >>> is_loop(list(range(66)))
    False
    """
    n = len(tokens)
    for period in range(1, MAX_PERIOD + 1):
        span = max(MIN_TOKENS, MIN_TIMES * period)
        if span > n:
            return False
        if tokens[n - 1] != tokens[n - 1 - period]:
            continue
        if all(tokens[i] == tokens[i - period] for i in range(n - 1, n - span + period - 1, -1)):
            return True
    return False
