"""Counters of kernels: the command of Nsight Compute, and what its file says."""

import csv
from collections.abc import Sequence
from pathlib import Path

from cuda_build import tool

# not those that fill a cache
KERNELS = (
    "regex:attend|decode|merge|score|choose|make_plan|prepare|write_out|transform_back|flash|"
    "convert|find_text|index|store"
)
MOST_LAUNCHES = 24
METRICS = {
    "gpu__time_duration.sum": "us",
    "launch__registers_per_thread": "registers",
    "launch__waves_per_multiprocessor": "waves",
    "sm__inst_issued.avg.per_cycle_active": "issued per cycle",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps %",
    "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active": "f16 products %",
    "sm__pipe_tensor_op_imma_cycles_active.avg.pct_of_peak_sustained_active": "int8 products %",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed": "shared memory %",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": "bank conflicts",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "memory %",
    "lts__t_sector_hit_rate.pct": "found in L2 %",
}
NANOSECONDS = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3}

Counted = dict[str, float | str]


def profiler() -> str | None:
    """Return the path of ncu."""
    return tool("ncu")


def command(to: Path, words: Sequence[str]) -> list[str]:
    """Return the command that counts what ``words`` launches, into a file."""
    count = ["-c", str(MOST_LAUNCHES), "-k", KERNELS, "--metrics", ",".join(METRICS)]
    form = ["--clock-control", "none", "--csv", "--page", "raw", "--log-file", str(to)]
    return [profiler() or "ncu", *form, *count, *words]


def read(path: Path) -> list[Counted]:
    """Return the counters of every launch in a file of ncu, by the names in METRICS.

    A counter that the card does not have is left out.
    """
    lines = [line for line in path.read_text().splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(lines))
    if not rows:
        return []
    units, launches = rows[0], rows[1:]
    found = []
    for launch in launches:
        counted: Counted = {"kernel": launch["Kernel Name"]}
        for metric, name in METRICS.items():
            try:
                value = float(launch.get(metric, "").replace(",", ""))
            except ValueError:
                continue
            counted[name] = value * NANOSECONDS.get(units.get(metric, ""), 1.0) if name == "us" else value
        found.append(counted)
    return found
