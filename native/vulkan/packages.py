"""What a build with ``GGML_VULKAN=ON`` needs, on Debian and Ubuntu: ``python native/vulkan/packages.py FOLDER``.

Installs the packages that are missing, or names them where that takes another user. Headers of Vulkan that are new
enough for llama.cpp are unpacked into FOLDER, whatever the distribution has.
"""

import os
import subprocess
import sys
from pathlib import Path

# a compiler of shaders; the loader; what ggml includes; a device in software
PACKAGES = ("glslc", "libvulkan-dev", "spirv-headers", "mesa-vulkan-drivers")
RELEASE = "trixie"  # of Debian, whose headers are of 1.4.309
SOURCE = "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian {} main\n"


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


def unpack_headers(folder: Path) -> None:
    """Unpack libvulkan-dev of another release, with lists of its own: apt is left as it is."""
    if (folder / "usr/include/vulkan/vulkan.hpp").is_file():
        return
    (folder / "lists/partial").mkdir(parents=True, exist_ok=True)
    (folder / "sources.list").write_text(SOURCE.format(RELEASE))
    where = {"Dir::Etc::SourceList": "sources.list", "Dir::Etc::SourceParts": "-", "Dir::State::lists": "lists",
             "Dir::Cache": "cache"}  # fmt: skip
    options = [f"-o{name}={value if value == '-' else folder.resolve() / value}" for name, value in where.items()]
    for action in (["update"], ["download", "libvulkan-dev"]):
        subprocess.run(["apt-get", "--quiet", *options, "-oAPT::Sandbox::User=root", *action], cwd=folder, check=True)
    [package] = folder.glob("libvulkan-dev_*.deb")
    subprocess.run(["dpkg", "-x", package.name, "."], cwd=folder, check=True)


if __name__ == "__main__":
    if names := missing():
        install(names)
    unpack_headers(Path(sys.argv[1]))
