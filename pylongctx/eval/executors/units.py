"""Units of work: some samples of one cell, which a worker runs from an open model to its records."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from pylongctx.eval.reuse import by_text
from pylongctx.eval.runner import Cell, digest, run
from pylongctx.eval.task import Record, Sample

SAMPLES_PER_UNIT = 8  # few enough to distribute and repeat, enough to be worth opening a model


@dataclass(frozen=True, eq=False)
class Unit:
    """Some samples of a cell, which can be pickled.

    Attributes
    ----------
    samples : sequence of Sample
        All samples of the cell, from which its context window is derived.
    todo : tuple of str
        Digests of those to run.
    """

    cell: Cell
    samples: Sequence[Sample]
    todo: tuple[str, ...]

    def without(self, done: Container[str]) -> Unit:
        """Return the unit without the samples of these digests."""
        return replace(self, todo=tuple(name for name in self.todo if name not in done))

    def records(self) -> Iterator[Record]:
        """Run the samples and yield their records."""
        others = {name for sample in self.samples if (name := digest(self.cell, sample)) not in self.todo}
        return run(self.cell, self.samples, others)


@dataclass(frozen=True)
class Failed:
    """The reason why the samples of a unit have no records."""

    reason: str


class Executor(Protocol):
    """Runs units, in any order."""

    def run(self, units: Sequence[Unit]) -> Iterator[tuple[Unit, Record | Failed]]:
        """Yield each record, or why there is none, with its unit; the caller writes the records."""


def units_of(cell: Cell, samples: Sequence[Sample], done: Container[str]) -> list[Unit]:
    """Return units of the samples whose digests are not in ``done``."""
    todo = {name: sample for sample in samples if (name := digest(cell, sample)) not in done}
    if cell.reads_once:  # all questions on a text
        names = {sample.id: name for name, sample in todo.items()}
        return [Unit(cell, samples, tuple(names[s.id] for s in group)) for group in by_text(list(todo.values()))]
    parts = (tuple(todo)[at : at + SAMPLES_PER_UNIT] for at in range(0, len(todo), SAMPLES_PER_UNIT))
    return [Unit(cell, samples, part) for part in parts]


def reason_of(error: BaseException) -> str:
    """Return an exception as a line."""
    return f"{type(error).__name__}: {error}"
