"""The model of a command that names none: the best of the catalogue with which this machine reads a text in time.

Nothing is downloaded here. Seconds are estimates until a model has read a text on this machine.
"""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from time import perf_counter
from typing import Any

from pylongctx._cache_folder import recall, remember
from pylongctx._free import free_bytes
from pylongctx.catalog import CATALOG
from pylongctx.catalog.entry import CatalogEntry
from pylongctx.catalog.huggingface import HubEntry

ANSWERS = 2  # least rank of a model that answers questions about a text rather than inventing
PATIENCE = 300  # seconds until the first word for which a larger model is worth waiting
MARGIN = 2**30  # bytes for graphs, and for other programs
MEMORY = "models.json"  # in the cache folder: speeds that were measured, and downloads that were declined
PROBE_SECONDS = 1.0  # of the connection that says whether huggingface.co is reachable
HUB = ("huggingface.co", 443)
PRODUCT = 1024  # rows and columns of the matrices whose product is timed
# Operations of quantized weights for each one of numpy's products in f32 on the same cores, and on a GPU: estimates
# for the first text that a machine reads.
FASTER, FASTER_ON_GPU = 6, 120
HALF_SPEED = 20_000  # tokens after which a token takes twice as long
BITS = 4.8  # of a weight in Q4_K_M
MIN_TOKENS = 256  # of a text whose speed is worth remembering


@dataclass(frozen=True)
class Candidate:
    """A model for a text."""

    entry: CatalogEntry
    seconds: float  # until the first word of an answer
    fits: bool  # into the free memory
    here: bool

    @property
    def answers(self) -> bool:
        """Whether it is large enough to answer questions about a text."""
        return self.entry.rank >= ANSWERS


@dataclass(frozen=True)
class Choice:
    """The model for a text, and what else there is."""

    n_tokens: int
    model: Candidate
    faster: Candidate | None
    better: Candidate | None

    def __str__(self) -> str:
        """The model and why, then the alternatives, in one line."""
        where = "here" if self.model.here else f"from {self.model.entry.origin}"
        others = ((self.faster, "faster"), (self.better, "better"))
        more = [f"{what}: -m {one.entry.name}, {duration(one.seconds)}" for one, what in others if one is not None]
        reads = f"reads {self.n_tokens} tokens that are new to it in about {duration(self.model.seconds)}"
        return "; ".join([f"{self.model.entry.name}, {where}: {reads}", *more])


def choose(n_tokens: int, without: Sequence[str] = ()) -> Choice:
    """Return the model for a text of ``n_tokens`` tokens; names in ``without`` are not downloaded.

    The best model that fits into memory and reads the text within five minutes, one that is here before one that is
    not; when none is so fast, the fastest one that can answer. A site is only asked when a model there may be chosen.

    Examples
    --------
    >>> choose(1000).model.entry.name in CATALOG
    True
    """
    found = [one for one in candidates(n_tokens) if one.here or one.entry.name not in without]
    model = _best(found)
    while _unreachable(model):
        found.remove(model)
        model = _best(found)
    others = [one for one in found if one.fits and one is not model and not _unreachable(one)]
    faster = [one for one in others if one.seconds < model.seconds]
    better = [one for one in others if one.entry.rank > model.entry.rank]
    return Choice(n_tokens, model, max(faster, key=_rank, default=None), min(better, key=_rank, default=None))


def candidates(n_tokens: int) -> list[Candidate]:
    """Return the models of the catalogue that may be chosen, the one that answers best last."""
    room = free_bytes() - MARGIN
    ranked = sorted((entry for entry in CATALOG.values() if entry.rank), key=lambda entry: entry.rank)
    return [
        Candidate(
            entry, seconds(entry, n_tokens), entry.size + n_tokens * entry.kv_bytes <= room, entry.path() is not None
        )
        for entry in ranked
    ]


