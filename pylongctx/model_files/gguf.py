"""Checks of a GGUF file for values with which llama.cpp aborts or hangs instead of returning an error.

The header is first read within bounds (``gguf_reader.py``), since llama.cpp spends memory and time on whatever it
declares. Its values are checked in ``gguf_checks.py``. llama.cpp itself checks the data after the header.
"""

import mmap
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from pylongctx._lib import error, lib
from pylongctx.errors import ModelRefused
from pylongctx.model_files.gguf_checks import ALIGNMENT, STRING, Header, problems
from pylongctx.model_files.gguf_reader import Damaged, Reader

ADAPTER_KINDS = {
    "general.type": STRING,
    "general.architecture": STRING,
    "adapter.type": STRING,
    "adapter.lora.alpha": 6,  # f32
}
MAX_ALPHA = 1e6
MAX_SHARDS = 2**16 - 1
SPLIT_NAME = re.compile(r"(.*)-\d{5}-of-\d{5}\.gguf", re.DOTALL)

FileId = tuple[int, ...]


@dataclass(frozen=True)
class FileLayout:
    """The layout of a file.

    Attributes
    ----------
    n_split : int
        Number of files of the model, if this is the first one.
    starts : dict
        Offset of the data of each tensor in the file, by name.
    header : int
        Bytes before the data of all tensors.
    """

    n_split: int
    starts: dict[str, int]
    header: int


_layouts: dict[FileId, FileLayout] = {}  # of valid files
_good: set[tuple[FileId, str]] = set()  # valid files and overrides


def check_gguf(path: str, overrides: Mapping[str, Any] | None = None) -> None:
    """Raise ModelRefused when loading or running a model would crash or hang the process.

    Parameters
    ----------
    path : str
        The file, or the first of several.
    overrides : mapping or None
        Values that override metadata of the file, by key.
    """
    layout = _checked(path, overrides or {})
    for other in shards(path, layout.n_split)[1:] if layout else ():
        if _checked(other, {}) is None:
            return


def _checked(path: str, overrides: Mapping[str, Any]) -> FileLayout | None:
    """Return the layout of a valid file; None for one that llama.cpp itself refuses."""
    try:
        with _opened(path) as (identity, data):
            if (identity, repr(overrides)) in _good:
                return _layouts[identity]
            header = Reader(data).header()
    except Damaged as reason:
        raise _refused(path, f"its header is damaged: {reason}") from None
    except (OSError, ValueError):
        return None  # missing, empty, or not a GGUF file
    wrong = [*_of_other_type(header, overrides), *problems(overridden(header, overrides))]
    if wrong:
        raise _refused(path, "; ".join(wrong[:3]))
    _layouts[identity] = _layout(header)
    _good.add((identity, repr(overrides)))
    return _layouts[identity]


def overridden(header: Header, overrides: Mapping[str, Any]) -> Header:
    """Return a header with the overrides applied."""
    values = {key: value.encode() if isinstance(value, str) else value for key, value in overrides.items()}
    return replace(header, meta=header.meta | values)


def _of_other_type(header: Header, overrides: Mapping[str, Any]) -> Iterator[str]:
    """Yield overrides that llama.cpp would ignore because the file has another type."""
    names = {bool: "a bool", int: "an int", float: "a float", bytes: "a text", str: "a text", list: "a list"}
    for key, value in overrides.items():
        was, given = (names[type(one)] for one in (header.meta.get(key, value), value))
        if was == "a list":
            yield f"{key} is a list, which kv_overrides cannot replace"
        elif was != given:
            yield f"{key} is {was} in the file, but kv_overrides has {given}, {value!r}"


@contextmanager
def _opened(path: str) -> Iterator[tuple[FileId, mmap.mmap]]:
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield file_id(os.fstat(file.fileno())), data


def _refused(path: str, reason: str) -> ModelRefused:
    return ModelRefused(f"{path} cannot be used: {reason}", lib.LCTX_INVALID)


def file_id(found: os.stat_result) -> FileId:
    """Return an identity that changes when a file is written or replaced, since every write changes its ctime."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def layout_of(path: str) -> FileLayout:
    """Return the layout of a file; InvalidInput when it cannot be read as GGUF."""
    try:
        with _opened(path) as (identity, data):
            return _layouts.get(identity) or _layout(Reader(data).header())
    except (OSError, ValueError) as reason:
        raise error(lib.LCTX_INVALID, f"{path} cannot be read as GGUF file: {reason}") from None


def shards(path: str, n: int) -> list[str]:
    """Return the paths of all n files of a split model, as llama.cpp names them."""
    name = SPLIT_NAME.fullmatch(path)
    if not 1 < n <= MAX_SHARDS or not name:
        return [path]  # llama.cpp opens no other file
    return [f"{name[1]}-{i:05d}-of-{n:05d}.gguf" for i in range(1, n + 1)]


def header_of(path: str) -> Header:
    """Return the metadata and tensors of a file; InvalidInput when it cannot be read as GGUF."""
    try:
        with _opened(path) as (_, data):
            return Reader(data).header()
    except (OSError, ValueError) as reason:
        raise error(lib.LCTX_INVALID, f"{path} cannot be read as GGUF file: {reason}") from None


def check_adapter(path: str) -> None:
    """Raise InvalidInput when loading the file as a LoRA adapter would crash or hang the process."""
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


def _layout(header: Header) -> FileLayout:
    alignment = _positive(header, "general.alignment", ALIGNMENT)
    start = -(-header.end // alignment) * alignment
    starts = {tensor.name: start + tensor.offset for tensor in header.tensors}
    return FileLayout(_positive(header, "split.count", 1), starts, start)


def _positive(header: Header, key: str, otherwise: int) -> int:
    """Return an integer of the file, or a default for another type, which llama.cpp refuses itself."""
    value = header.meta.get(key)
    return value if type(value) is int and value > 0 else otherwise
