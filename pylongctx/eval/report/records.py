"""The records of a folder, and their labels in tables and plots."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from pylongctx.eval.runner import Results
from pylongctx.eval.scorers import mean
from pylongctx.eval.task import Record
from pylongctx.methods import METHODS, Method, named
from pylongctx.models import embedded_model

RECORDS, ABOUT, FAILED = "records.jsonl", "about.json", "failed.json"
SCORES = ("strict", "string_match", "score")  # the relevant score, by kind of task
READ_ALL = {name for name, method in METHODS.items() if method.reads_all}


@dataclass(frozen=True)
class Evidence:
    """The content of a folder."""

    records: list[Record]  # one per sample
    about: dict[str, Any] = field(default_factory=dict)  # command, machine, trained length by model
    failed: list[dict[str, Any]] = field(default_factory=list)  # what failed, with the reasons

    @property
    def models(self) -> list[str]:
        """The models in order, with the embedded one last."""
        return sorted(dict.fromkeys(record["model"] for record in self.records), key=is_embedded)

    def trained(self, model: str) -> int | None:
        """Return the trained length of a model; None if unknown."""
        found: int | None = self.about.get("models", {}).get(model)
        return found

    def of(self, model: str) -> Evidence:
        """Return the records of one model."""
        return Evidence([r for r in self.records if r["model"] == model], self.about, [])


def is_embedded(model: str) -> bool:
    """Return True for the embedded model, whose numbers only verify the methods."""
    return model == embedded_model().name


def load(folder: str | Path) -> Evidence:
    """Return all records of a folder's ``.jsonl`` files without duplicates."""
    files = sorted(Path(folder).glob("*.jsonl"))
    records = {name: record for file in files for name, record in Results(str(file)).records.items()}
    if not records:
        raise ValueError(f"{folder} has no records; create them with pylongctx matrix FILE.toml --out {folder}")
    about = _json(folder, ABOUT, {})
    return Evidence(in_order(records.values(), about.get("methods", [])), about, _json(folder, FAILED, []))


def in_order(records: Iterable[Record], names: Iterable[str]) -> list[Record]:
    """Return records sorted by the order of their methods' labels; unknown ones come last."""
    places = {name: place for place, name in enumerate(dict.fromkeys(names))}
    return sorted(records, key=lambda record: places.get(label(record), len(places)))


def _json(folder: str | Path, name: str, default: Any) -> Any:
    file = Path(folder) / name
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else default


# ---- names ----


def label(record: Record) -> str:
    """Return method, RoPE scaling, KV types, compression ratio and where K and V are, leaving out defaults."""
    types, kept, place = kv_types(record), record.get("compress", 1), record.get("kv_offload")
    more = [types] * (types != "f16") + [f"{100 * kept:g}%"] * (kept < 1) + [f"on {place}"] * (place is not None)
    return " ".join([method_name(record), *more])


def method_name(record: Record) -> str:
    """Return method and RoPE scaling; a scaling alone implies full attention."""
    asked, rope = short(record["asked"]), record.get("rope", "")
    return (f"{asked}@{rope}" if rope else asked).removeprefix("full@")


def kv_types(record: Record) -> str:
    """Return the types of K and V, as one word if they are equal."""
    return "/".join(dict.fromkeys((record["type_k"], record["type_v"])))


def short(spec: str) -> str:
    """Return a spec string without options at their defaults."""
    method = named(spec)
    return "+".join(map(_short, method.parts)) if method else spec


def _short(part: Method) -> str:
    changed = (option.name for option in fields(part) if getattr(part, option.name) != option.default)
    return ",".join([part.name, *(f"{name}={getattr(part, name)}" for name in changed)])


def is_full(record: Record) -> bool:
    """Return True if every token is read, as in the papers' groups of methods."""
    return record["asked"].split(",")[0] in READ_ALL and "+" not in record["asked"]


def has_score(record: Record) -> bool:
    """Return True if a record has an answer."""
    return any(name in record for name in SCORES)


def score(record: Record) -> float:
    """Return the relevant score, 0 to 1."""
    return float(next(record[name] for name in SCORES if name in record))


# ---- groups ----


def grouped(records: Iterable[Record], *keys: str | Callable[[Record], Any]) -> dict[Any, list[Record]]:
    """Group records by a key or a tuple of keys, in the order of first records."""
    found: dict[Any, list[Record]] = {}
    for record in records:
        values = tuple(record[key] if isinstance(key, str) else key(record) for key in keys)
        found.setdefault(values if len(keys) > 1 else values[0], []).append(record)
    return found


def perplexity(records: Iterable[Record]) -> float:
    """Return the perplexity of all scored tokens."""
    parts = [(record["nll"], record["n_scored"]) for record in records]
    value = sum(nll for nll, _ in parts) / sum(n for _, n in parts)
    return math.exp(value) if value < 700 else math.inf


def measure(record: Record) -> str:
    """Return how a perplexity was measured."""
    return f"{record['mode']}, stride {record['stride']}" if "stride" in record else str(record["mode"])


def mean_of(key: str) -> Callable[[list[Record]], float]:
    """Return a function that averages a field of the records."""
    return lambda records: mean(record[key] for record in records)


def mean_score(records: list[Record]) -> float:
    """Return the mean score in percent."""
    return 100 * mean(map(score, records))


def labels(records: Iterable[Record]) -> list[str]:
    """Return all labels, with those that read every token first."""
    found = {label(record): is_full(record) for record in records}
    return sorted(found, key=lambda name: not found[name])
