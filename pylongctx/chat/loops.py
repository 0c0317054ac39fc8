"""Answers that repeat themselves."""

from collections.abc import Sequence

MIN_TOKENS, MIN_TIMES = 64, 4  # minimum length of a loop
MAX_PERIOD = 128  # tokens
LOOP_TOKENS = MIN_TIMES * MAX_PERIOD + 1  # that say whether a text ends in a loop
REPEATED = 12  # tokens whose repetition may begin a loop


def repeats(tokens: Sequence[int]) -> bool:
    """Return True if the last 12 tokens stand at most 128 tokens earlier too, which the second round of a loop does."""
    n, last = len(tokens), tokens[-REPEATED:]
    periods = range(1, min(MAX_PERIOD, n - REPEATED) + 1)
    return any(tokens[n - REPEATED - period : n - period] == last for period in periods)


def is_loop(tokens: Sequence[int]) -> bool:
    """Return True if an answer ends in a loop: one piece of tokens, repeated.

    The piece has at most 128 tokens and is repeated at least four times, over at least 64 tokens.
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
