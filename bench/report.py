"""What every benchmark prints: the machine, and Markdown tables of medians with their spread."""

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from statistics import median


def machine() -> str:
    """Return the CPU model, the number of cores we may use, and the system."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{model or platform.processor() or 'unknown CPU'}, {cores} cores, {platform.system()} {platform.machine()}"


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Return ``median (smallest - largest)``."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} - {max(values):.{digits}f})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [head, ["-" * w for w in widths], *rows]
    return "\n".join("| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |"
                     for row in lines)  # fmt: skip
