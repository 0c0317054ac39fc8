"""Checks of a GGUF file for what makes llama.cpp end the process instead of refusing the file.

llama.cpp itself checks the structure: magic, counts, lengths, sizes and offsets against the file, shapes of tensors.
A file that cannot be read here is left to it, since it says precisely what is wrong. What a file may say is checked in
``_gguf_checks.py``.
"""

import mmap
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any

from pylongctx._gguf_checks import ARRAY, SCALARS, STRING, Header, Tensor, problems
from pylongctx._lib import error, lib

ADAPTER_KINDS = {
    "general.type": STRING,
    "general.architecture": STRING,
    "adapter.type": STRING,
    "adapter.lora.alpha": 6,  # f32
}
MOST_LAYERS = 4096  # numbers of an array that are looked at: those of layers
UNREADABLE = (OSError, ValueError, KeyError, OverflowError, MemoryError, struct.error)

_good: set[tuple[int, ...]] = set()


def check_gguf(path: str) -> None:
    """Raise InvalidInput when loading the file, or running the model, would end the process."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            found = os.fstat(file.fileno())
            identity = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
            if identity in _good:
                return
            header = _read(data)
    except UNREADABLE:
        return  # cut off or no GGUF file: refused by llama.cpp
    if wrong := list(problems(header)):
        raise error(lib.LCTX_INVALID, f"{path} cannot be used: {'; '.join(wrong[:3])}")
    _good.add(identity)


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
    return Header(meta, [reader.tensor() for _ in range(n_tensors)])


class _Reader:
    """Walk through the header of a file; struct.error at its end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._pos = 0

    def struct(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._data, self._pos)
        self._pos += struct.calcsize(layout)
        return values

    def name(self) -> str:
        # a key that is not UTF-8 stands for itself, so that it cannot keep the others from being checked
        return self.strings(1)[0].decode("utf-8", "backslashreplace")

    def strings(self, n: int) -> list[bytes]:
        # Without a method call per string: a vocabulary has hundreds of thousands.
        data, pos, found = self._data, self._pos, []
        length: Callable[..., tuple[int]] = struct.Struct("<Q").unpack_from
        for _ in range(n):
            (size,) = length(data, pos)
            found.append(data[pos + 8 : pos + 8 + size])
            pos += 8 + size
        self._pos = pos
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
        start, size = self._pos, struct.calcsize("<" + SCALARS[kind])
        values = self.struct(f"<{min(n, MOST_LAYERS)}{SCALARS[kind]}")
        self._pos = start + n * size
        return list(values)

    def tensor(self) -> Tensor:
        name = self.name()
        (n_dims,) = self.struct("<I")
        dims = self.struct(f"<{n_dims}Q")
        kind, _ = self.struct("<IQ")
        return Tensor(name, dims, kind)
