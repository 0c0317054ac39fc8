"""Reading files: a corpus of every kind, encodings, limits, damage, folders, and what is refused."""

import os
import random
import re
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path

import pytest
from file_corpus import CASES, docx, encryption, epub, pdf, shown, table, zipped

from pylongctx.readers import archive, files, kinds
from pylongctx.readers.files import plain_text, read_all, read_file, text_of

pytestmark = pytest.mark.check

PAGE = Path(__file__).parents[2] / "docs" / "files.md"
PACKAGES = ("pypdfium2", "lxml", "lxml.etree", "chardet", "striprtf")
NEEDED = {  # what a file of the corpus needs that the standard library does not have
    "pypdfium2": r"\.pdf$",
    "lxml": r"\.(html?|epub|mbox)$",
    "chardet": r"(western|russian|unix|japanese|chinese|taiwan|korean|polish|old-mac)\.txt$",
    "striprtf": r"\.rtf$",
}


@pytest.fixture(autouse=True)
def _packages():
    for name in ("pypdfium2", "lxml", "chardet", "striprtf"):
        pytest.importorskip(name)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_file_is_read_or_refused_with_its_reason(case):
    if case.refusal:
        with pytest.raises(ValueError) as refused:
            text_of(case.content, case.name)
        assert str(refused.value) == f"{case.name} {case.refusal}"
        return
    found = text_of(case.content, case.name)
    assert (found.text, found.notes) == (case.text, case.notes)


def test_the_page_has_the_table_of_the_corpus():
    assert table() in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("case", [case for case in CASES if not case.refusal], ids=lambda case: case.name)
def test_a_damaged_file_is_read_or_refused(case):
    data, rng = case.content, random.Random(case.name)
    for _ in range(3 if case.name.endswith(".pdf") else 10):
        changed = bytearray(data[: rng.randrange(len(data))] if rng.random() < 0.4 else data)
        for _ in range(rng.choice((0, 1, 8))):
            if changed:
                changed[rng.randrange(len(changed))] = rng.randrange(256)
        try:
            text_of(bytes(changed), case.name)
        except ValueError as reason:
            assert re.fullmatch(rf"{re.escape(case.name)} \S.*", str(reason), re.DOTALL)


# ---- text ----


@pytest.mark.parametrize(
    ("data", "text", "note"),
    [
        (b"plain", "plain", ""),
        ("\ufeffGr\u00fc\u00dfe".encode(), "Gr\u00fc\u00dfe", ""),
        ("Gr\u00fc\u00dfe \u2026".encode("cp1252"), "Gr\u00fc\u00dfe \u2026", "Windows-1252"),
        (b"", "", ""),
        (
            "\u201cIt\u2019s\u201d \u2013 she said".encode("cp1252"),
            "\u201cIt\u2019s\u201d \u2013 she said",
            "Windows-1252",
        ),
        (b"cut \xe2\x82\xac \xe2\x82", "cut \u20ac \ufffd", "1 place is not UTF-8"),
        ("\u6f22\u5b57".encode("iso2022_jp"), "\u6f22\u5b57", ""),
        ("ab\u6f22".encode("utf-16-be") + b"\x00", None, "NUL bytes"),
        (b"\0\1", None, "NUL bytes"),
        (b"GGUF is a format, and %PDF-1.7\nis another", "GGUF is a format, and %PDF-1.7\nis another", ""),
        (b"From: here\nto there", "From: here\nto there", ""),
        (b'{"cells": 1}\n{"cells": 2}\n', '{"cells": 1}\n{"cells": 2}\n', ""),
    ],
)
def test_text_in_any_encoding(data, text, note):
    if text is None:
        with pytest.raises(ValueError, match=note):
            text_of(data, "a.txt")
        return
    found = text_of(data, "a.txt")
    notes = "; ".join(found.notes)
    assert found.text == text and note in notes and bool(note) == bool(notes)


def test_markup_stays_for_options_that_take_a_text_as_it_is(tmp_path, caplog):
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"<html><p>one</p>\r\n\xff\xe9")
    assert read_file(path).text.startswith("one")
    assert plain_text(path).startswith("<html><p>one</p>\n")
    assert "it is not UTF-8" in caplog.text
    path.write_bytes(epub({"a": "<p>one</p>"}))
    assert plain_text(path) == "one"


# ---- limits ----


