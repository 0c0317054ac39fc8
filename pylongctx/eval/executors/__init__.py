"""Run samples in processes of this machine, or on a Dask cluster."""

from pylongctx.eval.executors.units import Executor, Failed, Unit, units_of

__all__ = ["Executor", "Failed", "Unit", "make_executor", "units_of"]

LOCAL, DASK = "local", "dask://"


def make_executor(name: str, n_workers: int | None = 1) -> Executor:
    """Return the executor of ``"local"`` or ``"dask://host:port"``.

    Parameters
    ----------
    n_workers : int or None
        Maximum processes of ``local``; None: as many as memory and cores allow.

    Raises
    ------
    ValueError
        When the executor is unknown.
    ImportError
        When Dask is missing.
    """
    if name == LOCAL:
        from pylongctx.eval.executors.local import Local

        return Local(n_workers)
    if name.startswith(DASK) and len(name) > len(DASK):
        from pylongctx.eval.executors.cluster import Cluster

        return Cluster(name.removeprefix(DASK))
    raise ValueError(f"unknown executor {name!r}; it is {LOCAL}, or {DASK}HOST:PORT of a Dask scheduler")
