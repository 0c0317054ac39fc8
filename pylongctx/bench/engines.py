"""Who runs a test: pylongctx in a worker process, or the llama-bench of unpatched llama.cpp."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from pylongctx.bench.case import Case
from pylongctx.bench.record import FIELDS, Record, new_record, with_samples

STOCK = Path("build/tools/stock/llama-bench")
STOCK_VARIABLE = "LCTX_STOCK_BENCH"


class Engine:
    """One way to run one case, repetition by repetition; after ``error`` nothing more is run."""

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
        """Run the test once more, unless something went wrong."""
        if not self.error:
            self._run()

    def record(self) -> Record:
        """Return the results of all repetitions."""
        raise NotImplementedError

    def close(self) -> None:
        """Free what the engine holds."""

    def _run(self) -> None:
        raise NotImplementedError


class Ours(Engine):
    """pylongctx with one method, in a process of its own."""

    def __init__(self, case: Case, method: str, warmup: bool) -> None:
        super().__init__(case)
        self.method = method
        self._first_tokens: list[int] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pylongctx.bench.worker"],
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
            if len(self.samples) == 1:  # later ones count more memory: going back may take a checkpoint
                self._facts |= result

    def _ask(self, message: Mapping[str, Any]) -> Record:
        assert self._process.stdin and self._process.stdout
        with suppress(BrokenPipeError):  # it has ended: so has its output
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        answer: Record = json.loads(line) if line else {"error": f"the process ended, status {self._process.wait()}"}
        self.error = answer.pop("error", "")
        return answer


class Stock(Engine):
    """llama-bench of unpatched llama.cpp, started for every repetition."""

    def __init__(self, case: Case, binary: Path, flash_attn: int, warmup: bool) -> None:
        super().__init__(case)
        self.name = f"llama.cpp, fa {flash_attn}"
        self._flash_attn = flash_attn
        self._command = [str(binary), *stock_arguments(case), "-fa", str(flash_attn), "-r", "1", "-o", "json"]
        self._command += [] if warmup else ["--no-warmup"]
        self._environment = clean_environment()
        paths = (str(binary.resolve().parent), self._environment.get("LD_LIBRARY_PATH"))
        self._environment["LD_LIBRARY_PATH"] = os.pathsep.join(path for path in paths if path)
        self._first: Record = {}

    def record(self) -> Record:
        """Return the results of all repetitions."""
        if self.error:
            unknown = {"build_commit": None, "build_number": None, "flash_attn": self._flash_attn}
            return new_record(self.case, self.name, unknown, self.error)
        record = {name: self._first.get(name) for name in FIELDS} | {
            "method": self.name,
            "asked": self.name,
            "error": "",
        }
        return with_samples(record, self.samples)

    def _run(self) -> None:
        done = subprocess.run(self._command, capture_output=True, text=True, env=self._environment, check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"llama-bench ended with status {done.returncode}"]
            self.error = lines[-1]
            return
        self._first = json.loads(done.stdout)[0]
        self.samples += self._first["samples_ns"]


def stock_arguments(case: Case) -> list[str]:
    """Return the options of llama-bench that run one case."""
    both = case.n_prompt and case.n_gen
    tests = (
        {"-p": 0, "-n": 0, "-pg": f"{case.n_prompt},{case.n_gen}"} if both else {"-p": case.n_prompt, "-n": case.n_gen}
    )
    settings = {
        "-m": case.model_filename,
        "-d": case.n_depth,
        "-b": case.n_batch,
        "-ub": case.n_ubatch,
        "-t": case.n_threads,
        "-ctk": case.type_k,
        "-ctv": case.type_v,
        "-ngl": case.n_gpu_layers,
    }
    return [str(word) for option in (settings | tests).items() for word in option]


def find_stock(path: str | None) -> Path:
    """Return the llama-bench of unpatched llama.cpp: ``path``, LCTX_STOCK_BENCH, or what ``make tools-stock`` builds.

    Raises
    ------
    FileNotFoundError
        When it is not there; the message says how to get it.
    """
    found = Path(path or os.environ.get(STOCK_VARIABLE) or STOCK)
    if not found.is_file():
        raise FileNotFoundError(
            f"--vs-stock needs the llama-bench of unpatched llama.cpp, and there is none at {found}: build it with "
            f"'make tools-stock' in the source tree, or name another with --stock or {STOCK_VARIABLE}"
        )
    return found.absolute()


def clean_environment() -> dict[str, str]:
    """Return the environment without LCTX_METHOD: the command line says which method runs."""
    return {name: value for name, value in os.environ.items() if name != "LCTX_METHOD"}
