"""How much memory of the host is free: for the system, the control groups of this process, and its own limit."""

import resource
from collections.abc import Iterator
from pathlib import Path

# Names of files and of the fields of memory.stat: version 2, and version 1 of control groups.
V2 = ("memory.max", "memory.current", ("inactive_file", "active_file"))
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))


def free_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that this process can still take, cached files counted as free."""
    return min([_available(root), *address_room(root), *_group_rooms(root)])


def _available(root: Path) -> int:
    fields = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def address_room(root: Path = Path("/")) -> Iterator[int]:
    """Yield the addresses that ``ulimit -v`` leaves: all that is allocated or mapped takes some."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        pages = int((root / "proc/self/statm").read_text().split()[0])
        yield max(0, limit - pages * resource.getpagesize())


def _group_rooms(root: Path) -> Iterator[int]:
    """Yield what is left in each control group with a limit: that of the process and all around it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return  # a system without control groups
    base = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _rooms(base, path, V2)
        elif "memory" in controllers.split(","):
            yield from _rooms(base / "memory", path, V1)


def _rooms(base: Path, path: str, names: tuple[str, str, tuple[str, str]]) -> Iterator[int]:
    inner = base / path.lstrip("/")
    for folder in (inner, *inner.parents):
        room = _room(folder, *names)
        if room is not None:
            yield room
        if folder == base:
            return


def _room(folder: Path, limit: str, usage: str, cached: tuple[str, str]) -> int | None:
    """Return what a group may still take; None without a limit, or where it cannot be read, as in a container."""
    try:
        most, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if most == "max":
        return None
    return max(0, int(most) - used + sum(int(stat.get(name, 0)) for name in cached))
