"""The amount of haystack in a prompt, found by RULER's search, which draws random numbers too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

MAX_TRIES = 200


@dataclass(frozen=True)
class Drawn:
    """A prompt, what its answer begins with, the answers, and the end of the prompt that asks about the text."""

    prompt: str
    prefix: str
    answers: list[str]
    question: str

    @property
    def text(self) -> str:
        """Prompt and prefix."""
        return self.prompt + self.prefix


D = TypeVar("D", bound=Drawn)


def largest_size(size: Callable[[int], int], step: int, highest: int, room: int) -> int:
    """Return the largest number of units from ``step`` to ``highest`` with ``size(n) <= room``, or ``step``."""
    low, best = step, step
    while low <= highest:
        middle = (low + highest) // 2
        if size(middle) <= room:
            best, low = middle, middle + 1
        else:
            highest = middle - 1
    return best


def draw_all(draw: Callable[[int], D], fits: Callable[[D], bool], n_units: int, step: int, n: int) -> Iterator[D]:
    """Yield ``n`` draws that fit: of ``n_units``, and ``step`` fewer after each that does not.

    Raises
    ------
    ValueError
        When even the smallest do not fit.
    """
    for _ in range(n):
        units = n_units
        for _ in range(MAX_TRIES):
            drawn = draw(units)
            if fits(drawn):
                yield drawn
                break
            units = units - step if units > step else units
        else:
            raise ValueError("the length is too short for this task: its smallest prompt does not fit")
