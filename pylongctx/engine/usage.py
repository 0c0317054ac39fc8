"""The memory that a context holds, and the counters of rows in host memory."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


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
        Requested units that were on the device; that were copied to it; that were read from host memory because
        not all requested units fit.
    unit_bytes : int
        Bytes of a unit: K and V of one head.
    device_bytes : int
        Bytes on the devices for everything that the method keeps there.
    staged : int
        Units of a head that fit on its device; 0 without ``kv_offload``.
    chosen : int
        Maximum units of a head that a selecting query reads.
    """

    hits: int
    misses: int
    far: int
    unit_bytes: int
    device_bytes: int
    staged: int
    chosen: int

    @property
    def hit_rate(self) -> float:
        """Fraction of the requested units that were on the device."""
        return self.hits / max(1, self.hits + self.misses + self.far)

    @property
    def bytes_moved(self) -> int:
        """Bytes copied from host memory."""
        return (self.misses + self.far) * self.unit_bytes