def test_what_is_unpacked_is_counted(monkeypatch):
    monkeypatch.setattr(archive, "MAX_BYTES", 10_000)
    with pytest.raises(ValueError, match="unpacks to more than 10000 bytes"):
        text_of(epub({"a": "x" * 20_000}), "a.epub")
    with pytest.raises(ValueError, match="unpacks to more than 10000 bytes"):  # a part that is read four times
        text_of(epub({"a": "x" * 3_000}, order=["a"] * 4), "a.epub")


@pytest.mark.parametrize(("size", "is_read"), [(0xFFFFFF00, True), (100, False)])
def test_the_size_in_a_header_is_not_believed(size, is_read):
    book = bytearray(epub({"a": "x" * 3_000}))
    at = book.rindex(b"PK\x01\x02") + 24  # of the last part, the chapter
    assert int.from_bytes(book[at : at + 4], "little") > 3_000
    book[at : at + 4] = size.to_bytes(4, "little")
    if is_read:
        assert text_of(bytes(book), "a.epub").text == "x" * 3_000
        return
    with pytest.raises(ValueError, match=r"is damaged in the part OEBPS/text of/a\.xhtml"):
        text_of(bytes(book), "a.epub")


def test_a_bomb_takes_little_memory(monkeypatch):
    monkeypatch.setattr(archive, "MAX_BYTES", 1 << 20)
    data = epub({"a": bytes(1 << 26)})
    tracemalloc.start()
    with pytest.raises(ValueError, match="unpacks to more than"):
        text_of(data, "a.epub")
    assert tracemalloc.get_traced_memory()[1] < 1 << 23
    tracemalloc.stop()


def test_a_pdf_has_limits_of_memory_and_time(monkeypatch):
    from pylongctx.readers import pdf as reader

    monkeypatch.setattr(reader, "MEMORY", 1 << 20)
    with pytest.raises(ValueError, match=r"it needs more than .* or 1048576 bytes of memory"):
        text_of(pdf(shown(["one"])), "a.pdf")


def test_other_methods_of_compression_are_refused(tmp_path):
    path = tmp_path / "a.epub"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_BZIP2) as book:
        book.writestr("META-INF/container.xml", b"x" * 100)
    with pytest.raises(ValueError, match="a method that documents do not use"):
        read_file(path)


def test_a_file_may_have_a_limited_size(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * 11)
    monkeypatch.setattr(files, "MAX_BYTES", 10)
    with pytest.raises(ValueError, match=r"a\.txt has more than 10 bytes"):
        read_file(path)


