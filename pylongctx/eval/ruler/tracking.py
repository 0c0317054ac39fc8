"""RULER's variable tracking: which variables have a value in the end?"""

from __future__ import annotations

import string
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np

from pylongctx.eval.files import after_context
from pylongctx.eval.passkey import GARBAGE
from pylongctx.eval.ruler.sizes import Drawn

N_HOPS = 4
EXAMPLE_LENGTH, EXAMPLE_STEP = 500, 5
EXAMPLE_VALUE = "12345"


@dataclass(frozen=True)
class WithExample(Drawn):
    """A prompt before which a solved example stands."""

    example: str = ""

    @property
    def text(self) -> str:
        """Example, prompt and prefix."""
        return self.example + self.prompt + self.prefix


class Tracking:
    """Draw prompts; ``example`` is a solved prompt, made once, which every prompt shows with other names."""

    def __init__(self, prompts: dict[str, Any], seed: int) -> None:
        self._template, self._prefix = prompts["template"], prompts["answer_prefix"]
        self._random, self._state = Random(seed), np.random.RandomState(seed)
        self.example = ""

    def step(self, length: int) -> int:
        """Return by how many lines of haystack a prompt shrinks."""
        return 10 if length >= 4096 else 5

    def solve(self, drawn: Drawn) -> None:
        """Take a prompt as the example."""
        self.example = f"{drawn.text} {' '.join(drawn.answers)}\n"

    def _names(self, length: int) -> list[str]:
        def draw() -> str:
            return "".join(self._random.choices(string.ascii_uppercase, k=length))

        names = [draw() for _ in range(N_HOPS + 1)]
        while len(set(names)) < N_HOPS + 1:
            names.append(draw())
        return list(dict.fromkeys(names))

    def _number(self) -> str:
        return str(self._state.randint(10000, 99999))

    def __call__(self, n: int) -> WithExample:
        """Return a prompt with ``n`` lines of haystack, without the example."""
        names = self._names(5 if self.example else 3)
        value = self._number() if self.example else EXAMPLE_VALUE
        chain = [f"VAR {names[0]} = {value}"]
        chain += [f"VAR {new} = VAR {old} " for old, new in pairwise(names)]
        lines = [GARBAGE] * n
        for i, place in enumerate(sorted(self._random.sample(range(n), len(chain)))):
            lines.insert(place + i, chain[i])
        context = "\n".join(lines).replace(". \n", ".\n")
        fields = {"context": context, "query": value, "num_v": N_HOPS + 1}
        filled = [t.format(**fields) for t in (self._template, self._prefix, after_context(self._template))]
        prompt, prefix, question = filled
        return WithExample(prompt, prefix, names, question)

    def shown(self, n: int) -> WithExample:
        """Return a prompt after the example, which has other random names and another value."""
        drawn, example = self(n), self.example
        for name in example.split()[-N_HOPS - 1 :]:
            example = example.replace(name, "".join(self._random.choices(string.ascii_uppercase, k=len(name))))
        return replace(drawn, example=example.replace(EXAMPLE_VALUE, self._number()) + "\n")
