"""A saved sequence in memory or in a file: tokens, the last logits and the KV cache; and caches of them."""

import hashlib
import json
import os
import struct
import tempfile
import zlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from pylongctx._lib import error, lib
from pylongctx._log import LOG
from pylongctx.engine.prefix import longest_prefix
from pylongctx.errors import LctxError

MAGIC = b"LCTXSTAT"
VERSION = 1
HEAD = struct.Struct("<8sII")  # magic, version, length of the JSON header
TAIL = struct.Struct("<I")  # CRC-32 of everything before
ALIGNMENT = 16  # of the first array
DEFAULT_CAPACITY = 2 << 30
SUFFIX = ".lctxstate"
Key = TypeVar("Key")


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
    ends : tuple of int
        With sliding windows and recurrent layers: the positions of the checkpoints that the cache has, ascending.

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
    ends: tuple[int, ...] = ()

    @property
    def n_tokens(self) -> int:
        """The number of tokens."""
        return len(self.input_ids)

    def end_within(self, n: int) -> int:
        """Return the longest prefix of at most ``n`` tokens that ends at a checkpoint, or at the end."""
        return max((end for end in (*self.ends, self.n_tokens) if end <= n), default=0)

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
            tuple(header.get("ends", ())),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return LlamaState.from_bytes, (self.to_bytes(),)

    def parts(self) -> Iterator[bytes | memoryview]:
        """Yield the bytes of ``to_bytes`` without copying the arrays."""
        arrays: list[Any] = [self.input_ids, self.logits, self.llama_state]
        about = {"identity": dict(self.identity), "sizes": [array.nbytes for array in arrays]}
        header = json.dumps(about | ({"ends": self.ends} if self.ends else {})).encode()
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
        if isinstance(header["identity"], dict) and _are_sizes(header["sizes"]) and _are_ends(header.get("ends", [])):
            return header, end
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise _refusal("its header cannot be read: truncated or damaged")


def _are_sizes(sizes: list[int]) -> bool:
    return len(sizes) == 3 and all(type(n) is int and n >= 0 for n in sizes) and sizes[0] % 4 == sizes[1] % 4 == 0


def _are_ends(ends: list[int]) -> bool:
    return isinstance(ends, list) and all(type(n) is int and n >= 0 for n in ends)


def _refusal(reason: str) -> LctxError:
    return error(lib.LCTX_INVALID, f"the saved state cannot be used: {reason}")


class BaseLlamaCache(ABC):
    """A cache with token sequences as keys; the least recently used one is evicted first.

    ``cache[tokens]`` is the state with the longest common prefix with ``tokens``; KeyError when there is none.

    Parameters
    ----------
    capacity_bytes : int
        Maximum bytes to hold: tokens, logits and KV entries of all states.

    Examples
    --------
    >>> issubclass(LlamaRAMCache, BaseLlamaCache), issubclass(LlamaDiskCache, BaseLlamaCache)
    (True, True)
    """

    def __init__(self, capacity_bytes: int = DEFAULT_CAPACITY) -> None:
        self.capacity_bytes = capacity_bytes

    @property
    @abstractmethod
    def cache_size(self) -> int:
        """Bytes held now."""

    @abstractmethod
    def __getitem__(self, key: Sequence[int]) -> LlamaState: ...

    @abstractmethod
    def __contains__(self, key: Sequence[int]) -> bool: ...

    @abstractmethod
    def __setitem__(self, key: Sequence[int], value: LlamaState) -> None: ...