def _best(found: Sequence[Candidate]) -> Candidate:
    able = [one for one in found if one.fits and one.answers]
    in_time = [one for one in able if one.seconds <= PATIENCE]
    if in_time:
        return max(in_time, key=lambda one: (one.here, one.entry.rank))
    return min(able or found[:1], key=lambda one: one.seconds)


def _rank(one: Candidate) -> int:
    return one.entry.rank


def _unreachable(one: Candidate) -> bool:
    return not one.here and isinstance(one.entry, HubEntry) and not hub_reachable()


@cache
def hub_reachable() -> bool:
    """Return True if huggingface.co can be reached within a second, and may be asked."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    try:
        socket.create_connection(HUB, PROBE_SECONDS).close()
    except OSError:
        return False
    return True


# ---- seconds ----


def seconds(entry: CatalogEntry, n_tokens: int) -> float:
    """Return how long a model takes to read a text: at the speed of the last text, else by its size."""
    speeds = _memory()["speeds"]
    speed = speeds.get(_machine(entry.name)) or _operations(speeds) / _per_token(entry)
    return _work(n_tokens) / speed


def remember_speed(name: str, n_tokens: int, seconds: float) -> None:
    """Keep the speed at which a model of the catalogue has read a text from its beginning."""
    if name in CATALOG and n_tokens >= MIN_TOKENS and seconds > 0:
        found = _memory()
        found["speeds"][_machine(name)] = round(_work(n_tokens) / seconds, 2)
        remember(MEMORY, found)


def _work(n_tokens: int) -> float:
    """Return the tokens of a text, later ones counted as what they take: attention grows with the text."""
    return n_tokens * (1 + n_tokens / HALF_SPEED / 2)


def has_gpu() -> bool:
    """Return True if the library computes on a GPU; it is loaded for that, which other commands need not wait for."""
    from pylongctx import _arguments

    return _arguments.has_gpu()


def _machine(name: str) -> str:
    return f"{name} on a GPU" if has_gpu() else name


def _per_token(entry: CatalogEntry) -> float:
    """Return the operations that a token takes: a multiplication and an addition for each weight."""
    return 2 * 8 * entry.size / BITS


def _operations(speeds: Mapping[str, float]) -> float:
    """Return the operations per second of quantized products: those of a model that has read here, else estimated."""
    known = [speeds[name] * _per_token(entry) for entry in CATALOG.values() if (name := _machine(entry.name)) in speeds]
    return max(known) if known else _estimated_operations()


@cache
def _estimated_operations() -> float:
    """Return the operations per second of quantized products, estimated from one in f32."""
    import numpy as np

    matrix = np.ones((PRODUCT, PRODUCT), np.float32)
    times = []
    for _ in range(3):
        start = perf_counter()
        matrix @ matrix
        times.append(perf_counter() - start)
    return 2 * PRODUCT**3 / min(times) * (FASTER_ON_GPU if has_gpu() else FASTER)


def duration(seconds: float) -> str:
    """Return a rounded duration as text.

    Examples
    --------
    >>> duration(7.4), duration(42), duration(290), duration(5000)
    ('7 s', '40 s', '5 minutes', '83 minutes')
    """
    if seconds < 10:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds, -1):.0f} s" if seconds < 120 else f"{round(seconds / 60)} minutes"


# ---- what is remembered ----


def declined() -> list[str]:
    """Return the models whose download was declined."""
    return list(_memory()["declined"])


def remember_declined(name: str) -> None:
    """Keep that a model is not to be downloaded unless it is named."""
    found = _memory()
    found["declined"] = sorted({*found["declined"], name})
    remember(MEMORY, found)


def _memory() -> dict[str, Any]:
    found = recall(MEMORY)
    speeds, declined = found.get("speeds"), found.get("declined")
    return {
        "speeds": speeds if isinstance(speeds, dict) else {},
        "declined": declined if isinstance(declined, list) else [],
    }
