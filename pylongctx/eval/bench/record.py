"""A record of results: the fields of llama-bench, then those of pylongctx."""

import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from pylongctx.eval.bench.case import Case

# Order and types are those of llama-bench (get_fields and get_field_type in llama-bench.cpp), followed by pylongctx's.
FIELDS = {
    "build_commit": str,
    "build_number": int,
    "cpu_info": str,
    "gpu_info": str,
    "backends": str,
    "model_filename": str,
    "model_type": str,
    "model_size": int,
    "model_n_params": int,
    "n_batch": int,
    "n_ubatch": int,
    "n_threads": int,
    "cpu_mask": str,
    "cpu_strict": bool,
    "poll": int,
    "type_k": str,
    "type_v": str,
    "n_gpu_layers": int,
    "n_cpu_moe": int,
    "split_mode": str,
    "main_gpu": int,
    "no_kv_offload": bool,
    "flash_attn": int,
    "devices": str,
    "tensor_split": str,
    "tensor_buft_overrides": str,
    "load_mode": str,
    "lazy_mode": str,
    "embeddings": bool,
    "no_op_offload": int,
    "no_host": bool,
    "repack": bool,
    "fit_target": int,
    "fit_min_ctx": int,
    "n_prompt": int,
    "n_gen": int,
    "n_depth": int,
    "test_time": str,
    "avg_ns": int,
    "stddev_ns": int,
    "avg_ts": float,
    "stddev_ts": float,
    "method": str,
    "kv_bytes": int,
    "peak_rss": int,
    "ttft_ns": int,
    "error": str,
}
SAMPLES = ("samples_ns", "samples_ts")
# settings without an option in pylongctx
FIXED = {
    "cpu_mask": "0x0",
    "cpu_strict": False,
    "poll": 50,
    "n_cpu_moe": 0,
    "split_mode": "layer",
    "main_gpu": 0,
    "no_kv_offload": False,
    "flash_attn": -1,
    "devices": "auto",
    "tensor_split": "0.00",
    "tensor_buft_overrides": "none",
    "load_mode": "auto",
    "lazy_mode": "auto",
    "embeddings": False,
    "no_op_offload": 0,
    "no_host": False,
    "repack": True,
    "fit_target": 0,
    "fit_min_ctx": 0,
}

Record = dict[str, Any]  # FIELDS, once measured SAMPLES, and "asked": the method before automatic choices


def new_record(case: Case, method: str, facts: Record, error: str = "") -> Record:
    """Return the record of a test that pylongctx ran or refused, with None for unknown fields."""
    from pylongctx import __version__
    from pylongctx._lib import build_info

    build = build_info()
    known = {
        "build_commit": f"pylongctx {__version__} {build['series']}",
        "build_number": 0,
        "cpu_info": cpu_name(),
        "gpu_info": "",
        "backends": ",".join(name for name in build["backends"] if name != "CPU") or "CPU",
        "test_time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "method": method,
        "error": error,
    }
    known |= FIXED | asdict(case) | facts
    return {name: known.get(name) for name in FIELDS} | {"asked": method}


def with_samples(record: Record, samples_ns: Sequence[int]) -> Record:
    """Return the record with the times of repetitions and their statistics, computed as in llama-bench."""
    n_tokens = record["n_prompt"] + record["n_gen"]
    rates = [1e9 * n_tokens / ns for ns in samples_ns]
    times = {
        "avg_ns": int(fmean(samples_ns)),
        "stddev_ns": int(_deviation(samples_ns)),
        "avg_ts": fmean(rates),
        "stddev_ts": _deviation(rates),
    }
    return record | times | {"samples_ns": list(samples_ns), "samples_ts": rates}


def _deviation(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def cpu_name() -> str:
    """Return the CPU's model name from the system."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")


def physical_cores() -> int:
    """Return llama-bench's number of threads: the cores, not the hardware threads, that this process may use."""
    folder = Path("/sys/devices/system/cpu")
    siblings = set()
    usable = os.sched_getaffinity(0)
    for cpu in usable:
        file = folder / f"cpu{cpu}" / "topology" / "thread_siblings"
        siblings.add(file.read_text() if file.exists() else str(cpu))
    return len(siblings)
