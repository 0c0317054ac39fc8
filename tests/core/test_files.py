"""Reading files: encodings, PDF, EPUB, folders, and what is refused."""

import zipfile

import pytest

from pylongctx.files import files_in, read_file, text_of

pytestmark = pytest.mark.check


def pdf(*lines):
    """Return a PDF of one page that shows lines of ASCII; no line: an empty page."""
    shown = " T* ".join(f"({line}) Tj" for line in lines)
    stream = f"BT /F1 12 Tf 14 TL 72 720 Td {shown} ET".encode()
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R "
        b"/Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    out, places = b"%PDF-1.4\n", []
    for i, one in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (i, one)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    trailer = b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % (len(objects) + 1, len(out))
    return out + b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1) + table + trailer


def epub(path, chapters, order=None):
    """Write an EPUB; chapters by name, in the order of the spine."""
    items = "".join(f'<item id="{name}" href="text%20of/{name}.xhtml"/>' for name in chapters)
    spine = "".join(f'<itemref idref="{name}"/>' for name in order or chapters)
    with zipfile.ZipFile(path, "w") as book:
        book.writestr("mimetype", "application/epub+zip")
        book.writestr(
            "META-INF/container.xml",
            '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
            '<rootfile full-path="OEBPS/book.opf"/></rootfiles></container>',
        )
        package = f'<package xmlns="http://www.idpf.org/2007/opf"><manifest>{items}</manifest><spine>{spine}</spine></package>'
        book.writestr("OEBPS/book.opf", package)
        for name, body in chapters.items():
            book.writestr(
                f"OEBPS/text of/{name}.xhtml", f"<html><head><style>x</style></head><body>{body}</body></html>"
            )


@pytest.mark.parametrize(
    ("data", "text", "note"),
    [
        (b"plain", "plain", ""),
        ("\ufeffGr\u00fc\u00dfe".encode(), "Gr\u00fc\u00dfe", ""),
        ("Gr\u00fc\u00dfe \u2026".encode("cp1252"), "Gr\u00fc\u00dfe \u2026", "Windows-1252"),
        (b"", "", ""),
    ],
)
def test_text_in_any_encoding(data, text, note):
    found = text_of(data, "a.txt")
    assert found.text == text and note in found.note and bool(note) == bool(found.note)


def test_a_pdf_and_one_without_text(tmp_path):
    pytest.importorskip("pypdf")
    path = tmp_path / "a.pdf"
    path.write_bytes(pdf("The butler hid the letter", "behind the clock."))
    assert read_file(path).text.split() == "The butler hid the letter behind the clock.".split()
    path.write_bytes(pdf())
    with pytest.raises(ValueError, match="has no text, only images"):
        read_file(path)
    path.write_bytes(b"%PDF-1.4\nnothing")
    with pytest.raises(ValueError, match="PDF"):
        read_file(path)


def test_an_epub_is_read_in_the_order_of_its_spine(tmp_path):
    pytest.importorskip("bs4")
    path = tmp_path / "a.epub"
    epub(path, {"b": "<p>Second <b>chapter</b> &amp; end</p>", "a": "<h1>First</h1><p>chapter</p>"}, ["a", "b"])
    assert read_file(path).text.split() == "First chapter Second chapter & end".split()
    data = path.read_bytes()
    path.write_bytes(data[:300])
    with pytest.raises(ValueError, match="damaged EPUB"):
        read_file(path)


def test_what_is_not_text_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"x\.bin is not a text file: it contains NUL bytes"):
        text_of(b"a\0b", "x.bin")
    with pytest.raises(OSError, match="missing"):
        read_file(tmp_path / "missing")


def test_a_folder_is_its_text_files_in_order(tmp_path):
    for name, data in {"b.txt": b"b", "a/z.md": b"z", ".git/x": b"x", "c.png": b"\x89PNG\0\0", "empty": b""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    found = list(files_in(["first.txt", str(tmp_path)]))
    assert found == ["first.txt", str(tmp_path / "a/z.md"), str(tmp_path / "b.txt")]
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="no text file in the folder"):
        list(files_in([str(tmp_path / "none")]))
