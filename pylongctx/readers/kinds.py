"""The kind of a file by its content; names decide only between kinds of text."""

from collections.abc import Callable
from typing import NamedTuple

from pylongctx.readers import encoding, epub, html, mail, notebook, office, pdf, rtf, subtitles
from pylongctx.readers.archive import Archive
from pylongctx.readers.extract import Extract, Refused

HEAD = 8192  # bytes by which most kinds are recognized
PDF_WITHIN = 1024  # bytes, where other programs look for the beginning of a PDF
PICTURE = "is a picture: read its letters with OCR first, for instance with Tesseract"
SOUND = "is a recording or a film: write down what is said first, for instance with Whisper"
PACKED = "is a compressed archive: unpack it first"
# bytes at an offset, and what a file is that has them
REFUSED = (
    (0, b"\x89PNG\r\n", PICTURE),
    (0, b"\xff\xd8\xff", PICTURE),
    (0, b"GIF87a", PICTURE),
    (0, b"GIF89a", PICTURE),
    (0, b"II*\0", PICTURE),
    (0, b"MM\0*", PICTURE),
    (8, b"WEBPVP8", PICTURE),
    (4, b"ftypheic", PICTURE),
    (4, b"ftypavif", PICTURE),
    (0, b"AT&TFORM", PICTURE),
    (0, b"ID3\x03", SOUND),
    (0, b"ID3\x04", SOUND),
    (0, b"OggS\0", SOUND),
    (0, b"fLaC\0", SOUND),
    (8, b"WAVEfmt ", SOUND),
    (8, b"AVI LIST", SOUND),
    (4, b"ftyp", SOUND),
    (0, b"\x1aE\xdf\xa3", SOUND),
    (0, b"\x1f\x8b\x08", PACKED),
    (4, b"1AY&SY", PACKED),
    (0, b"\xfd7zXZ\0", PACKED),
    (0, b"7z\xbc\xaf\x27\x1c", PACKED),
    (0, b"Rar!\x1a\x07", PACKED),
    (0, b"\x28\xb5\x2f\xfd", PACKED),
    (257, b"ustar", PACKED),
    (60, b"BOOKMOBI", "is a Kindle book: convert it to EPUB first, for instance with Calibre"),
    (0, b"\xeaDRMION\xee", "is a Kindle book with DRM: only the programs of its shop can read it"),
    (0, b"%!PS-Adobe", "is PostScript: convert it to PDF first, for instance with ps2pdf"),
    (0, b"GGUF\x02\0", "is a model: name it with -m"),
    (0, b"GGUF\x03\0", "is a model: name it with -m"),
    (0, b"\x7fELF", "is a program, not a text"),
    (0, b"MZ\x90\0", "is a program, not a text"),
    (0, b"SQLite format 3\0", "is a database: export what you need as CSV first"),
)
OLD_OFFICE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
PASSWORD_STREAM = "EncryptedPackage".encode("utf-16-le")
SPREADSHEET = "is a spreadsheet: export it as CSV first"
SLIDES = "is a presentation: export it as PDF first"
OPEN_DOCUMENT = b"application/vnd.oasis.opendocument."


class Kind(NamedTuple):
    """A kind of file: its name for messages, and what reads it."""

    title: str
    read: Callable[[bytes], Extract]
    is_markup: bool = False  # text with markup, which is a text as it stands too


TEXT = Kind("text file", encoding.decode)
MARKUP = (
    (lambda head, name: mail.is_mail(head), Kind("e-mail", mail.read, is_markup=True)),
    (lambda head, name: subtitles.is_subtitles(head), Kind("subtitle file", subtitles.read, is_markup=True)),
    (lambda head, name: notebook.is_notebook(head), Kind("notebook", notebook.read, is_markup=True)),
    (html.is_html, Kind("HTML page", html.read, is_markup=True)),
)


def kind_of(data: bytes, name: str) -> Kind:
    """Return the kind of a file; Refused for one that is not read."""
    check_head(data[:HEAD])
    if _is_pdf(data):
        return Kind("PDF", pdf.read)
    if data.startswith(b"PK\x03\x04"):
        return _zipped(Archive(data))
    if data.startswith(b"{\\rtf"):
        return Kind("RTF file", rtf.read)
    if data.startswith(OLD_OFFICE):
        raise Refused(_old_office(data))
    head = encoding.head_of(data)
    return next((kind for matches, kind in MARKUP if matches(head, name)), TEXT)


def check_head(head: bytes) -> None:
    """Refuse a file that by its first bytes is of a kind without text, or of one that is not read."""
    for offset, mark, reason in REFUSED:
        if head.startswith(mark, offset):
            raise Refused(reason)


def _is_pdf(data: bytes) -> bool:
    if data[:PDF_WITHIN].lstrip(b"\xef\xbb\xbf \t\r\n\0").startswith(b"%PDF-"):
        return True
    return b"\n%PDF-" in data[:PDF_WITHIN] and b"startxref" in data[-PDF_WITHIN:]


def _zipped(archive: Archive) -> Kind:
    """Return the kind of a zip file by the parts that it has."""
    names = archive.names
    if epub.CONTAINER in names:
        return Kind("EPUB", lambda _: epub.read(archive))
    if "content.xml" in names and "mimetype" in names:
        kind = archive.read("mimetype").strip().removeprefix(OPEN_DOCUMENT)
        if kind.startswith(b"text"):
            return Kind("OpenDocument text", lambda _: office.read_odt(archive))
        raise Refused(SPREADSHEET if kind.startswith(b"spreadsheet") else SLIDES)
    if any(name.startswith("xl/") for name in names):
        raise Refused(SPREADSHEET)
    if any(name.startswith("ppt/") for name in names):
        raise Refused(SLIDES)
    if "[Content_Types].xml" in names:
        return Kind("Word document", lambda _: office.read_docx(archive))
    raise Refused(PACKED)


def _old_office(data: bytes) -> str:
    if PASSWORD_STREAM in data:
        return "is protected with a password: save it without one"
    return "is a file of an old Office program: save it as DOCX, or as PDF"
