"""Estimated time of a matrix: the tokens left to evaluate, at the prefill speed of each model on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pylongctx._free import available_cpus

if TYPE_CHECKING:
    from pylongctx.cli.progress import Cells
    from pylongctx.eval.executors.units import Unit
    from pylongctx.eval.runner import Results

TRIED = 512  # tokens of the prefill that measures the speed


def estimates(cells: Cells, results: Results) -> Iterator[str]:
    """Yield a line per model: samples and tokens left, and the hours they take."""
    from pylongctx.eval.executors import units_of

    for model in dict.fromkeys(cell.model for cell, _ in cells):
        here = [(cell, samples) for cell, samples in cells if cell.model == model]
        units = [unit for cell, samples in here for unit in units_of(cell, samples, results.records)]
        n_left, n_all = sum(len(unit.todo) for unit in units), sum(len(samples) for _, samples in here)
        line = f"{Path(model).name}: {n_left} of {n_all} samples are left"
        if n_left:
            n_tokens, speed = sum(map(_tokens, units)), _speed(model)
            hours = n_tokens / speed / 3600
            line += (
                f", with at most {n_tokens} tokens to prefill: about {hours:.1f} hours at {speed:.0f} tokens/s, "
                f"the speed of the first {TRIED} tokens with full attention on {available_cpus()} cores; "
                "it drops as the context grows"
            )
        yield line


def _tokens(unit: Unit) -> int:
    """Return an upper bound of the tokens of a unit; a shared text counts once, and its replay as prefills."""
    from pylongctx.engine.compress import compression_prefills
    from pylongctx.methods import named

    cell, n_texts = unit.cell, 1 if unit.cell.reads_once else len(unit.todo)
    method = named(cell.method)
    n_replays = compression_prefills(method) if method is not None and cell.compress < 1 else 0.0
    return round(cell.length * n_texts * (1 + n_replays))


def _speed(model: str) -> float:
    from pylongctx.eval.advice import prefill_seconds, sample_tokens
    from pylongctx.llama import Llama

    with Llama(model, method="full", n_ctx=2 * TRIED, verbose=False) as llm:
        return TRIED / prefill_seconds(llm, sample_tokens(llm, TRIED))
