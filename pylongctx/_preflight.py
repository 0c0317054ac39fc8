"""Whether a model and its context fit into memory, asked before anything is allocated.

The library makes both without memory and says what each device would hold, placed and sized as in earnest.
"""

import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from pylongctx._free import address_room, free_bytes
from pylongctx._lib import InvalidInput, check, ffi, lib, text
from pylongctx.engine.model import Model, with_fields

MAX_DEVICES = 64
LOOK = 32 * 2**20  # addresses that a model and a context without memory take; llama.cpp aborts where there are none
STEP = 256  # tokens: llama.cpp pads n_ctx to it
ROWS = {
    "weights": "weights",
    "k": "K",
    "v": "V",
    "chunks": "representations of chunks",
    "near": "near keys",
    "other": "page tables and lists",
    "compute": "compute",
}


@dataclass(frozen=True)
class Sizes:
    """What a context holds on one device, in bytes; see ``lctx_sizes``."""

    device: str
    weights: int
    k: int
    v: int
    chunks: int
    near: int
    other: int
    compute: int
    free: int | None

    @property
    def kv(self) -> int:
        """All that grows with the text."""
        return self.k + self.v + self.chunks + self.near + self.other

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.compute

    @property
    def fits(self) -> bool:
        return self.free is None or self.total <= self.free


class Plan:
    """A model without weights, and what contexts of it would take.

    Raises
    ------
    InvalidInput
        When the library refuses the model.
    """

    def __init__(self, path: str, model_settings: dict[str, Any], settings: dict[str, Any], method: str) -> None:
        self.path, self.model_settings, self.settings, self.method = path, model_settings, settings, method
        self._model = Model(path, model_settings | {"dry": 1})
        self.info = self._model.info

    def close(self) -> None:
        self._model.close()

    def __enter__(self) -> "Plan":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def sizes(self, **changes: Any) -> list[Sizes]:
        """Return what the devices would hold, the host first; InvalidInput when the library refuses the settings."""
        return self._estimate(**changes)[1]

    def n_ctx(self) -> int:
        """Return what ``n_ctx`` stands for."""
        return self._estimate()[0]

    def fits(self, **changes: Any) -> bool:
        """Return whether changed settings are possible and fit everywhere."""
        try:
            return all(size.fits for size in self.sizes(**changes))
        except InvalidInput:
            return False

    def longest(self) -> int:
        """Return the largest ``n_ctx`` that fits, a multiple of 256; 0 for none."""
        return STEP * most(self.n_ctx() // STEP, lambda n: self.fits(n_ctx=n * STEP))

    def _estimate(self, **changes: Any) -> tuple[int, list[Sizes]]:
        method = changes.pop("method", self.method)
        params = with_fields("lctx_context_params", lib.lctx_context_params_default, self.settings | changes)
        out, reason = ffi.new("lctx_sizes[]", MAX_DEVICES), ffi.new("char[]", 4096)
        n = lib.lctx_estimate(self._model.handle, params, method.encode(), out, MAX_DEVICES, reason, len(reason))
        check(min(n, lib.LCTX_OK), reason)
        host = free_bytes()
        return params.n_ctx, [
            Sizes(device=text(s.device), free=host if i == 0 else device_free(s), **{k: getattr(s, k) for k in ROWS})
            for i, s in enumerate(out[0:n])
        ]


def device_free(sizes: Any) -> int | None:
    """Return the free bytes of the device of an ``lctx_sizes``; None when it does not tell."""
    return sizes.free or None


def most(n: int, works: Callable[[int], bool]) -> int:
    """Return the largest number up to ``n`` for which ``works`` is true, 0 for none: it is for all below."""
    low = 0
    while low < n:
        middle = (low + n + 1) // 2
        low, n = (middle, n) if works(middle) else (low, middle - 1)
    return low


def fit(path: str, model_settings: dict[str, Any], settings: dict[str, Any], method: str) -> dict[str, Any]:
    """Return the settings of the context, with a smaller ``n_ctx`` where that was left to us and memory demands it.

    Raises
    ------
    MemoryError
        When they do not fit, with what each part takes and ways out.
    InvalidInput
        When the library refuses the model or the settings.
    """
    if min(address_room(), default=LOOK) < LOOK:
        raise MemoryError(f"to look at a model takes {amount(LOOK)}, and ulimit -v leaves less; raise it")
    with _quiet(), Plan(path, model_settings, settings, method) as plan:
        if all(size.fits for size in plan.sizes()):
            return settings
        longest, asked, trained = plan.longest(), plan.n_ctx(), plan.info.n_ctx_train
        if settings["n_ctx"] == 0 and trained <= longest < asked:
            warnings.warn(
                f"n_ctx is {longest}, as much as memory allows: {asked} tokens, {asked // trained} times the trained "
                "context, would not fit",
                UserWarning,
                stacklevel=3,
            )
            return settings | {"n_ctx": longest}
        raise MemoryError(explain(plan, longest))


def serves(path: str, model_settings: dict[str, Any], settings: dict[str, Any], method: str) -> bool:
    """Return whether a method runs on a model, whatever the size of its context."""
    try:
        with _quiet(), Plan(path, model_settings, settings, method) as plan:
            plan.sizes(n_ctx=STEP)
    except InvalidInput:
        return False
    return True


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep llama.cpp's messages back: they come again when the model is loaded, or are the reason of an exception."""
    lib.lctx_log_set_level(0)
    try:
        yield
    finally:
        lib.lctx_log_set_level(1)


def explain(plan: Plan, longest: int) -> str:
    """Return the message of the MemoryError."""
    from pylongctx._ways_out import ways_out

    note = ""
    if "corm" in plan.method:
        note = "\nHow much corm keeps depends on the text: counted is what is certain."
    anyway = "preflight=False (--no-preflight): opens it all the same"
    if plan.method:
        anyway += ", for a shorter text: K and V take memory as it grows"
    ways = "\n".join(f"- {way}" for way in [*ways_out(plan, longest), anyway])
    return f"n_ctx {plan.n_ctx()} does not fit into memory:\n{table(plan.sizes())}{note}\nWays out:\n{ways}"


def table(sizes: list[Sizes]) -> str:
    """Return the sizes as lines of text, a column for each device."""
    lines = Table(box=None, pad_edge=False)
    lines.add_column("")
    for size in sizes:
        lines.add_column(size.device, justify="right")
    for name, label in ROWS.items():
        if any(getattr(size, name) for size in sizes):
            lines.add_row(label, *(amount(getattr(size, name)) for size in sizes))
    lines.add_row("sum", *(amount(size.total) for size in sizes))
    lines.add_row("free", *("unknown" if size.free is None else amount(size.free) for size in sizes))
    console = Console(file=io.StringIO(), width=40 + 20 * len(sizes))
    console.print(lines)
    return "\n".join(line.rstrip() for line in console.file.getvalue().rstrip().splitlines())  # type: ignore[attr-defined]


def amount(n: int) -> str:
    """Return bytes in a unit that fits."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if n >= size:
            return f"{n / size:,.1f} {unit}"
    return f"{n / 1024:.1f} KiB"
