"""What a build with ``GGML_VULKAN=ON`` needs, on Debian and Ubuntu: ``vulkan_packages.py FOLDER``.

Installs the packages that are missing, or names them where that takes another user. Headers of Vulkan that are new
enough for llama.cpp are unpacked into FOLDER, whatever the distribution has.
"""

import os
import subprocess
import sys
from pathlib import Path

from debian import unpack

# a compiler of shaders; the loader; what ggml includes; a device in software
PACKAGES = ("glslc", "libvulkan-dev", "spirv-headers", "mesa-vulkan-drivers")
RELEASE = "trixie"  # of Debian, whose headers are of 1.4.309


def missing() -> list[str]:
    """Return the packages that are not installed."""
    shown = [subprocess.run(["dpkg", "-s", name], capture_output=True).returncode for name in PACKAGES]
    return [name for name, status in zip(PACKAGES, shown, strict=True) if status != 0]


def install(names: list[str]) -> None:
    """Install packages.

    Raises
    ------
    SystemExit
        With the command, where this user may not.
    """
    command = ["apt-get", "install", "--yes", "--no-install-recommends", *names]
    if os.geteuid() != 0:
        raise SystemExit(f"GGML_VULKAN needs packages that are not here: sudo {' '.join(command)}")
    subprocess.run(["apt-get", "update"], check=True)
    subprocess.run(command, check=True, env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"})


if __name__ == "__main__":
    if names := missing():
        install(names)
    headers = Path(sys.argv[1])
    if not (headers / "usr/include/vulkan/vulkan.hpp").is_file():
        unpack(headers, RELEASE, ["libvulkan-dev"])
