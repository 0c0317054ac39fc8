"""Engines that run tests: pylongctx in a worker process, or another program."""

import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from statistics import fmean
from typing import Any

from pylongctx.eval.bench.case import Case
from pylongctx.eval.bench.programs import Program, clean_environment
from pylongctx.eval.bench.record import FIELDS, Record, new_record, with_samples


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
