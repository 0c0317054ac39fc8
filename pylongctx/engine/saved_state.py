"""A saved sequence: tokens, the last logits and the KV cache, in memory or in a file."""

import json
import os
import struct
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from pylongctx._lib import error, lib
from pylongctx.errors import LctxError

MAGIC = b"LCTXSTAT"
VERSION = 1
HEAD = struct.Struct("<8sII")  # magic, version, length of the JSON header
TAIL = struct.Struct("<I")  # CRC-32 of everything before
ALIGNMENT = 16  # of the first array


@dataclass(frozen=True, eq=False)
class LlamaState:
    """The result of ``Llama.save_state``. It can be pickled, and written to a file with ``save``.

    Attributes
    ----------
    input_ids : numpy.ndarray
        int32 [n_tokens], the evaluated tokens.
    logits : numpy.ndarray
        float32 [n_vocab], the logits after the last token; empty if they were not computed.
    llama_state : numpy.ndarray
        uint8, the KV cache in the library's format.
    identity : dict
        The model, the method and the settings that the cache depends on.

    Examples
    --------
    >>> llm.eval(tokens[:32])
    >>> llm.save_state().save("text.state")
    >>> llm.reset()
    >>> llm.load_state(LlamaState.load("text.state"))
    >>> llm.n_tokens
    32
    """

    input_ids: NDArray[np.int32]
    logits: NDArray[np.float32]
    llama_state: NDArray[np.uint8]
    identity: Mapping[str, Any]

    @property
    def n_tokens(self) -> int:
        """The number of tokens."""
        return len(self.input_ids)

    @property
    def llama_state_size(self) -> int:
        """Bytes of the KV cache."""
        return self.llama_state.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of everything."""
        return self.input_ids.nbytes + self.logits.nbytes + self.llama_state.nbytes

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to a file; an existing file is replaced atomically."""
        path = Path(path)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            try:
                file.writelines(self.parts())
                file.close()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "LlamaState":
        """Load a file that was written by ``save``.

        Raises
        ------
        InvalidInput
            When it is not a state, or has another version, or is truncated or damaged.
        """
        try:
            return cls.from_bytes(Path(path).read_bytes())
        except LctxError as reason:
            raise error(reason.status, f"{path}: {reason}") from None

    def to_bytes(self) -> bytes:
        """Return the content of the file that ``save`` writes."""
        return b"".join(self.parts())

    @classmethod
    def from_bytes(cls, data: bytes) -> "LlamaState":
        """Return the state of ``to_bytes``; its arrays are views of ``data``."""
        header, start = _read_header(data)
        sizes = header["sizes"]
        end = start + sum(sizes)
        if len(data) != end + TAIL.size:
            raise _refusal(f"it holds {len(data)} bytes, not {end + TAIL.size}: truncated or damaged")
        if zlib.crc32(memoryview(data)[:end]) != TAIL.unpack_from(data, end)[0]:
            raise _refusal("its checksum is wrong: damaged")
        logits_start, rows_start = start + sizes[0], start + sizes[0] + sizes[1]
        return cls(
            np.frombuffer(data, np.int32, sizes[0] // 4, start),
            np.frombuffer(data, np.float32, sizes[1] // 4, logits_start),
            np.frombuffer(data, np.uint8, sizes[2], rows_start),
            header["identity"],
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return LlamaState.from_bytes, (self.to_bytes(),)

    def parts(self) -> Iterator[bytes | memoryview]:
        """Yield the bytes of ``to_bytes`` without copying the arrays."""
        arrays: list[Any] = [self.input_ids, self.logits, self.llama_state]
        header = json.dumps({"identity": dict(self.identity), "sizes": [array.nbytes for array in arrays]}).encode()
        header += b" " * (-(HEAD.size + len(header)) % ALIGNMENT)
        views: list[Any] = [memoryview(array.view(np.uint8)) for array in arrays]
        checksum = 0
        for part in (HEAD.pack(MAGIC, VERSION, len(header)), header, *views):
            checksum = zlib.crc32(part, checksum)
            yield part
        yield TAIL.pack(checksum)


def read_tokens(path: Path) -> NDArray[np.int32]:
    """Return int32 [n_tokens] of a saved state without reading the rest."""
    with path.open("rb") as file:
        header, start = _read_header(_read_head(file))
        if start + header["sizes"][0] + TAIL.size > os.fstat(file.fileno()).st_size:
            raise _refusal("it ends within its tokens: truncated or damaged")
        file.seek(start)
        return np.frombuffer(file.read(header["sizes"][0]), np.int32)


def read_identity(path: Path) -> dict[str, Any]:
    """Return the identity of a saved state without reading the rest."""
    with path.open("rb") as file:
        identity: dict[str, Any] = _read_header(_read_head(file))[0]["identity"]
        return identity


def _read_head(file: BinaryIO) -> bytes:
    head = file.read(HEAD.size)
    return head + file.read(HEAD.unpack(head)[2]) if len(head) == HEAD.size else head


def _read_header(data: bytes) -> tuple[dict[str, Any], int]:
    """Return the JSON header and the offset of the arrays."""
    if len(data) < HEAD.size or data[: len(MAGIC)] != MAGIC:
        raise _refusal("it is not a saved state of pylongctx")
    _, version, length = HEAD.unpack_from(data)
    if version != VERSION:
        raise _refusal(f"its version is {version}, but this pylongctx reads version {VERSION}")
    end = HEAD.size + length
    try:
        header = json.loads(data[HEAD.size : end])
        if isinstance(header["identity"], dict) and _are_sizes(header["sizes"]):
            return header, end
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise _refusal("its header cannot be read: truncated or damaged")


def _are_sizes(sizes: list[int]) -> bool:
    return len(sizes) == 3 and all(type(n) is int and n >= 0 for n in sizes) and sizes[0] % 4 == sizes[1] % 4 == 0


def _refusal(reason: str) -> LctxError:
    return error(lib.LCTX_INVALID, f"the saved state cannot be used: {reason}")
