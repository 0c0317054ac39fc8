"""A context of the C API with nothing between it and the test."""

from pathlib import Path

import numpy as np
from cases import LOGIT_TOLERANCE

try:
    import op_harness as harness
except ImportError:  # the library was built without it
    harness = None


def assert_same(got: np.ndarray, want: np.ndarray, tolerance: float = LOGIT_TOLERANCE) -> None:
    """Hold two arrays of logits together, relative to the largest."""
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * abs(want).max(initial=0))


class Session:
    """One model and one context; ``where`` are fields of ``lctx_model_params``, the others of ``lctx_context_params``.

    All layers are on the CPU, also where there is a GPU, unless ``where`` has ``n_gpu_layers``.

    Raises
    ------
    ValueError
        With the reason that the native code gave.
    """

    def __init__(self, ffi, lib, path: Path | str, method: str, where: dict | None = None, **params):
        self.ffi, self.lib, self.ctx = ffi, lib, ffi.NULL
        model_params = ffi.new("lctx_model_params *")
        lib.lctx_model_params_default(model_params)
        servers = ffi.new("char[]", (where or {}).get("rpc_servers", "").encode())
        for name, value in ({"n_gpu_layers": 0} | (where or {}) | {"rpc_servers": servers}).items():
            setattr(model_params, name, value)
        self.model = lib.lctx_model_load(str(path).encode(), model_params, ffi.NULL)
        self._raise_error(lib.lctx_model_error(self.model))
        self.ctx = lib.lctx_context_create(self.model, self._context_params(params), method.encode())
        self._raise_error(lib.lctx_context_error(self.ctx))
        info = ffi.new("lctx_model_info *")
        lib.lctx_model_get_info(self.model, info)
        self.n_vocab = info.n_vocab

    def _context_params(self, params: dict):
        out = self.ffi.new("lctx_context_params *")
        self.lib.lctx_context_params_default(out)
        f32 = self.lib.lctx_type_from_name(b"f32")
        for name, value in ({"type_k": f32, "type_v": f32} | params).items():
            setattr(out, name, value)
        return out

    def _raise_error(self, message) -> None:
        if message != self.ffi.NULL:
            reason = self.ffi.string(message).decode()
            self.close()
            raise ValueError(reason)

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        if self.ctx != self.ffi.NULL:
            self.lib.lctx_context_free(self.ctx)
        self.lib.lctx_model_free(self.model)
        self.ctx, self.model = self.ffi.NULL, self.ffi.NULL

    def check(self) -> None:
        """Raise ValueError if what the cache knows of its sequences and pages contradicts itself."""
        if harness is not None and self.ctx != self.ffi.NULL:
            address = int(self.ffi.cast("uintptr_t", self.lib.lctx_context_llama(self.ctx)))
            args = harness.ffi.new("lctx_check_args *", {"context": harness.ffi.cast("void *", address)})
            harness.call(harness.lib.lctx_check_run, args)

    @property
    def n_past(self) -> int:
        return self.lib.lctx_n_past(self.ctx, 0)

    @property
    def error(self) -> str | None:
        message = self.lib.lctx_context_error(self.ctx)
        return None if message == self.ffi.NULL else self.ffi.string(message).decode()

    def try_decode(self, tokens: list[int]) -> tuple[int, np.ndarray]:
        """Return the status and the logits of every token of one batch."""
        logits = np.full((len(tokens), self.n_vocab), np.nan, dtype=np.float32)
        buffer = self.ffi.from_buffer("float[]", logits, require_writable=True)
        status = self.lib.lctx_decode(self.ctx, tokens, len(tokens), self.n_past, buffer, 1)
        self.check()
        return status, logits

    def decode(self, tokens: list[int], step: int | None = None) -> np.ndarray:
        """Evaluate ``tokens`` in batches of ``step`` and return all their logits."""
        step, out = step or len(tokens), []
        for i in range(0, len(tokens), step):
            status, logits = self.try_decode(tokens[i : i + step])
            assert status == self.lib.LCTX_OK, self.error
            out.append(logits)
        return np.concatenate(out)

    def remove_tail(self, p0: int, seq: int = 0) -> bool:
        """Remove positions from ``p0`` on; False when the method refuses."""
        done = self.lib.lctx_seq_rm(self.ctx, seq, p0, -1) == 1
        self.check()
        return done

    def restorable(self, n: int, seq: int = 0) -> int:
        """Return the longest prefix of at most ``n`` positions that the sequence can be cut back to."""
        return self.lib.lctx_seq_restorable(self.ctx, seq, n)

    def cut_back(self, n: int, seq: int) -> int:
        """Keep ``n`` positions, or as many before them as the method can go back to; return how many."""
        if not self.remove_tail(n, seq):
            refused, n = n, self.restorable(n, seq)
            assert n < refused
            assert self.remove_tail(n, seq), self.error
        return n

    # ---- several sequences ----

    def length(self, seq: int) -> int:
        return self.lib.lctx_n_past(self.ctx, seq)

    def try_decode_mixed(self, batch: list[tuple[int, int]]) -> tuple[int, np.ndarray]:
        """Return the status and the logits of every (sequence, token) of one batch."""
        next_pos = {seq: self.length(seq) for seq, _ in batch}
        pos = []
        for seq, _ in batch:
            pos.append(next_pos[seq])
            next_pos[seq] += 1
        logits = np.full((len(batch), self.n_vocab), np.nan, dtype=np.float32)
        buffer = self.ffi.from_buffer("float[]", logits, require_writable=True)
        seqs, tokens = ([item[i] for item in batch] for i in (0, 1))
        wanted = [1] * len(batch)
        status = self.lib.lctx_decode_batch(self.ctx, len(batch), tokens, pos, seqs, wanted, buffer)
        self.check()
        return status, logits

    def decode_mixed(self, batch: list[tuple[int, int]]) -> np.ndarray:
        """Evaluate (sequence, token) pairs as one batch and return all their logits."""
        status, logits = self.try_decode_mixed(batch)
        assert status == self.lib.LCTX_OK, self.error
        return logits

    def copy(self, src: int, dst: int, n: int = -1) -> bool:
        done = self.lib.lctx_seq_cp(self.ctx, src, dst, n) == 1
        self.check()
        return done

    def keep(self, seq: int) -> None:
        self.lib.lctx_seq_keep(self.ctx, seq)
        self.check()

    def save(self, seq: int = -1) -> bytes:
        size = self.lib.lctx_state_size(self.ctx, seq)
        buffer = self.ffi.new("uint8_t[]", size)
        assert self.lib.lctx_state_get(self.ctx, seq, buffer, size) == size, self.error
        return bytes(buffer)

    def restore(self, state: bytes, seq: int = -1) -> bool:
        done = self.lib.lctx_state_set(self.ctx, seq, self.ffi.from_buffer("uint8_t[]", state), len(state)) > 0
        self.check()
        return done

    @property
    def kv_bytes(self) -> int:
        info = self.ffi.new("lctx_kv_info *")
        assert self.lib.lctx_kv_usage(self.ctx, info, self.ffi.NULL) == self.lib.LCTX_OK
        return info.bytes

    def clear(self) -> None:
        self.lib.lctx_clear(self.ctx)
        self.check()
