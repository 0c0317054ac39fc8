"""Fit a text into a number of tokens, and find the tokens of a part of it."""

from collections.abc import Callable, Sequence

from pylongctx.engine.prefix import longest_prefix
from pylongctx.eval.task import Sample, Vocabulary

Tokenize = Callable[[bytes], list[int]]
Make = Callable[[str], Sample]  # of a document
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


def fitted(
    vocabulary: Vocabulary, asked: Sequence[tuple[str, Make]], length: int, where: str, tests: int | None = None
) -> list[Sample]:
    """Return samples of documents, which lose their end where prompt and answer would be longer than ``length``.

    All samples of a document have the same part of it, as the longest one leaves room for, so that it can be read once;
    they follow each other.

    Parameters
    ----------
    asked : sequence of tuple
        A document, and what makes a sample of it.
    where : str
        What an error begins with.
    tests : int or None
        The number of samples, from the first on; None: all.

    Raises
    ------
    ValueError
        When the length has no room for any of a document.

    Examples
    --------
    >>> from pylongctx.eval.task import ModelVocabulary
    >>> asked = [("a b " * 99, lambda text: Sample("0", text + "?", max_tokens=4))]
    >>> (sample,) = fitted(ModelVocabulary(llm), asked, 32, "x")
    >>> 12 < len(ModelVocabulary(llm).tokens(sample)) <= 28
    True
    """
    by_document: dict[str, list[Make]] = {}
    for document, make in asked:
        by_document.setdefault(document, []).append(make)
    found: list[Sample] = []
    for document, makes in by_document.items():
        if tests is not None and len(found) >= tests:
            break
        kept = _kept(vocabulary, makes, document, length, where)
        found += [make(kept) for make in makes]
    return found[:tests]


def _kept(vocabulary: Vocabulary, makes: Sequence[Make], document: str, length: int, where: str) -> str:
    """Return the part of a document that all samples have room for."""
    bare = [make("") for make in makes]
    n_fixed = max(len(vocabulary.tokens(sample)) + sample.max_tokens for sample in bare) + MARGIN
    if n_fixed >= length:
        raise ValueError(f"{where}: question and answer alone need {n_fixed} tokens; ask for a greater length")
    tokens = vocabulary.tokenize(document)
    room = length - n_fixed
    return document if len(tokens) <= room else vocabulary.detokenize(tokens[:room])


def questions_on_parts(
    vocabulary: Vocabulary,
    make: Callable[[slice, int], Sample],
    asks: Sequence[str],
    at: int,
    length: int,
    where: str,
    questions: int,
) -> list[Sample]:
    """Return samples of one text of parts: the first asks for the part at ``at``, the others for evenly spaced ones.

    The text has as many parts as fit, and the one at ``at`` keeps its depth.

    Parameters
    ----------
    make : callable
        Returns the sample of a range of parts that asks for one of them.
    asks : sequence of str
        How each part is asked for.
    where : str
        What an error begins with.
    questions : int
        How many samples, at most one per part of the text.

    Raises
    ------
    ValueError
        When the asked part alone does not fit.

    Examples
    --------
    >>> from pylongctx.eval.task import ModelVocabulary
    >>> make = lambda part, asked: Sample("0", "abcdefghij"[part] + "?" + "abcdefghij"[asked])
    >>> samples = questions_on_parts(ModelVocabulary(llm), make, "abcdefghij", 4, 99, "x", questions=3)
    >>> [sample.prompt for sample in samples]
    ['abcdefghij?e', 'abcdefghij?c', 'abcdefghij?h']
    """
    sizes = [len(vocabulary.tokenize(text)) for text in asks] if questions > 1 else [0] * len(asks)
    room = length - (max(sizes) - sizes[at])
    part = _part_around(vocabulary, lambda part: make(part, at), len(asks), at, room, where)
    others = [i for i in range(part.start, part.stop) if i != at]
    count = min(questions - 1, len(others))
    return [make(part, i) for i in (at, *(others[(2 * k + 1) * len(others) // (2 * count)] for k in range(count)))]


def _part_around(
    vocabulary: Vocabulary, make: Callable[[slice], Sample], n: int, at: int, length: int, where: str
) -> slice:
    """Return as many of ``n`` parts as fit into a sample of ``length``, the one at ``at`` at the same depth."""

    def around(n_kept: int) -> slice:
        start = round(at * (n - n_kept) / max(1, n - 1))
        return slice(start, start + n_kept)

    def size(n_kept: int) -> int:
        sample = make(around(n_kept))
        return len(vocabulary.tokens(sample)) + sample.max_tokens

    if (least := size(1)) > length:
        raise ValueError(f"{where}: one part and the answer need {least} tokens; ask for a greater length")
    return around(n if size(n) <= length else largest_fit(lambda k: k < n and size(max(1, k)) <= length, n // 2))
