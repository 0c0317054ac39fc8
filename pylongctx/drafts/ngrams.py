"""Drafts from the tokens of a text."""

from collections import Counter
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from pylongctx.drafts.speculative import LlamaDraftModel
from pylongctx.engine.prefix import longest_prefix
from pylongctx.engine.session import Session
from pylongctx.methods.base import check_int

BITS = 22  # of places in the table of NgramModDraft: 16 MiB, as in llama.cpp
MAX_FILL = 0.25  # share of used places at which the table is cleared
EMPTY = -1  # no token is known
FACTOR = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: its powers spread tokens over 64 bits
MASK = (1 << 64) - 1
LENGTHS = (4, 3, 2, 1)  # of the n-grams of NgramCacheDraft, the longest first
MIN_COUNTS = {4: 1, 3: 1, 2: 2, 1: 2}  # occurrences of an n-gram, by its length
MIN_PERCENT = {4: 50, 3: 50, 2: 50, 1: 66}  # share of one continuation
Tokens = NDArray[np.int32]
Places = NDArray[np.uint64]


class NgramDraft(LlamaDraftModel):
    """Drafts the tokens that followed an earlier occurrence of the last ``size_n`` tokens, as llama.cpp's ngram kinds.

    The length of drafts is adaptive, up to ``size_m`` tokens.

    Parameters
    ----------
    size_n : int
        Tokens that must be equal.
    size_m : int
        Maximum number of draft tokens.
    min_hits : int
        Minimum number of earlier occurrences.
    most_common : bool
        Draft the continuation that followed most often, and the latest of several; else the latest one.

    Examples
    --------
    >>> guess = NgramDraft(size_n=2, size_m=3)
    >>> guess(np.array([7, 8, 9, 1, 2, 7, 8], np.int32))
    array([9, 1, 2], dtype=int32)
    >>> guess(np.array([7, 8, 9, 1, 2, 7, 8], np.int32), n_max=1)
    array([9], dtype=int32)
    """

    adaptive = True

    def __init__(self, size_n: int = 12, size_m: int = 48, min_hits: int = 1, most_common: bool = False) -> None:
        for name, value in (("size_n", size_n), ("size_m", size_m), ("min_hits", min_hits)):
            check_int(name, value, 1)
        self.size_n, self.size_m, self.min_hits, self.most_common = size_n, size_m, min_hits, most_common

    def __call__(self, input_ids: Tokens, /, n_max: int | None = None, **kwargs: Any) -> Tokens:
        """Return at most ``n_max`` tokens that followed the last ones before."""
        n, most = len(input_ids), min(self.size_m, n_max if n_max is not None else self.size_m)
        if n <= self.size_n:
            return input_ids[:0]
        ends = np.flatnonzero(input_ids[self.size_n - 1 : -1] == input_ids[-1]) + self.size_n  # of earlier occurrences
        for back in range(1, self.size_n):
            ends = ends[input_ids[ends - 1 - back] == input_ids[-1 - back]]
        if len(ends) < self.min_hits:
            return input_ids[:0]
        parts = [input_ids[end : end + most] for end in ends]
        if not self.most_common:
            return parts[-1]
        counts = Counter(part.tobytes() for part in parts)
        return max(reversed(parts), key=lambda part: counts[part.tobytes()])


