"""A Python for 64-bit ARM and the packages that the tests need, for qemu: ``python tests/support/arm_root.py FOLDER``.

``FOLDER/root`` has packages of Debian, unpacked and not installed, ``FOLDER/site`` those of PyPI. Works on Debian and
Ubuntu, without the rights to install.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

from debian import unpack

RELEASE, PYTHON = "bookworm", "3.11"
PACKAGES = (
    *(f"python{PYTHON}-minimal", f"libpython{PYTHON}-minimal", f"libpython{PYTHON}-stdlib", "libc6", "libgcc-s1"),
    *("libstdc++6", "zlib1g", "libexpat1", "libffi8", "libssl3", "libbz2-1.0", "liblzma5", "libsqlite3-0", "libuuid1"),
)
WHEELS = ("numpy", "cffi", "pytest", "hypothesis", "gguf", "rich", "llguidance~=1.9", "markdown-it-py")
PLATFORMS = ("manylinux_2_31", "manylinux_2_28", "manylinux_2_17", "manylinux2014")
QEMU = ("qemu-aarch64", "qemu-aarch64-static")


def unpack_wheels(folder: Path) -> None:
    """Unpack packages of PyPI below ``site``."""
    if (folder / "site/numpy").is_dir():
        return
    platforms = [word for name in PLATFORMS for word in ("--platform", f"{name}_aarch64")]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:", "--python-version", PYTHON]
    subprocess.run([*pip, *platforms, "--dest", folder / "wheels", *WHEELS], check=True)
    for wheel in (folder / "wheels").glob("*.whl"):
        with ZipFile(wheel) as file:
            file.extractall(folder / "site")


if __name__ == "__main__":
    if not any(map(shutil.which, QEMU)):
        raise SystemExit("no qemu-aarch64 here: sudo apt-get install qemu-user-static")
    target = Path(sys.argv[1])
    if not (target / f"root/usr/bin/python{PYTHON}").is_file():
        unpack(target, RELEASE, PACKAGES, "root", "arm64")
    unpack_wheels(target)
