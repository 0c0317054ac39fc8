"""Reading text from plain text, PDF and EPUB files, and from all files of a folder."""

import io
import posixpath
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

from pylongctx._log import LOG

MAX_FILES = 1000  # in a folder
LOOKED_AT = 8192  # bytes by which text files in a folder are recognized
MAX_BYTES = 1 << 28  # unpacked size of an EPUB
INSTALL = "install it with: pip install 'pylongctx[documents]'"
EPUB = "{urn:oasis:names:tc:opendocument:xmlns:container}rootfile"
PACKAGE = "{http://www.idpf.org/2007/opf}"


@dataclass(frozen=True)
class FileText:
    """The text of a file."""

    name: str  # as given
    text: str
    note: str = ""  # about how it was read

    @property
    def framed(self) -> str:
        """The text with a header line for a prompt; unchanged without a name."""
        return f"--- File: {self.name} ---\n{self.text}\n" if self.name else f"{self.text}\n"


def read_file(name: str | Path) -> FileText:
    """Return the text of a file.

    Raises ValueError when it is not a text file, a PDF or an EPUB, or has no text, ImportError when the package for its
    format is not installed, and OSError when it cannot be read.
    """
    path = Path(name).expanduser()
    return text_of(path.read_bytes(), str(name))


def plain_text(name: str | Path) -> str:
    """Return the text of a file with newlines as line ends. A note about how it was read becomes a warning.

    Raises what ``read_file`` raises.
    """
    return without_note(read_file(name)).replace("\r\n", "\n")


def without_note(file: FileText) -> str:
    """Return the text of a file; a note about how it was read becomes a warning."""
    if file.note:
        LOG.warning("%s: %s", file.name, file.note)
    return file.text


def text_of(data: bytes, name: str) -> FileText:
    """Return the text in the bytes of a file, see ``read_file``."""
    if data.startswith(b"%PDF-"):
        return FileText(name, _filled(name, _pdf(data)))
    if data.startswith(b"PK") and b"application/epub+zip" in data[:LOOKED_AT]:
        return FileText(name, _filled(name, _epub(data, name)))
    if b"\0" in data:
        raise ValueError(f"{name} is not a text file: it contains NUL bytes, so it is binary")
    try:
        return FileText(name, data.decode("utf-8-sig"))
    except UnicodeDecodeError:
        text = data.decode("cp1252", "replace")
        return FileText(name, text, "read as Windows-1252, as it is not UTF-8")


def files_in(names: Iterable[str]) -> Iterator[str]:
    """Yield files, and instead of a folder its text files in order, without hidden ones.

    Raises ValueError when a folder has none, or too many.
    """
    for name in names:
        folder = Path(name).expanduser()
        if not folder.is_dir():
            yield name
            continue
        found = [str(path) for path in sorted(folder.rglob("*")) if _is_wanted(path, folder)]
        if not found:
            raise ValueError(f"there is no text file in the folder {name}")
        if len(found) > MAX_FILES:
            raise ValueError(f"the folder {name} has {len(found)} text files, more than {MAX_FILES}: name some of them")
        yield from found


def _is_wanted(path: Path, folder: Path) -> bool:
    if any(part.startswith(".") for part in path.relative_to(folder).parts) or not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(LOOKED_AT)
    return bool(head) and (b"\0" not in head or head.startswith(b"%PDF-") or b"application/epub+zip" in head)


def _filled(name: str, text: str) -> str:
    if not text.strip():
        raise ValueError(f"{name} has no text, only images: run OCR on it first")
    return text


def _pdf(data: bytes) -> str:
    try:
        from pypdf import PdfReader
        from pypdf.errors import PyPdfError
    except ImportError as reason:
        raise ImportError(f"PDF files need the package pypdf: {INSTALL}") from reason
    try:
        return "\n\n".join(page.extract_text() for page in PdfReader(io.BytesIO(data)).pages)
    except PyPdfError as reason:
        raise ValueError(f"the PDF cannot be read: {reason}") from reason


def _epub(data: bytes, name: str) -> str:
    try:
        from bs4 import BeautifulSoup
    except ImportError as reason:
        raise ImportError(f"EPUB files need the package beautifulsoup4: {INSTALL}") from reason
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as book:
            if (n := sum(part.file_size for part in book.infolist())) > MAX_BYTES:
                raise ValueError(f"{name} has {n} bytes when unpacked, more than {MAX_BYTES}")
            chapters = [book.read(part) for part in _spine(book)]
    except (zipfile.BadZipFile, KeyError, ElementTree.ParseError) as reason:
        raise ValueError(f"{name} is a damaged EPUB: {reason}") from reason
    texts = (BeautifulSoup(chapter, "html.parser").get_text("\n", strip=True) for chapter in chapters)
    return "\n\n".join(text for text in texts if text)


def _spine(book: zipfile.ZipFile) -> Iterator[str]:
    """Yield the parts of a book in their order."""
    root = ElementTree.fromstring(book.read("META-INF/container.xml")).iter(EPUB)
    package = next(one.attrib["full-path"] for one in root)
    tree = ElementTree.fromstring(book.read(package))
    parts = {item.get("id"): item.get("href", "") for item in tree.iter(f"{PACKAGE}item")}
    for reference in tree.iter(f"{PACKAGE}itemref"):
        href = unquote(parts[reference.get("idref")].partition("#")[0])
        yield posixpath.normpath(posixpath.join(posixpath.dirname(package), href))
