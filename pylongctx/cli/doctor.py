"""``pylongctx doctor``: what is installed, what it was built with, what it can use."""

import argparse
import importlib.metadata
import json
import os
import platform
from typing import Any

from rich.console import Console
from rich.table import Table

from pylongctx import __version__
from pylongctx.models import embedded_model


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser("doctor", help="show the installation", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report; returns 1 when the installation cannot work."""
    facts = report()
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        Console().print(_table(facts))
    return 0 if facts["problems"] == [] else 1


def report() -> dict[str, Any]:
    """Return the facts of this installation; ``problems`` lists what keeps it from working."""
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
        "ram_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }
    if not embedded_model().is_file():
        problems.append(f"the embedded model is missing: {embedded_model()}")
    return facts | {"problems": problems}


def _library() -> dict[str, Any]:
    from pylongctx._lib import build_info, lib, library_path, text

    return {
        "library": str(library_path()),
        "abi": lib.lctx_abi_version(),
        "build": build_info(),
        "cpu_features": text(lib.lctx_system_info()),
    }


def _table(facts: dict[str, Any]) -> Table:
    table = Table(show_header=False)
    for key, value in facts.items():
        for name, shown in _rows(key, value):
            table.add_row(name, shown)
    return table


def _rows(key: str, value: Any) -> list[tuple[str, str]]:
    if key == "build":
        return [(f"build {name}", _shown(part)) for name, part in value.items()]
    if key == "ram_bytes":
        return [("ram", f"{value / 2**30:.1f} GiB")]
    return [(key.replace("_", " "), _shown(value))]


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
