"""What every benchmark prints: the machine, and Markdown tables of medians with their spread."""

import os
import platform
from collections.abc import Sequence
from statistics import median

from pylongctx.bench.formats import table
from pylongctx.bench.record import cpu_name

__all__ = ["machine", "spread", "table"]


def machine() -> str:
    """Return the CPU model, the number of cores we may use, and the system."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cpu_name()}, {cores} cores, {platform.system()} {platform.machine()}"


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Return ``median (smallest - largest)``."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} - {max(values):.{digits}f})"
