"""``pylongctx doctor``: the installation, or for a model the time and memory of a text on this machine."""

import argparse
import importlib.metadata
import json
import os
import platform
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

from pylongctx import __version__
from pylongctx._free import available_cpus
from pylongctx._platform import ram_bytes
from pylongctx._units import bytes_text
from pylongctx.models import embedded_model

if TYPE_CHECKING:
    from pylongctx.eval.advice import Advice

KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
HEAD_DIMS = (64, 80, 96, 128, 256)


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser("doctor", description=__doc__)
    help = "GGUF file or a name of pylongctx get: estimate seconds and bytes by method, takes a minute"
    parser.add_argument("model", nargs="?", help=help)
    parser.add_argument("--length", type=int, metavar="N", help="length of the text in tokens (the trained context)")
    parser.add_argument("-t", "--threads", type=int, metavar="N", help="threads (as many as cores)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report; returns 1 when the installation cannot work, or the model does not fit."""
    if args.model is not None:
        return _advise(args)
    if args.length is not None or args.threads is not None:
        raise ValueError("--length and --threads need a model: pylongctx doctor MODEL --length N")
    facts = report()
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        print("\n".join(_lines(facts)))
    return 0 if facts["problems"] == [] else 1


def _advise(args: argparse.Namespace) -> int:
    from pylongctx.cli.console import show_table
    from pylongctx.cli.get import fetched
    from pylongctx.eval.advice import advise

    given = {} if args.threads is None else {"n_threads": args.threads, "n_threads_batch": args.threads}
    found = advise(fetched(args.model), args.length, **given)
    if args.json:
        print(json.dumps(asdict(found) | {"method": found.best.method, "kv_type": found.kv_type}, indent=2))
    else:
        show_table(_table(args.model, found))
        print(_words(found))
    return int(not found.kv_type)


def _table(model: str, found: "Advice") -> Table:
    from pylongctx.eval.advice import KEPT

    title = f"{model}, a text of {found.length} tokens on {available_cpus()} cores"
    table = Table(title=title, caption=f"trained context: {found.n_ctx_train} tokens; seconds are estimates")
    for head in ("method", "prefill", "generate 100 tokens", *(f"KV {kv}" for kv in found.best.kv_bytes)):
        table.add_column(head, justify="left" if head == "method" else "right")
    for one in found.estimates:
        sizes = (bytes_text(n) for n in one.kv_bytes.values())
        label = f"kvzip, compress({KEPT})" if one.method == "kvzip" else one.method
        table.add_row(label, f"{one.read:.0f} s", f"{100 * one.token:.1f} s", *sizes)
    return table


def _words(found: "Advice") -> str:
    memory, disk = bytes_text(found.tiers.memory), bytes_text(found.tiers.disk)
    tiers = f"method='longheads', kv_offload='disk': at most {memory} in memory, {disk} in a file"
    if found.kv_type:
        given = "" if found.kv_type == "f16" else f", type_k={found.kv_type!r}, type_v={found.kv_type!r}"
        return f"Fastest: method={found.best.method!r}{given}\nLess memory: {tiers}"
    sizes = ", ".join(f"{bytes_text(n)} with {kv}" for kv, n in found.best.kv_bytes.items())
    way = tiers if found.tiers.fits else "use a shorter text or a smaller model"
    return f"This text does not fit into memory ({sizes}): {way}."


def report() -> dict[str, Any]:
    """Return the facts about this installation; ``problems`` lists what prevents it from working."""
    problems: list[str] = []
    facts: dict[str, Any] = {"version": __version__}
    try:
        facts |= _library()
    except ImportError as reason:
        problems.append(str(reason))
    facts |= {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cffi": importlib.metadata.version("cffi"),
        "numpy": importlib.metadata.version("numpy"),
        "embedded_model": str(embedded_model()),
        "cpu_count": os.cpu_count(),
        "cpus_available": available_cpus(),
        "ram_bytes": ram_bytes(),
    }
    if not embedded_model().is_file():
        problems.append(f"the embedded model is missing: {embedded_model()}")
    return facts | {"problems": problems}


def _library() -> dict[str, Any]:
    from pylongctx._arguments import has_gpu, why_no_gpu
    from pylongctx._lib import build_info, lib, library_path, text
    from pylongctx.planning import devices

    return {
        "library": str(library_path()),
        "compiled_for": _compiled_for(build_info(), library_path().parent.name),
        "abi": lib.lctx_abi_version(),
        "build": build_info(),
        "gpu": "used for layers with n_gpu_layers" if has_gpu() else f"none: {why_no_gpu()}",
        "devices": [asdict(device) for device in devices()],
        "cpu_features": text(lib.lctx_system_info()),
        "attention": {device: _attention(device) for device in build_info()["backends"]},
    }


def _compiled_for(build: dict[str, Any], folder: str) -> str:
    if build["native"] == "ON":
        return "the CPU of the machine that built it"
    return f"every CPU with {build['kernels']['CPU']}" if folder == "lib" else folder


def _attention(device: str) -> dict[str, list[int]]:
    """Return the head sizes that a device supports, for every KV type."""
    return {kv: [dim for dim in HEAD_DIMS if _runs(device, kv, dim)] for kv in KV_TYPES}


def _runs(device: str, kv: str, head_dim: int) -> bool:
    from pylongctx._lib import lib

    return bool(lib.lctx_device_attends(device.encode(), lib.lctx_type_from_name(kv.encode()), head_dim))


def _lines(facts: dict[str, Any]) -> list[str]:
    """Return one untruncated line per fact, so that it can be pasted into a bug report."""
    rows = [row for key, value in facts.items() for row in _rows(key, value)]
    width = max(len(name) for name, _ in rows)
    return [f"{name:{width}}  {line}" for name, shown in rows for name, line in _named(name, shown)]


def _named(name: str, shown: str) -> list[tuple[str, str]]:
    first, *others = shown.split("\n")
    return [(name, first), *(("", other) for other in others)]


def _rows(key: str, value: Any) -> list[tuple[str, str]]:
    if key == "build":
        return [(f"build {name}", _shown(part)) for name, part in value.items()]
    if key == "devices":
        return [(device["name"], _device(device)) for device in value]
    if key == "attention":
        return [(f"attention on {device}", _by_width(types)) for device, types in value.items()]
    if key == "ram_bytes":
        return [("ram", bytes_text(value))]
    return [(key.replace("_", " "), _shown(value))]


def _device(facts: dict[str, Any]) -> str:
    from pylongctx.planning import Device

    device = Device(**facts)
    return f"{device.type}, {device.description}, {device.memory}"


def _by_width(types: dict[str, list[int]]) -> str:
    """Return the KV types, grouped by the head sizes that they support."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for kv, dims in types.items():
        groups.setdefault(tuple(dims), []).append(kv)
    lines = [f"{' '.join(names)}: head_dim {' '.join(map(str, dims))}" for dims, names in groups.items() if dims]
    return "\n".join(lines) or "none"


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {part}" for name, part in value.items())
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
