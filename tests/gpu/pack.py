"""What a machine with nothing but CUDA and Python needs for a short run, in a folder of at most 64 MiB."""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from cuda_build import ROOT

from pylongctx._lib import library_path

MOST = 64 * 2**20  # bytes
PYTHON = "3.12"  # of the other machine
WHEELS = ("cffi", "pycparser", "llguidance", "gguf")  # numpy is there
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
FOLDERS = ("pylongctx", "bench", "tests")
LEFT_OUT = ("__pycache__", "results", "peers", "lib")


def run(args: argparse.Namespace) -> int:
    """Pack this installation; returns 1 when it does not fit."""
    args.folder.mkdir(parents=True, exist_ok=True)
    project(args.folder / "project.tar.xz")
    wheels(args.folder / "wheels")
    size = sum(path.stat().st_size for path in args.folder.rglob("*") if path.is_file())
    print(f"{args.folder}: {size / 2**20:.1f} of {MOST / 2**20:.0f} MiB")
    return int(size > MOST)


def project(to: Path) -> None:
    """Pack the sources, and the library without symbols and its generated module."""
    library = library_path()
    package = library.parent.parent
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in FOLDERS:
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
        (root / "pylongctx" / "lib").mkdir()
        for path in library.parent.glob("lib*"):
            copy_stripped(path, root / "pylongctx" / "lib" / path.name)
        shutil.copy(package / "_ffi_generated.py", root / "pylongctx")
        header = root / "native" / "harness" / "harness.h"
        header.parent.mkdir(parents=True)
        shutil.copy(ROOT / "native" / "harness" / "harness.h", header)
        with tarfile.open(to, "w:xz") as tar:
            tar.add(root, ".")


def copy_stripped(path: Path, to: Path) -> None:
    shutil.copy(path, to)
    if strip := shutil.which("strip"):
        subprocess.run([strip, "--strip-unneeded", to], check=True)


def wheels(folder: Path) -> None:
    """Fetch the packages that the project needs, for the Python of the other machine."""
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    of = ["--no-deps", "--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp", *platforms]
    command = [sys.executable, "-m", "pip", "download", "-q", "-d", os.fspath(folder), *of, *WHEELS]
    subprocess.run(command, check=True)
