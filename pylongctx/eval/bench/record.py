"""Test cases of a benchmark, their records in llama-bench's form, and the formats that are printed."""

import csv
import json
import os
import re
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from io import StringIO
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import IO, Any

from pylongctx._platform import usable_cpus
from pylongctx._units import bytes_text
from pylongctx.catalog import resolve


@dataclass(frozen=True)
class Case:
    """One test of one model, without the engine that runs it. The names are those of llama-bench's fields."""

    model_filename: str
    n_prompt: int
    n_gen: int
    n_depth: int = 0
    n_batch: int = 2048
    n_ubatch: int = 512
    n_threads: int = 1
    type_k: str = "f16"
    type_v: str = "f16"
    n_gpu_layers: int = 0
    load_mode: str = "auto"

    @property
    def name(self) -> str:
        """llama-bench's name of the test, such as ``"pp512 @ d16384"``."""
        return label(self.n_prompt, self.n_gen, self.n_depth)

    @property
    def n_ctx(self) -> int:
        """The tokens that the test evaluates."""
        return self.n_prompt + self.n_gen + self.n_depth


def label(n_prompt: int, n_gen: int, n_depth: int) -> str:
    """Return llama-bench's name of a test."""
    parts = ([f"pp{n_prompt}"] if n_prompt else []) + ([f"tg{n_gen}"] if n_gen else [])
    return "+".join(parts) + (f" @ d{n_depth}" if n_depth else "")


def model_file(name: str) -> str:
    """Return the file of a model, as ``catalog.resolve``."""
    if name.startswith("random:"):
        program = f"python bench/geometries.py {name.removeprefix('random:')}"
        raise ValueError(f"{name}: models with random weights are written by '{program}' of the repository, as a file")
    return resolve(name)


def pair(text: str) -> tuple[int, int]:
    """Return the tokens of a prompt and of a generation, given as ``"512,128"``."""
    match = re.fullmatch(r"(\d+),(\d+)", text)
    if not match:
        raise ValueError(f"{text!r} is not a pair such as 512,128")
    return int(match[1]), int(match[2])


