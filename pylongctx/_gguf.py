"""Checks of a GGUF file for what makes llama.cpp end the process, or never end, instead of refusing the file.

The header is read within bounds first (``_gguf_reader.py``), since llama.cpp takes memory and time for whatever it
announces. What a file may say is checked in ``_gguf_checks.py``. llama.cpp itself checks the data behind the header.
"""

import mmap
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from pylongctx._gguf_checks import ALIGNMENT, STRING, Header, problems
from pylongctx._gguf_reader import Damaged, Reader
from pylongctx._lib import error, lib
from pylongctx.errors import ModelRefused

ADAPTER_KINDS = {
    "general.type": STRING,
    "general.architecture": STRING,
    "adapter.type": STRING,
    "adapter.lora.alpha": 6,  # f32
}
MAX_ALPHA = 1e6
MOST_SHARDS = 2**16 - 1
SPLIT_NAME = re.compile(r"(.*)-\d{5}-of-\d{5}\.gguf", re.DOTALL)

FileId = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Where things are in a file.

    Attributes
    ----------
    n_split : int
        How many files the model has, when this is its first.
    starts : dict
        Where in the file the data of each tensor begins, by name.
    header : int
        Bytes before the data of all tensors.
    """

    n_split: int
    starts: dict[str, int]
    header: int


_layouts: dict[FileId, Layout] = {}  # of files that are good
_good: set[tuple[FileId, str]] = set()  # with which overrides


def check_gguf(path: str, overrides: Mapping[str, Any] | None = None) -> None:
    """Raise ModelRefused when loading the files of a model, or running it, would end the process or not come back.

    Parameters
    ----------
    path : str
        The file, or the first of several.
    overrides : mapping or None
        Values in the place of the file's, by key.
    """
    layout = _checked(path, overrides or {})
    for other in shards(path, layout.n_split)[1:] if layout else ():
        if _checked(other, {}) is None:
            return


def _checked(path: str, overrides: Mapping[str, Any]) -> Layout | None:
    """Return the layout of a good file; None for one that llama.cpp refuses at once."""
    try:
        with _opened(path) as (identity, data):
            if (identity, repr(overrides)) in _good:
                return _layouts[identity]
            header = Reader(data).header()
    except Damaged as reason:
        raise _refused(path, f"its header is damaged: {reason}") from None
    except (OSError, ValueError):
        return None  # there is none, it is empty or no GGUF file
    wrong = [*_of_other_type(header, overrides), *problems(overridden(header, overrides))]
    if wrong:
        raise _refused(path, "; ".join(wrong[:3]))
    _layouts[identity] = _layout(header)
    _good.add((identity, repr(overrides)))
    return _layouts[identity]


def overridden(header: Header, overrides: Mapping[str, Any]) -> Header:
    """Return a header with other values of some keys."""
    values = {key: value.encode() if isinstance(value, str) else value for key, value in overrides.items()}
    return replace(header, meta=header.meta | values)


def _of_other_type(header: Header, overrides: Mapping[str, Any]) -> Iterator[str]:
    """Yield what llama.cpp would ignore: values of another type than that of the file."""
    names = {bool: "a bool", int: "an int", float: "a float", bytes: "a text", str: "a text", list: "a list"}
    for key, value in overrides.items():
        was, given = (names[type(one)] for one in (header.meta.get(key, value), value))
        if was == "a list":
            yield f"{key} is a list, of which kv_overrides can replace nothing"
        elif was != given:
            yield f"{key} is {was} in the file, and kv_overrides has {given}, {value!r}"


@contextmanager
def _opened(path: str) -> Iterator[tuple[FileId, mmap.mmap]]:
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield file_id(os.fstat(file.fileno())), data


def _refused(path: str, reason: str) -> ModelRefused:
    return ModelRefused(f"{path} cannot be used: {reason}", lib.LCTX_INVALID)


def file_id(found: os.stat_result) -> FileId:
    """Return what changes when a file is written or replaced: no program can write one and keep its ctime."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def layout_of(path: str) -> Layout:
    """Return where things are in a file; InvalidInput when it cannot be read as GGUF."""
    try:
        with _opened(path) as (identity, data):
            return _layouts.get(identity) or _layout(Reader(data).header())
    except (OSError, ValueError) as reason:
        raise error(lib.LCTX_INVALID, f"{path} cannot be read as GGUF file: {reason}") from None


def shards(path: str, n: int) -> list[str]:
    """Return the paths of all files of a model, whose first has ``split.count`` n; named as llama.cpp names them."""
    name = SPLIT_NAME.fullmatch(path)
    if not 1 < n <= MOST_SHARDS or not name:
        return [path]  # of the others llama.cpp opens none
    return [f"{name[1]}-{i:05d}-of-{n:05d}.gguf" for i in range(1, n + 1)]


def header_of(path: str) -> Header:
    """Return metadata and tensors of a file; InvalidInput when it cannot be read as GGUF."""
    try:
        with _opened(path) as (_, data):
            return Reader(data).header()
    except (OSError, ValueError) as reason:
        raise error(lib.LCTX_INVALID, f"{path} cannot be read as GGUF file: {reason}") from None


def check_adapter(path: str) -> None:
    """Raise InvalidInput when loading the file as a LoRA adapter would end the process or not come back."""
    try:
        with _opened(path) as (_, data):
            header = Reader(data).header()
            wrong = next(_wrong_kinds(Reader(data)), None)
    except Damaged as reason:
        raise _refused(path, f"its header is damaged: {reason}") from None
    except (OSError, ValueError):
        return
    if wrong:
        raise _refused(path, f"the value of {wrong} has the wrong type")
    alpha = header.meta.get("adapter.lora.alpha", 1.0)
    if not abs(alpha) <= MAX_ALPHA:
        raise _refused(path, f"adapter.lora.alpha must be from {-MAX_ALPHA:g} to {MAX_ALPHA:g}, not {alpha:g}")


def _wrong_kinds(reader: Reader) -> Iterator[str]:
    _, n_meta = reader.counts()
    for _ in range(n_meta):
        key, kind = reader.key()
        reader.value(kind)
        if kind != ADAPTER_KINDS.get(key, kind):
            yield key


def _layout(header: Header) -> Layout:
    alignment = _positive(header, "general.alignment", ALIGNMENT)
    start = -(-header.end // alignment) * alignment
    starts = {tensor.name: start + tensor.offset for tensor in header.tensors}
    return Layout(_positive(header, "split.count", 1), starts, start)


def _positive(header: Header, key: str, otherwise: int) -> int:
    """Return an integer of the file; what is none is refused by llama.cpp, whatever stands for it here."""
    value = header.meta.get(key)
    return value if type(value) is int and value > 0 else otherwise
