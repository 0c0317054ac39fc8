"""Calls ``lctx_op_run`` and ``lctx_layer_run`` on numpy arrays: inputs of a case, native result, and the oracle's."""

from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import oracle
from cases import OpCase
from cases_chunks import HALF, ChunkCase
from cases_evict import EvictCase
from needs import lacks
from oracle_chunks import UNUSED, LongHeads, Stored, as_mask, byte_steps, is_in_bytes, missed
from oracle_evict import Layer
from oracle_rules import Kvzip

from pylongctx._lib import lib as library

try:
    from op_harness import call, ffi, lib
except ImportError as reason:
    lacks("harness", str(reason))

POISON = np.float32(1e30)
NEAR = 2e-5  # of the largest score: what float32 leaves
# the same where a number was rounded the other way before it was compared: a byte of a query, a level of a key
ROUNDED_OTHERWISE = 3e-2
RARE = 0.001


@dataclass
class Inputs:
    """Arrays of one case, as ``lctx_op_args`` wants them."""

    k: np.ndarray
    v: np.ndarray
    q: np.ndarray
    k_pos: np.ndarray
    k_near_pos: np.ndarray | None
    seg_rows: np.ndarray
    seg_pos: np.ndarray
    near_mask: int


def make_inputs(case: OpCase) -> Inputs:
    """Draw keys, values and queries, and lay out the segments of the case."""
    rng = np.random.default_rng(case.seed)
    normal = lambda *shape: rng.standard_normal(shape, dtype=np.float32)  # noqa: E731
    segs = case.segments()
    rows = np.arange(case.n_rows, dtype=np.int32)
    near = [any(query[s].near for query in segs) for s in range(len(segs[0]))]
    return Inputs(
        k=normal(case.n_rows, case.n_head_kv, case.head_dim_k),
        v=normal(case.n_rows, case.n_head_kv, case.head_dim_v),
        q=normal(case.n_tokens, case.n_head, case.head_dim_k) * np.float32(case.sharpness),
        k_pos=case.method.storage(rows).astype(np.int32),
        k_near_pos=rows if case.near_rows else None,
        seg_rows=np.array([[(s.row0, s.row1) for s in query] for query in segs], dtype=np.int32),
        seg_pos=np.array([[s.a for s in query] for query in segs], dtype=np.int32),
        near_mask=sum(1 << s for s, is_near in enumerate(near) if is_near),
    )


def run_native(case: OpCase, x: Inputs, **override) -> tuple[np.ndarray, np.ndarray | None]:
    """Return (out, lse) of the native op; keyword arguments override fields of ``lctx_op_args``.

    Raises
    ------
    ValueError
        With the reason that the native code gave.
    """
    out = np.full((case.n_tokens, case.n_head, case.head_dim_v), POISON)
    lse = np.full((case.n_tokens, case.n_head), POISON) if case.lse else None
    with _op_args(case, x, out, lse, override) as args:
        call(lib.lctx_op_run, args)
    return out, lse


@contextmanager
def _op_args(case: OpCase, x: Inputs, out: np.ndarray, lse: np.ndarray | None, override: dict):
    """Give an ``lctx_op_args``, and keep what it points to."""
    arrays = {"k": x.k, "v": x.v, "q": x.q, "k_pos": x.k_pos, "k_near_pos": x.k_near_pos, "seg_rows": x.seg_rows,
              "seg_pos": x.seg_pos, "freq_factors": case.make_rope().freq_factors, "out": out, "lse": lse}  # fmt: skip
    keep = {name: _pointer(array) for name, array in arrays.items()}
    keep |= {name: _value(value) for name, value in override.items()}
    yield ffi.new("lctx_op_args *", _scalars(case, x) | keep)


def flash_run(case: OpCase, x: Inputs, **override) -> tuple[np.ndarray, np.ndarray]:
    """Return the output of ggml_flash_attn_ext, and the microseconds of every repeat.

    Raises
    ------
    ValueError
        With the reason that the native code gave.
    """
    out = np.full((case.n_tokens, case.n_head, case.head_dim_v), POISON)
    times = np.zeros(override.get("n_repeat", 1))
    with _op_args(case, x, out, None, {"times": _pointer(times)} | override) as args:
        call(lib.lctx_flash_run, args)
    return out, times


