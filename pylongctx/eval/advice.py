"""Estimates for a text and each method: seconds from a measured speed, bytes from the library.

Reading a token costs a part for the weights and a part for every key that it is compared with; ``longheads`` reads a
window of keys and scores the others. Both parts are measured on short texts of the machine, and grow as the formula
says: n tokens of full attention compare n^2 / 2 pairs. In a prompt, heads that need few chunks are faster than that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

from pylongctx import _arguments as arguments
from pylongctx._enums import DISK
from pylongctx.engine.compress import compression_prefills
from pylongctx.eval.runner import plan_of
from pylongctx.llama import Llama
from pylongctx.methods import Kvzip, LongHeads

SHORT_TEXT, LONG_TEXT = 512, 2048  # tokens of the texts that are measured
STEPS = 8  # tokens that are generated
WINDOW = 256  # of longheads in a measurement
CONTEXT_MULTIPLE = 256  # tokens by which a context grows
ANSWER = 1024  # tokens of a context in addition to the text
TYPES = ("f16", "q8_0", "q4_0")
KEPT = 0.35  # of the entries, after a compression: a tenth of the bytes of f16 with K and V in q4_0
ONE = (1, 1)  # threads, for what does not depend on them


@dataclass(frozen=True)
class Speed:
    """Seconds of a token, for reading a text and for writing an answer."""

    weights: float  # without any attention
    key: float  # more for each key that is read
    score: float  # more for each key that is scored, and perhaps not read

    def of_full(self, n: int) -> float:
        """Return the seconds of the token after ``n`` others, with full attention."""
        return self.weights + self.key * n

    def of_longheads(self, n: int, rows: int, select_from: int) -> float:
        """Return the same where only ``rows`` are read from ``select_from`` on."""
        if n < select_from:
            return self.of_full(n)
        return self.weights + self.key * rows + self.score * n


@dataclass(frozen=True)
class Estimate:
    """Time and memory of a method for a text."""

    method: str
    read: float  # seconds until the text is evaluated, and compressed
    token: float  # seconds of a token of the answer
    kv_bytes: dict[str, int]  # by type, that of kvzip after compress
    fits: dict[str, bool]  # by type: together with the weights


@dataclass(frozen=True)
class Tiers:
    """Bytes of ``longheads`` with ``kv_offload="disk"``, in f16."""

    memory: int  # of K, V and the index, at most
    disk: int
    fits: bool  # the memory, together with the weights


@dataclass(frozen=True)
class Advice:
    """Estimates of methods for a text of ``length`` tokens, and which one to take."""

    n_ctx_train: int
    length: int
    estimates: tuple[Estimate, ...]
    tiers: Tiers

    @property
    def best(self) -> Estimate:
        """The fastest method."""
        return min(self.estimates, key=lambda one: one.read)

    @property
    def kv_type(self) -> str:
        """The first type that fits; empty when none does."""
        return next((kv for kv in TYPES if self.best.fits[kv]), "")


def advise(path: str, length: int | None = None, **options: Any) -> Advice:
    """Return estimates of time and memory for the methods that can read a text.

    ``length`` None is the trained context, less room for an answer; ``options`` are arguments of Llama.
    """
    if length is not None and length < 1:
        raise ValueError(f"length must be at least 1, not {length}")
    n_train = _trained(path)
    n = length or max(1, n_train - ANSWER)
    reading, writing = measure(path, **options)
    window, tile, first = _windows(path, **options)
    every = "full" if n <= n_train else "dca"
    rows = (
        (every, _sum(reading.of_full, n), writing.of_full(n)),
        (
            "longheads",
            _sum(lambda at: reading.of_longheads(at, tile, first), n),
            writing.of_longheads(n, window, first),
        ),
    )
    estimates = [Estimate(*row, *_sizes(path, row[0], _context(n), options)) for row in rows]
    if every == "full":
        estimates.append(_compressed(path, estimates[0], writing, n, options))
    return Advice(n_train, n, tuple(estimates), _tiers(path, _context(n), options))


def _compressed(path: str, full: Estimate, writing: Speed, n: int, options: dict[str, Any]) -> Estimate:
    """Return the estimate for a text that is compressed after its prefill, which has to fit whole."""
    kept = round(KEPT * n)
    held, _ = _sizes(path, "kvzip", _context(kept), options)
    return Estimate("kvzip", full.read * (1 + compression_prefills(Kvzip())), writing.of_full(kept), held, full.fits)


def _tiers(path: str, n_ctx: int, options: dict[str, Any]) -> Tiers:
    options = options | {"n_ctx": n_ctx, "kv_offload": DISK, "n_gpu_layers": 0}
    with plan_of(path, "longheads", arguments.thread_counts(None, None), options) as plan:
        sizes = plan.sizes()
    held, disk = sum(size.kv for size in sizes), sum(size.disk for size in sizes)
    return Tiers(held, disk, all(size.fits for size in sizes))


def _windows(path: str, **options: Any) -> tuple[int, int, int]:
    """Return what ``longheads`` reads for a token and for one of a tile, and from where it selects, by default."""
    with Llama(path, **{"verbose": False, **options}, method="longheads", n_ctx=LONG_TEXT) as llm:
        chosen = llm.method
        assert isinstance(chosen, LongHeads) and chosen.window is not None and chosen.select_from is not None
        return chosen.window, chosen.tile_window or chosen.window, chosen.select_from


def measure(path: str, **options: Any) -> tuple[Speed, Speed]:
    """Return the speed of reading and of writing, from two short texts with each of two methods."""
    first, (dense_read, dense_write) = _timed(path, "full", options)
    _, (chosen_read, chosen_write) = _timed(
        path, f"longheads,window={WINDOW},select_from={WINDOW},tile_window={WINDOW}", options
    )
    n, pairs = LONG_TEXT - SHORT_TEXT, (LONG_TEXT**2 - SHORT_TEXT**2) / 2
    # first = SHORT_TEXT * weights + SHORT_TEXT^2 / 2 * key; dense_read = n * weights + pairs * key
    key = max(0.0, (dense_read - n / SHORT_TEXT * first[0]) / (pairs - n * SHORT_TEXT / 2))
    weights = max(0.0, (dense_read - pairs * key) / n)
    score = max(0.0, (chosen_read - n * (weights + WINDOW * key)) / pairs)
    key_write = max(0.0, (dense_write - first[1]) / (LONG_TEXT - SHORT_TEXT))
    weights_write = max(0.0, dense_write - LONG_TEXT * key_write)
    score_write = max(0.0, (chosen_write - weights_write - WINDOW * key_write) / LONG_TEXT)
    return Speed(weights, key, score), Speed(weights_write, key_write, score_write)


def _timed(path: str, method: str, options: dict[str, Any]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return seconds of reading SHORT_TEXT tokens and of a token after them; the same for the rest up to LONG_TEXT."""
    with Llama(path, **{"verbose": False, **options}, method=method, n_ctx=LONG_TEXT + 4 * STEPS) as llm:
        text = sample_tokens(llm, LONG_TEXT)
        llm.prefill(text[:SHORT_TEXT])  # the first time is slower
        llm.reset()
        read = [prefill_seconds(llm, text[:n]) for n in (SHORT_TEXT, LONG_TEXT)]
        write_long = _write(llm, text)
        llm.reset()
        llm.prefill(text[:SHORT_TEXT])
        return (read[0], _write(llm, text)), (read[1], write_long)