def test_external_entities_are_not_fetched(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    prolog = f'<!DOCTYPE d [<!ENTITY x SYSTEM "file://{secret}">]>'
    body = "<w:p><w:r><w:t>&x;</w:t></w:r></w:p>"
    with pytest.raises(ValueError, match="declares the XML entity 'x'"):
        text_of(docx(body, prolog), "a.docx")
    page = f'<!DOCTYPE html [<!ENTITY x SYSTEM "file://{secret}">]><html><p>a &x; <img src="file://{secret}"></p>'
    assert "secret" not in text_of(page.encode(), "a.html").text.replace(str(secret), "")


HOSTILE = {
    "comments.html": b"<!-- -->" * 8_000,
    "meta.html": b"<html>" + b"<meta " * 100_000,
    "elements.html": b"<html>" + b"<a " * 100_000,
    "spaces.html": b"<html><pre>" + b" " * 300_000 + b"x",
    "lists.html": b"<html>" + b"<ul><li>" * 5_000 + b"x",
    "notes.docx": docx('<w:p><w:r><w:footnoteReference w:id="1"/></w:r></w:p>' * 20_000),
    "envelope.mbox": b"From a 00:00 " * 5_000 + b"\n",
    "styles.vtt": b"WEBVTT\n\n00:01.000 --> 00:02.000\n" + b"<a" * 300_000,
    "word.pdf": pdf(shown(["a" * 300_000])),
    "groups.rtf": b"{\\rtf1" + b"{" * 100_000,
    "parts.eml": b"From: a\nTo: b\nContent-Type: multipart/mixed; boundary=b\n\n" + b"--b\n" * 50_000,
    "brackets.ipynb": b'{"cells": ' + b"[" * 300_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_takes_time_in_proportion_to_its_size(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(HOSTILE[name])
    code = f"""from pylongctx.readers.files import read_file
try:
    read_file({str(path)!r})
except ValueError:
    pass"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# ---- what is missing ----


def test_a_missing_part_of_a_document_is_named():
    with pytest.raises(ValueError, match=r"its part word/document\.xml is missing"):
        text_of(zipped({"[Content_Types].xml": ""}), "a.docx")
    with pytest.raises(ValueError, match=r"its part OEBPS/book\.opf is not XML"):
        text_of(zipped({"META-INF/container.xml": CONTAINER, "OEBPS/book.opf": "<a>"}), "a.epub")
    drm = epub({"a": b"\x81"}, encryption=encryption("text%20of/a.xhtml"))
    with pytest.raises(ValueError, match=r"protected by DRM \(unknown\)"):
        text_of(drm, "a.epub")


CONTAINER = '<container><rootfiles><rootfile full-path="OEBPS/book.opf"/></rootfiles></container>'


def test_what_is_not_text_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"x\.bin is not a text file: it contains NUL bytes"):
        text_of(b"a\0b", "x.bin")
    with pytest.raises(ValueError, match=r"x\.bin is not a text file: it contains many control characters"):
        text_of(bytes(range(1, 9)) * 9, "x.bin")
    with pytest.raises(ValueError, match=r"standard input is a picture"):
        text_of(b"\x89PNG\r\n", "")
    with pytest.raises(OSError, match="missing"):
        read_file(tmp_path / "missing")


def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    cases = [case for case in CASES if not case.refusal]
    for case in cases:
        (folder / case.name).write_bytes(case.content)
    code = (
        f"import sys; sys.modules |= dict.fromkeys({PACKAGES!r}); from pylongctx.readers.files import read_all; "
        f"found, lines = read_all([{str(folder)!r}]); print(*(file.name for file in found)); print(*lines, sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    read, *lines = done.stdout.splitlines()
    needed = {case.name for case in cases if re.search("|".join(NEEDED.values()), case.name)}
    assert {Path(name).name for name in read.split()} == {case.name for case in cases} - needed
    for package in NEEDED:
        reason = (
            rf"is not read, as .* need the package {package}: install it with: pip install 'pylongctx\[documents\]'"
        )
        assert any(re.search(reason, line) for line in lines), lines


# ---- folders ----


def test_a_folder_is_its_text_files_in_order(tmp_path):
    for name, data in {"b.txt": b"b", "a/z.md": b"z", ".git/x": b"x", "c.png": b"\x89PNG\r\n", "empty": b""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    (tmp_path / "first.txt").write_bytes(b"1")
    found, left_out = read_all([str(tmp_path / "first.txt"), str(tmp_path)])
    names = [str(tmp_path / name) for name in ("first.txt", "a/z.md", "b.txt", "first.txt")]
    assert [file.name for file in found] == names
    assert [line.removeprefix(f"left out of {tmp_path}: ") for line in left_out] == [
        ".git is hidden",
        "c.png is a picture: read its letters with OCR first, for instance with Tesseract",
        "empty is empty",
    ]
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="no text file in the folder"):
        read_all([str(tmp_path / "none")])


def test_what_a_folder_leaves_out_has_one_line_for_each_reason(tmp_path, monkeypatch):
    for i in range(6):
        (tmp_path / f"{i}.png").write_bytes(b"\x89PNG\r\n")
    (tmp_path / "a.txt").write_bytes(b"a")
    (tmp_path / "cut.epub").write_bytes(epub({"a": "<p>x</p>"})[:100])
    (tmp_path / "elsewhere").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    found, left_out = read_all([str(tmp_path)])
    assert [Path(file.name).name for file in found] == ["a.txt"]
    assert [line.removeprefix(f"left out of {tmp_path}: ") for line in left_out] == [
        f"0.png, 1.png, 2.png and 3 more: each {kinds.PICTURE}",
        "cut.epub is a damaged zip file (File is not a zip file): copy or download it again",
        "elsewhere is a link to a folder, or a folder that cannot be opened",
        "pipe is not a regular file",
    ]
    monkeypatch.setattr(files, "MAX_FILES", 1)
    (tmp_path / "b.txt").write_bytes(b"b")
    with pytest.raises(ValueError, match="has 2 text files, more than 1"):
        read_all([str(tmp_path)])


# ---- cost ----


def test_libraries_are_imported_when_a_file_needs_them():
    code = "import sys, pylongctx, pylongctx.readers.files; print(sorted(set(sys.modules) & {}))"
    done = subprocess.run(
        [sys.executable, "-c", code.format({*PACKAGES, "email.policy"})], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
