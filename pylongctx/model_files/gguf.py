"""Checks of a GGUF file for values with which llama.cpp aborts or hangs instead of returning an error.

The header is first read within bounds, since llama.cpp spends memory and time on whatever it declares. Its values are
checked in ``gguf_checks.py``. llama.cpp itself checks the data after the header.
"""

import mmap
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pylongctx._lib import error, lib
from pylongctx.errors import ModelRefused
from pylongctx.model_files.gguf_checks import ALIGNMENT, ARRAY, MAX_TOKEN, SCALARS, STRING, Header, Tensor, problems

MAGIC = b"GGUF"
HEAD = 512  # bytes to inspect
CONVERT = "convert it with convert_hf_to_gguf.py of llama.cpp, or download a model with pylongctx get"
TRUNCATED = "corrupted or incomplete"  # llama.cpp's message about a truncated file
FETCH = "pylongctx get lists models to download"
VERSIONS = (2, 3)
TOKENS = "tokenizer.ggml.tokens"  # the only list of strings that is always kept
MAX_META, MAX_TENSORS = 2**16, 2**17
MAX_KEY, MAX_NAME, MAX_DIMS = 2**16 - 1, 63, 4  # of GGUF, and of ggml
MAX_TEXT = 2**26  # bytes of a value: a tokenizer.json may be one
MAX_TEXTS, MAX_TOKENS = 2**21, 2**20  # in all lists together, and in the vocabulary
MAX_TOKEN_BYTES = 2**25
MAX_NUMBERS = 2**24
KEPT_TEXTS, KEPT_TEXT = 2**24, 256  # bytes of strings kept in total, and bytes kept of each further one
KEPT_NUMBERS = 4096  # of a list
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
_valid: set[tuple[FileId, str]] = set()  # valid files and overrides


def why_not_gguf(path: str) -> str:
    """Describe a path that is not a GGUF file, and the way out; empty for a file that begins like GGUF."""
    if Path(path).is_dir():
        files = sorted(file.name for file in Path(path).glob("*.gguf"))
        return f"it is a folder; give {'one of ' if len(files) > 1 else ''}{', '.join(files[:8]) or 'a .gguf file'}"
    with open(path, "rb") as file:
        head = file.read(HEAD)
    if head.startswith(MAGIC):
        return ""
    if not head:
        return f"it is empty; {FETCH}"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
        return f"it is a safetensors file; {CONVERT}"
    if head.startswith(b"PK") or head.startswith(b"\x80\x02"):
        return f"it is a PyTorch checkpoint; {CONVERT}"
    if head[:4] in (b"lmgg", b"fmgg", b"tjgg"):
        return f"it is a model in a llama.cpp format older than GGUF; {CONVERT}"
    if head.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer, not the file itself; run git lfs pull"
    if head.lstrip()[:1] == b"<":
        return f"it is an HTML page, perhaps from a failed download; {FETCH}"
    return f"it begins with {head[:4]!r}, not with GGUF; {FETCH}"


def load_failure(path: str, said: str) -> str:
    """Return why a GGUF file cannot be loaded, from llama.cpp's log; a single line for a truncated file."""
    if TRUNCATED not in said:
        return said
    reason = said.splitlines()[0].rpartition("error loading model: ")[2].partition(", model is ")[0]
    return f"{path} is damaged or incomplete: {reason}; it has {Path(path).stat().st_size} bytes: download it again"


class Damaged(ValueError):  # noqa: N818 - reads as what happened
    """The header declares more than the file can hold or any file has."""


class NotGguf(ValueError):  # noqa: N818 - reads as what happened
    """The file does not begin like GGUF, which llama.cpp reports itself."""


