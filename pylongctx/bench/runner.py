"""The order in which tests run, and the comparison with unpatched llama.cpp."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from pylongctx.bench.case import Case
from pylongctx.bench.engines import Engine, Ours, Stock
from pylongctx.bench.formats import table

UNQUANTIZED = ("f32", "f16", "bf16")


@dataclass(frozen=True)
class Plan:
    """How every case is run.

    Attributes
    ----------
    methods : sequence of str
        Methods of pylongctx.
    repetitions : int
        How often each test is repeated.
    warmup : bool
        Whether something is run before.
    delay : float
        Seconds to wait before each test.
    progress : bool
        Say on stderr what runs.
    stock : Path or None
        The llama-bench of unpatched llama.cpp, to take turns with.
    flash_attn : sequence of int
        How it shall run; empty: 0 and 1, but only 1 with a quantized V, which it cannot read otherwise.
    """

    methods: Sequence[str]
    repetitions: int = 5
    warmup: bool = True
    delay: float = 0
    progress: bool = False
    stock: Path | None = None
    flash_attn: Sequence[int] = ()

    def rounds(self, case: Case) -> list[list[Callable[[], Engine]]]:
        """Return the engines of a case; those of one list are open at the same time and take turns."""
        ours = [lambda method=method: Ours(case, method, self.warmup) for method in self.methods]
        if self.stock is None:
            return [[engine] for engine in ours]
        binary, flash_attn = self.stock, self.flash_attn or ((0, 1) if case.type_v in UNQUANTIZED else (1,))
        return [[*ours, *(lambda fa=fa: Stock(case, binary, fa, self.warmup) for fa in flash_attn)]]


def run(plan: Plan, cases: Sequence[Case]) -> Iterator[list[Engine]]:
    """Run all cases; yields the engines that took turns, with their results."""
    for number, case in enumerate(cases, 1):
        for makers in plan.rounds(case):
            time.sleep(plan.delay)
            with ExitStack() as stack:
                engines = []
                for make in makers:
                    _say(plan, f"benchmark {number}/{len(cases)}: {case.name}: starting")
                    engines.append(make())
                    stack.callback(engines[-1].close)
                for repetition in range(plan.repetitions):
                    _say(plan, f"benchmark {number}/{len(cases)}: {case.name}: run {repetition + 1}/{plan.repetitions}")
                    for engine in engines:
                        engine.run()
            yield engines


def _say(plan: Plan, message: str) -> None:
    if plan.progress:
        print(f"pylongctx bench: {message}", file=sys.stderr)


# ---- ratios ----


@dataclass(frozen=True)
class Ratio:
    """One of our engines against the faster of llama.cpp's, round by round."""

    ours: Ours
    stock: Stock

    @property
    def values(self) -> list[float]:
        """Rates divided by those of the other, one for each repetition."""
        return [a / b for a, b in zip(self.ours.rates, self.stock.rates, strict=True)]


def ratios(engines: Sequence[Engine]) -> list[Ratio]:
    """Return the ratios of engines that took turns; none where a side was refused."""
    stock = [engine for engine in engines if isinstance(engine, Stock) and not engine.error]
    if not stock:
        return []
    faster = max(stock, key=lambda engine: median(engine.rates))
    return [Ratio(engine, faster) for engine in engines if isinstance(engine, Ours) and not engine.error]


HEAD = ["model", "threads", "KV", "test", "method", "t/s", "llama.cpp t/s", "its fastest", "ratio", "min", "max"]


def ratio_table(ratios: Sequence[Ratio]) -> str:
    """Return a Markdown table of medians; above 1 is faster than llama.cpp."""
    return table(HEAD, [_ratio_row(ratio) for ratio in ratios])


def _ratio_row(ratio: Ratio) -> list[str]:
    case, values = ratio.ours.case, ratio.values
    kv = case.type_k if case.type_k == case.type_v else f"{case.type_k}, {case.type_v}"
    rates = [f"{median(engine.rates):.2f}" for engine in (ratio.ours, ratio.stock)]
    numbers = [f"{value:.2f}" for value in (median(values), min(values), max(values))]
    names = [Path(case.model_filename).stem, str(case.n_threads), kv, case.name, ratio.ours.method]
    return [*names, *rates, ratio.stock.name, *numbers]
