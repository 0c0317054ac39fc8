"""Read the files of benchmarks: errors name the file, the line and the field."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from pylongctx._log import LOG

Kind = type | tuple[type, ...]
Row = dict[str, Any]
NAMES = {str: "a string", int: "a number", float: "a number", list: "a list", dict: "an object", bool: "true or false"}


def read_rows(path: str | Path, fields: Mapping[str, Kind], hint: str, skip_broken: bool = False) -> list[Row]:
    """Return the objects of a file of JSON lines, or of a JSON list; a name that ends with ``.gz`` is compressed.

    Parameters
    ----------
    path : str or Path
        The file; in ``.json`` there is one list, otherwise one object per line.
    fields : mapping of str to type
        What every object must have.
    hint : str
        What to name instead, when there is no such file.
    skip_broken : bool
        Leave out lines that are not JSON, with a warning.

    Raises
    ------
    ValueError
        When there is no such file, or a line is not JSON or lacks a field; names the line and the field.

    Examples
    --------
    >>> Path("rows.jsonl").write_text('{"input": "x"}')
    14
    >>> read_rows("rows.jsonl", {"input": str}, "--data is a file of JSON lines")
    [{'input': 'x'}]
    >>> read_rows("rows.jsonl", {"outputs": list}, "")
    Traceback (most recent call last):
    ValueError: rows.jsonl, line 1: there is no field 'outputs'; it has input
    """
    if str(path).removesuffix(".gz").endswith(".json"):
        found = read_json(path, hint)
        if not isinstance(found, list):
            raise ValueError(f"{path} holds {_name(found)}, not a list of objects")
        numbered = [(f"{path}, item {i}", row) for i, row in enumerate(found, 1)]
    else:
        numbered = _lines(Path(path), _text(path, hint), skip_broken)
    return [check_fields(row, fields, where) for where, row in numbered]


def _lines(path: Path, text: str, skip_broken: bool) -> list[tuple[str, Any]]:
    found = []
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines: texts hold other line separators
        where = f"{path}, line {number}"
        try:
            if line.strip():
                found.append((where, json.loads(line)))
        except json.JSONDecodeError as reason:
            if not skip_broken:
                raise ValueError(f"{where}, column {reason.colno}, is not JSON: {reason.msg}") from None
            LOG.warning("%s is left out, it is not JSON: %s in column %d", where, reason.msg, reason.colno)
    return found


def read_json(path: str | Path, hint: str) -> Any:
    """Return the content of a JSON file.

    Raises
    ------
    ValueError
        When there is no such file or it is not JSON.

    Examples
    --------
    >>> read_json("nothing.json", "--data is SQuAD's JSON file")
    Traceback (most recent call last):
    ValueError: nothing.json does not exist; --data is SQuAD's JSON file
    """
    try:
        return json.loads(_text(path, hint))
    except json.JSONDecodeError as reason:
        where = f"{path}, line {reason.lineno}, column {reason.colno}"
        raise ValueError(f"{where}, is not JSON: {reason.msg}") from None


def read_lines(path: str | Path, hint: str) -> list[str]:
    """Return the lines of a text file.

    Raises
    ------
    ValueError
        When there is no such file.
    """
    return _text(path, hint).rstrip("\n").split("\n")


def _text(path: str | Path, hint: str) -> str:
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"{file} does not exist; {hint}")
    try:
        data = file.read_bytes()
        return (gzip.decompress(data) if file.suffix == ".gz" else data).decode("utf-8")
    except (EOFError, gzip.BadGzipFile, UnicodeDecodeError) as reason:
        raise ValueError(f"{file} cannot be read: {reason}; {hint}") from None


def check_fields(row: Any, fields: Mapping[str, Kind], where: str) -> Row:
    """Return an object that has fields of certain types.

    Raises
    ------
    ValueError
        When it is not an object, or a field is missing or of another type.

    Examples
    --------
    >>> check_fields({"input": 1}, {"input": str}, "quality.jsonl, line 1")
    Traceback (most recent call last):
    ValueError: quality.jsonl, line 1: the field 'input' is a number, not a string
    """
    if not isinstance(row, dict):
        raise ValueError(f"{where}: it is {_name(row)}, not an object with {', '.join(fields)}")
    for field, kind in fields.items():
        if field not in row:
            raise ValueError(f"{where}: there is no field {field!r}; it has {', '.join(row) or 'none'}")
        if not isinstance(row[field], kind):
            wanted = " or ".join(NAMES[one] for one in (kind if isinstance(kind, tuple) else (kind,)))
            raise ValueError(f"{where}: the field {field!r} is {_name(row[field])}, not {wanted}")
    return row


def _name(value: Any) -> str:
    return NAMES.get(type(value), "null")


def stem(path: str | Path) -> str:
    """Return the name of a file without its endings.

    Examples
    --------
    >>> stem("data/kv-retrieval-75_keys.jsonl.gz")
    'kv-retrieval-75_keys'
    """
    return Path(str(path).removesuffix(".gz")).stem


def after_context(template: str) -> str:
    """Return the part of a benchmark's prompt after the text, which asks about it.

    Examples
    --------
    >>> after_context("Read this. {context}\\nQuestion: {query}")
    '\\nQuestion: {query}'
    """
    return template.rpartition("{context}")[2]


@cache
def published(benchmark: str) -> dict[str, Any]:
    """Return published data of a benchmark's tasks, by name: prompts, longest answers, labels.

    Examples
    --------
    >>> published("ruler")["qa"]["tokens_to_generate"]
    32
    """
    file = resources.files("pylongctx.eval") / "data" / f"{benchmark}.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["tasks"]
    return found
