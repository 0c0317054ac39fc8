"""The program that reads a PDF, see ``pdf.py``: SYS_PATH MEMORY SECONDS MAX_TEXT, the file on stdin, JSON on stdout."""

import json
import statistics
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

GUTTER = 8.0  # points between columns, at least
MIN_ROWS = 4  # lines next to each other on a page with columns
MIN_COLUMN = 0.2  # width of a column, as a share of that of the text
MIN_FILLED = 0.5  # share of its column that a line of prose fills, and a cell of a table does not
PASSWORD = 4  # FPDF_ERR_PASSWORD


class Box(NamedTuple):
    """A rectangle on a page, in points from the lower left corner."""

    left: float
    bottom: float
    right: float
    top: float


def around(boxes: list[Box]) -> Box:
    """Return the smallest box with all of these."""
    left, bottom, right, top = zip(*boxes, strict=True)
    return Box(min(left), min(bottom), max(right), max(top))


def in_order(boxes: list[Box]) -> list[Box]:
    """Return parts of a page in reading order, from the boxes of texts in the order in which they are drawn.

    It is one part unless columns are drawn line by line.
    """
    x = _gutter(boxes)
    if x is None:
        return [around(boxes)]
    parts: list[Box] = []
    band: list[Box] = []
    for box in sorted(boxes, key=lambda one: -one.top):
        if box.left < x < box.right:  # a line across the columns
            parts += _sides(band, x)
            parts.append(box)
            band = []
        else:
            band.append(box)
    return parts + _sides(band, x)


def _sides(band: list[Box], x: float) -> list[Box]:
    sides = [box for box in band if box.right <= x], [box for box in band if box.left >= x]
    return [part for side in sides if side for part in in_order(side)]


def _gutter(boxes: list[Box]) -> float | None:
    """Return where the page is divided into columns that are drawn line by line."""
    pairs = [(a, b) for a, b in pairwise(boxes) if _are_in_line(a, b)]
    if len(pairs) < MIN_ROWS:
        return None
    x = statistics.median(b.left for _, b in pairs) - GUTTER / 2
    whole = around(boxes)
    width = MIN_COLUMN * (whole.right - whole.left)
    if min(x - whole.left, whole.right - x) < width:
        return None
    sides = [a for a, b in pairs if a.right <= x <= b.left], [b for a, b in pairs if a.right <= x <= b.left]
    prose = all(len(side) >= MIN_ROWS and _filled(side) >= MIN_FILLED for side in sides)
    return x if prose else None


def _are_in_line(a: Box, b: Box) -> bool:
    middle = (b.bottom + b.top) / 2
    return a.bottom < middle < a.top and b.left - a.right >= GUTTER


def _filled(side: list[Box]) -> float:
    whole = around(side)
    return statistics.median(box.right - box.left for box in side) / max(1.0, whole.right - whole.left)


def pages(data: bytes) -> Iterator[str]:
    """Yield the texts of the pages."""
    import pypdfium2

    document = pypdfium2.PdfDocument(data)
    for i in range(len(document)):
        page = document[i]
        text = page.get_textpage()
        yield page_text(text)
        text.close()
        page.close()


def page_text(page: Any) -> str:
    """Return the text of a page in reading order, with newlines as line ends."""
    boxes = [Box(*page.get_rect(i)) for i in range(page.count_rects())]
    parts = in_order(boxes) if boxes else []
    texts = [page.get_text_bounded(*_wider(part)) for part in parts] if len(parts) > 1 else [page.get_text_range()]
    return "\n".join(texts).replace("\r\n", "\n").replace("\r", "\n").replace("\x02", "\ufffe")


def _wider(box: Box) -> Box:
    return Box(box.left - 1, box.bottom - 1, box.right + 1, box.top + 1)


def answer(data: bytes, most_text: int) -> dict[str, Any]:
    """Return the pages, or why they are not read."""
    import pypdfium2

    found, n = [], 0
    try:
        for text in pages(data):
            found.append(text)
            n += len(text)
            if n > most_text:
                return {"refused": f"has more than {most_text} characters, and no more are read"}
    except pypdfium2.PdfiumError as reason:
        if getattr(reason, "err_code", None) == PASSWORD:
            return {"refused": "is protected with a password: save it without one, for instance with qpdf --decrypt"}
        return {"refused": "is a damaged PDF: copy or download it again"}
    return {"pages": found}


def limit(memory: int, seconds: int) -> None:
    """Set the limits of this process: on Windows none, and on macOS none of memory, which it would refuse."""
    if sys.platform == "win32":
        return
    import resource

    kinds = [(resource.RLIMIT_CPU, seconds), (resource.RLIMIT_CORE, 0)]
    kinds += [(resource.RLIMIT_AS, memory)] if sys.platform == "linux" else []
    for kind, most in kinds:
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def main() -> None:
    """Read the PDF on stdin."""
    sys.path[:] = json.loads(sys.argv[1])
    memory, seconds, most_text = map(int, sys.argv[2:])
    limit(memory, seconds)
    sys.stdout.write(json.dumps(answer(sys.stdin.buffer.read(), most_text)))


if __name__ == "__main__":
    main()
