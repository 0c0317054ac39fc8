"""PDF: the text of its pages, which a process of its own reads with PDFium."""

import json
import re
import subprocess
import sys
from pathlib import Path

from pylongctx.readers.extract import MAX_BYTES, Extract, Refused, counted, listed, package
from pylongctx.readers.flow import without_trailing_spaces

PROGRAM = Path(__file__).with_name("pdf_worker.py")
MEMORY = 2 << 30  # bytes, of the process
SECONDS = 300  # of CPU time, and as long again for a busy machine
DIVIDED = "\ufffe"  # how PDFium marks a hyphen at the end of a line, of which it makes one word
DIVISION = re.compile(rf"(?<!\w)(\w*){DIVIDED}(\w*)")
HYPHENATED = re.compile(r"(?<!\w)\w+-\w+")
LIGATURES = {
    "\ufb00": "ff",
    "\ufb01": "fi",
    "\ufb02": "fl",
    "\ufb03": "ffi",
    "\ufb04": "ffl",
    "\ufb05": "st",
    "\ufb06": "st",
}
WITHOUT_WIDTH = dict.fromkeys(("\u00ad", "\u200b", "\ufeff", "\uffff", "\x02", *map(chr, (*range(9), *range(14, 32)))))
CLEAN = str.maketrans(LIGATURES | WITHOUT_WIDTH | {"\u00a0": " "})


def read(data: bytes) -> Extract:
    """Return the text of all pages; a note has the number of those without text."""
    pages = [page.translate(CLEAN).strip() for page in _pages(data)]
    empty = [str(i) for i, page in enumerate(pages, 1) if not page]
    if len(empty) == len(pages):
        raise Refused("has no text, only images: run OCR on it first, for instance with ocrmypdf")
    hint = "they may be pictures, which OCR can read"
    note = f"{len(empty)} of {counted(len(pages), 'page')} have no text (page {listed(empty)}): {hint}"
    text = without_trailing_spaces(_joined("\n\n".join(filter(None, pages))))
    return Extract(text, (note,) if empty else ())


def _pages(data: bytes) -> list[str]:
    """Return the texts of the pages from a process, which may take too much time or memory, or crash."""
    package("pypdfium2", "pypdfium2", "PDF files")
    command = [sys.executable, "-I", "-S", str(PROGRAM), json.dumps(sys.path), *map(str, (MEMORY, SECONDS, MAX_BYTES))]
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=2 * SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise Refused(f"takes more than {SECONDS} seconds to read: name a part of it") from None
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        why = f"it needs more than {SECONDS} seconds or {MEMORY} bytes of memory, or PDFium crashed"
        raise Refused(f"is not read: {why} (exit status {done.returncode})") from None
    if "refused" in answer:
        raise Refused(answer["refused"])
    return [str(page) for page in answer["pages"]]


def _joined(text: str) -> str:
    """Join words that lines divide; hyphens stay before capitals and digits, and where the text has them elsewhere."""
    known = set(HYPHENATED.findall(text))

    def join(found: re.Match[str]) -> str:
        first, second = found.groups()
        keeps = not second[:1].islower() or f"{first}-{second}" in known
        return f"{first}-{second}" if keeps else first + second

    return DIVISION.sub(join, text).replace(DIVIDED, "")
