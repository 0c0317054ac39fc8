"""Resources available to this process: free host memory and CPUs.

They depend on the system, the control groups of the process, its resource limits and its CPU affinity.
"""

import mmap
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from pylongctx._platform import address_limit, free_ram, usable_cpus

# File names and fields of memory.stat, for versions 2 and 1 of control groups.
V2 = ("memory.max", "memory.current", ("inactive_file", "active_file"))
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))


def free_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that this process can still allocate, counting the page cache as free."""
    rooms = (_room(folder, *(V2 if unified else V1)) for folder, unified in _groups(root, "memory"))
    return min([free_ram(root), *address_room(root), *(room for room in rooms if room is not None)])


def disk_free(folder: Path) -> int | None:
    """Return the free bytes of the disk on which a folder is or would be made; None if its file system does not say."""
    path = folder.absolute()
    usage = shutil.disk_usage(next(one for one in (path, *path.parents) if one.exists()))
    return usage.free if usage.total else None


def available_cpus(root: Path = Path("/")) -> int:
    """Return how many CPUs this process may use, by its affinity and the limits of its control groups."""
    shares = (_cpu_share(folder, unified) for folder, unified in _groups(root, "cpu"))
    return max(1, min([_affinity(), *(int(share) for share in shares if share is not None)]))


def available_cores(root: Path = Path("/")) -> int:
    """Return how many physical cores this process may use; half of the CPUs where the system does not list them.

    Threads that share a core share its arithmetic and its caches, so generation is fastest with one per core.
    """
    n, cpus = available_cpus(root), usable_cpus()
    files = [root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list" for cpu in cpus]
    if not files or not all(file.is_file() for file in files):
        return max(1, n // 2)
    return min(n, len({file.read_text().strip() for file in files}))


def _affinity() -> int:
    return len(usable_cpus()) or os.cpu_count() or 1


def address_room(root: Path = Path("/")) -> Iterator[int]:
    """Yield the bytes of address space that ``ulimit -v`` leaves for allocations and mappings."""
    if (limit := address_limit()) is not None:
        pages = int((root / "proc/self/statm").read_text().split()[0])
        yield max(0, limit - pages * mmap.PAGESIZE)


# ---- control groups ----


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield the control group of the process and its parents for a controller, and whether it is of version 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return  # a system without control groups
    base = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from ((folder, True) for folder in _around(base, path))
        elif controller in controllers.split(","):
            yield from ((folder, False) for folder in _around(base / controller, path))


def _around(base: Path, path: str) -> Iterator[Path]:
    inner = base / path.lstrip("/")
    for folder in (inner, *inner.parents):
        yield folder
        if folder == base:
            return


def _room(folder: Path, limit: str, usage: str, cached: tuple[str, str]) -> int | None:
    """Return the bytes that a group may still use; None without a limit, or if it is unreadable, as in a container."""
    try:
        most, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if most == "max":
        return None
    return max(0, int(most) - used + sum(int(stat.get(name, 0)) for name in cached))


def _cpu_share(folder: Path, unified: bool) -> float | None:
    """Return how many CPUs a group may use; None without a limit, or if it is unreadable."""
    try:
        if unified:
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
    except (OSError, ValueError):
        return None
    return None if quota in ("max", "-1") else int(quota) / int(period)
