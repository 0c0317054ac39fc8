"""Calls of the native single-op runs on random rows: a step of a method, ggml_flash_attn_ext, the roofline."""

import math
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import numpy as np
from op_harness import call, ffi, lib

from pylongctx._lib import lib as library

OPS = ("store", "summarize", "select", "attend", "vote", "evict")


@dataclass(frozen=True)
class Shape:
    """Heads of one layer; ``neox`` and ``base`` are its RoPE."""

    n_head: int
    n_head_kv: int
    head_dim: int
    neox: bool = False
    base: float = 10000.0


SHAPES = {
    "llama-3-8b": Shape(32, 8, 128, base=500000.0),
    "llama-2-7b": Shape(32, 32, 128),
    "qwen2.5-1.5b": Shape(12, 2, 128, neox=True, base=1000000.0),
    "phi-2": Shape(32, 32, 80, neox=True),
}


@dataclass(frozen=True)
class Rows:
    """Keys, values and queries of one shape, not rotated; the queries are those of the last rows."""

    shape: Shape
    k: np.ndarray
    v: np.ndarray
    q: np.ndarray

    @classmethod
    def random(cls, shape: Shape, n_rows: int, n_tokens: int) -> "Rows":
        normal = np.random.default_rng(0).standard_normal
        rows = (n_rows, shape.n_head_kv, shape.head_dim)
        queries = (n_tokens, shape.n_head, shape.head_dim)
        return cls(shape, *(normal(size, dtype=np.float32) for size in (rows, rows, queries)))

    @classmethod
    def load(cls, path: Path) -> "Rows":
        """Read what ``save`` has written, for instance by ``bench/record_rows.py``."""
        with np.load(path) as file:
            k, v, q = (file[name].astype(np.float32) for name in "kvq")
            shape = Shape(q.shape[1], k.shape[1], k.shape[2], bool(file["neox"]), float(file["base"]))
        return cls(shape, k, v, q)

    def save(self, path: Path) -> None:
        """Write an npz file of f16 numbers."""
        arrays = {name: getattr(self, name).astype(np.float16) for name in "kvq"}
        np.savez(path, neox=self.shape.neox, base=self.shape.base, **arrays)

    def step(self, n_rows: int, n_tokens: int) -> "Rows":
        """Return the rows of a step of ``n_tokens`` that ends at row ``n_rows``.

        Raises
        ------
        ValueError
            When there are not as many rows, or no queries of these tokens.
        """
        n, first = len(self.k), n_rows - n_tokens - len(self.k) + len(self.q)
        if n_rows > n or first < 0:
            raise ValueError(f"a step ends at {n - len(self.q) + n_tokens} to {n} of these rows, not at {n_rows}")
        return replace(self, k=self.k[:n_rows], v=self.v[:n_rows], q=self.q[first : first + n_tokens])


@dataclass(frozen=True)
class Run:
    """How often and on what: ``n_rows`` rows in all, of which the last ``n_tokens`` ask.

    Attributes
    ----------
    device : str or None
        A ggml device; None is the CPU with caches made cold before every repeat.
    n_layer : int
        Equal layers that are timed together: enough that their rows do not fit into a cache.
    hadamard : int
        -1: rows are transformed as a context stores them; 0: they are not.
    """

    kv: str
    n_rows: int
    n_tokens: int
    n_threads: int
    n_repeat: int
    device: str | None = None
    n_layer: int = 1
    hadamard: int = -1


@dataclass(frozen=True)
class Step:
    """Microseconds of every repeat per sub-op, bytes and operations of *attend*; rows that KV head 0 held before.

    ``scratch``: bytes of the device in addition to the tensors.
    """

    times: dict[str, list[float]]
    attend_bytes: float
    attend_flops: float
    n_held: int
    scratch: int


@dataclass(frozen=True)
class Flash:
    """Microseconds of every repeat of ggml_flash_attn_ext; bytes of the device in addition to the tensors."""

    times: list[float]
    scratch: int


def _pointer(array: np.ndarray):
    return ffi.from_buffer({"f": "float[]", "i": "int32_t[]", "d": "double[]"}[array.dtype.char], array)