def sample_tokens(llm: Llama, n: int) -> list[int]:
    """Return ``n`` tokens of a text to measure with."""
    return llm.tokenize(b"The quick brown fox jumps over the lazy dog. " * n)[:n]


def prefill_seconds(llm: Llama, tokens: Sequence[int]) -> float:
    """Return the seconds of a prefill without its cached prefix."""
    return _seconds(partial(llm.prefill, tokens))


def _write(llm: Llama, text: Sequence[int]) -> float:
    """Return the seconds of a token after those that the cache holds."""

    def steps() -> None:
        for i in range(STEPS):
            llm.eval(text[i : i + 1])

    return _seconds(steps) / STEPS


def _seconds(work: Callable[[], object]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start


def _sum(seconds: Any, n: int) -> float:
    """Return the seconds of n tokens, each after those before it, by some of them."""
    places = range(0, n, max(1, n // 1024))
    return float(sum(map(seconds, places)) * n / len(places))


def _context(n: int) -> int:
    return -(-(n + ANSWER) // CONTEXT_MULTIPLE) * CONTEXT_MULTIPLE


def _trained(path: str) -> int:
    with plan_of(path, "full", ONE, {}) as plan:
        return int(plan.info.n_ctx_train)


def _sizes(path: str, method: str, n_ctx: int, options: dict[str, Any]) -> tuple[dict[str, int], dict[str, bool]]:
    held, fits = {}, {}
    with plan_of(path, method, arguments.thread_counts(None, None), options | {"n_ctx": n_ctx}) as plan:
        for kv in TYPES:
            types = {name: arguments.kv_type(name, kv) for name in ("type_k", "type_v")}
            sizes: Sequence[Any] = plan.sizes(**types)
            held[kv], fits[kv] = sum(size.kv for size in sizes), all(size.fits for size in sizes)
    return held, fits
