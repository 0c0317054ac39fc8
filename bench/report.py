"""What every benchmark prints: the machine, and Markdown tables of medians with their spread."""

import platform
from collections.abc import Sequence
from statistics import median

from pylongctx._free import available_cpus
from pylongctx.eval.bench.record import cpu_name, table

__all__ = ["machine", "spread", "table"]


def machine() -> str:
    """Return the CPU model, the number of cores we may use, and the system."""
    cores = available_cpus()
    return f"{cpu_name()}, {cores} cores, {platform.system()} {platform.machine()}"


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Return ``median (smallest - largest)``."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} - {max(values):.{digits}f})"
