"""RULER's eight needles in a haystack."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from pylongctx.eval.files import after_context
from pylongctx.eval.haystack import sentences
from pylongctx.eval.passkey import GARBAGE
from pylongctx.eval.ruler.sizes import Drawn
from pylongctx.eval.ruler.words import adjective_nouns

NEEDLE = "One of the special magic {type_needle_v} for {key} is: {value}."
DEPTHS = [int(depth) for depth in np.round(np.linspace(0, 100, 40))]


@dataclass(frozen=True)
class Kind:
    """The needles and the haystack of a variant, with RULER's names of the options."""

    type_haystack: str = "essay"
    type_needle_k: str = "words"
    type_needle_v: str = "numbers"
    num_needle_k: int = 1
    num_needle_v: int = 1
    num_needle_q: int = 1

    @property
    def n_keys(self) -> int:
        """As many keys as are asked for, at least."""
        return max(self.num_needle_k, self.num_needle_q)


KINDS = {
    "niah_single_1": Kind("noise"),
    "niah_single_2": Kind("essay"),
    "niah_single_3": Kind("essay", type_needle_v="uuids"),
    "niah_multikey_1": Kind("essay", num_needle_k=4),
    "niah_multikey_2": Kind("needle"),
    "niah_multikey_3": Kind("needle", type_needle_k="uuids", type_needle_v="uuids"),
    "niah_multivalue": Kind("essay", num_needle_v=4),
    "niah_multiquery": Kind("essay", num_needle_q=4),
}


class Niah:
    """Draw prompts of one variant.

    Parameters
    ----------
    prompts : dict
        ``template`` and ``answer_prefix``.
    essay : str
        The haystack of the variants that want one.
    """

    def __init__(self, kind: Kind, prompts: dict[str, Any], seed: int, essay: str) -> None:
        self._kind, self._seed, self._random = kind, seed, Random(seed)
        self._template, self._prefix = prompts["template"], prompts["answer_prefix"]
        self._essay = re.sub(r"\s+", " ", essay).split(" ") if kind.type_haystack == "essay" else []
        wanted = {kind.type_needle_k, kind.type_needle_v}
        self._words = adjective_nouns() if "words" in wanted else None

    def steps(self, length: int) -> tuple[int, int]:
        """Return by how many units of haystack a prompt shrinks, and with how many the search begins."""
        is_long = length >= 4096
        if self._kind.type_haystack == "essay":
            return (500, 500) if is_long else (20, 100)  # RULER: always 500, which leaves no short prompts
        return (25, 25) if is_long else (5, 5)

    def _value(self, kind: str) -> str:
        if kind == "numbers":
            return str(self._random.randint(10**6, 10**7 - 1))
        if kind == "uuids":
            return str(uuid.UUID(int=self._random.getrandbits(128), version=4))
        assert self._words is not None
        return self._random.choice(self._words)

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(type_needle_v=self._kind.type_needle_v, key=key, value=value)

    def __call__(self, n: int) -> Drawn:
        """Return a prompt with ``n`` units of haystack."""
        kind = self._kind
        values: dict[str, list[str]] = {}
        keys, needles = [], []
        for _ in range(kind.n_keys):
            keys.append(self._value(kind.type_needle_k))
            values[keys[-1]] = [self._value(kind.type_needle_v) for _ in range(kind.num_needle_v)]
            needles += [self._needle(keys[-1], value) for value in values[keys[-1]]]
        Random(self._seed).shuffle(needles)
        context = self._in_essay(needles, n) if self._essay else self._in_lines(needles, n)
        asked = [keys[i] for i in self._random.sample(range(kind.n_keys), kind.num_needle_q)]
        answers = [value for key in asked for value in values[key]]
        query = ", ".join(asked[:-1]) + ", and " + asked[-1] if len(asked) > 1 else asked[0]
        filled = [self._fill(t, context, query) for t in (self._template, self._prefix, after_context(self._template))]
        prompt, prefix, question = filled
        return Drawn(prompt, prefix, answers, question)

    def _in_essay(self, needles: list[str], n: int) -> str:
        words = self._essay * -(-n // len(self._essay))
        parts = sentences(" ".join(words[:n]))
        places = sorted(int(len(parts) * (depth / 100)) for depth in self._random.sample(DEPTHS, len(needles)))
        pieces, start = [], 0
        for place, needle in zip(places, needles, strict=True):
            pieces += [" ".join(parts[start:place]), needle]
            start = place
        return " ".join([*pieces, " ".join(parts[start:])])

    def _in_lines(self, needles: list[str], n: int) -> str:
        kind = self._kind
        if kind.type_haystack == "noise":
            lines = [GARBAGE] * n
        else:
            lines = [self._needle(self._value(kind.type_needle_k), self._value(kind.type_needle_v)) for _ in range(n)]
        places = sorted(self._random.sample(range(n), len(needles)), reverse=True)
        for place, needle in zip(places, needles, strict=True):
            lines.insert(place, needle)
        return "\n".join(lines)

    def _fill(self, template: str, context: str, query: str) -> str:
        what = self._kind.type_needle_v
        if self._kind.num_needle_q * self._kind.num_needle_v == 1:
            what = what[:-1]
            for plural, singular in (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer")):
                template = template.replace(plural, singular)
        return template.format(type_needle_v=what, context=context, query=query)
