"""Other benchmark programs: llama-bench and llama-sweep-bench, of llama.cpp or a fork."""

import json
import os
import shlex
import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from pylongctx.eval.bench.record import Case, Record, cpu_name

STOCK = Path("build/tools/stock/llama-bench")
STOCK_VARIABLE = "LCTX_STOCK_BENCH"
STOCK_GROUP = "llama.cpp"
EXAMPLE = "--vs 'ik=build/tools/ik/bin/llama-bench -rtr 1'"

# options of both kinds, with two names each; a program's own arguments override the value of the case
SETTINGS = {
    "-b": ("--batch-size", "n_batch"),
    "-t": ("--threads", "n_threads"),
    "-ctk": ("--cache-type-k", "type_k"),
    "-ctv": ("--cache-type-v", "type_v"),
    "-ngl": ("--n-gpu-layers", "n_gpu_layers"),
}
# options that define the test or the output, fixed for all programs
RESERVED = frozenset(
    "-m --model -p --n-prompt --prompt -n --n-gen --predict --n-predict -pg -gp -d --n-depth -ub --ubatch-size -c "
    "--ctx-size -r --repetitions -nrep --n-repetitions --sweep-stride -o --output -oe --output-err "
    "--output-format".split()
)


class Dialect(ABC):
    """The command line of a kind of program for a case, and the parsing of its output."""

    @abstractmethod
    def unable(self, case: Case) -> str:
        """Return why the program has no such test, or nothing."""

    @abstractmethod
    def options(self, case: Case, warmup: bool) -> list[str]:
        """Return the options of the test, without those of ``SETTINGS``."""

    @abstractmethod
    def read(self, case: Case, done: "subprocess.CompletedProcess[str]") -> Record:
        """Return fields of the record, one ``samples_ns`` among them; ValueError for unusable output."""


@dataclass(frozen=True)
class LlamaBench(Dialect):
    """llama-bench. That of ik_llama.cpp has no ``-d``, but ``-gp``, and warms up with a single token."""

    depth: bool = True  # it has -d
    no_warmup: tuple[str, ...] = ("--no-warmup",)  # turns off its own warm-up

    def unable(self, case: Case) -> str:
        """Return why the program has no such test, or nothing."""
        if self.depth or not case.n_depth or not case.n_prompt:
            return ""
        return "this llama-bench has no -d, so it cannot prefill at a depth; use its llama-sweep-bench"

    def options(self, case: Case, warmup: bool) -> list[str]:
        """Return the options of the test, without those of ``SETTINGS``."""
        test: dict[str, object] = {"-p": case.n_prompt, "-n": case.n_gen}
        if case.n_prompt and case.n_gen:
            test = {"-p": 0, "-n": 0, "-pg": f"{case.n_prompt},{case.n_gen}"}
        elif case.n_depth and not self.depth:
            test = {"-p": 0, "-n": 0, "-gp": f"{case.n_depth},{case.n_gen}"}
        depth = {"-d": case.n_depth} if self.depth else {}
        loaded = {"-lm": case.load_mode} if self.depth and case.load_mode != "auto" else {}
        # a whole repetition as warm-up, since the program's own is shorter
        again = warmup and not self.depth and not case.n_depth
        quiet = () if warmup and self.depth else self.no_warmup
        given = test | depth | loaded | {"-ub": case.n_ubatch, "-r": 1 + again, "-o": "json"}
        return [*_words(given), *quiet]

    def read(self, case: Case, done: "subprocess.CompletedProcess[str]") -> Record:
        """Return fields of the record, one ``samples_ns`` among them; ValueError for unusable output."""
        results = _objects(done.stdout, "samples_ns", "n_prompt", "n_gen")
        if not results:
            raise ValueError(f"printed no result of llama-bench, but {_first_words(done.stdout)!r}")
        if len(results) > 1:
            raise ValueError(f"printed the results of {len(results)} tests instead of one")
        result = results[0]
        after = case.n_depth and not self.depth
        wanted = (case.n_depth if after else case.n_prompt, case.n_gen)
        measured = (result["n_prompt"], result["n_gen"])
        if measured != wanted:
            raise ValueError(f"measured n_prompt, n_gen = {measured} instead of {wanted}")
        return {"backends": _backends(result)} | result | {"samples_ns": result["samples_ns"][-1:]}


