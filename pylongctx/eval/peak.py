"""Peak memory of this process."""

import re
import sys
from pathlib import Path

from pylongctx._platform import peak_bytes

RESET = "5"  # the value that Linux expects


def reset_peak_memory(process: Path = Path("/proc/self")) -> bool:
    """Reset the peak; returns False where the system cannot, so that it stays the peak since the start."""
    try:
        (process / "clear_refs").write_text(RESET)
    except OSError:
        return False
    return True


def peak_memory(process: Path = Path("/proc/self")) -> int:
    """Return the peak in bytes; not from getrusage, whose value is inherited from the parent."""
    if sys.platform != "linux":
        return peak_bytes()
    found = re.search(r"VmHWM:\s+(\d+) kB", (process / "status").read_text(encoding="utf-8", errors="replace"))
    if not found:
        raise RuntimeError(f"{process}/status has no VmHWM")
    return 1024 * int(found[1])
