"""The order of tests, and the comparison with other programs."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from pylongctx.eval.bench.programs import STOCK_GROUP, Program, clean_environment, stock_program
from pylongctx.eval.bench.record import FIELDS, Case, Record, new_record, table, with_samples


class BenchEngine:
    """An engine that runs the repetitions of one case, and stops after an ``error``."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.samples: list[int] = []
        self.error = ""

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each repetition."""
        n_tokens = self.case.n_prompt + self.case.n_gen
        return [1e9 * n_tokens / ns for ns in self.samples]

    def run(self) -> None:
        """Run the test once more, unless an error occurred."""
        if not self.error:
            self._run()

    def record(self) -> Record:
        """Return the results of all repetitions."""
        raise NotImplementedError

    def close(self) -> None:
        """Release the resources of the engine."""

    def _run(self) -> None:
        raise NotImplementedError


class Ours(BenchEngine):
    """pylongctx with one method in its own process."""

    def __init__(self, case: Case, method: str, warmup: bool) -> None:
        super().__init__(case)
        self.method = method
        self._first_tokens: list[int] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pylongctx.eval.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=clean_environment(),
        )
        self._facts = self._ask({"case": asdict(case), "method": method, "warmup": warmup})

    def record(self) -> Record:
        """Return the results of all repetitions."""
        if self.error:
            return new_record(self.case, self.method, self._facts, self.error)
        facts = self._facts | {"ttft_ns": int(fmean(self._first_tokens))}
        return with_samples(new_record(self.case, self.method, facts), self.samples)

    def close(self) -> None:
        """End the process."""
        if self._process.stdin and self._process.stdout:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.wait()
            self._process.stdout.close()

    def _run(self) -> None:
        result = self._ask({})
        if not self.error:
            self.samples.append(result.pop("ns"))
            self._first_tokens.append(result.pop("ttft_ns"))
            if len(self.samples) == 1:  # later ones use more memory, since rewinding may take a checkpoint
                self._facts |= result

    def _ask(self, message: Mapping[str, Any]) -> Record:
        assert self._process.stdin and self._process.stdout
        with suppress(BrokenPipeError):  # the process has already exited
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        answer: Record = json.loads(line) if line else {"error": f"the process ended, status {self._process.wait()}"}
        self.error = answer.pop("error", "")
        return answer


class Peer(BenchEngine):
    """Another program, started for every repetition."""

    def __init__(self, case: Case, program: Program, warmup: bool) -> None:
        super().__init__(case)
        self.program = program
        self._warmup = warmup
        self._facts: Record = {}

    def record(self) -> Record:
        """Return the results of all repetitions."""
        if self.error:
            unknown = dict.fromkeys(("build_commit", "build_number", "backends", "flash_attn"))
            return new_record(self.case, self.program.label, unknown, self.error)
        test = {name: getattr(self.case, name) for name in ("n_prompt", "n_gen", "n_depth")}
        ours = {"method": self.program.label, "error": ""}
        known = self._facts | test | ours
        return with_samples({name: known.get(name) for name in FIELDS} | {"asked": self.program.label}, self.samples)

    def _run(self) -> None:
        try:
            result = self.program.measure(self.case, self._warmup)
        except RuntimeError as reason:
            self.error = str(reason)
            return
        self.samples += result["samples_ns"]
        self._facts = self._facts or result


# ---- the loop ----

UNQUANTIZED = ("f32", "f16", "bf16")


@dataclass(frozen=True)
class BenchPlan:
    """Settings of a benchmark that all cases share."""

    methods: Sequence[str]
    repetitions: int = 5
    warmup: bool = True
    delay: float = 0  # seconds before each test
    progress: bool = False
    stock: Path | None = None  # the llama-bench of unpatched llama.cpp, to alternate with
    flash_attn: Sequence[int] = ()  # its -fa; empty: 0 and 1, but only 1 with a quantized V, which 0 does not support
    programs: Sequence[Program] = ()  # others to alternate with

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