class LlamaRAMCache(BaseLlamaCache):
    """States in memory.

    Examples
    --------
    >>> cache = LlamaRAMCache(capacity_bytes=1 << 20)
    >>> llm.set_cache(cache)
    >>> text = llm("It was the best of times,", max_tokens=4)["choices"][0]["text"]
    >>> llm.set_cache(None)
    >>> 0 < cache.cache_size <= 1 << 20
    True
    """

    def __init__(self, capacity_bytes: int = DEFAULT_CAPACITY) -> None:
        super().__init__(capacity_bytes)
        self.cache_state: OrderedDict[bytes, LlamaState] = OrderedDict()

    @property
    def cache_size(self) -> int:
        """Bytes held now."""
        return sum(len(key) + state.nbytes for key, state in self.cache_state.items())

    def __getitem__(self, key: Sequence[int]) -> LlamaState:
        found = self._find(key)
        if found is None:
            raise KeyError("no state begins like these tokens")
        self.cache_state.move_to_end(found)
        return self.cache_state[found]

    def __contains__(self, key: Sequence[int]) -> bool:
        return self._find(key) is not None

    def __setitem__(self, key: Sequence[int], value: LlamaState) -> None:
        name = _ids(key).tobytes()
        self.cache_state[name] = value
        self.cache_state.move_to_end(name)
        while self.cache_state and self.cache_size > self.capacity_bytes:
            self.cache_state.popitem(last=False)

    def _find(self, key: Sequence[int]) -> bytes | None:
        return _best(_ids(key), ((name, np.frombuffer(name, np.int32)) for name in self.cache_state))


LlamaCache = LlamaRAMCache


class LlamaDiskCache(BaseLlamaCache):
    """States on disk, one file per state; they outlive the process.

    Use one folder per model and method: a state of another one is never loaded, but may hide a matching one.
    A file that is not a state is skipped with a log message. One that is damaged after its tokens is removed.

    Parameters
    ----------
    cache_dir : str
        The folder; created if missing, readable by its owner only.
    capacity_bytes : int
        Maximum bytes of all files.

    Examples
    --------
    >>> cache = LlamaDiskCache("prompts", capacity_bytes=1 << 20)
    >>> llm.eval(tokens[:32])
    >>> cache[tokens[:32]] = llm.save_state()
    >>> tokens in cache, cache[tokens].n_tokens
    (True, 32)
    """

    def __init__(self, cache_dir: str = ".cache/llama_cache", capacity_bytes: int = DEFAULT_CAPACITY) -> None:
        super().__init__(capacity_bytes)
        self.folder = Path(cache_dir)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._skipped: set[Path] = set()

    @property
    def cache_size(self) -> int:
        """Bytes of all files."""
        return sum(path.stat().st_size for path in self._files())

    def __getitem__(self, key: Sequence[int]) -> LlamaState:
        while (path := self._find(key)) is not None:
            try:
                state = LlamaState.load(path)
            except LctxError as reason:
                LOG.warning("removed: %s", reason)
                path.unlink(missing_ok=True)
            except FileNotFoundError:  # removed by another process
                continue
            else:
                with suppress(OSError):  # a read-only folder
                    os.utime(path)  # the mtime records the order of use
                return state
        raise KeyError("no state begins like these tokens")

    def __contains__(self, key: Sequence[int]) -> bool:
        return self._find(key) is not None

    def __setitem__(self, key: Sequence[int], value: LlamaState) -> None:
        value.save(self.folder / (hashlib.sha256(_ids(key).tobytes()).hexdigest() + SUFFIX))
        oldest_first = sorted(self._files(), key=lambda path: path.stat().st_mtime_ns)
        while oldest_first and self.cache_size > self.capacity_bytes:
            oldest_first.pop(0).unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        return [path for path in self.folder.glob(f"*{SUFFIX}") if path.is_file()]

    def _find(self, key: Sequence[int]) -> Path | None:
        return _best(_ids(key), [(path, self._tokens_of(path)) for path in self._files()])

    def _tokens_of(self, path: Path) -> NDArray[np.int32]:
        try:
            return read_tokens(path)
        except (LctxError, ValueError, OSError) as reason:  # damaged or gone: never the best one
            if path not in self._skipped:
                self._skipped.add(path)
                LOG.warning("skipped %s: %s", path, reason)
            return np.empty(0, np.int32)


def _best(ids: NDArray[np.int32], known: Iterable[tuple[Key, NDArray[np.int32]]]) -> Key | None:
    """Return the key with the longest common prefix with ``ids``; None when there is none."""
    length, best = 0, None
    for key, tokens in known:
        if (n := longest_prefix(tokens, ids)) > length:
            length, best = n, key
    return best


def _ids(key: Sequence[int]) -> NDArray[np.int32]:
    return np.asarray(key, np.int32)
