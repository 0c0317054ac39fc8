"""Choice of the native library for this CPU: a wheel has one for each kind of CPU, and a generic one."""

import json
import os
from pathlib import Path
from struct import iter_unpack

__all__ = ["VARIABLE", "cpu_features", "cpu_kind", "cpu_kinds"]

VARIABLE = "PYLONGCTX_CPU"
KINDS = "kinds.json"  # written by native/cpu/kinds.cmake
# bits of what Linux tells each process on 64-bit ARM (include/uapi/asm/hwcap.h), by their entries
HWCAPS = {
    16: {"crc32": 7, "atomics": 8, "fphp": 9, "asimdhp": 10, "asimdrdm": 12, "asimddp": 20},
    26: {"i8mm": 13, "bf16": 14},
}


def cpu_features(machine: str = "", proc: Path = Path("/proc")) -> set[str]:
    """Return the CPU flags that Linux lists, by its names; empty where it does not list any."""
    if (machine or _machine()) in ("aarch64", "arm64"):
        return _arm_features(proc / "self/auxv")
    info = proc / "cpuinfo"
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    return set(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), []))


def _machine() -> str:
    return os.uname().machine if hasattr(os, "uname") else ""


def _arm_features(vector: Path) -> set[str]:
    # not /proc/cpuinfo, which an emulator may leave to the machine that it runs on
    words = iter_unpack("=QQ", vector.read_bytes()) if vector.exists() else ()
    return {name for entry, bits in words for name, bit in HWCAPS.get(entry, {}).items() if bits >> bit & 1}


def cpu_kinds(folder: Path, features: set[str]) -> list[str]:
    """Return the kinds of CPU whose library in ``folder`` runs on a CPU with ``features``, the fastest first.

    The last one is the library in the folder itself, which needs nothing. Without ``kinds.json`` there are none.
    """
    return [kind for kind, needed in _kinds(folder).items() if features.issuperset(needed)]


def _kinds(folder: Path) -> dict[str, list[str]]:
    """Return the CPU flags that the library of each kind needs, best first."""
    kinds = folder / KINDS
    return dict(json.loads(kinds.read_text(encoding="utf-8"))) if kinds.is_file() else {}


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
    return kind if kinds[kind] else ""