def roofline_run(n_threads: int, device: str | None = None):
    """Return the filled ``lctx_roofline_args``."""
    name = _value(device)
    args = ffi.new("lctx_roofline_args *", {"n_threads": n_threads, "device": name})
    call(lib.lctx_roofline_run, args)
    return args


# ---- one layer of a method ----


@dataclass
class LayerRun:
    """What ``lctx_layer_run`` gave.

    Attributes
    ----------
    out : array ``[n_rows, n_head, head_dim_v]``
    held : bool array ``[n_head_kv, n_rows]``
        After the eviction that is due at the end.
    scores : int32 array ``[n_head_kv, n_rows]``
        Meaningful for rows held; the bits of a float for some rules.
    summaries : array ``[n_summary, n_chunk, summary_dim]`` or None
        None where keys are compared.
    chunks : bool array ``[n_rows, n_head, n_chunk]`` or None
        Those that a query reads, in whole or in part.
    """

    out: np.ndarray
    held: np.ndarray
    scores: np.ndarray
    summaries: np.ndarray | None = None
    chunks: np.ndarray | None = None


def run_layer(
    case: OpCase, x: Inputs, n_ubatch: int, spec: str, n_ctx_train: int, shows_chunks: bool = True, **override
) -> LayerRun:
    """Return what one layer read, chose and held; ``override`` replaces fields of ``lctx_op_args``.

    A layer that does not show its chunks makes no choice where there is none.

    Raises
    ------
    ValueError
        With the reason that the native code gave.
    """
    by_head = np.full((2, case.n_head_kv, case.n_rows), -2, dtype=np.int32)
    run = LayerRun(np.full((case.n_rows, case.n_head, case.head_dim_v), POISON), *by_head)
    method = getattr(case, "in_context", case.method)
    method = method if isinstance(method, LongHeads) and shows_chunks else None
    n_read = method.n_read_max + 2 if method else 0  # more room than is needed
    n_summary = case.n_head * (case.n_rows // method.chunk_size) if method else 0
    summaries = np.full(n_summary * 3 * case.head_dim_k + 1, POISON) if method else None
    chunks = np.full((case.n_rows, case.n_head, n_read), UNUSED, dtype=np.int32) if method else None
    with _op_args(case, x, run.out, None, override) as op:
        arrays = {"summaries": summaries, "chunks": chunks, "held": run.held, "scores": run.scores}
        keep = {name: _pointer(array) for name, array in arrays.items()}
        keep |= {"op": op, "method": ffi.new("char[]", spec.encode())}
        sizes = {"n_ctx_train": n_ctx_train, "n_ubatch": n_ubatch, "n_read_max": n_read}
        if isinstance(getattr(case, "rule", None), Kvzip) and Kvzip.name in spec:
            sizes |= {"n_text": case.rule.n_text, "fraction": case.rule.share}
        args = ffi.new("lctx_layer_run_args *", sizes | keep)
        call(lib.lctx_layer_run, args)
    assert np.isin(run.held, (0, 1)).all(), "held must be 0 or 1 everywhere"
    run.held = run.held.astype(bool)
    if method:
        _take_chunks(method, run, chunks, summaries, args)
    return run


def _take_chunks(method: LongHeads, run: LayerRun, chunks: np.ndarray, summaries: np.ndarray, args) -> None:
    assert args.n_read <= method.n_read_max
    assert (chunks[..., args.n_read :] == UNUSED).all(), "more chunks than a query reads at most"
    ascends = (np.diff(chunks) > 0) | (chunks[..., 1:] == UNUSED)
    assert ascends.all(), "chunks must ascend, each once"
    n_rows = len(chunks)
    run.chunks = as_mask(chunks, -(-n_rows // method.chunk_size))
    if not method.key_bits:
        shape = args.n_summary, n_rows // method.chunk_size, args.summary_dim
        run.summaries = summaries[: np.prod(shape)].reshape(shape)


def assert_same_summaries(
    case: ChunkCase | EvictCase, got: np.ndarray | None, want: np.ndarray | None, tolerance: float
) -> None:
    """Hold summaries together: within a tolerance, relative to the largest, and a step of what keeps them.

    The bound of a chunk may be a number that was stored a step away.
    """
    if want is None:
        assert got is None
        return
    largest = abs(want).max(initial=0)
    # a scale that is one half off moves the largest level by 1/16 of a step
    step = 1.1 * byte_steps(want) if is_in_bytes(case.method, case.head_dim_k) else HALF * largest
    error = abs(got - want)
    assert (error > np.maximum(step, tolerance * largest)).sum() <= RARE * error.size
    assert (error <= np.maximum(step, 10 * tolerance * largest)).all()


def assert_right_choices(layer: Stored, got: LayerRun) -> None:
    """Every query has read what it must, and of the others the best, near ties aside."""
    scores, n = layer.all_scores(got.summaries), layer.method.n_free
    free = [layer.method.free(p) for p in range(len(scores))]
    alone = [p for p in range(len(scores)) if layer.tile_of(p) is None]
    wants = layer.wants(got.summaries)
    chosen_by = {p: layer.group_scores(scores[p], wants[p], p) for p in alone}
    by = [[missed(*pair, free[p], n) for pair in zip(chosen_by[p], got.chunks[p, :, : len(free[p])], strict=True)]
          for p in alone]  # fmt: skip
    assert_near_ties(np.array(by), scores)
    assert not any(got.chunks[p, :, len(free[p]) :].any() for p in range(len(scores))), "a chunk begins after its query"
    for first in {layer.tile_of(p) for p in range(len(scores))} - {None}:
        assert_right_list(layer, got, first)


def assert_right_list(layer: Stored, got: LayerRun, first: int) -> None:
    """The queries of a tile have read what they must, and of the others the same: the best, near ties aside."""
    free, end = layer.method.tile_free(first), first + layer.method.tile
    held = np.ones((layer.n_head_kv, len(layer.k)), dtype=bool)
    values = layer.tile_values(layer.wants(got.summaries), first, held)
    last = got.chunks[end - 1, :, : len(free)]
    for p, head in np.ndindex(layer.method.tile, layer.q.shape[1]):
        own = (first + p) // layer.method.chunk_size + 1
        np.testing.assert_array_equal(got.chunks[first + p, head, :own], last[head, :own])
    n, least = layer.method.n_shared, -layer.method.tile_cutoff * np.log(2)
    by = [missed(values[i], last[i * layer.ratio], free, n, least) for i in range(len(values))]
    assert_near_ties(np.array(by), values)


def assert_near_ties(by: np.ndarray, scores: np.ndarray) -> None:
    """Chunks that were left are better than those taken by next to nothing."""
    largest = abs(scores[scores > -np.inf]).max(initial=0)
    assert by.max(initial=0) <= ROUNDED_OTHERWISE * largest, f"another chunk is better by {by.max() / largest:.3g}"
    assert (by > NEAR * largest).sum() <= 1 + RARE * by.size, f"{(by > NEAR * largest).sum()} of {by.size} are no ties"


def run_chunks(case: ChunkCase, x: Inputs, method: str | None = None, **override) -> LayerRun:
    """Return what a method that chooses chunks chose and read."""
    run = run_layer(case, x, case.n_ubatch, method or case.method.text(), case.n_ctx_train, **override)
    assert run.held.all()
    return run


def run_evict(case: EvictCase, x: Inputs, spec: str | None = None, **override) -> LayerRun:
    """Return what heads that drop rows read and held."""
    n_ctx_train = getattr(case.method, "n_ctx_train", 4096)
    return run_layer(case, x, case.n_ubatch, spec or case.evicting.text(), n_ctx_train, **override)


@dataclass
class StepRun:
    """What ``lctx_step_run`` gave: microseconds per sub-op, bytes and operations of *attend*; rows held before."""

    out: np.ndarray
    times: dict[str, np.ndarray]
    attend_bytes: float
    attend_flops: float
    n_held: int


def run_step(case: OpCase, x: Inputs, spec: str, n_tokens: int, n_repeat: int = 1, held: float = 1.0,
             unvoted: float = 1.0, fill_q: bool = True, n_layer: int = 0,
             n_ctx_train: int = 64) -> StepRun:  # fmt: skip
    """Return what the last ``n_tokens`` rows of the case did as one ubatch of a method.

    Raises
    ------
    ValueError
        With the reason that the native code gave.
    """
    names = ("store", "summarize", "select", "attend", "vote", "evict")
    n_past = max(0, case.n_rows - n_tokens)
    step = replace(x, q=np.ascontiguousarray(x.q[n_past:]))
    out = np.full((max(0, n_tokens), case.n_head, case.head_dim_v), POISON)
    times = np.full((len(names), n_repeat), -1.0)
    sizes = {"n_tokens": n_tokens, "n_repeat": n_repeat, "n_layer": n_layer}
    with _op_args(case, step, out, None, sizes) as op:
        pointers = {"op": op, "method": ffi.new("char[]", spec.encode()), "times": _pointer(times),
                    "fill_q": _pointer(x.q if fill_q else None)}  # fmt: skip
        settings = {"n_ctx_train": n_ctx_train, "held_fraction": held, "open_fraction": unvoted}
        args = ffi.new("lctx_step_run_args *", pointers | settings)
        call(lib.lctx_step_run, args)
    return StepRun(out, dict(zip(names, times, strict=True)), args.attend_bytes, args.attend_flops, args.n_held)


def evict_layer(case: EvictCase, x: Inputs) -> Layer:
    """Return the oracle of one layer whose heads drop rows."""
    settings = (case.evicting, case.make_rope(), case.scale, case.softcap, case.type_k, case.type_v,
                case.hadamard_k, case.hadamard_v)  # fmt: skip
    return Layer(x.q, x.k, x.v, *settings, n_ubatch=case.n_ubatch)


def stored(case: ChunkCase, x: Inputs) -> Stored:
    """Return the oracle of one layer that holds the rows of the case."""
    settings = (case.in_context, case.make_rope(), case.scale, case.softcap, case.type_k, case.type_v, case.hadamard_k,
                case.hadamard_v)  # fmt: skip
    return Stored(x.q, x.k, x.v, *settings, n_ubatch=case.n_ubatch)


def _pointer(array: np.ndarray | None):
    if array is None:
        return ffi.NULL
    c_type = {"float32": "float[]", "float64": "double[]", "int32": "int32_t[]"}[array.dtype.name]
    return ffi.from_buffer(c_type, np.ascontiguousarray(array), require_writable=True)


def _value(value):
    if isinstance(value, str):
        return ffi.new("char[]", value.encode())
    return ffi.NULL if value is None else value


def _scalars(case: OpCase, x: Inputs) -> dict:
    rope = case.make_rope()
    sizes = ("head_dim_k", "head_dim_v", "n_head", "n_head_kv", "n_rows", "n_tokens", "near_rows", "n_threads",
             "hadamard_k", "hadamard_v")  # fmt: skip
    return {name: getattr(case, name) for name in sizes} | {
        "n_seg": x.seg_rows.shape[1],
        "near_mask": x.near_mask,
        "type_k": library.lctx_type_from_name(case.type_k.encode()),
        "type_v": library.lctx_type_from_name(case.type_v.encode()),
        "page_seed": case.seed + 7,
        "n_repeat": 1,
        "scale": case.scale,
        "softcap": case.softcap,
        "rope_mode": rope.mode,
        "rope_dims": rope.n_dims,
        "rope_n_ctx_orig": rope.n_ctx_orig,
        "rope_freq_base": rope.freq_base,
        "rope_freq_scale": rope.freq_scale,
        "rope_ext_factor": rope.ext_factor,
        "rope_attn_factor": rope.attn_factor,
        "rope_beta_fast": rope.beta_fast,
        "rope_beta_slow": rope.beta_slow,
    }


def run_oracle(case: OpCase, x: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """Return (out, lse) of the reference in float64."""
    rope, ratio = case.make_rope(), case.n_head // case.n_head_kv
    stored = oracle.round_trip(oracle.rotate(x.k, x.k_pos[:, None], rope), case.type_k, case.hadamard_k)
    near = stored
    if x.k_near_pos is not None:
        near = oracle.round_trip(oracle.rotate(x.k, x.k_near_pos[:, None], rope), case.type_k, case.hadamard_k)
    v = oracle.round_trip(x.v, case.type_v, case.hadamard_v)
    out = np.empty((case.n_tokens, case.n_head, case.head_dim_v))
    lse = np.empty((case.n_tokens, case.n_head))
    for t, segs in enumerate(case.segments()):
        for h in range(case.n_head):
            g = h // ratio
            rows = (stored[:, g], near[:, g], v[:, g])
            out[t, h], lse[t, h] = oracle.attend_segments(x.q[t, h], segs, *rows, rope, case.scale, case.softcap)
    return out, lse