class NgramModDraft(LlamaDraftModel):
    """Drafts, token by token, what followed the last ``n_match`` tokens in any text, as llama.cpp's ``ngram-mod``.

    A table of hashes keeps the latest next token, for the texts of all sequences; texts of different owners do not
    share entries. The length of drafts is adaptive, up to ``n_max`` tokens. An object is for one model.

    Parameters
    ----------
    n_match : int
        Tokens that must be equal.
    n_max : int
        Maximum number of draft tokens.
    n_min : int
        Nothing is drafted where fewer tokens are known to follow.

    Examples
    --------
    >>> guess = NgramModDraft(n_match=2, n_max=4, n_min=1)
    >>> guess(np.array([7, 8, 9, 1, 2, 7, 8], np.int32))
    array([9, 1, 2, 7], dtype=int32)
    >>> guess(np.array([5, 9, 1], np.int32), n_max=1)
    array([2], dtype=int32)
    """

    adaptive = True

    def __init__(self, n_match: int = 24, n_max: int = 64, n_min: int = 48) -> None:
        check_int("n_match", n_match, 1)
        check_int("n_max", n_max, 1)
        check_int("n_min", n_min, 0, n_max)
        self.n_match, self.n_max, self.n_min = n_match, n_max, n_min
        self._next = np.full(1 << BITS, EMPTY, np.int32)
        self._n_used = 0
        self._texts: dict[int, Tokens] = {}  # of each sequence, as far as the table contains them

    def __call__(
        self, input_ids: Tokens, /, n_max: int | None = None, session: Session | None = None, **kwargs: Any
    ) -> Tokens:
        """Return at most ``n_max`` tokens."""
        most = min(self.n_max, self.n_max if n_max is None else n_max)
        seq, owner = (EMPTY, None) if session is None else (session.seq, session.owner)
        seed = 0 if owner is None else (1 + crc32(owner.encode())) * FACTOR & MASK
        self._learn(input_ids, seq, seed)
        draft = self._follow(input_ids, max(most, self.n_min), seed)
        return draft[:most] if len(draft) >= self.n_min else draft[:0]

    def _learn(self, tokens: Tokens, seq: int, seed: int) -> None:
        """Store the next token of all n-grams of a text that the table does not contain yet."""
        first = max(self.n_match, longest_prefix(self._texts.get(seq, tokens[:0]), tokens))
        if first >= len(tokens):
            return
        self._texts[seq] = tokens
        places = self._places(tokens[first - self.n_match : -1], seed)
        self._n_used += int((self._next[np.unique(places)] == EMPTY).sum())
        self._next[places] = tokens[first:]  # of equal n-grams the last one stays
        if self._n_used > MAX_FILL * len(self._next):
            self._next.fill(EMPTY)
            self._n_used = 0
            self._texts.clear()

    def _places(self, tokens: Tokens, seed: int) -> Places:
        """Return the place of each n-gram, uint64 [n - n_match + 1]."""
        n = len(tokens) - self.n_match + 1
        values, sums, factor = tokens.astype(np.uint64), np.zeros(n, np.uint64), np.uint64(FACTOR)
        for i in range(self.n_match):
            sums = sums * factor + values[i : i + n]
        places: Places = ((sums ^ np.uint64(seed)) * factor) >> np.uint64(64 - BITS)
        return places

    def _follow(self, tokens: Tokens, most: int, seed: int) -> Tokens:
        """Return at most ``most`` tokens, each of which followed the ``n_match`` tokens before it."""
        if len(tokens) < self.n_match:
            return tokens[:0]
        text, oldest = tokens[-self.n_match :].tolist(), pow(FACTOR, self.n_match - 1, 1 << 64)
        total = 0
        for token in text:
            total = (total * FACTOR + token) & MASK
        while len(text) < self.n_match + most:
            token = int(self._next[((total ^ seed) * FACTOR & MASK) >> (64 - BITS)])
            if token == EMPTY:
                break
            total = ((total - text[-self.n_match] * oldest) * FACTOR + token) & MASK
            text.append(token)
        return np.array(text[self.n_match :], np.int32)


class NgramCacheDraft(LlamaDraftModel):
    """Drafts, token by token, what mostly followed the last 4 tokens of the text, as llama.cpp's ``ngram-cache``.

    If that is not known or no continuation has half of the occurrences, the last 3, 2 and 1 tokens are tried, the last
    two with at least two occurrences. The length of drafts is adaptive, up to ``n_max`` tokens.

    Parameters
    ----------
    n_max : int
        Maximum number of draft tokens.

    Examples
    --------
    >>> guess = NgramCacheDraft(n_max=3)
    >>> guess(np.array([1, 2, 3, 4, 5, 9, 1, 2], np.int32))
    array([], dtype=int32)
    >>> guess(np.array([1, 2, 3, 4, 5, 9, 1, 2, 3], np.int32))
    array([4, 5, 9], dtype=int32)
    """

    adaptive = True

    def __init__(self, n_max: int = 8) -> None:
        check_int("n_max", n_max, 1)
        self.n_max = n_max

    def __call__(self, input_ids: Tokens, /, n_max: int | None = None, **kwargs: Any) -> Tokens:
        """Return at most ``n_max`` tokens."""
        most = min(self.n_max, self.n_max if n_max is None else n_max)
        last, draft = input_ids[-LENGTHS[0] :].tolist(), list[int]()
        while len(draft) < most and (token := _mostly(input_ids, last)) is not None:
            draft.append(token)
            last = [*last, token][-LENGTHS[0] :]
        return np.array(draft, np.int32)


def _mostly(tokens: Tokens, last: list[int]) -> int | None:
    """Return the token that mostly follows ``last`` in a text, or a shorter end of it; None: there is none."""
    ends, found = np.arange(1, len(tokens)), {}
    for n in range(1, len(last) + 1):
        ends = ends[ends >= n]
        ends = ends[tokens[ends - n] == last[-n]]
        found[n] = ends
    for n in LENGTHS:
        following = tokens[found.get(n, ends[:0])]
        if len(following) >= MIN_COUNTS[n]:
            values, at, counts = np.unique(following[::-1], return_index=True, return_counts=True)
            if 100 * counts.max() >= MIN_PERCENT[n] * len(following):
                return int(values[np.lexsort((at, -counts))[0]])  # the latest of equally frequent ones
    return None
