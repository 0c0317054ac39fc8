"""Workers of a Dask cluster, whose scheduler moves the units of a lost worker to another one.

Models must be at the same path on every worker. ``dask worker --nthreads 1`` runs one model at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pylongctx.eval.executors.units import Failed, Unit, reason_of
from pylongctx.eval.task import Record

HOW_TO_INSTALL = "an executor dask:// needs Dask: pip install 'pylongctx[cluster]'"


def run_unit(unit: Unit) -> list[Record]:
    """Return the records of a unit; runs on a worker."""
    return list(unit.records())


class Cluster:
    """The workers of the scheduler at ``address``, "host:port"."""

    def __init__(self, address: str) -> None:
        try:
            import distributed
        except ImportError as reason:
            raise ImportError(HOW_TO_INSTALL) from reason
        self._distributed: Any = distributed
        self._address = address

    def run(self, units: Sequence[Unit]) -> Iterator[tuple[Unit, Record | Failed]]:
        """Yield the records of complete units; a unit that Dask repeats is yielded once."""
        with self._distributed.Client(self._address) as client:
            futures = {client.submit(run_unit, unit, pure=False): unit for unit in units}
            for future in self._distributed.as_completed(list(futures)):
                unit = futures.pop(future)
                if future.status == "finished":
                    yield from ((unit, record) for record in future.result())
                else:
                    yield unit, Failed(reason_of(future.exception()))
