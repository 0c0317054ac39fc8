"""A loaded GGUF model: facts, metadata, vocabulary."""

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pylongctx._closed import closed
from pylongctx._lib import check_process, ffi, lib, out_buffer, text
from pylongctx.errors import ModelRefused
from pylongctx.model_files.gguf import check_gguf, load_failure, why_not_gguf
from pylongctx.model_files.overrides import as_json, as_texts

FAILED = -(2**31)


class Borrower(Protocol):
    """An object that uses the handle of a model until it is closed."""

    def close(self) -> None:
        """Release the handle."""


def freed_before(of_model: Any, handle: Any, free: Callable[[Any], None]) -> Any:
    """Return a handle that keeps its model's handle, and is freed before it."""
    return ffi.gc(handle, partial(_free_first, free, of_model))


def _free_first(free: Callable[[Any], None], of_model: Any, handle: Any) -> None:
    free(handle)


class Model:
    """Owner of one ``lctx_model``.

    ``settings`` are fields of ``lctx_model_params``, the others keep llama.cpp's defaults; ``kv_overrides`` and
    ``override_tensor`` are as in ``Llama``. Raises ValueError when the file is missing or cannot be loaded.
    """

    def __init__(self, path: str, settings: dict[str, Any]) -> None:
        self._handle: Any = None
        self._pid = os.getpid()
        self._borrowers: weakref.WeakSet[Borrower] = weakref.WeakSet()
        self._lock = threading.RLock()  # of the borrowers; a finalizer may run within its block
        if not os.path.exists(path):
            raise ValueError(f"Model path does not exist: {path}")
        if why := why_not_gguf(path):
            raise ModelRefused(f"{path} is not a GGUF file: {why}", lib.LCTX_INVALID)
        self.overrides: dict[str, Any] = settings.get("kv_overrides") or {}
        self.has_mtp = bool(settings.get("mtp"))
        check_gguf(path, self.overrides)
        overrides = as_json(self.overrides, settings.get("override_tensor")).encode()
        split, servers = settings.get("tensor_split", []), settings.get("rpc_servers", "")
        memory = ffi.new("float[]", split), ffi.new("char[]", servers.encode())  # must outlive the call
        own = {name: value for name, value in settings.items() if name not in ("kv_overrides", "override_tensor")}
        fields = own | {"tensor_split": memory[0], "n_tensor_split": len(split), "rpc_servers": memory[1]}
        params = with_fields("lctx_model_params", lib.lctx_model_params_default, fields)
        handle = lib.lctx_model_load(os.fsencode(path), params, overrides)
        if failure := text(lib.lctx_model_error(handle)):
            lib.lctx_model_free(handle)
            raise ModelRefused(load_failure(path, failure), lib.LCTX_INVALID)
        self._handle = ffi.gc(handle, partial(_free, self._pid))
        self._pieces: dict[tuple[int, bool], bytes] = {}  # cache of the bytes of tokens
        self._ends: dict[int, bool] = {}
        self.info = self._read_info()

    @property
    def handle(self) -> Any:
        """The ``lctx_model *``, which is reference-counted; RuntimeError when closed or forked."""
        if self._handle is None:
            raise closed()
        check_process(self._pid)
        return self._handle

    def lend(self, borrower: Borrower) -> Any:
        """Return the handle to an object that keeps it; ``close`` closes that object, so that the model is freed."""
        with self._lock:
            self._borrowers.add(borrower)
            return self.handle

    def close(self) -> None:
        """Free the model once calls in other threads have returned."""
        self._handle = None
        if os.getpid() != self._pid:
            return  # a forked child: the lock may be held by a thread that does not exist here
        with self._lock:
            borrowers = list(self._borrowers)
        for borrower in borrowers:
            borrower.close()
        self._pieces, self._ends = {}, {}

    def _read_info(self) -> Any:
        info = ffi.new("lctx_model_info *")
        lib.lctx_model_get_info(self.handle, info)
        return info

    def metadata(self) -> dict[str, str]:
        """Return the key-value pairs of the GGUF file as strings, including overrides."""
        handle = self.handle
        found = {
            _string(lib.lctx_model_meta_key, handle, i): _string(lib.lctx_model_meta_val, handle, i)
            for i in range(lib.lctx_model_meta_count(handle))
        }
        return found | as_texts(self.overrides)

    def description(self) -> str:
        """Return llama.cpp's line about architecture, size and type."""
        return _string(lib.lctx_model_desc, self.handle)

    def tokenize(self, data: bytes, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return the token ids of UTF-8 bytes."""
        if not isinstance(data, bytes):
            raise TypeError(f"text must be bytes, not {type(data).__name__}")
        handle = self.handle
        tokens = np.empty(len(data) + 8, np.int32)
        while True:
            out = out_buffer("tokens", tokens, np.int32)
            n = lib.lctx_tokenize(handle, data, len(data), out, len(tokens), add_special, parse_special)
            if n >= 0:
                ids: list[int] = tokens[:n].tolist()
                return ids
            if n == FAILED or -n <= len(tokens):
                raise RuntimeError(f"the text cannot be tokenized ({len(data)} bytes)")
            tokens = np.empty(-n, np.int32)

    @property
    def start(self) -> list[int]:
        """The tokens at the beginning of every text: the BOS token, or none."""
        return [int(self.info.token_bos)] if self.info.add_bos and self.info.token_bos >= 0 else []

    def piece(self, token: int, special: bool = False) -> bytes:
        """Return the bytes of one token."""
        known = self._pieces.get((token, special))
        if known is None:
            known = self._pieces[token, special] = self._piece(token, special)
        return known

    def _piece(self, token: int, special: bool) -> bytes:
        handle = self.handle
        size = 64
        while True:
            buffer = ffi.new("char[]", size)
            n = lib.lctx_token_to_piece(handle, token, buffer, size, special)
            if n >= 0:
                return bytes(ffi.buffer(buffer, n))
            if n == FAILED:
                raise RuntimeError(f"the vocabulary of the model is damaged: token {token} has no text")
            size = -n

    def detokenize(self, tokens: Iterable[int], special: bool = False) -> bytes:
        """Return the bytes of tokens; a space right after a leading BOS token is dropped."""
        ids: list[int] = self.check_tokens(tokens, allow_empty=True).tolist()
        pieces = {token: self.piece(token, special) for token in set(ids)}
        data = b"".join(pieces[token] for token in ids)
        after_bos = ids[:1] == [self.info.token_bos]
        return data[1:] if after_bos and data[:1] == b" " else data

    @cached_property
    def longest_piece(self) -> int:
        """Bytes of the longest token."""
        return max((len(self.piece(token, True)) for token in range(self.info.n_vocab)), default=1)

    def is_special(self, token: int) -> bool:
        """Return True for a control token, whose text is not part of an answer."""
        return not self.piece(token) and bool(self.piece(token, True))

    @cached_property
    def special_texts(self) -> frozenset[str]:
        """The texts of the special tokens."""
        handle, none = self.handle, ffi.new("char[]", 1)  # only the empty text fits into an empty buffer
        found = (t for t in range(self.info.n_vocab) if not lib.lctx_token_to_piece(handle, t, none, 0, False))
        return frozenset(self.piece(token, True).decode("utf-8", "ignore") for token in found) - {""}

    def ends_generation(self, token: int) -> bool:
        """Return True if the token ends a generation."""
        known = self._ends.get(token)
        if known is None:
            known = self._ends[token] = bool(lib.lctx_token_is_eog(self.handle, token))
        return known

    @cached_property
    def end_tokens(self) -> NDArray[np.int32]:
        """The tokens that end a generation, int32 [n]."""
        return np.array([token for token in range(self.info.n_vocab) if self.ends_generation(token)], np.int32)

    def check_tokens(self, tokens: Iterable[int], allow_empty: bool = False) -> NDArray[np.int32]:
        """Return the ids as int32 [n]; ValueError when they are not tokens of this model."""
        ids = np.asarray(tokens if isinstance(tokens, np.ndarray) else list(tokens))
        if ids.size == 0 and ids.ndim == 1 and allow_empty:
            return np.empty(0, np.int32)
        if ids.size == 0:
            raise ValueError("tokens is empty")
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(f"tokens must be a flat sequence of integers, not {ids.dtype} of shape {ids.shape}")
        bad = (ids < 0) | (ids >= self.info.n_vocab)
        if bad.any():
            raise ValueError(f"token {ids[bad][0]} is outside the vocabulary (0 to {self.info.n_vocab - 1})")
        return np.ascontiguousarray(ids, np.int32)


def _free(pid: int, handle: Any) -> None:
    if os.getpid() == pid:
        lib.lctx_model_free(handle)


def with_fields(name: str, defaults: Callable[[Any], None], fields: Mapping[str, Any]) -> Any:
    """Return a new struct of the library with its defaults, except for ``fields``."""
    params = ffi.new(f"{name} *")
    defaults(params)
    for key, value in fields.items():
        try:
            setattr(params, key, value)
        except TypeError as reason:
            raise TypeError(f"{key}={value!r}: {reason}") from None
        except OverflowError as reason:
            raise ValueError(f"{key}={value!r} is out of range: {reason}") from None
    return params


def _string(function: Callable[..., int], *args: Any) -> str:
    size = 256
    while True:
        buffer = ffi.new("char[]", size)
        n = function(*args, buffer, size)
        if n < size:
            return text(buffer)
        size = n + 1