def _op_args(rows: Rows, run: Run, keep: list, **more):
    """Return an ``lctx_op_args``; ``keep`` holds what it points to."""
    shape, dim = rows.shape, rows.shape.head_dim
    arrays = {
        "k": rows.k,
        "v": rows.v,
        "q": rows.q[: run.n_tokens],
        "out": np.empty_like(rows.q[: run.n_tokens]),
        **more,
    }
    pointers = {name: _pointer(array) for name, array in arrays.items()}
    pointers["device"] = ffi.new("char[]", run.device.encode()) if run.device else ffi.NULL
    keep += [*arrays.values(), *pointers.values()]
    kv = library.lctx_type_from_name(run.kv.encode())
    return ffi.new("lctx_op_args *", pointers | {
        "head_dim_k": dim, "head_dim_v": dim, "n_head": shape.n_head, "n_head_kv": shape.n_head_kv,
        "n_rows": run.n_rows, "n_tokens": run.n_tokens, "n_seg": 1, "type_k": kv, "type_v": kv,
        "n_threads": run.n_threads, "n_repeat": run.n_repeat, "n_layer": run.n_layer,
        "cold": int(run.device is None), "scale": 1 / math.sqrt(dim),
        "rope_mode": 2 if shape.neox else 0, "rope_dims": 32 if dim == 80 else dim, "rope_n_ctx_orig": run.n_rows,
        "rope_freq_base": shape.base, "rope_freq_scale": 1.0, "rope_attn_factor": 1.0,
        "rope_beta_fast": 32.0, "rope_beta_slow": 1.0, "hadamard_k": run.hadamard, "hadamard_v": run.hadamard,
    })  # fmt: skip


def flash(rows: Rows, run: Run) -> Flash:
    """Return what ggml_flash_attn_ext takes on llama.cpp's layout of the same rows."""
    keep: list = []
    times = np.empty(run.n_repeat)
    positions = np.arange(run.n_rows, dtype=np.int32)
    last = positions[-run.n_tokens :].copy()
    segs = np.stack([np.zeros_like(last), last + 1], axis=1)
    args = _op_args(rows, run, keep, times=times, k_pos=positions, seg_pos=last, seg_rows=segs)
    call(lib.lctx_flash_run, args)
    return Flash(times.tolist(), args.scratch_bytes)


def step(rows: Rows, run: Run, method: str, n_ctx_train: int, held: float = 1.0, unvoted: float = 1.0) -> Step:
    """Return what the sub-ops of one ubatch of a method take."""
    keep: list = []
    times = np.empty((len(OPS), run.n_repeat))
    op, name = _op_args(rows, run, keep), ffi.new("char[]", method.encode())
    args = ffi.new("lctx_step_run_args *", {
        "op": op, "method": name, "n_ctx_train": n_ctx_train, "held_fraction": held,
        "open_fraction": unvoted, "times": _pointer(times),
    })  # fmt: skip
    call(lib.lctx_step_run, args)
    by_op = {op: row.tolist() for op, row in zip(OPS, times, strict=True)}
    return Step(by_op, args.attend_bytes, args.attend_flops, args.n_held, op.scratch_bytes)


@dataclass(frozen=True)
class Roofline:
    """Bytes of the last-level cache; bytes and operations per second; ``gemm_bf16``: 0 without such a product."""

    cache_bytes: int
    read_bandwidth: float
    gemm_f32: float
    gemm_bf16: float
    copy_bandwidth: float

    def best(self, other: "Roofline") -> "Roofline":
        """Return the higher of each: what else runs on a machine only ever takes away."""
        return Roofline(*(max(pair) for pair in zip(astuple(self), astuple(other), strict=True)))


def roofline(n_threads: int, device: str | None = None) -> Roofline:
    """Measure what the machine can do; of a device, how fast it copies."""
    name = ffi.new("char[]", device.encode()) if device else ffi.NULL
    args = ffi.new("lctx_roofline_args *", {"n_threads": n_threads, "device": name})
    call(lib.lctx_roofline_run, args)
    return Roofline(args.cache_bytes, args.read_bandwidth, args.gemm_f32, args.gemm_bf16, args.copy_bandwidth)
