"""How much text fits into a number of tokens, and where some of it stands among them."""

from collections.abc import Callable

from pylongctx.engine.prefix import longest_prefix

Tokenize = Callable[[bytes], list[int]]


def token_span(tokenize: Tokenize, tokens: list[int], before: str, needle: str) -> tuple[int, int]:
    """Return start and stop of the tokens that hold ``needle``, which follows ``before``.

    Examples
    --------
    >>> whole = llm.tokenize(b"It rained. The key is 12345.")
    >>> start, stop = token_span(llm.tokenize, whole, "It rained. ", "The key is 12345.")
    >>> llm.detokenize(whole[start:stop]).decode().strip()
    'The key is 12345.'
    """
    until = tokenize((before + needle).encode())
    stop = longest_prefix(tokens, until)
    return longest_prefix(tokens, tokenize(before.encode())), stop + (stop < len(until))


def largest_fit(fits: Callable[[int], bool], guess: int) -> int:
    """Return the largest n that fits, by doubling and bisection; ``fits(0)`` holds.

    Examples
    --------
    >>> largest_fit(lambda n: n * n <= 50, guess=2)
    7
    """
    low, high = 0, guess
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
