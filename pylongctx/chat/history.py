"""The tokens of a chat prompt: those of the conversation so far stay what they were."""

import re
from collections.abc import Iterable, Sequence

from pylongctx.engine.model import Model

SPACE = re.compile(rb"\s*")
GUARDS = ("", "\n")  # what stands in front of a text that shall be tokenized as a continuation


def prompt_tokens(model: Model, prompt: str, known: Sequence[int]) -> list[int]:
    """Return the tokens of a rendered conversation.

    Where its text begins as that of the ``known`` tokens does, the result begins with these tokens: a model may have
    written words in other tokens than its tokenizer would, and then a turn would evaluate the answer before it again.
    """
    start = [int(model.info.token_bos)] if model.info.add_bos and model.info.token_bos >= 0 else []
    if list(known[: len(start)]) == start:
        kept, n_bytes = _common(model, known[len(start) :], prompt.encode())
        rest = _continuation(model, prompt.encode()[n_bytes:]) if kept else None
        if rest is not None:
            return [*start, *kept, *rest]
    return [*start, *model.tokenize(prompt.encode(), False, True)]


def closest(model: Model, prompt: str, conversations: Iterable[Sequence[int]]) -> Sequence[int]:
    """Return the one of several ``known`` tokens that saves most of a prompt; none when nothing does."""
    n_start = int(model.info.add_bos and model.info.token_bos >= 0)
    text = prompt.encode()
    return max(conversations, key=lambda known: len(_common(model, known[n_start:], text)[0]), default=())


def _common(model: Model, known: Sequence[int], prompt: bytes) -> tuple[Sequence[int], int]:
    """Return the known tokens with which the prompt begins, up to a place where no word can go on, and their bytes."""
    ends = _walk(model, known, prompt, True)
    n = len(ends)
    while 0 < n < len(known) and not _is_special(model, known[n]):
        n -= 1
    return known[:n], ends[n - 1] if n else 0


def _walk(model: Model, tokens: Sequence[int], text: bytes, fresh: bool) -> list[int]:
    """Return where each token ends in the text, as far as it is made of them; ``fresh``: the text begins here."""
    pieces = {token: model.piece(token, True) for token in set(tokens)}
    at, ends = 0, []
    for token in tokens:
        at = _end(pieces[token], text, at, fresh)
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
