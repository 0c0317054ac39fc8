"""Selection as a filter on a base, in numpy: which chunks a query reads anyway, and which it chooses from.

Chunk ``i`` is rows ``[i*l, (i+1)*l)``; ``own`` is the chunk of the query. The base, a method of ``oracle.py``, says at
which distance a query sees a key. As there two descriptions of the positions stand side by side,
``relative_positions`` and ``segments``, and ``test_chunks.py`` holds them together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from oracle import Full, Method, Segment, SelfExtend, dual_chunk_auto, self_extend_auto, shifted_auto


@dataclass(frozen=True)
class LongHeads:
    """The settings; contexts are what automatic settings of the base depend on."""

    chunk_size: int = 16
    window: int = 64
    n_recent: int = 1
    select: str = "head"
    representation: str = "keys2"
    position: str = "full"
    n_ctx_train: int = 4096
    n_ctx: int = 4096
    tile: int = 1
    tile_window: int = 0
    tile_cutoff: int = 1000

    def text(self) -> str:
        names = ("chunk_size", "window", "n_recent", "select", "representation", "position")
        options = {name: getattr(self, name) for name in names}
        options |= {"select_from": self.window} if self.position != "packed" else {}
        of_tile = {"tile_window": self.tile_window, "tile_cutoff": self.tile_cutoff}
        options |= {"tile": self.tile} | (of_tile if self.tile > 1 else {})
        return ",".join(["longheads", *(f"{name}={value}" for name, value in options.items())])

    @property
    def base(self) -> Method:
        """Return the base; of ``packed``, which has positions of its own, what is said of rows holds for Full."""
        if self.position == "dca":
            return dual_chunk_auto(self.n_ctx_train, self.chunk_size)
        if self.position == "string":
            return shifted_auto(self.n_ctx_train, self.n_ctx)
        extended = self_extend_auto(self.n_ctx_train, self.n_ctx)
        return extended if self.position == "selfextend" and extended.group_size > 1 else Full()

    @property
    def is_packed(self) -> bool:
        return self.position == "packed"

    @property
    def key_bits(self) -> int:
        """Return in how many bits a channel every key is compared; 0: chunks have summaries."""
        return {"keys1": 1, "keys2": 2}.get(self.representation, 0)

    @property
    def n_free(self) -> int:
        """Return how many chunks a query chooses."""
        return self.window // self.chunk_size - 2 - self.n_recent

    @property
    def n_shared(self) -> int:
        """Return how many chunks the queries of a tile choose together."""
        return self.tile_window // self.chunk_size - 2 - self.n_recent

    @property
    def n_read_max(self) -> int:
        """Return the room that lists of chunks need: with all that the base adds, and a tile."""
        near = self.base.neighbor_window // self.chunk_size if isinstance(self.base, SelfExtend) else 0
        near += (1 + len(self.base.segments(0))) * (self.tile // self.chunk_size + 1) * (self.tile > 1)
        return max(self.window, self.tile_window) // self.chunk_size + near + 2

    # ---- positions ----

    def rows(self, p: int, chunks: Sequence[int]) -> np.ndarray:
        """Return the rows of ``chunks`` (ascending) that are not later than ``p``."""
        rows = np.concatenate([np.arange(i * self.chunk_size, (i + 1) * self.chunk_size) for i in chunks])
        return rows[rows <= p]

    def relative_positions(self, p: int, chunks: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows that ``p`` reads of ``chunks`` and its distance to each: the base's, or side by side."""
        rows = self.rows(p, chunks)
        if self.is_packed:
            return rows, len(rows) - 1 - np.arange(len(rows))
        return rows, self.base.relative_positions(p)[1][rows]

    def segments(self, p: int, chunks: Sequence[int]) -> list[Segment]:
        """Return how the native code reaches these distances from the storage positions."""
        size = self.chunk_size
        if self.is_packed:
            places = range(len(chunks))[::-1]
            return [
                Segment(i * size, min((i + 1) * size, p + 1), place * size + p % size)
                for i, place in zip(chunks, places, strict=True)
            ]
        cuts = [
            Segment(max(s.row0, i * size), min(s.row1, j * size), s.a, s.near)
            for s in self.base.segments(p) for i, j in _runs(chunks)
        ]  # fmt: skip
        return [s for s in cuts if s.row0 < s.row1]

    def storage(self, j: np.ndarray) -> np.ndarray:
        return j % self.chunk_size if self.is_packed else self.base.storage(j)

    # ---- runs and far chunks ----

    def free(self, p: int) -> np.ndarray:
        """Return which chunks ``[own + 1]`` the query chooses from: none where as many as there are may be read."""
        far = ~must_read(self, p)
        return far & (far.sum() > self.n_free)

    def tile_free(self, first: int) -> np.ndarray:
        """Return which chunks, up to that of its last row, the tile that begins at ``first`` chooses from.

        Those that none of its queries must read and all see from the same angle of theirs; none where as many as there
        are may be read.
        """
        last, own = first + self.tile - 1, first // self.chunk_size
        far = np.ones(last // self.chunk_size + 1, dtype=bool)
        at_first = kinds(self.base, first, first)[:: self.chunk_size]
        for p in range(first, last + 1):
            whole = must_read(self, p)
            far[: len(whole)] &= ~whole
            far[: len(at_first)] &= kinds(self.base, p, first)[:: self.chunk_size] == at_first
        far[own:] = False
        return far & (far.sum() > self.n_shared)

    def is_tile(self, first: int) -> bool:
        """Return whether no segment of the base begins more than a tile further on for the last query of a tile."""
        begins = [np.array([s.row0 for s in self.base.segments(p)]) for p in (first, first + self.tile - 1)]
        return bool((begins[1] - begins[0] <= self.tile).all())


def _runs(chunks: Sequence[int]) -> list[tuple[int, int]]:
    """Return ascending numbers as ranges [first, end)."""
    runs: list[tuple[int, int]] = []
    for i in chunks:
        touches = runs and runs[-1][1] == i
        first = runs.pop()[0] if touches else i
        runs.append((first, i + 1))
    return runs


def kinds(base: Method, p: int, n: int) -> np.ndarray:
    """Return from which of its angles, by number, the query at ``p`` sees each of the first ``n`` rows."""
    out = np.full(n, -1)
    for i, s in enumerate(base.segments(p)):
        out[s.row0 : s.row1] = i
    return out


@cache
def must_read(method: LongHeads, p: int) -> np.ndarray:
    """Return which chunks ``[own + 1]`` the query at ``p`` reads whatever their scores.

    The first chunk; the own and the recent ones; those with a row that it sees in the near ring, or with rows that it
    sees from different angles.
    """
    own, base = p // method.chunk_size, method.base
    seen = kinds(base, p, own * method.chunk_size).reshape(own, method.chunk_size)
    near = [i for i, s in enumerate(base.segments(p)) if s.near]
    whole = np.ones(own + 1, dtype=bool)
    whole[:own] = (np.isin(seen, near) | (seen != seen[:, :1])).any(1)
    whole[0] = True
    whole[max(0, own - method.n_recent) :] = True
    return whole
