"""The order of tests, and the comparison with other programs."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from pylongctx.eval.bench.case import Case
from pylongctx.eval.bench.engines import BenchEngine, Ours, Peer
from pylongctx.eval.bench.formats import table
from pylongctx.eval.bench.programs import STOCK_GROUP, Program, stock_program

UNQUANTIZED = ("f32", "f16", "bf16")


@dataclass(frozen=True)
class BenchPlan:
    """Settings of a benchmark that all cases share.

    Attributes
    ----------
    methods : sequence of str
        Methods of pylongctx.
    repetitions : int
        Number of repetitions of each test.
    warmup : bool
        Whether to run a warm-up.
    delay : float
        Seconds to wait before each test.
    progress : bool
        Whether to report progress on stderr.
    stock : Path or None
        The llama-bench of unpatched llama.cpp, to alternate with.
    flash_attn : sequence of int
        Its -fa settings; empty: 0 and 1, but only 1 with a quantized V, which 0 does not support.
    programs : sequence of Program
        Other programs to alternate with.
    """

    methods: Sequence[str]
    repetitions: int = 5
    warmup: bool = True
    delay: float = 0
    progress: bool = False
    stock: Path | None = None
    flash_attn: Sequence[int] = ()
    programs: Sequence[Program] = ()

    @property
    def groups(self) -> list[str]:
        """The groups to compare with, in the order of the columns."""
        return [*([STOCK_GROUP] if self.stock else []), *(program.group for program in self.programs)]

    def rounds(self, case: Case) -> list[list[Callable[[], BenchEngine]]]:
        """Return the engines of a case; those of one list are open at the same time and alternate."""
        ours = [lambda method=method: Ours(case, method, self.warmup) for method in self.methods]
        programs = [*self._stock(case), *self.programs]
        if not programs:
            return [[engine] for engine in ours]
        return [[*ours, *(lambda program=program: Peer(case, program, self.warmup) for program in programs)]]

    def _stock(self, case: Case) -> list[Program]:
        flash_attn = self.flash_attn or ((0, 1) if case.type_v in UNQUANTIZED else (1,))
        return [stock_program(self.stock, fa) for fa in flash_attn] if self.stock else []


def run(plan: BenchPlan, cases: Sequence[Case]) -> Iterator[list[BenchEngine]]:
    """Run all cases; yields the alternating engines with their results."""
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


def _say(plan: BenchPlan, message: str) -> None:
    if plan.progress:
        print(f"pylongctx bench: {message}", file=sys.stderr)


# ---- ratios ----


@dataclass(frozen=True)
class Ratio:
    """A comparison of a pylongctx engine with the fastest program of every group, round by round."""

    ours: Ours
    peers: Mapping[str, Peer]

    def values(self, group: str) -> list[float]:
        """Ratios of rates, one per repetition."""
        return [a / b for a, b in zip(self.ours.rates, self.peers[group].rates, strict=True)]


def ratios(engines: Sequence[BenchEngine]) -> list[Ratio]:
    """Return the ratios of alternating engines; empty if one side failed."""
    fastest: dict[str, Peer] = {}
    ran = [engine for engine in engines if isinstance(engine, Peer) and not engine.error]
    for engine in sorted(ran, key=lambda engine: median(engine.rates)):
        fastest[engine.program.group] = engine
    if not fastest:
        return []
    return [Ratio(engine, fastest) for engine in engines if isinstance(engine, Ours) and not engine.error]


HEAD = ["model", "threads", "KV", "test", "method", "t/s"]


def ratio_table(ratios: Sequence[Ratio], groups: Sequence[str]) -> str:
    """Return a Markdown table of medians, with two columns for every group; above 1 pylongctx is faster."""
    head = [*HEAD, *(title for group in groups for title in (f"{group} t/s", f"ratio to {group}"))]
    return table(head, [_ratio_row(ratio, groups) for ratio in ratios])


def _ratio_row(ratio: Ratio, groups: Sequence[str]) -> list[str]:
    case = ratio.ours.case
    kv = case.type_k if case.type_k == case.type_v else f"{case.type_k}, {case.type_v}"
    names = [Path(case.model_filename).stem, str(case.n_threads), kv, case.name, ratio.ours.method]
    others = (cell for group in groups for cell in _peer_cells(ratio, group))
    return [*names, f"{median(ratio.ours.rates):.2f}", *others]


def _peer_cells(ratio: Ratio, group: str) -> tuple[str, str]:
    if group not in ratio.peers:
        return "-", "-"
    peer, values = ratio.peers[group], ratio.values(group)
    form = peer.program.label.removeprefix(group)
    rate = f"{median(peer.rates):.2f}{form}"
    return rate, f"{median(values):.2f} ({min(values):.2f} - {max(values):.2f})"
