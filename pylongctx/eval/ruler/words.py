"""RULER's common and frequent words, and the lists of words."""

from __future__ import annotations

import math
import string
from bisect import bisect_right
from collections.abc import Callable, Sequence
from importlib import resources
from itertools import accumulate
from random import Random
from typing import Any, overload

import numpy as np

from pylongctx.eval.files import after_context, read_json
from pylongctx.eval.ruler.sizes import Drawn

N_COMMON = 10
WORD_LENGTH = 6
ZETA_2 = math.pi**2 / 6
N_INVENTED = 200_000


def word_list(name: str) -> list[str]:
    """Return a list of the package wonderwords: "noun", "adjective" or "verb"."""
    try:
        file = resources.files("wonderwords") / "assets" / f"{name}list.txt"
    except ImportError as reason:
        raise ImportError("RULER's words come from the package wonderwords: pip install pylongctx[eval]") from reason
    return [line.rstrip() for line in file.read_text(encoding="utf-8").splitlines()]


class Pairs(Sequence[str]):
    """All ``f"{first}-{second}"`` once, sorted, without holding them: there are millions."""

    def __init__(self, first: Sequence[str], second: Sequence[str]) -> None:
        self._second = sorted(set(second))
        self._groups: list[list[str]] = []
        for word in sorted(set(first), key=lambda word: f"{word}-"):
            # what begins with an earlier word and a hyphen is sorted among the pairs of that one
            if self._groups and word.startswith(f"{self._groups[-1][0]}-"):
                self._groups[-1].append(word)
            else:
                self._groups.append([word])
        self._ends = list(accumulate(len(self._pairs(group)) for group in self._groups))

    def _pairs(self, group: list[str]) -> Sequence[str]:
        return self._second if len(group) == 1 else sorted({f"{a}-{b}" for a in group for b in self._second})

    def __len__(self) -> int:
        return self._ends[-1]

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        i = bisect_right(self._ends, at)
        found = self._pairs(self._groups[i])[at - (self._ends[i - 1] if i else 0)]
        return found if len(self._groups[i]) > 1 else f"{self._groups[i][0]}-{found}"


def adjective_nouns() -> Pairs:
    """Return the keys and values of needles."""
    return Pairs(word_list("adjective"), word_list("noun"))


class Common:
    """Draw lists in which ten words are more common than others.

    Parameters
    ----------
    more : str or None
        RULER's english_words.json, for lists that are longer than wonderwords has words. None: invented words.
    """

    def __init__(self, prompts: dict[str, Any], seed: int, length: int, more: str | None) -> None:
        self._template, self._prefix, self._seed = prompts["template"], prompts["answer_prefix"], seed
        self._random, self._is_long, self._more_file = Random(seed), length >= 4096, more
        self._words = sorted({*word_list("noun"), *word_list("adjective"), *word_list("verb")})
        Random(seed).shuffle(self._words)
        self._more: list[str] = []
        self.exact = True

    def step(self, length: int) -> int:
        """Return by how many words a prompt shrinks."""
        return 10

    def _list(self, n: int) -> list[str]:
        if n <= len(self._words):
            return self._words
        if not self._more and self._more_file:
            words = read_json(self._more_file, "--data for cwe is RULER's english_words.json")
            if not isinstance(words, dict):
                raise ValueError(f"{self._more_file} is not an object of words, as RULER's english_words.json is")
            self._more = list(words.values())
        if not self._more:
            self._more, self.exact = invented_words(N_INVENTED), False
        return self._more

    def _example(self, n: int, common: int, uncommon: int) -> tuple[str, list[str]]:
        chosen = self._random.sample(self._list(n), n)
        words = chosen[:N_COMMON] * common + chosen[N_COMMON:] * uncommon
        Random(self._seed).shuffle(words)
        return numbered(words), chosen[:N_COMMON]

    def __call__(self, n: int) -> Drawn:
        """Return a prompt with ``n`` different words, after a solved example."""
        shown, right = self._example(*((40, 10, 3) if self._is_long else (20, 3, 1)))
        context, answers = self._example(n, *((30, 3) if self._is_long else (6, 1)))
        example = self._template.format(context=shown) + self._prefix + " " + numbered(right)
        prompt = f"{example}\n{self._template.format(context=context)}"
        return Drawn(prompt, self._prefix, answers, after_context(self._template))


def numbered(words: Sequence[str]) -> str:
    """Return ``"1. word 2. word"``."""
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


def invented_words(n: int) -> list[str]:
    """Return ``n`` different words that can be spoken."""
    random, found = Random(0), dict[str, None]()
    while len(found) < n:
        syllables = (random.choice("bdfgklmnprstvz") + random.choice("aeiou") for _ in range(random.randint(2, 4)))
        found["".join(syllables) + random.choice("lmnrst")] = None
    return list(found)


class Frequent:
    """Draw texts of coded words whose frequencies fall with the square of the rank."""

    def __init__(self, prompts: dict[str, Any], seed: int, room: int) -> None:
        self._template, self._prefix, self._seed = prompts["template"], prompts["answer_prefix"], seed
        self._random, self._room = Random(seed), room
        self._n_coded = room // 50
        self._step = room // 32
        if self._n_coded < 4:
            raise ValueError("the length is too short for this task: it needs more than 250 tokens")

    def _coded_words(self) -> list[str]:
        words = [self._word() for _ in range(self._n_coded)]
        while len(set(words)) < self._n_coded:
            words.append(self._word())
        words = sorted(set(words))
        Random(self._seed).shuffle(words)
        words[0] = "..."
        return words

    def _word(self) -> str:
        return "".join(self._random.choices(string.ascii_lowercase, k=WORD_LENGTH))

    def _text(self, words: list[str], n: int) -> Drawn:
        ranks = np.arange(1, len(words) + 1)
        counts = (n * (ranks**-2.0) / ZETA_2).astype(int)
        text = [word for word, count in zip(words, counts, strict=True) for _ in range(count)]
        Random(self._seed).shuffle(text)
        prompt = self._template.format(context=" ".join(text))
        return Drawn(prompt, self._prefix, words[1:4], after_context(self._template))

    def n_words(self, size: Callable[[Drawn], int]) -> int:
        """Return how many words a prompt holds."""
        words, n = self._coded_words(), self._room // WORD_LENGTH
        while size(self._text(words, n)) < self._room:
            n += self._step
        return n - self._step

    def draw(self, n: int, size: Callable[[Drawn], int]) -> Drawn:
        """Return a prompt with ``n`` words, or fewer where they are longer than others."""
        words = self._coded_words()
        while size(drawn := self._text(words, n)) > self._room:
            n -= self._step
            if n <= 0:
                raise ValueError("the length is too short for this task")
        return drawn
