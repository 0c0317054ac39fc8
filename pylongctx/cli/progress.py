"""Progress of an evaluation: bars in a terminal, or a line per cell in a pipe."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from pylongctx.eval.runner import Cell, Results
    from pylongctx.eval.task import Sample

Cells = list[tuple["Cell", list["Sample"]]]
Key = tuple[Any, ...]
Refusal = tuple["Cell", str]


class CellProgress(Progress):
    """Bars with sample counts, elapsed and remaining time; in a pipe lines instead."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[n]}/{task.fields[of]}"))
        times = (TimeElapsedColumn(), TimeRemainingColumn())
        super().__init__(*columns, *times, console=Console(stderr=True), transient=True)
        self._since = perf_counter()
        self._n_cells = 0
        self._left: dict[Key, int] = {}

    def begin(self, cells: Cells, results: Results) -> None:
        """Show a bar scaled by the tokens of all samples, and count those that already have results."""
        self._results, self._samples = results, {_key(cell): samples for cell, samples in cells}
        self._left = {key: len(samples) for key, samples in self._samples.items()}
        self._n_cells = len(cells)
        self._bar = self.add_bar(sum(self._left.values()), sum(cell.length * len(samples) for cell, samples in cells))
        for cell, samples in cells:
            self.count(cell, len(results.of(cell, samples)))

    def count(self, cell: Cell, n: int = 1) -> None:
        """Count ``n`` samples of a cell; after the last one, print the cell's result to a pipe."""
        self.move(self._bar, n, cell.length)
        key = _key(cell)
        self._left[key] -= n
        if not self._left[key] and not self.console.is_terminal:
            records = self._results.of(cell, self._samples[key])
            n_done = sum(not left for left in self._left.values())
            text = cell.task.cell_text(records) if records else "failed"
            line = f"[{n_done}/{self._n_cells}, {perf_counter() - self._since:.0f} s] {name_of(cell)}: {text}"
            self.say(line)

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def at(self, cell: Cell) -> None:
        """Show which cell is being measured."""
        self.update(self._bar, description=name_of(cell))

    def add_bar(self, n: int, work: float) -> TaskID:
        """Add a bar for ``n`` samples with a total of ``work`` tokens."""
        return self.add_task("", total=work, n=0, of=n)

    def move(self, bar: TaskID, n: int, work: int = 1) -> None:
        """Advance a bar by ``n`` samples of ``work`` tokens each."""
        done: int = next(task.fields["n"] for task in self.tasks if task.id == bar)
        self.update(bar, advance=n * work, n=done + n)


def name_of(cell: Cell) -> str:
    """Return the task, the method and the length of a cell."""
    from pylongctx.eval.report.records import label

    return f"{cell.task.name}: {label(cell.facts)} at {cell.length}"


def make_all(cells: Sequence[Cell], progress: CellProgress, refused: list[Refusal] | None = None) -> Cells:
    """Return the samples of all cells; cells that differ in method or KV types share them.

    A task without samples of a length is an error, unless ``refused`` is given: then the cell and the reason are added
    to that list, and the other cells are prepared.
    """
    from pylongctx.eval.executors.units import reason_of
    from pylongctx.eval.runner import make_samples

    made: dict[Key, list[Sample]] = {}
    reasons: dict[Key, str] = {}
    bar = progress.add_bar(len(cells), len(cells))
    for cell in cells:
        progress.update(bar, description=f"preparing the samples of {cell.task.name} at {cell.length}")
        if (key := _content(cell)) not in made | reasons:
            try:
                made[key] = make_samples(cell)
            except ValueError as reason:
                if refused is None:
                    raise
                reasons[key] = reason_of(reason)
                progress.say(f"failed: {cell.task.name} at {cell.length}: {reason}")
        progress.move(bar, 1)
    progress.remove_task(bar)
    if refused is not None:
        refused += [(cell, reasons[key]) for cell in cells if (key := _content(cell)) in reasons]
    return [(cell, made[key]) for cell in cells if (key := _content(cell)) in made]


def _key(cell: Cell) -> Key:
    """Return the facts that distinguish the cells of a run, without a worker's threads."""
    return *_content(cell), cell.method, cell.rope, cell.type_k, cell.type_v, cell.reuse, cell.compress


def _content(cell: Cell) -> Key:
    return cell.model, cell.task, cell.length, cell.seed, cell.chat
