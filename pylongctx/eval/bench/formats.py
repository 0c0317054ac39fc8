"""The output formats of llama-bench: md, csv, json, jsonl and sql, record by record."""

import csv
import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import IO, Any

from pylongctx._units import bytes_text
from pylongctx.eval.bench.case import label
from pylongctx.eval.bench.record import FIELDS, SAMPLES, Record


class Printer:
    """Writes records to a file one by one.

    Attributes
    ----------
    head, between, foot : str
        Texts before, between and after the records.
    """

    head = between = foot = ""

    def __init__(self, file: IO[str], columns: Collection[str] = ()) -> None:
        self.file = file
        self.columns = columns
        self.count = 0

    def start(self) -> None:
        """Write the text before the records."""
        self._write(self.head)

    def add(self, record: Record) -> None:
        """Write one record."""
        self._write((self.between if self.count else "") + self.format(record))
        self.count += 1

    def stop(self) -> None:
        """Write the text after the records."""
        self._write(self.foot)

    def format(self, record: Record) -> str:
        """Return the text of one record."""
        raise NotImplementedError

    def _write(self, text: str) -> None:
        self.file.write(text)
        self.file.flush()


class JSON(Printer):
    """A list of objects, including samples."""

    head, between, foot = "[\n", ",\n", "\n]\n"

    def format(self, record: Record) -> str:
        """Return the text of one record."""
        lines = (f"    {json.dumps(name)}: {json.dumps(value)}" for name, value in _published(record).items())
        return "  {\n" + ",\n".join(lines) + "\n  }"


class JSONL(Printer):
    """One object per line, including samples."""

    def format(self, record: Record) -> str:
        """Return the text of one record."""
        return json.dumps(_published(record)) + "\n"


def _published(record: Record) -> Record:
    return {name: record[name] for name in (*FIELDS, *SAMPLES) if name in record}


class CSV(Printer):
    """A header and quoted values; unknown ones are empty."""

    head = ",".join(FIELDS) + "\n"

    def format(self, record: Record) -> str:
        """Return the text of one record."""
        line = _Line()
        csv.writer(line, quoting=csv.QUOTE_ALL, lineterminator="\n").writerow(_plain(record))
        return line.text


class _Line:
    """A buffer for a line of the csv module."""

    text = ""

    def write(self, text: str) -> None:
        self.text += text


class SQL(Printer):
    """A table ``llama_bench``, for sqlite3."""

    _types = {str: "TEXT", bool: "INTEGER", int: "INTEGER", float: "REAL"}
    head = (
        "CREATE TABLE IF NOT EXISTS llama_bench (\n"
        + ",\n".join(f"  {name} {kind}" for name, kind in zip(FIELDS, map(_types.get, FIELDS.values()), strict=True))
        + "\n);\n\n"
    )

    def format(self, record: Record) -> str:
        """Return the text of one record."""
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

    def format(self, record: Record) -> str:
        """Return the text of one record."""
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