@dataclass(frozen=True)
class SweepBench(Dialect):
    """llama-sweep-bench: a prompt of ``n_ubatch`` and some tokens at every multiple of ``n_ubatch``."""

    stride: bool = True  # it can skip depths, which is faster
    warm: bool = True  # it can warm up with a batch

    def unable(self, case: Case) -> str:
        """Return why the program has no such test, or nothing."""
        n = case.n_ubatch
        if case.n_prompt and case.n_gen:
            return "llama-sweep-bench measures a prompt or a generation, not both together"
        if case.n_prompt not in (0, n) or case.n_gen > n or case.n_depth % n:
            return (
                f"llama-sweep-bench with -ub {n} measures pp{n} and at most tg{n}, at depths that {n} divides, "
                f"not {case.name}"
            )
        return ""

    def options(self, case: Case, warmup: bool) -> list[str]:
        """Return the options of the test, without those of ``SETTINGS``."""
        n_ctx = case.n_depth + 2 * case.n_ubatch  # room for the warm-up batch, which occupies an empty context
        given: dict[str, object] = {"-c": n_ctx, "-ub": case.n_ubatch, "-n": case.n_gen or 1}
        given["--output-format"] = "jsonl"
        if self.stride and case.n_depth:
            given["--sweep-stride"] = case.n_depth // case.n_ubatch
        warm = ["-wb"] if self.warm else []
        return [*_words(given), *(warm if warmup else ["--no-warmup"])]

    def read(self, case: Case, done: "subprocess.CompletedProcess[str]") -> Record:
        """Return fields of the record, one ``samples_ns`` among them; ValueError for unusable output."""
        rows = _objects(done.stdout + "\n" + done.stderr, "n_kv", "pp", "tg", "t_pp", "t_tg")
        row = next((row for row in rows if row["n_kv"] == case.n_depth), None)
        if row is None:
            raise ValueError(f"printed no row of llama-sweep-bench for n_kv {case.n_depth}, but {len(rows)} others")
        part, wanted = ("pp", case.n_prompt) if case.n_prompt else ("tg", case.n_gen)
        if row[part] != wanted:
            raise ValueError(f"measured {part} = {row[part]} instead of {wanted}")
        samples = [round(1e9 * row[f"t_{part}"])]
        return {"cpu_info": cpu_name(), "model_filename": case.model_filename} | row | {"samples_ns": samples}


@dataclass(frozen=True)
class Program:
    """A program to compare with."""

    label: str  # in tables
    path: Path
    arguments: tuple[str, ...]  # in every test, before the test's own options
    dialect: Dialect
    group: str  # shares a column of ratios, which shows the fastest program

    def command(self, case: Case, warmup: bool) -> list[str]:
        """Return the command that runs a case once."""
        settings = {option: getattr(case, field) for option, (_, field) in SETTINGS.items() if not self._own(option)}
        given = {"-m": case.model_filename} | settings
        return [str(self.path), *_words(given), *self.arguments, *self.dialect.options(case, warmup)]

    def _own(self, option: str) -> str:
        """Return the program's own value of a setting, or an empty list."""
        names = (option, SETTINGS[option][0])
        return next((value for name, value in pairwise(self.arguments) if name in names), "")

    def measure(self, case: Case, warmup: bool) -> Record:
        """Run a case once; returns the known fields of a record, and ``samples_ns``."""
        if reason := self.dialect.unable(case):
            raise RuntimeError(reason)
        done = _run(self.command(case, warmup), self.path)
        if done.returncode:
            raise RuntimeError(_ending(done))
        try:
            types = {"type_k": self._own("-ctk") or case.type_k, "type_v": self._own("-ctv") or case.type_v}
            return types | self.dialect.read(case, done)
        except ValueError as wrong:
            raise RuntimeError(f"{self.path.name} {wrong}") from wrong


# ---- which programs ----


