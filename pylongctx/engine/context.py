"""One llama.cpp context with a method: a thin, locked wrapper of the lctx_context calls; and its memory."""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pylongctx._closed import closed
from pylongctx._lib import check, check_process, error, ffi, in_buffer, lib, out_buffer, text
from pylongctx.engine.model import Model, with_fields


@dataclass(frozen=True, eq=False)
class KVUsage:
    """The KV memory of a context.

    Attributes
    ----------
    bytes : int
        Bytes held now: K and V in pages, near keys, chunk summaries, lists of rows.
    peak_bytes : int
        Maximum bytes held so far.
    full_bytes : int
        Bytes of a full cache of the same types for the same tokens.
    rest_bytes : int
        Bytes of sliding windows and recurrent states, which llama.cpp manages, and of their checkpoints; not included
        in the other numbers.
    mapped_bytes : int
        Bytes mapped for the method on GPUs that map memory in units of 2 MiB, including gaps between pages. 0 without
        such a GPU.
    rows : numpy.ndarray
        int32 [n_layer, n_head_kv], KV entries held per layer and KV head.
    """

    bytes: int
    peak_bytes: int
    full_bytes: int
    rest_bytes: int
    mapped_bytes: int
    rows: NDArray[np.int32]

    def sizes(self) -> dict[str, int]:
        """Return the bytes by name."""
        return {name: value for name, value in vars(self).items() if name != "rows"}


@dataclass(frozen=True)
class OffloadUsage:
    """Counters of K and V units in host memory, over all layers and heads since the context was created.

    A unit is a chunk if the chunk size divides 64 tokens, else 64 tokens.

    Attributes
    ----------
    hits, misses, far : int
        Requested units that were close, in the buffer; that were copied to it; that were read from the slower memory
        because not all requested units fit.
    unit_bytes : int
        Bytes of a unit: K and V of one head.
    device_bytes : int
        Bytes on the devices for everything that the method keeps there: the CPU with ``kv_offload="disk"``.
    staged : int
        Units of a head that fit into the buffer; 0 without ``kv_offload``.
    chosen : int
        Maximum units of a head that a selecting query reads.
    file_bytes, read_bytes, written_bytes : int
        With ``kv_offload="disk"``: bytes that the file takes now; bytes read from it and written to it.
    file_seconds : float
        Time that threads spent reading and writing it; threads add up.
    """

    hits: int
    misses: int
    far: int
    unit_bytes: int
    device_bytes: int
    staged: int
    chosen: int
    file_bytes: int
    read_bytes: int
    written_bytes: int
    file_seconds: float

    @property
    def hit_rate(self) -> float:
        """Fraction of the requested units that were close."""
        return self.hits / max(1, self.hits + self.misses + self.far)

    @property
    def bytes_moved(self) -> int:
        """Bytes copied from the slower memory to the buffer."""
        return (self.misses + self.far) * self.unit_bytes


