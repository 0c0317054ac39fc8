"""Choice of the native library for this CPU: a wheel has one for each kind of x86-64 CPU, and a generic one."""

import json
import os
from pathlib import Path

__all__ = ["VARIABLE", "cpu_features", "cpu_kind", "cpu_kinds"]

VARIABLE = "PYLONGCTX_CPU"
ANY = "x64"  # the kind of the library in the folder itself
KINDS = "kinds.json"  # written by native/cpu/kinds.cmake


def cpu_features(info: Path = Path("/proc/cpuinfo")) -> set[str]:
    """Return the CPU flags that Linux lists; empty where it does not list any."""
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    return set(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), []))


def cpu_kinds(folder: Path, features: set[str]) -> list[str]:
    """Return the kinds of CPU whose library in ``folder`` runs on a CPU with ``features``, the fastest first.

    The last one is "x64", the library in the folder itself; without ``kinds.json`` it is the only one.
    """
    return [kind for kind, needed in _kinds(folder).items() if features.issuperset(needed)]


def _kinds(folder: Path) -> dict[str, list[str]]:
    """Return the CPU flags that the library of each kind needs, best first."""
    kinds = folder / KINDS
    return (json.loads(kinds.read_text(encoding="utf-8")) if kinds.is_file() else {}) | {ANY: []}


def cpu_kind(folder: Path, features: set[str]) -> str:
    """Return the kind of the fastest library in ``folder`` that runs on this CPU.

    It is the name of a folder below the package's ``lib``, or "" for ``lib`` itself, which without ``kinds.json`` has
    one library, compiled for the build machine. Raises ImportError when ``PYLONGCTX_CPU`` requests a kind that is
    missing or that this CPU cannot run.
    """
    if not (folder / KINDS).is_file():
        return ""
    kinds = _kinds(folder)
    wanted = os.environ.get(VARIABLE)
    if wanted and wanted not in kinds:
        raise ImportError(f"{VARIABLE}={wanted}: this package only has libraries for {', '.join(kinds)}")
    if wanted and (missing := [feature for feature in kinds[wanted] if feature not in features]):
        raise ImportError(f"{VARIABLE}={wanted}: this CPU has no {', '.join(missing)}")
    kind = wanted or cpu_kinds(folder, features)[0]
    return "" if kind == ANY else kind
