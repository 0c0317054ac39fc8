"""Overrides of metadata and of the buffer types of tensors, in the library's form."""

import json
import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

MAX_BYTES = 127  # of a key and of a string in llama.cpp
MAX_INT = 2**32 - 1  # llama.cpp reads no larger integer from a header
MAX_FLOAT = 3.4028234663852886e38  # of f32
EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch)?exps"  # in tensor names

Value = bool | int | float | str


def checked_metadata(given: Mapping[str, Value] | None) -> dict[str, Value]:
    """Return ``kv_overrides`` with plain values.

    Raises TypeError or ValueError when it is not a mapping, or llama.cpp cannot represent a value; the message names
    the key.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"kv_overrides must be a dict of keys and values, not {given!r}")
    return {_short("a key", key): _value(key, value) for key, value in given.items()}


def _value(key: str, value: Any) -> Value:
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        if not 0 <= int(value) <= MAX_INT:
            raise ValueError(f"kv_overrides: {key} must be from 0 to {MAX_INT}, not {value}")
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        if not (math.isfinite(number) and abs(number) <= MAX_FLOAT):
            raise ValueError(f"kv_overrides: {key} must be a finite 32-bit number, not {number}")
        return number
    if isinstance(value, str):
        return _short(f"the text of {key}", value)
    raise TypeError(f"kv_overrides: {key} must be a bool, an int, a float or a str, not {value!r}")


def _short(what: str, text: Any) -> str:
    if not isinstance(text, str):
        raise TypeError(f"kv_overrides: {what} must be a str, not {text!r}")
    size = len(text.encode("utf-8", "surrogateescape"))
    if size > MAX_BYTES or "\0" in text:
        raise ValueError(
            f"kv_overrides: {what} must have at most {MAX_BYTES} bytes and no NUL, not {size}: {text!r:.60}"
        )
    return text


def checked_tensors(given: Mapping[str, str] | None) -> dict[str, str]:
    """Return a checked ``override_tensor``: buffer types by name patterns."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(
        isinstance(one, str) and one for pair in given.items() for one in pair
    ):
        raise TypeError(f"override_tensor must be a dict of patterns and buffer types, not {given!r}")
    return dict(given)


def as_json(metadata: Mapping[str, Value] | None, tensors: Mapping[str, str] | None = None) -> str:
    """Return the overrides as ``lctx_model_load`` reads them; empty for none."""
    found = {name: values for name, values in (("metadata", metadata), ("tensors", tensors)) if values}
    return json.dumps(found) if found else ""


def as_texts(metadata: Mapping[str, Value]) -> dict[str, str]:
    """Return values in llama.cpp's textual form."""
    return {key: _as_text(value) for key, value in metadata.items()}


def _as_text(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:f}" if isinstance(value, float) else str(value)


def first_layers(n: int, pattern: str) -> str:
    """Return a regular expression for tensors of the first ``n`` layers whose other part matches ``pattern``."""
    return rf"^blk\.({'|'.join(map(str, range(n)))}){pattern}"