class Context:
    """Owner of one ``lctx_context``.

    The model must outlive it. ``settings`` are fields of ``lctx_context_params``, the others keep llama.cpp's defaults;
    an empty ``method`` is llama.cpp's own KV cache. Raises InvalidInput when the library refuses the model or a
    setting.
    """

    def __init__(self, model: Model, settings: dict[str, Any], method: str) -> None:
        self._lock = threading.Lock()
        self._handle: Any = None
        self._pid = os.getpid()
        self._abort = ffi.new("int32_t *")
        params = with_fields("lctx_context_params", lib.lctx_context_params_default, settings)
        handle = lib.lctx_context_create(model.handle, params, method.encode())
        if failure := text(lib.lctx_context_error(handle)):
            lib.lctx_context_free(handle)
            raise error(lib.LCTX_INVALID, failure)
        self._handle = handle
        self.n_vocab: int = model.info.n_vocab
        self._heads = (model.info.n_layer, model.info.n_head)
        self.n_ctx: int = lib.lctx_context_n_ctx(handle)
        self.n_batch: int = lib.lctx_context_n_batch(handle)
        self.n_ubatch: int = lib.lctx_context_n_ubatch(handle)
        self.n_step = min(self.n_batch, self.n_ubatch)  # maximum tokens of a step
        self.n_seq: int = params.n_seq_max
        self.types = {name: text(lib.lctx_type_name(getattr(params, name))) for name in ("type_k", "type_v")}
        self.method = text(lib.lctx_context_method(handle))
        self.why = text(lib.lctx_context_why(handle))
        self.rollback: int = lib.lctx_context_rollback(handle)
        self.tracing = False
        self.step_seconds, self.step_tokens = 0.0, 1  # of the last step
        lib.lctx_context_set_abort(handle, self._abort)

    @property
    def handle(self) -> Any:
        """The ``lctx_context *``; RuntimeError when closed or forked."""
        if self._handle is None:
            raise closed()
        check_process(self._pid)
        return self._handle

    def close(self) -> None:
        """Free the context; waits for a running call."""
        if os.getpid() != self._pid:
            return  # a forked child: the lock may be held by a thread that does not exist here
        with self._lock:
            handle, self._handle = self._handle, None
            if handle is not None:
                lib.lctx_context_free(handle)

    @property
    def abort(self) -> bool:
        """True to stop a running ``decode``; may be set from any thread."""
        return bool(self._abort[0])

    @abort.setter
    def abort(self, value: bool) -> None:
        self._abort[0] = value

    def decode(
        self,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        seqs: NDArray[np.int32],
        wanted: NDArray[np.int8],
        logits: NDArray[np.float32],
    ) -> None:
        """Evaluate tokens of several sequences, int32 [n] each; logits: float32 [n_wanted, n_vocab]."""
        if logits.size != int(wanted.sum()) * self.n_vocab:
            raise ValueError(f"logits must have a row of {self.n_vocab} for each requested token, not {logits.shape}")
        buffers = [in_buffer("tokens", tokens, np.int32), in_buffer("positions", positions, np.int32)]
        buffers += [in_buffer("seqs", seqs, np.int32), in_buffer("wanted", wanted, np.int8)]
        out = out_buffer("logits", logits, np.float32) if len(logits) else ffi.NULL
        with self._lock:
            handle = self.handle
            started = time.monotonic()
            status = lib.lctx_decode_batch(handle, len(tokens), *buffers, out)
            self.step_seconds, self.step_tokens = time.monotonic() - started, len(tokens)
            check(status, lib.lctx_context_error(handle))

    def _ask(self, function: Any, *args: Any) -> int:
        """Return the answer of a function of the library."""
        with self._lock:
            return int(function(self.handle, *args))

    def _refusal(self, function: Any, *args: Any) -> str:
        """Return why a function of the library refused, or the empty string."""
        with self._lock:
            done = function(self.handle, *args)
            return "" if done else text(lib.lctx_context_error(self.handle)) or "refused"

    def n_past(self, seq: int = 0) -> int:
        """Return the number of positions of a sequence in the cache."""
        return self._ask(lib.lctx_n_past, seq)

    def step(self, pos: int, n: int) -> int:
        """Return how many of ``n`` tokens from ``pos`` one ``decode`` may evaluate and still be undone completely."""
        return self._ask(lib.lctx_context_step, pos, n)

    def held_rows(self, layer: int, head: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return the positions that a KV head holds, int32 [n] ascending, and their scores, int32 [n]."""
        rows, scores = np.empty((2, self.n_ctx), np.int32)
        buffers = [out_buffer(name, array, np.int32) for name, array in (("rows", rows), ("scores", scores))]
        with self._lock:
            n = lib.lctx_seq_held(self.handle, 0, layer, head, *buffers, self.n_ctx)
        return rows[:n], scores[:n]

    def n_held(self, seq: int, layer: int, head: int) -> int:
        """Return the number of KV entries of a sequence that a KV head holds."""
        return self._ask(lib.lctx_seq_held, seq, layer, head, ffi.NULL, ffi.NULL, 0)

    def truncate(self, n: int, seq: int = 0) -> str:
        """Remove the positions from ``n`` on; returns the reason of a refusal, or the empty string."""
        return self._refusal(lib.lctx_seq_rm, seq, n, -1)

    def restorable(self, n: int, seq: int = 0) -> int:
        """Return the longest prefix of at most ``n`` positions to which ``truncate`` can cut."""
        return self._ask(lib.lctx_seq_restorable, seq, n)

    @property
    def keeps_checkpoints(self) -> bool:
        """True if the sequence needs checkpoints to be rewound."""
        return bool(self.method) and self.rollback != lib.LCTX_ROLLBACK_FREE

    def checkpoint(self, seq: int = 0) -> str:
        """Take a checkpoint at the current end; returns the reason of a refusal, or the empty string."""
        return self._refusal(lib.lctx_seq_checkpoint, seq)

    def checkpoints(self, seq: int = 0) -> list[int]:
        """Return the positions of the checkpoints that a state of the sequence has, ascending."""
        positions = np.empty(self._ask(lib.lctx_seq_checkpoints, seq, ffi.NULL, 0), np.int32)
        buffer = out_buffer("positions", positions, np.int32)
        self._ask(lib.lctx_seq_checkpoints, seq, buffer, len(positions))
        return positions.tolist()

    def cut_before(self, pos: int) -> int:
        """Return the last position up to ``pos`` where a checkpoint is usable."""
        return self._ask(lib.lctx_context_cut_before, pos)

    def copy(self, source: int, target: int, n: int) -> bool:
        """Copy the first ``n`` positions of one sequence to another; False: refused, nothing changed."""
        return bool(self._ask(lib.lctx_seq_cp, source, target, n))

    def select_from(self, first: int = -1) -> None:
        """Let queries before a position read everything, and later ones choose; -1: as the method says."""
        if refusal := self._refusal(lib.lctx_context_select_from, first):
            raise error(lib.LCTX_INVALID, refusal)

    def can_draft(self, seq: int = 0) -> bool:
        """Return True if the MTP block knows the hidden state of the last token of a sequence."""
        return bool(self._ask(lib.lctx_mtp_ready, seq))

    def draft_step(
        self, tokens: NDArray[np.int32], positions: NDArray[np.int32], seqs: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        """Evaluate a token of each sequence in the MTP block, int32 [n] each; returns logits, float32 [n, n_vocab]."""
        logits = np.empty((len(tokens), self.n_vocab), np.float32)
        buffers = [in_buffer("tokens", tokens, np.int32), in_buffer("positions", positions, np.int32)]
        buffers += [in_buffer("seqs", seqs, np.int32), out_buffer("logits", logits, np.float32)]
        with self._lock:
            handle = self.handle
            check(lib.lctx_mtp_step(handle, len(tokens), *buffers), lib.lctx_context_error(handle))
        return logits

    def begin_replay(self, seq: int = 0) -> int:
        """Start votes by queries of new tokens; returns after how many ``truncate`` can still restore this state."""
        return self._counted(lib.lctx_seq_replay, seq, True)

    def end_replay(self, seq: int = 0) -> None:
        """Stop the votes."""
        self._counted(lib.lctx_seq_replay, seq, False)

    def replay_piece(self, first: int, end: int, seq: int = 0) -> None:
        """Begin the replay of a piece of the text: queries read no other one if the method replays pieces."""
        self._counted(lib.lctx_seq_replay_piece, seq, first, end)

    def _counted(self, function: Any, *args: Any) -> int:
        """Return the number from a function of the library, which is negative for an error."""
        with self._lock:
            n = int(function(self.handle, *args))
            check(min(n, lib.LCTX_OK), lib.lctx_context_error(self.handle))
            return n

    def compress(self, share: float, seq: int = 0) -> None:
        """Keep a fraction of the KV entries of a sequence, by the votes of its replay."""
        if refusal := self._refusal(lib.lctx_seq_compress, seq, share):
            raise error(lib.LCTX_INVALID, refusal)

    def clear(self, seq: int = 0) -> None:
        """Clear all sequences, or one of them."""
        with self._lock:
            if self.n_seq == 1:
                lib.lctx_clear(self.handle)
            else:
                lib.lctx_seq_rm(self.handle, seq, 0, -1)

    def state_size(self, seq: int = 0) -> int:
        """Return the bytes of ``state``."""
        return self._ask(lib.lctx_state_size, seq)

    def state(self, seq: int = 0) -> NDArray[np.uint8]:
        """Return the KV cache of a sequence as bytes."""
        with self._lock:
            size = lib.lctx_state_size(self.handle, seq)
            data = np.empty(size, np.uint8)
            if not size or lib.lctx_state_get(self.handle, seq, out_buffer("state", data, np.uint8), size) != size:
                raise error(lib.LCTX_FAILED, text(lib.lctx_context_error(self.handle)))
            return data

    def set_state(self, data: NDArray[np.uint8], seq: int = 0) -> None:
        """Replace the KV cache of a sequence by bytes from ``state``; InvalidInput when they do not fit."""
        with self._lock:
            if lib.lctx_state_set(self.handle, seq, in_buffer("state", data, np.uint8), len(data)) != len(data):
                reason = text(lib.lctx_context_error(self.handle)) or "its length is wrong"
                raise error(lib.LCTX_INVALID, f"the saved state cannot be used: {reason}")

    @property
    def slice_kind(self) -> int:
        """The content of a slice of a sequence, see ``lctx_context_slices``."""
        return self._ask(lib.lctx_context_slices)

    def slice(self, first: int, end: int, seq: int = 0) -> NDArray[np.uint8]:
        """Return the bytes of a range of positions of a sequence, in whole pages and chunks."""
        return self._written(lambda *out: lib.lctx_slice_get(self.handle, seq, first, end, *out))

    def foreign(self, seq: int = 0) -> NDArray[np.uint8]:
        """Return the windows and recurrent states at the end of a sequence, which slices do not contain."""
        return self._written(lambda *out: lib.lctx_foreign_get(self.handle, seq, *out))

    def append_slice(self, data: NDArray[np.uint8], seq: int = 0) -> None:
        """Append a slice from ``slice`` to a sequence; InvalidInput when it does not fit."""
        self._read(lambda *given: lib.lctx_slice_append(self.handle, seq, *given), data)

    def insert_slice(self, data: NDArray[np.uint8], skip: int, n: int, seq: int = 0) -> None:
        """Append ``n`` rows of a slice after its first ``skip``, ignoring their prefix; InvalidInput when refused."""
        self._read(lambda *given: lib.lctx_slice_insert(self.handle, seq, *given, skip, n), data)

    def n_exact(self, seq: int = 0) -> int:
        """Return how many rows of a sequence were computed from exactly the rows before them."""
        return self._ask(lib.lctx_seq_exact, seq)

    def drop(self, first: int, end: int, seq: int = 0) -> str:
        """Remove positions of a sequence, shifting later ones; returns the reason of a refusal, or the empty string."""
        return self._refusal(lib.lctx_seq_drop, seq, first, end)

    def set_foreign(self, data: NDArray[np.uint8], seq: int = 0) -> None:
        """Complete a sequence built from slices; InvalidInput when it does not fit, which leaves the sequence empty."""
        self._read(lambda *given: lib.lctx_foreign_set(self.handle, seq, *given), data)

    def _written(self, write: Callable[..., int]) -> NDArray[np.uint8]:
        with self._lock:
            size = write(ffi.NULL, 0)
            data = np.empty(size, np.uint8)
            if not size or write(out_buffer("data", data, np.uint8), size) != size:
                raise error(lib.LCTX_FAILED, text(lib.lctx_context_error(self.handle)))
            return data

    def _read(self, read: Callable[..., int], data: NDArray[np.uint8]) -> None:
        with self._lock:
            if not read(in_buffer("data", data, np.uint8), len(data)):
                raise error(lib.LCTX_INVALID, text(lib.lctx_context_error(self.handle)))

    def set_adapters(self, adapters: list[tuple[Any, float]]) -> None:
        """Use these LoRA adapters, given as handle and scale; the KV cache stays unchanged."""
        handles = ffi.new("lctx_adapter *[]", [handle for handle, _ in adapters])
        scales = ffi.new("float[]", [scale for _, scale in adapters])
        with self._lock:
            status = lib.lctx_context_set_adapters(self.handle, len(adapters), handles, scales)
            check(status, lib.lctx_context_error(self.handle))

    def pooling_type(self) -> int:
        """Return the pooling, see ``lctx_context_pooling``."""
        return self._ask(lib.lctx_context_pooling)

    def embed(self, texts: list[list[int]]) -> NDArray[np.float32]:
        """Return embeddings, float32 [n, size], one per text or without pooling per token; clears the cache."""
        lengths = np.array([len(tokens) for tokens in texts], np.int32)
        tokens = np.concatenate([np.array(tokens, np.int32) for tokens in texts])
        with self._lock:
            handle = self.handle
            n = len(tokens) if lib.lctx_context_pooling(handle) == 0 else len(texts)
            out = np.empty((n, lib.lctx_embedding_size(handle)), np.float32)
            buffers = [in_buffer(name, array, np.int32) for name, array in (("lengths", lengths), ("tokens", tokens))]
            status = lib.lctx_embed(handle, len(texts), *buffers, out_buffer("out", out, np.float32))
            check(status, lib.lctx_context_error(handle))
        return out

    def kv_usage(self) -> KVUsage:
        """Return the KV memory held now."""
        info = ffi.new("lctx_kv_info *")
        with self._lock:
            self._kv_usage(info, ffi.NULL)
            rows = np.zeros((info.n_layer, info.n_head_kv), np.int32)
            self._kv_usage(info, out_buffer("rows", rows, np.int32))
        return KVUsage(info.bytes, info.peak_bytes, info.full_bytes, info.foreign_bytes, info.mapped_bytes, rows)

    def offload_usage(self) -> OffloadUsage:
        """Return the counters of ``kv_offload``."""
        info = ffi.new("lctx_offload_info *")
        with self._lock:
            check(lib.lctx_offload_usage(self.handle, info), lib.lctx_context_error(self.handle))
        counts = (info.n_hit, info.n_miss, info.n_far)
        sizes = (info.unit_bytes, info.device_bytes, info.n_staged, info.n_chosen)
        return OffloadUsage(*counts, *sizes, info.file_bytes, info.read_bytes, info.written_bytes, info.file_seconds)

    def _kv_usage(self, info: Any, rows: Any) -> None:
        check(lib.lctx_kv_usage(self.handle, info, rows), lib.lctx_context_error(self.handle))

    def start_trace(self, start: int, stop: int, seq: int = 0) -> None:
        """Record the chunks read at ``start <= p < stop``, replacing earlier records; an empty range stops."""
        with self._lock:
            check(lib.lctx_trace_start(self.handle, seq, start, stop), lib.lctx_context_error(self.handle))
            self.tracing = start < stop

    def read_trace(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return the records: positions [n_query], chunks [n_query, n_layer, n_head, n_read].

        Raises MemoryError when there is no memory for the copy, or there was none for a record.
        """
        info = ffi.new("lctx_trace_info *")
        with self._lock:
            self._read_trace(info, ffi.NULL, ffi.NULL)
            positions = np.empty(info.n_query, np.int32)
            chunks = np.empty((info.n_query, info.n_layer, info.n_head, info.n_read), np.int32)
            self._read_trace(info, out_buffer("pos", positions, np.int32), out_buffer("chunks", chunks, np.int32))
        return positions, chunks

    def _read_trace(self, info: Any, *arrays: Any) -> None:
        if lib.lctx_trace_get(self.handle, info, *arrays) != lib.LCTX_OK:
            raise MemoryError("there was no memory to record the chunks that were read")