class Reader:
    """Walk through the header of a file.

    Time and memory depend on the ``MOST_`` numbers, not on the size of the file.
    """

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._size = data, len(data)
        self._n_texts, self._room = 0, KEPT_TEXTS  # strings in lists so far, remaining bytes of other strings to keep
        self.pos = 0

    def counts(self) -> tuple[int, int]:
        """Return the numbers of tensors and values that follow."""
        if self._size < 24 or self._data[:4] != b"GGUF":
            raise NotGguf("not a GGUF file")
        _, version, n_tensors, n_meta = self._numbers("<4sIQQ")
        if version not in VERSIONS:
            raise NotGguf(f"GGUF of version {version}")
        self._at_most("values", n_meta, MAX_META, 13)
        self._at_most("tensors", n_tensors, MAX_TENSORS, 24)
        return n_tensors, n_meta

    def header(self) -> Header:
        """Return the whole header."""
        n_tensors, n_meta = self.counts()
        meta: dict[str, Any] = {}
        for _ in range(n_meta):
            key, kind = self.key()
            if key in meta:
                raise Damaged(f"the key {key[:80]!r} occurs twice")
            meta[key] = self.value(kind, key == TOKENS)
        tensors = [self._tensor() for _ in range(n_tensors)]
        names = {tensor.name for tensor in tensors}
        if len(names) < n_tensors:
            raise Damaged("two tensors have the same name")
        return Header(meta, tensors, self.pos)

    def key(self) -> tuple[str, int]:
        """Return the next key, and the kind of its value."""
        # escape a key that is not UTF-8, so that the other keys can still be checked
        key = self._text("a key", MAX_KEY).decode("utf-8", "backslashreplace")
        return key, self._numbers("<I")[0]

    def value(self, kind: int, kept: bool = False) -> Any:
        """Return a value; of a list the first numbers, or all strings or none."""
        if kind == STRING:
            return self._text("a text", MAX_TEXT)
        if kind != ARRAY:
            return self._numbers("<" + _scalar(kind))[0]
        kind, n = self._numbers("<IQ")
        if kind == STRING:
            return self._texts(n, kept)
        layout = _scalar(kind)
        size = struct.calcsize("<" + layout)
        self._at_most("numbers of a list", n, MAX_NUMBERS, size)
        end = self.pos + n * size
        values = list(self._numbers(f"<{min(n, KEPT_NUMBERS)}{layout}"))
        self.pos = end
        return values

    def _numbers(self, layout: str) -> tuple[Any, ...]:
        try:
            values = struct.unpack_from(layout, self._data, self.pos)
        except struct.error:
            raise Damaged(f"the file ends after {self._size} bytes, in the middle of it") from None
        self.pos += struct.calcsize(layout)
        return values

    def _text(self, what: str, most: int) -> bytes:
        """Return a string, or its beginning when many are long."""
        (size,) = self._numbers("<Q")
        self._at_most(f"bytes of {what}", size, most, 1)
        start, self.pos = self.pos, self.pos + size
        kept = size if size <= self._room else min(size, KEPT_TEXT)
        self._room -= min(kept, self._room)
        return self._data[start : start + kept]

    def _texts(self, n: int, kept: bool) -> list[bytes]:
        self._n_texts += n
        self._at_most("texts of lists", self._n_texts, MAX_TEXTS, 0)
        self._at_most("texts of a list", n, MAX_TOKENS if kept else MAX_TEXTS, 8)
        found: list[bytes] = []
        try:
            end = self._kept(n, found) if kept else self._skipped(n)
        except struct.error:
            end = self._size + 1
        if end > self._size:
            raise Damaged("a string of a list is longer than the rest of the file")
        self.pos = end
        return found

    def _skipped(self, n: int) -> int:
        # No method call per string: a vocabulary has hundreds of thousands.
        data, pos, size = self._data, self.pos, self._size
        length: Callable[..., tuple[int]] = struct.Struct("<Q").unpack_from
        for _ in range(n):
            if pos > size:
                break
            pos += 8 + length(data, pos)[0]
        return pos

    def _kept(self, n: int, found: list[bytes]) -> int:
        data, pos, left = self._data, self.pos, MAX_TOKEN_BYTES
        length: Callable[..., tuple[int]] = struct.Struct("<Q").unpack_from
        for i in range(n):
            (size,) = length(data, pos)
            left -= size
            if left < 0:
                raise Damaged(
                    f"token {i} ends after {MAX_TOKEN_BYTES - left} bytes; the maximum of all is {MAX_TOKEN_BYTES}"
                )
            found.append(data[pos + 8 : pos + 8 + min(size, MAX_TOKEN + 1)])
            pos += 8 + size
        return pos

    def _tensor(self) -> Tensor:
        name = self._text("a tensor's name", MAX_NAME).decode("utf-8", "backslashreplace")
        (n_dims,) = self._numbers("<I")
        self._at_most("dimensions of a tensor", n_dims, MAX_DIMS, 8)
        dims = self._numbers(f"<{n_dims}Q")
        kind, offset = self._numbers("<IQ")
        return Tensor(name, dims, kind, offset)

    def _at_most(self, what: str, n: int, most: int, size: int) -> None:
        """Raise Damaged when there are more than ``most``, or more than fit with at least ``size`` bytes each."""
        if n > most:
            raise Damaged(f"it declares {n} {what}; the maximum is {most}")
        if n * size > self._size - self.pos:
            raise Damaged(f"it declares {n} {what}, more than the {self._size} bytes of the file can hold")


def _scalar(kind: int) -> str:
    if kind not in SCALARS:
        raise Damaged(f"a value has the unknown type {kind}")
    return SCALARS[kind]


@dataclass(frozen=True)
class FileLayout:
    """The layout of a file."""

    n_split: int  # number of files of the model, if this is the first one
    starts: dict[str, int]  # offset of the data of each tensor in the file, by name
    header: int  # bytes before the data of all tensors


_layouts: dict[FileId, FileLayout] = {}  # of valid files


def check_gguf(path: str, overrides: Mapping[str, Any] | None = None) -> None:
    """Raise ModelRefused when loading or running a model would crash or hang the process.

    ``path`` is the file, or the first of several; ``overrides`` replace metadata of it, by key.
    """
    layout = _checked(path, overrides or {})
    for other in shards(path, layout.n_split)[1:] if layout else ():
        if _checked(other, {}) is None:
            return


def _checked(path: str, overrides: Mapping[str, Any]) -> FileLayout | None:
    """Return the layout of a valid file; None for one that llama.cpp itself refuses."""
    try:
        with _opened(path) as (identity, data):
            if (identity, repr(overrides)) in _valid:
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
    _valid.add((identity, repr(overrides)))
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
