"""The tokens of a chat prompt: those of the conversation so far stay what they were."""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import numpy as np

from pylongctx.engine.model import Model
from pylongctx.engine.prefix import longest_prefix

SPACE = re.compile(rb"\s*")
PROBE = 24  # bytes by which it is found where a text goes on
EDGE = 16  # tokens with which what left may begin as what stays
GUARDS = ("", "\n")  # what stands in front of a text that shall be tokenized as a continuation


def prompt_tokens(model: Model, prompt: str, known: Sequence[int]) -> list[int]:
    """Return the tokens of a rendered conversation.

    Where its text begins as that of the ``known`` tokens does, the result begins with these tokens: a model may have
    written words in other tokens than its tokenizer would, and then a turn would evaluate the answer before it again.
    """
    start = model.start
    if list(known[: len(start)]) == start:
        kept, n_bytes = _common(model, known[len(start) :], prompt.encode())
        rest = _continuation(model, prompt.encode()[n_bytes:]) if kept else None
        if rest is not None:
            return [*start, *kept, *rest]
    return [*start, *model.tokenize(prompt.encode(), False, True)]


def closest(model: Model, prompt: str, conversations: Sequence[Sequence[int]]) -> Sequence[int]:
    """Return the one of several ``known`` tokens that saves most of a prompt."""
    if len(conversations) == 1:
        return conversations[0]
    n_start, text = len(model.start), prompt.encode()
    return max(conversations, key=lambda known: len(_common(model, known[n_start:], text)[0]), default=())


def without_gap(model: Model, prompt: str, known: Sequence[int]) -> Sequence[int]:
    """Return the ``known`` tokens without those that a prompt lacks which begins as their text and goes on behind."""
    text, start = prompt.encode(), model.start
    own = known[len(start) :]
    ends = [0, *_walk(model, own, text, True)]
    if len(ends) > len(own):
        return known
    pieces = [model.piece(token, True) for token in own]
    joined = b"".join(pieces)
    borders = list(accumulate(map(len, pieces), initial=0))
    places = {border: i for i, border in enumerate(borders)}
    for n in range(len(ends) - 1, max(-1, len(ends) - 1 - EDGE), -1):  # the gap may begin as what is behind it
        rest = text[ends[n] :]
        found = [places[end] for end in _all(joined, rest[:PROBE], borders[n] + 1) if end in places]
        sizes = {i: len(_walk(model, own[i:], rest, False)) for i in found}
        if any(sizes.values()):
            return [*known[: len(start) + n], *own[max(sizes, key=lambda i: sizes[i]) :]]
    return known


def _all(text: bytes, part: bytes, start: int) -> Iterator[int]:
    """Yield where a part stands in a text, from a place on."""
    while part and (start := text.find(part, start)) >= 0:
        yield start
        start += 1


def left_out(model: Model, tokens: Sequence[int], prompt: str, shorter: str) -> tuple[int, int] | None:
    """Return the run of a prompt's tokens without which they are a shorter prompt; None when no run of tokens is it.

    Parameters
    ----------
    tokens : list of int
        Begins with the tokens of the prompt.
    prompt, shorter : str
        A rendering of a conversation, and one without some of its messages.
    """
    n_start, whole, rest = len(model.start), prompt.encode(), shorter.encode()
    ends = [0, *_walk(model, tokens[n_start:], whole, True)]
    n_less, same = len(whole) - len(rest), _equal_bytes(whole, rest)
    least = len(rest) - _equal_bytes(whole[::-1], rest[::-1])
    places = {end: i for i, end in enumerate(ends)}
    found = [i for i, end in enumerate(ends) if least <= end <= same and end + n_less in places]
    if n_less <= 0 or not found:
        return None
    special = [i for i in found if _is_special(model, tokens[n_start + i])]
    first = max(special or found)
    return n_start + first, n_start + places[ends[first] + n_less]


def _equal_bytes(a: bytes, b: bytes) -> int:
    return longest_prefix(np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8))


def _common(model: Model, known: Sequence[int], prompt: bytes) -> tuple[Sequence[int], int]:
    """Return the known tokens with which the prompt begins, up to a place where no word can go on, and their bytes."""
    ends = _walk(model, known, prompt, True)
    n = len(ends)
    while 0 < n < len(known) and not _is_special(model, known[n]):
        n -= 1
    return known[:n], ends[n - 1] if n else 0


def _walk(model: Model, tokens: Sequence[int], text: bytes, fresh: bool) -> list[int]:
    """Return where each token ends in the text, as far as it is made of them; ``fresh``: the text begins here."""
    at, ends = 0, []
    for token in tokens:
        at = _end(model.piece(token, True), text, at, fresh)
        if at < 0:
            break
        ends.append(at)
        fresh = _is_special(model, token)
    return ends


def _end(piece: bytes, text: bytes, at: int, fresh: bool) -> int:
    """Return where a piece ends that begins at a place of the text, -1 when it does not.

    At the beginning and behind special tokens, a tokenizer may put a space that the text has not, or drop its own.
    """
    if text.startswith(piece, at):
        return at + len(piece)
    for start in (at, _end_of_space(text, at)) if fresh else ():
        for spelled in (piece, piece.removeprefix(b" ")):
            if text.startswith(spelled, start):
                return start + len(spelled)
    return -1


def _end_of_space(text: bytes, at: int) -> int:
    found = SPACE.match(text, at)
    return found.end() if found else at


def _is_special(model: Model, token: int) -> bool:
    return not model.piece(token) and bool(model.piece(token, True))


def _continuation(model: Model, text: bytes) -> list[int] | None:
    """Return tokens of exactly these bytes, without a space in front; None when there are none."""
    for guard in GUARDS:
        tokens = model.tokenize(guard.encode() + text, False, True) if text else []
        for n in range(min(len(tokens), 3) + 1):
            if _spells(model, tokens[n:], text):
                return tokens[n:]
    return None


def _spells(model: Model, tokens: list[int], text: bytes) -> bool:
    """Return whether the tokens are a text, up to spaces that a tokenizer drops behind its last special token."""
    ends = _walk(model, tokens, text, False)
    if not ends or len(ends) < len(tokens):
        return not tokens and not text
    return ends[-1] == len(text) or (_is_special(model, tokens[-1]) and text[ends[-1] :].isspace())


def tokens_of(model: Model, texts: Iterable[str]) -> frozenset[int]:
    """Return the tokens that stand for a whole text each."""
    found = (model.tokenize(text.encode(), False, True) for text in texts)
    return frozenset(tokens[0] for tokens in found if len(tokens) == 1)
