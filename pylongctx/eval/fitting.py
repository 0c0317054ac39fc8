"""How much text fits into a number of tokens, and where some of it stands among them."""

from collections.abc import Callable

from pylongctx.engine.prefix import longest_prefix
from pylongctx.eval.task import Sample, Vocabulary

Tokenize = Callable[[bytes], list[int]]
MARGIN = 8  # tokens by which a document may grow when it is cut and joined


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


def fitted(vocabulary: Vocabulary, make: Callable[[str], Sample], document: str, length: int, where: str) -> Sample:
    """Return the sample of a document that loses its end where prompt and answer would be longer than ``length``.

    Parameters
    ----------
    make : callable
        Returns the sample of a document.
    where : str
        What an error begins with.

    Raises
    ------
    ValueError
        When the length has no room for any of the document.

    Examples
    --------
    >>> from pylongctx.eval.task import ModelVocabulary
    >>> sample = fitted(ModelVocabulary(llm), lambda text: Sample("0", text + "?", max_tokens=4), "a b " * 99, 32, "x")
    >>> 12 < len(ModelVocabulary(llm).tokens(sample)) <= 28
    True
    """
    bare = make("")
    n_fixed = len(vocabulary.tokens(bare)) + bare.max_tokens + MARGIN
    if n_fixed >= length:
        raise ValueError(f"{where}: question and answer alone need {n_fixed} tokens; ask for a greater length")
    tokens = vocabulary.tokenize(document)
    room = length - n_fixed
    return make(document if len(tokens) <= room else vocabulary.detokenize(tokens[:room]))
