"""A bounded reader of GGUF headers: declared sizes are checked against the file before anything is read."""

import mmap
import struct
from collections.abc import Callable
from typing import Any

from pylongctx.model_files.gguf_checks import ARRAY, MAX_TOKEN, SCALARS, STRING, Header, Tensor

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


class Damaged(ValueError):  # noqa: N818 - reads as what happened
    """The header declares more than the file can hold or any file has."""


class NotGguf(ValueError):  # noqa: N818 - reads as what happened
    """The file does not begin like GGUF, which llama.cpp reports itself."""


class Reader:
    """Walk through the header of a file.

    Time and memory depend on the ``MOST_`` numbers, not on the size of the file.

    Parameters
    ----------
    data : mmap
        The file.
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