def wanted(
    prompts: Sequence[int], generations: Sequence[int], pairs: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Return (n_prompt, n_gen) of every test, in the order of llama-bench; tests with 0 tokens are skipped."""
    every = [*((p, 0) for p in prompts), *((0, n) for n in generations), *pairs]
    return [test for test in every if test != (0, 0)]


def cases(tests: Sequence[tuple[int, int]], **values: Sequence[object]) -> list[Case]:
    """Return all combinations of values, fields of ``Case``; the last one changes fastest, then the test."""
    combinations = (dict(zip(values, chosen, strict=True)) for chosen in product(*values.values()))
    return [
        Case(n_prompt=n_prompt, n_gen=n_gen, **fields)  # type: ignore[arg-type]
        for fields in combinations
        for n_prompt, n_gen in tests
    ]


# ---- records ----

# Order and types are those of llama-bench (get_fields and get_field_type in llama-bench.cpp), followed by pylongctx's.
FIELDS = {
    "build_commit": str,
    "build_number": int,
    "cpu_info": str,
    "gpu_info": str,
    "backends": str,
    "model_filename": str,
    "model_type": str,
    "model_size": int,
    "model_n_params": int,
    "n_batch": int,
    "n_ubatch": int,
    "n_threads": int,
    "cpu_mask": str,
    "cpu_strict": bool,
    "poll": int,
    "type_k": str,
    "type_v": str,
    "n_gpu_layers": int,
    "n_cpu_moe": int,
    "split_mode": str,
    "main_gpu": int,
    "no_kv_offload": bool,
    "flash_attn": int,
    "devices": str,
    "tensor_split": str,
    "tensor_buft_overrides": str,
    "load_mode": str,
    "lazy_mode": str,
    "embeddings": bool,
    "no_op_offload": int,
    "no_host": bool,
    "repack": bool,
    "fit_target": int,
    "fit_min_ctx": int,
    "n_prompt": int,
    "n_gen": int,
    "n_depth": int,
    "test_time": str,
    "avg_ns": int,
    "stddev_ns": int,
    "avg_ts": float,
    "stddev_ts": float,
    "method": str,
    "kv_bytes": int,
    "peak_rss": int,
    "ttft_ns": int,
    "error": str,
}
SAMPLES = ("samples_ns", "samples_ts")
# settings without an option in pylongctx
FIXED = {
    "cpu_mask": "0x0",
    "cpu_strict": False,
    "poll": 50,
    "n_cpu_moe": 0,
    "split_mode": "layer",
    "main_gpu": 0,
    "no_kv_offload": False,
    "flash_attn": -1,
    "devices": "auto",
    "tensor_split": "0.00",
    "tensor_buft_overrides": "none",
    "load_mode": "auto",
    "lazy_mode": "auto",
    "embeddings": False,
    "no_op_offload": 0,
    "no_host": False,
    "repack": True,
    "fit_target": 0,
    "fit_min_ctx": 0,
}

Record = dict[str, Any]  # FIELDS, once measured SAMPLES, and "asked": the method before automatic choices


def new_record(case: Case, method: str, facts: Record, error: str = "") -> Record:
    """Return the record of a test that pylongctx ran or refused, with None for unknown fields."""
    from pylongctx import __version__
    from pylongctx._lib import build_info

    build = build_info()
    known = {
        "build_commit": f"pylongctx {__version__} {build['series']}",
        "build_number": 0,
        "cpu_info": cpu_name(),
        "gpu_info": "",
        "backends": ",".join(name for name in build["backends"] if name != "CPU") or "CPU",
        "test_time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "method": method,
        "error": error,
    }
    known |= FIXED | asdict(case) | facts
    return {name: known.get(name) for name in FIELDS} | {"asked": method}


def with_samples(record: Record, samples_ns: Sequence[int]) -> Record:
    """Return the record with the times of repetitions and their statistics, computed as in llama-bench."""
    n_tokens = record["n_prompt"] + record["n_gen"]
    rates = [1e9 * n_tokens / ns for ns in samples_ns]
    times = {
        "avg_ns": int(fmean(samples_ns)),
        "stddev_ns": int(_deviation(samples_ns)),
        "avg_ts": fmean(rates),
        "stddev_ts": _deviation(rates),
    }
    return record | times | {"samples_ns": list(samples_ns), "samples_ts": rates}


def _deviation(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def cpu_name() -> str:
    """Return the CPU's model name from the system."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")


def physical_cores() -> int:
    """Return llama-bench's number of threads: the cores, not the hardware threads, that this process may use."""
    folder = Path("/sys/devices/system/cpu")
    siblings = set()
    usable = usable_cpus() or range(os.cpu_count() or 1)
    for cpu in usable:
        file = folder / f"cpu{cpu}" / "topology" / "thread_siblings"
        siblings.add(file.read_text() if file.exists() else str(cpu))
    return len(siblings)


# ---- formats ----


class Printer:
    """Writes records to a file one by one."""

    head = between = foot = ""  # texts before, between and after the records

    def __init__(self, file: IO[str], columns: Collection[str] = ()) -> None:
        self.file = file
        self.columns = columns
        self.count = 0

    def start(self) -> None:
        """Write the text before the records."""
        self._write(self.head)

    def add(self, record: Record) -> None:
        """Write one record."""
        self._write((self.between if self.count else "") + self._text(record))
        self.count += 1

    def stop(self) -> None:
        """Write the text after the records."""
        self._write(self.foot)

    def _text(self, record: Record) -> str:
        raise NotImplementedError

    def _write(self, text: str) -> None:
        self.file.write(text)
        self.file.flush()


class JSON(Printer):
    """A list of objects, including samples."""

    head, between, foot = "[\n", ",\n", "\n]\n"

    def _text(self, record: Record) -> str:
        lines = (f"    {json.dumps(name)}: {json.dumps(value)}" for name, value in _published(record).items())
        return "  {\n" + ",\n".join(lines) + "\n  }"


class JSONL(Printer):
    """One object per line, including samples."""

    def _text(self, record: Record) -> str:
        return json.dumps(_published(record)) + "\n"


def _published(record: Record) -> Record:
    return {name: record[name] for name in (*FIELDS, *SAMPLES) if name in record}


class CSV(Printer):
    """A header and quoted values; unknown ones are empty."""

    head = ",".join(FIELDS) + "\n"

    def _text(self, record: Record) -> str:
        line = StringIO()
        csv.writer(line, quoting=csv.QUOTE_ALL, lineterminator="\n").writerow(_plain(record))
        return line.getvalue()


class SQL(Printer):
    """A table ``llama_bench``, for sqlite3."""

    _types = {str: "TEXT", bool: "INTEGER", int: "INTEGER", float: "REAL"}
    head = (
        "CREATE TABLE IF NOT EXISTS llama_bench (\n"
        + ",\n".join(f"  {name} {kind}" for name, kind in zip(FIELDS, map(_types.get, FIELDS.values()), strict=True))
        + "\n);\n\n"
    )

    def _text(self, record: Record) -> str:
        values = ", ".join("NULL" if x is None else "'" + str(x).replace("'", "''") + "'" for x in _plain(record))
        return f"INSERT INTO llama_bench ({', '.join(FIELDS)}) VALUES ({values});\n"


def _plain(record: Record) -> list[Any]:
    """Return the values of the fields; llama-bench writes booleans as 0 and 1 except in JSON."""
    values = [record[name] for name in FIELDS]
    return [int(value) if isinstance(value, bool) else value for value in values]


class Markdown(Printer):
    """A table; ``columns`` are additional parameters to show."""

    def start(self) -> None:
        """Write the head of the table."""
        shown = {name: COLUMNS[name] for name in COLUMNS if name in ALWAYS or name in self.columns}
        self._shown = shown
        self._records: list[Record] = []
        names = (f"{title:>{-width}}" if width < 0 else f"{title:<{width}}" for title, width, _ in shown.values())
        rules = (f"{'-' * (abs(width) - 1)}{':' if width < 0 else '-'}" for _, width, _ in shown.values())
        self._write(f"| {' | '.join(names)} |\n| {' | '.join(rules)} |\n")

    def _text(self, record: Record) -> str:
        self._records.append(record)
        cells = ((width, _cell(show, record)) for _, width, show in self._shown.values())
        return f"| {' | '.join(f'{c:>{-width}}' if width < 0 else f'{c:<{width}}' for width, c in cells)} |\n"

    def stop(self) -> None:
        """Write the automatic choices of methods, and the build and machine of the measurements."""
        records = [record for record in self._records if not record["error"]]
        chosen = dict.fromkeys((r["asked"], r["method"]) for r in records if r["asked"] != r["method"])
        builds = dict.fromkeys(f"{r['build_commit']} ({r['build_number']})" for r in records if r["build_commit"])
        machines = dict.fromkeys(r["cpu_info"] for r in records)
        lines = [f"{asked}: {method}" for asked, method in chosen]
        self._write("".join(f"\n{line}\n" for line in [*lines, f"build: {', '.join(builds)}; {', '.join(machines)}"]))


def _cell(show: Callable[[Record], str] | str, record: Record) -> str:
    value = record[show] if isinstance(show, str) else show(record)
    text = "-" if value is None else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def _size(n_bytes: int | None) -> str:
    return "-" if n_bytes is None else bytes_text(n_bytes)


def _params(record: Record) -> str:
    n = record["model_n_params"]
    return "-" if n is None else f"{n / 1e6:.2f} M" if n < 1e9 else f"{n / 1e9:.2f} B"


def _rate(record: Record) -> str:
    if record["avg_ts"] is None:
        return f"refused: {record['error']}"
    return f"{record['avg_ts']:.2f} \u00b1 {record['stddev_ts']:.2f}"


def _first_token(record: Record) -> str:
    return "-" if record["ttft_ns"] is None else f"{record['ttft_ns'] / 1e6:.1f} ms"


# field: title, width (negative: right-aligned), cell format; in llama-bench's order, names and widths
COLUMNS: dict[str, tuple[str, int, Callable[[Record], str] | str]] = {
    "model": ("model", 30, lambda r: r["model_type"] or Path(r["model_filename"]).name),
    "size": ("size", -10, lambda r: _size(r["model_size"])),
    "params": ("params", -10, _params),
    "backends": ("backend", 10, "backends"),
    "n_gpu_layers": ("ngl", -3, "n_gpu_layers"),
    "n_threads": ("threads", -7, "n_threads"),
    "n_batch": ("n_batch", -7, "n_batch"),
    "n_ubatch": ("n_ubatch", -8, "n_ubatch"),
    "type_k": ("type_k", -6, "type_k"),
    "type_v": ("type_v", -6, "type_v"),
    "load_mode": ("lm", 10, "load_mode"),
    "flash_attn": ("fa", -3, "flash_attn"),
    "method": ("method", 20, "asked"),
    "test": ("test", -15, lambda r: label(r["n_prompt"], r["n_gen"], r["n_depth"])),
    "t/s": ("t/s", -20, _rate),
    "kv_bytes": ("KV", -10, lambda r: _size(r["kv_bytes"])),
    "peak_rss": ("peak RSS", -10, lambda r: _size(r["peak_rss"])),
    "ttft_ns": ("TTFT", -11, _first_token),
}
ALWAYS = ("model", "size", "params", "backends", "method", "test", "t/s", "kv_bytes", "peak_rss", "ttft_ns")

FORMATS: dict[str, type[Printer]] = {"csv": CSV, "json": JSON, "jsonl": JSONL, "md": Markdown, "sql": SQL}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with columns of even width."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join(
        f"| {' | '.join(f'{cell:<{width}}' for cell, width in zip(line, widths, strict=True))} |" for line in lines
    )
