"""HTML: the text without markup, scripts and what is hidden."""

import re

from pylongctx.readers.encoding import decode, head_of
from pylongctx.readers.extract import Extract, package
from pylongctx.readers.flow import Flow

START = re.compile(
    r"\s*(<\?xml[^>]*>\s*)?(<!--((?!-->).)*-->\s*)*<(!doctype\s+html|html|head|body)\b", re.IGNORECASE | re.DOTALL
)
ELEMENT = re.compile(r"<(p|div|h[1-6]|ul|ol|table|br|span|a|b|i|em|strong)\b[^<>]*>", re.IGNORECASE)
CHARSET = re.compile(
    r"<(?:meta[^>]*?\scharset|\?xml[^>]*?\sencoding|meta[^>]*?;\s*charset)\s*=\s*[\"']?([\w.:-]+)", re.IGNORECASE
)
DECLARED_WITHIN = 4096  # characters
PARAGRAPHS = set("p h1 h2 h3 h4 h5 h6 blockquote figure ul ol dl pre hr".split())
LINES = set(
    "address article aside body caption dd details div dt fieldset figcaption footer form header legend li main nav "
    "option section summary title".split()
)
SKIPPED = set("annotation annotation-xml noscript rp script style svg template".split())


def is_html(head: str, name: str) -> bool:
    """Return whether a text is HTML; without the usual beginning the name decides."""
    named = name.lower().endswith((".html", ".htm", ".xhtml"))
    return bool(START.match(head) or (named and ELEMENT.search(head)))


def read(data: bytes, titled: bool = True) -> Extract:
    """Return the text of a page, with its title as the first line if ``titled``."""
    declared = CHARSET.search(head_of(data)[:DECLARED_WITHIN])
    text, notes = decode(data, declared[1] if declared else None)
    return Extract(plain(text, titled), notes)


def plain(text: str, titled: bool = True) -> str:
    """Return the text in HTML without its markup."""
    etree = package("lxml.etree", "lxml", "HTML, EPUB and e-mail in HTML")
    page = _Page(titled)
    parser = etree.HTMLParser(target=page, encoding="utf-8", huge_tree=True)
    parser.feed(b"<html>" + text.encode())  # nothing is not a document
    parser.close()
    return page.text()


class _Page:
    """Collects the text of a page; libxml2 closes elements that are not closed, and fetches nothing."""

    def __init__(self, titled: bool) -> None:
        self._flow = Flow()
        self._titled = titled
        self._inner: list[Flow] = []  # around superscripts and readings
        self._ruby = ""
        self._skipped = 0  # elements inside of one without text, and this one
        self._lists: list[int] = []  # numbers of items, -1 in lists without numbers
        self._links = self._verbatim = 0

    def text(self) -> str:
        """Return the text."""
        return str(self._flow)

    # ---- what the parser calls ----

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        """Begin an element."""
        name = tag.rpartition(":")[2]
        if self._skipped or self._is_hidden(name, attributes):
            self._skipped += 1
        elif name in ("sup", "rt"):
            self._inner.append(self._flow)
            self._flow = Flow()
        else:
            self._start(name, attributes)

    def end(self, tag: str) -> None:
        """End an element."""
        name = tag.rpartition(":")[2]
        if self._skipped:
            self._skipped -= 1
        elif name in ("sup", "rt"):
            text, self._flow = str(self._flow), self._inner.pop()
            if name == "rt":
                self._ruby += text
            else:
                self._flow.text(self._raised(text))
        else:
            self._end(name)

    def data(self, data: str) -> None:
        """Add text."""
        if not self._skipped:
            self._flow.verbatim(data) if self._verbatim else self._flow.text(data)

    def comment(self, text: str) -> None:
        """Leave a comment out."""

    def close(self) -> None:
        """End the page."""

    # ---- elements ----

    def _is_hidden(self, name: str, attributes: dict[str, str]) -> bool:
        if name == "title":
            return not self._titled
        style = attributes.get("style", "").replace(" ", "").lower()
        hidden = "hidden" in attributes or attributes.get("aria-hidden") == "true" or "display:none" in style
        return hidden or name in SKIPPED

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        flow = self._flow
        self._separate(name)
        match name:
            case "ul" | "ol":
                self._lists.append(0 if name == "ol" else -1)
            case "li":
                flow.text(self._bullet() + " ")
            case "br":
                flow.break_line()
            case "img" if told := attributes.get("alt", "").strip():
                flow.text(f"[picture: {told}]")
            case "table":
                flow.table()
            case "tr":
                flow.row()
            case "td" | "th":
                flow.cell()
            case "a":
                self._links += 1
            case "pre":
                self._verbatim += 1

    def _end(self, name: str) -> None:
        flow = self._flow
        match name:
            case "ul" | "ol":
                self._lists.pop()
            case "table":
                flow.end_table()
            case "td" | "th":
                flow.end_cell()
            case "a":
                self._links -= 1
            case "pre":
                self._verbatim -= 1
            case "ruby" if self._ruby:  # readings go after their word
                flow.text(f"({self._ruby})")
                self._ruby = ""
        self._separate(name)

    def _separate(self, name: str) -> None:
        """End the paragraph or the line where an element begins or ends."""
        if name in PARAGRAPHS and not (name in ("ul", "ol") and self._lists):
            self._flow.paragraph()
        elif name in LINES or name in PARAGRAPHS:
            self._flow.line()

    def _bullet(self) -> str:
        if not self._lists or self._lists[-1] < 0:
            return "-"
        self._lists[-1] += 1
        return f"{self._lists[-1]}."

    def _raised(self, text: str) -> str:
        """Return superscript text so that a number does not look like a part of its word: a note, or a power."""
        if not text.isdigit():
            return text
        if self._links:
            return f"[{text}]"
        return f"^{text}" if self._flow.ends_in_word else text
