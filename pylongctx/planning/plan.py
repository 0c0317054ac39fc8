"""Memory that a model and its context would take on each device.

The library creates both without allocating memory and reports the sizes that a real load would have.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pylongctx._free import free_bytes
from pylongctx._lib import InvalidInput, check, ffi, lib, text
from pylongctx.engine.model import Model, with_fields

MAX_DEVICES = 64
STEP = 256  # tokens: llama.cpp pads n_ctx to it
ROWS = {
    "weights": "weights",
    "k": "K",
    "v": "V",
    "chunks": "chunk summaries",
    "near": "near keys",
    "other": "block tables and lists",
    "foreign": "windows and states",
    "compute": "compute",
}


@dataclass(frozen=True)
class Sizes:
    """Memory of a context on one device, in bytes; see ``lctx_sizes``."""

    device: str
    weights: int
    k: int
    v: int
    chunks: int
    near: int
    other: int
    foreign: int
    compute: int
    free: int | None

    @property
    def kv(self) -> int:
        """The bytes that grow with the text."""
        return self.k + self.v + self.chunks + self.near + self.other

    @property
    def total(self) -> int:
        """The bytes of everything."""
        return self.weights + self.kv + self.foreign + self.compute

    @property
    def fits(self) -> bool:
        """True if the free memory of the device suffices, or is not known."""
        return self.free is None or self.total <= self.free


class Plan:
    """A model without weights, and the memory that its contexts would take.

    Raises
    ------
    InvalidInput
        When the library refuses the model.
    """

    def __init__(self, path: str, model_settings: dict[str, Any], settings: dict[str, Any], method: str) -> None:
        self.path, self.model_settings, self.settings, self.method = path, model_settings, settings, method
        self._model = Model(path, model_settings | {"dry": 1})
        self.info = self._model.info

    def moved(self, **where: Any) -> "Plan":
        """Return the plan of the same context of a model that other settings place elsewhere."""
        return type(self)(self.path, self.model_settings | where, self.settings, self.method)

    def close(self) -> None:
        """Free the model."""
        self._model.close()

    def __enter__(self) -> "Plan":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def sizes(self, **changes: Any) -> list[Sizes]:
        """Return the sizes on each device, the host first; InvalidInput when the library refuses the settings."""
        return self._estimate(**changes)[1]

    def n_ctx(self) -> int:
        """Return the actual ``n_ctx``, with 0 resolved."""
        return self._estimate()[0]

    def fits(self, **changes: Any) -> bool:
        """Return True if changed settings are valid and fit on all devices."""
        try:
            return all(size.fits for size in self.sizes(**changes))
        except InvalidInput:
            return False

    def longest(self, **changes: Any) -> int:
        """Return the largest ``n_ctx`` that fits with changed settings, a multiple of 256; 0 for none."""
        return STEP * most(self.n_ctx() // STEP, lambda n: self.fits(**changes, n_ctx=n * STEP))

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
    """Return the free bytes of the device of an ``lctx_sizes``; None when it does not report them."""
    return sizes.free or None


def most(n: int, works: Callable[[int], bool]) -> int:
    """Return the largest number up to ``n`` for which the monotonic ``works`` is true; 0 for none."""
    low = 0
    while low < n:
        middle = (low + n + 1) // 2
        low, n = (middle, n) if works(middle) else (low, middle - 1)
    return low
