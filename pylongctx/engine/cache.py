"""Caches of saved states: a completion starts from the longest cached prefix of its prompt."""

import hashlib
import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pylongctx._log import LOG
from pylongctx.engine.prefix import longest_prefix
from pylongctx.engine.saved_state import LlamaState, read_tokens
from pylongctx.errors import LctxError

DEFAULT_CAPACITY = 2 << 30
SUFFIX = ".lctxstate"

Key = TypeVar("Key")


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
