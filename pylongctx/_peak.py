"""The most memory that this process has had."""

import re
from pathlib import Path

RESET = "5"  # what Linux takes for that


def reset_peak_memory(process: Path = Path("/proc/self")) -> bool:
    """Let the peak begin anew; returns False where the system cannot: the peak is that since the start then."""
    try:
        (process / "clear_refs").write_text(RESET)
    except OSError:
        return False
    return True


def peak_memory(process: Path = Path("/proc/self")) -> int:
    """Return the bytes of the peak; that of getrusage is inherited from the parent."""
    found = re.search(r"VmHWM:\s+(\d+) kB", (process / "status").read_text(encoding="utf-8", errors="replace"))
    if not found:
        raise RuntimeError(f"{process}/status has no VmHWM")
    return 1024 * int(found[1])
