"""Packages of Debian, unpacked and not installed."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

SOURCE = "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian {} main\n"


def unpack(folder: Path, release: str, packages: Sequence[str], into: str = ".", architecture: str = "") -> None:
    """Unpack packages of a release below ``folder/into``, with lists of apt of its own: apt is left as it is.

    Parameters
    ----------
    architecture : str
        As Debian names it; "": that of this machine.
    """
    (folder / "lists/partial").mkdir(parents=True, exist_ok=True)
    (folder / "sources.list").write_text(SOURCE.format(release))
    where = {"Dir::Etc::SourceList": "sources.list", "Dir::State::lists": "lists", "Dir::Cache": "cache"}
    options = [f"-o{name}={folder.resolve() / value}" for name, value in where.items()]
    options += ["-oDir::Etc::SourceParts=-", "-oAPT::Sandbox::User=root"]
    if architecture:
        options += [f"-oAPT::Architecture={architecture}", f"-oAPT::Architectures={architecture}"]
    for action in (["update"], ["download", *packages]):
        subprocess.run(["apt-get", "--quiet", *options, *action], cwd=folder, check=True)
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package.name, into], cwd=folder, check=True)
