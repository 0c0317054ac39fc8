"""What Linux, macOS and Windows do differently: locks, memory, priorities, pipes and terminals.

Modules that one system has are imported where they are used, so this one can be imported everywhere.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

__all__ = [
    "LIBRARY",
    "address_limit",
    "free_ram",
    "has_data",
    "locked_folder",
    "lower_priority",
    "peak_bytes",
    "ram_bytes",
    "resident_bytes",
    "take_lock",
    "thread_seconds",
    "unechoed",
    "usable_cpus",
]

# the name of the native library
LIBRARY = {"win32": "libllama.dll", "darwin": "libllama.dylib"}.get(sys.platform, "libllama.so")
PAGES = re.compile(r"^Pages (?:free|inactive|speculative|purgeable):\s+(\d+)", re.MULTILINE)  # of macOS' vm_stat


# ---- locks: other processes wait, and the end of a process releases them ----

LOCKED = 1 << 62  # a byte that no file has: on Windows, locked bytes can be neither read nor written


def take_lock(file: Any, wait: bool = True) -> None:
    """Lock an open file, as long as it stays open. Without ``wait``, OSError when another process has locked it."""
    if sys.platform == "win32":
        import msvcrt

        place = file.tell()
        file.seek(LOCKED)
        try:
            while True:
                try:
                    return msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
                except OSError:
                    if not wait:
                        raise
                time.sleep(0.1)
        finally:
            file.seek(place)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Lock an existing folder; waits for other processes. On Windows, with a file in it that is removed at the end."""
    if sys.platform == "win32":
        lock = folder / ".lock"
        with lock.open("ab") as file:
            take_lock(file)
            yield
        with suppress(OSError):  # another process has opened it
            lock.unlink()
    else:
        number = os.open(folder, os.O_RDONLY)
        try:
            take_lock(number)
            yield
        finally:
            os.close(number)


# ---- memory ----


def ram_bytes() -> int:
    """Return the size of the memory of this machine."""
    if sys.platform == "win32":
        return _memory_status()[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_ram(root: Path = Path("/")) -> int:
    """Return the bytes that can be allocated, counting the page cache as free. ``root`` is for tests on Linux."""
    if sys.platform == "win32":
        return _memory_status()[1]
    if sys.platform == "darwin":
        said = subprocess.run(["vm_stat"], capture_output=True, text=True, check=True).stdout
        return os.sysconf("SC_PAGE_SIZE") * free_pages(said)
    fields = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def free_pages(vm_stat: str) -> int:
    """Return the pages that can be allocated, from what vm_stat of macOS prints."""
    return sum(map(int, PAGES.findall(vm_stat)))


def address_limit() -> int | None:
    """Return the limit of this process's address space; None without one, and where what is used cannot be read."""
    if sys.platform != "linux":
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def resident_bytes(process: int) -> int:
    """Return the memory of another process; 0 when it has exited, and on other systems than Linux."""
    if sys.platform == "linux":
        with suppress(OSError, ValueError, IndexError):
            return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def peak_bytes() -> int:
    """Return the most memory that this process has had since its start, on other systems than Linux."""
    if sys.platform == "win32":
        import ctypes

        counters = (ctypes.c_size_t * 9)()  # PROCESS_MEMORY_COUNTERS: two numbers of 32 bits, then the peak
        ctypes.windll.kernel32.GetCurrentProcess.restype = ctypes.c_void_p
        process = ctypes.c_void_p(ctypes.windll.kernel32.GetCurrentProcess())
        if not ctypes.windll.kernel32.K32GetProcessMemoryInfo(process, counters, ctypes.sizeof(counters)):
            raise ctypes.WinError()
        return int(counters[1])
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def _memory_status() -> tuple[int, int]:
    """Return the size of the memory and what is available of it, on Windows."""
    if sys.platform != "win32":
        raise NotImplementedError
    import ctypes

    status = (ctypes.c_uint64 * 8)()  # MEMORYSTATUSEX: its size and a load in percent, then sizes
    status[0] = ctypes.sizeof(status)
    if not ctypes.windll.kernel32.GlobalMemoryStatusEx(status):
        raise ctypes.WinError()
    return status[1], status[2]


# ---- CPUs and threads ----


def usable_cpus() -> set[int]:
    """Return the numbers of the CPUs that this process may use; empty where the system does not say."""
    if sys.platform == "linux" and hasattr(os, "sched_getaffinity"):  # a C library may lack it
        return os.sched_getaffinity(0)
    return set()


def lower_priority(thread: int, niceness: int) -> None:
    """Lower the priority of a thread, by its native number. Linux only: elsewhere it would be that of a process."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, thread, niceness)


def thread_seconds(thread: int) -> float:
    """Return the CPU time of a thread, by its identifier; on other systems than Linux, that of all threads together."""
    if sys.platform == "linux":
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    return time.process_time()


# ---- pipes and terminals ----


def has_data(pipe: IO[bytes], seconds: float) -> bool:
    """Wait until a pipe has data or ends, at most this long; returns False when the time is over."""
    if sys.platform == "win32":
        import ctypes
        import msvcrt

        handle, n, until = msvcrt.get_osfhandle(pipe.fileno()), ctypes.c_ulong(), time.monotonic() + seconds
        while ctypes.windll.kernel32.PeekNamedPipe(ctypes.c_void_p(handle), None, 0, None, ctypes.byref(n), None):
            if n.value or time.monotonic() > until:
                return n.value > 0
            time.sleep(0.001)
        return True  # it has ended
    import select

    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


@contextmanager
def unechoed() -> Iterator[None]:
    """Turn off echo of the terminal; the next prompt receives what is typed. On Windows, it stays as it is."""
    if sys.platform == "win32":
        yield
        return
    import termios

    try:
        before = termios.tcgetattr(sys.stdin)
    except (termios.error, ValueError):  # not a terminal, or closed
        yield
        return
    quiet = before.copy()
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
