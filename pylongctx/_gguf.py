"""Checks of a GGUF file for what makes llama.cpp end the process instead of refusing the file.

llama.cpp itself checks the structure: magic, counts, lengths, sizes and offsets against the file, shapes of tensors.
A file that cannot be read here is left to it, since it says precisely what is wrong. What a file may say is checked in
``_gguf_checks.py``.
"""

import mmap
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pylongctx._gguf_checks import ALIGNMENT, ARRAY, SCALARS, STRING, Header, Tensor, problems
from pylongctx._lib import error, lib

ADAPTER_KINDS = {
    "general.type": STRING,
    "general.architecture": STRING,
    "adapter.type": STRING,
    "adapter.lora.alpha": 6,  # f32
}
MOST_LAYERS = 4096  # numbers of an array that are looked at: those of layers
UNREADABLE = (OSError, ValueError, KeyError, OverflowError, MemoryError, struct.error)

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


_good: dict[FileId, Layout] = {}


def check_gguf(path: str) -> None:
    """Raise InvalidInput when loading the file, or running the model, would end the process."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            identity = file_id(os.fstat(file.fileno()))
            if identity in _good:
                return
            header = _read(data)
    except UNREADABLE:
        return  # cut off or no GGUF file: refused by llama.cpp
    if wrong := list(problems(header)):
        raise error(lib.LCTX_INVALID, f"{path} cannot be used: {'; '.join(wrong[:3])}")
    _good[identity] = _layout(header)


def file_id(found: os.stat_result) -> FileId:
    """Return what changes when a file is written or replaced: no program can write one and keep its ctime."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def layout_of(path: str) -> Layout:
    """Return where things are in a file; InvalidInput when it cannot be read as GGUF."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _good.get(file_id(os.fstat(file.fileno()))) or _layout(_read(data))
    except UNREADABLE as reason:
        raise error(lib.LCTX_INVALID, f"{path} cannot be read as GGUF file: {reason}") from None


def header_of(path: str) -> Header:
    """Return metadata and tensors of a file; InvalidInput when it cannot be read as GGUF."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(data)
    except UNREADABLE as reason:
        raise error(lib.LCTX_INVALID, f"{path} cannot be read as GGUF file: {reason}") from None


def check_adapter(path: str) -> None:
    """Raise InvalidInput when loading the file as a LoRA adapter would end the process."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            wrong = list(_wrong_kinds(_Reader(data)))
    except UNREADABLE:
        return
    if wrong:
        raise error(lib.LCTX_INVALID, f"{path} cannot be used: the value of {wrong[0]} has the wrong type")


def _wrong_kinds(reader: "_Reader") -> Iterator[str]:
    _, _, _, n_meta = reader.struct("<4sIQQ")
    for _ in range(n_meta):
        key = reader.name()
        (kind,) = reader.struct("<I")
        reader.value(kind)
        if kind != ADAPTER_KINDS.get(key, kind):
            yield key


def _read(data: mmap.mmap) -> Header:
    reader = _Reader(data)
    magic, _, n_tensors, n_meta = reader.struct("<4sIQQ")
    if magic != b"GGUF":
        raise ValueError("no GGUF file")
    meta = {}
    for _ in range(n_meta):
        key = reader.name()
        meta[key] = reader.value(*reader.struct("<I"))
    tensors = [reader.tensor() for _ in range(n_tensors)]
    return Header(meta, tensors, reader.pos)


def _layout(header: Header) -> Layout:
    alignment = _positive(header, "general.alignment", ALIGNMENT)
    start = -(-header.end // alignment) * alignment
    starts = {tensor.name: start + tensor.offset for tensor in header.tensors}
    return Layout(_positive(header, "split.count", 1), starts, start)


def _positive(header: Header, key: str, otherwise: int) -> int:
    """Return an integer of the file; what is none is refused by llama.cpp, whatever stands for it here."""
    value = header.meta.get(key)
    return value if type(value) is int and value > 0 else otherwise


class _Reader:
    """Walk through the header of a file; struct.error at its end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.pos = 0

    def struct(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._data, self.pos)
        self.pos += struct.calcsize(layout)
        return values

    def name(self) -> str:
        # a key that is not UTF-8 stands for itself, so that it cannot keep the others from being checked
        return self.strings(1)[0].decode("utf-8", "backslashreplace")

    def strings(self, n: int) -> list[bytes]:
        # Without a method call per string: a vocabulary has hundreds of thousands.
        data, pos, found = self._data, self.pos, []
        length: Callable[..., tuple[int]] = struct.Struct("<Q").unpack_from
        for _ in range(n):
            (size,) = length(data, pos)
            found.append(data[pos + 8 : pos + 8 + size])
            pos += 8 + size
        self.pos = pos
        return found

    def value(self, kind: int) -> Any:
        """Return a value; of a long array of numbers the first ones."""
        if kind == STRING:
            return self.strings(1)[0]
        if kind != ARRAY:
            return self.struct("<" + SCALARS[kind])[0]
        kind, n = self.struct("<IQ")
        if kind == STRING:
            return self.strings(n)
        start, size = self.pos, struct.calcsize("<" + SCALARS[kind])
        values = self.struct(f"<{min(n, MOST_LAYERS)}{SCALARS[kind]}")
        self.pos = start + n * size
        return list(values)

    def tensor(self) -> Tensor:
        name = self.name()
        (n_dims,) = self.struct("<I")
        dims = self.struct(f"<{n_dims}Q")
        kind, offset = self.struct("<IQ")
        return Tensor(name, dims, kind, offset)