def program(text: str) -> Program:
    """Return the program of ``"LABEL=PATH ARGUMENTS"``; its kind is detected from ``--help``."""
    label, _, command = (part.strip() for part in text.partition("="))
    try:
        words = shlex.split(command)
    except ValueError as reason:
        raise ValueError(f"--vs {text!r}: {reason}") from reason
    if not label or not words:
        raise ValueError(f"--vs {text!r} is not LABEL=PATH or 'LABEL=PATH ARGUMENTS', as in {EXAMPLE}")
    if taken := RESERVED.intersection(words[1:]):
        raise ValueError(f"--vs {label}: {min(taken)} is set for all programs and cannot be an argument of one")
    path = Path(words[0]).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"--vs {label}: there is no program {path}")
    path = path.absolute()
    return Program(label, path, tuple(words[1:]), _dialect(label, path), label)


def _dialect(label: str, path: Path) -> Dialect:
    try:
        done = _run([str(path), "--help"], path)
    except RuntimeError as refused:
        raise ValueError(f"--vs {label}: {refused}") from refused
    help = done.stdout + done.stderr
    if "--n-gen" in help:
        return LlamaBench("--n-depth" in help, ("--no-warmup",) if "--no-warmup" in help else ("-w", "0"))
    if "sweep-bench" in help:
        return SweepBench("--sweep-stride" in help, "--warmup-batch" in help)
    reason = _ending(done) if done.returncode else "its --help names neither --n-gen nor sweep-bench"
    raise ValueError(f"--vs {label}: {path} is neither llama-bench nor llama-sweep-bench: {reason}")


def stock_program(path: Path, flash_attn: int) -> Program:
    """Return the llama-bench of unpatched llama.cpp, run with ``-fa``; these form one group."""
    return Program(f"llama.cpp, fa {flash_attn}", path, ("-fa", str(flash_attn)), LlamaBench(), STOCK_GROUP)


def find_stock(path: str | None) -> Path:
    """Return unpatched llama.cpp's llama-bench: ``path``, LCTX_STOCK_BENCH, or what ``make tools-stock`` builds."""
    found = Path(path or os.environ.get(STOCK_VARIABLE) or STOCK)
    if not found.is_file():
        raise FileNotFoundError(
            f"--vs-stock needs the llama-bench of unpatched llama.cpp, but {found} does not exist: build it with "
            f"'make tools-stock' in the source tree, or set another with --stock or {STOCK_VARIABLE}"
        )
    return found.absolute()


# ---- processes and what they print ----


def clean_environment() -> dict[str, str]:
    """Return the environment without LCTX_METHOD, since the command line sets the method."""
    return {name: value for name, value in os.environ.items() if name != "LCTX_METHOD"}


def _run(command: Sequence[str], path: Path) -> "subprocess.CompletedProcess[str]":
    environment = clean_environment()
    paths = (str(path.resolve().parent), environment.get("LD_LIBRARY_PATH"))
    environment["LD_LIBRARY_PATH"] = os.pathsep.join(folder for folder in paths if folder)
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, env=environment,
            check=False,
        )  # fmt: skip
    except OSError as reason:
        raise RuntimeError(f"{path} cannot be run: {reason.strerror}") from reason


def _ending(done: "subprocess.CompletedProcess[str]") -> str:
    """Return why a program failed: its last output line, and the signal, if any."""
    code = done.returncode
    lines = done.stderr.strip().splitlines()
    if code < 0:
        return f"ended by {signal.Signals(-code).name}" + (f": {lines[-1]}" if lines else "")
    return lines[-1] if lines else f"ended with status {code}"


def _words(options: Mapping[str, object]) -> list[str]:
    return [str(word) for option in options.items() for word in option]


def _objects(text: str, *fields: str) -> list[Record]:
    """Return the JSON objects with these fields, ignoring other output."""
    decoder, found, position = json.JSONDecoder(), [], 0
    while (start := text.find("{", position)) >= 0:
        position = start + 1
        with suppress(json.JSONDecodeError):
            value, position = decoder.raw_decode(text, start)
            if value.keys() >= set(fields):
                found.append(value)
    return found


def _first_words(text: str) -> str:
    return next((line.strip()[:80] for line in text.splitlines() if line.strip()), "")


def _backends(result: Record) -> str:
    """Return the backends, which older versions of llama-bench report in separate fields."""
    names = ("cuda", "vulkan", "metal", "sycl", "rpc", "blas")
    return ",".join(name.upper() for name in names if result.get(name) in (True, "1")) or "CPU"
