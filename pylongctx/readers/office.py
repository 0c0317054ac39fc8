"""Word processors: DOCX and OpenDocument texts, whose XML is read as a stream of events."""

import posixpath
from xml.parsers.expat import ExpatError

from pylongctx.readers.archive import Archive
from pylongctx.readers.extract import Extract, Refused, counted
from pylongctx.readers.flow import Flow
from pylongctx.readers.xml import Handler, elements, parse

MAX_SPACES = 64  # that one element of OpenDocument adds
RELATIONS = "_rels/.rels"
MANIFEST = "META-INF/manifest.xml"


def read_docx(archive: Archive) -> Extract:
    """Return the text of a Word document with its footnotes and endnotes at the end."""
    document = _document(archive)
    text = _Word()
    _parse(archive, document, text)
    for kind in ("footnotes", "endnotes"):
        name = posixpath.join(posixpath.dirname(document), f"{kind}.xml")
        if name in archive.names:
            _parse(archive, name, text)
    return text.extract()


def read_odt(archive: Archive) -> Extract:
    """Return the text of an OpenDocument text with its notes at the end."""
    if MANIFEST in archive.names and _has_password(archive):
        raise Refused("is protected with a password: save it without one")
    text = _OpenDocument()
    _parse(archive, "content.xml", text)
    return text.extract()


def _document(archive: Archive) -> str:
    """Return the name of the main part of a Word document."""
    if RELATIONS in archive.names:
        for relation in elements(archive.read(RELATIONS)).named("Relationship"):
            target = relation.get("Target", "").lstrip("/")
            if relation.get("Type", "").endswith("/officeDocument") and target in archive.names:
                return target
    return "word/document.xml"


def _has_password(archive: Archive) -> bool:
    return bool(elements(archive.read(MANIFEST)).named("encryption-data"))


def _parse(archive: Archive, name: str, handler: Handler) -> None:
    try:
        parse(archive.read(name), handler)
    except KeyError:
        raise Refused(f"is a damaged document: its part {name} is missing; save or download it again") from None
    except ExpatError as reason:
        raise Refused(f"is a damaged document: its part {name} is not XML ({reason})") from reason


class _Document:
    """Collects the text of a document, and of its notes, which go to the end."""

    SKIPPED: frozenset[str]  # elements without text of the document

    def __init__(self) -> None:
        self.flow = Flow()
        self._outer: list[Flow] = []  # around the current note, reading or description
        self._notes: list[str] = []
        self._skipped, self._depth = "", 0  # an element that is skipped, and how often it is nested
        self.n_comments = 0

    def extract(self) -> Extract:
        """Return the text, and what was left out."""
        text = "\n\n".join(filter(None, (str(self.flow), "\n".join(self._notes))))
        comments = counted(self.n_comments, "comment is", "comments are")
        return Extract(text, (f"{comments} left out",) if self.n_comments else ())

    def start(self, name: str, attributes: dict[str, str]) -> None:
        """Begin an element."""
        if self._skipped:
            self._depth += name == self._skipped
            return
        if name in self.SKIPPED:
            self._skipped, self._depth = name, 1
        self.begin(name, attributes)

    def end(self, name: str) -> None:
        """End an element."""
        if not self._skipped:
            self.finish(name)
            return
        self._depth -= name == self._skipped
        self._skipped = self._skipped if self._depth else ""

    def data(self, text: str) -> None:
        """Add text."""
        if not self._skipped:
            self.add(text)

    def paragraph(self) -> None:
        """Begin or end a paragraph."""
        self.flow.line() if self._outer else self.flow.paragraph()

    def aside(self) -> None:
        """Collect what follows separately, until ``end_aside``."""
        self._outer.append(self.flow)
        self.flow = Flow()

    def end_aside(self) -> str:
        """Return what was collected."""
        text, self.flow = str(self.flow), self._outer.pop()
        return text

    def note(self, label: str, text: str) -> None:
        """Keep a note for the end."""
        self._notes.append(f"[{label}] {text}")

    def picture(self, told: str) -> None:
        """Add the alternative text of a picture."""
        if told.strip():
            self.flow.text(f"[picture: {told.strip()}]")

    def begin(self, name: str, attributes: dict[str, str]) -> None:
        """Begin an element."""
        raise NotImplementedError

    def finish(self, name: str) -> None:
        """End an element that is not skipped."""
        raise NotImplementedError

    def add(self, text: str) -> None:
        """Add text of an element that is not skipped."""
        raise NotImplementedError


class _Word(_Document):
    """The main part of a DOCX and then its notes."""

    # deleted text, instructions of fields, tab stops, and what is there in another form too
    SKIPPED = frozenset("del moveFrom instrText delInstrText pPrChange rPrChange tabs Fallback".split())

    def __init__(self) -> None:
        super().__init__()
        self._is_text = self._is_hidden = False
        self._reading = ""  # of a word in ruby
        self._numbers: dict[tuple[str, str], int] = {}  # of notes, by their kinds and ids
        self._note: tuple[str, str] = ("", "")  # the current one

    def begin(self, name: str, attributes: dict[str, str]) -> None:
        match name:
            case "t":
                self._is_text = not self._is_hidden
            case "r":
                self._is_hidden = False
            case "vanish":
                self._is_hidden = attributes.get("val") not in ("0", "false", "off")
            case "p":
                self.paragraph()
            case "numId" if attributes.get("val") != "0":
                self.flow.text("- ")
            case "tab" | "ptab":
                self.flow.verbatim("\t")
            case "br" | "cr":
                self.flow.break_line()
            case "noBreakHyphen":
                self.flow.verbatim("-")
            case "tbl":
                self.flow.table()
            case "tr":
                self.flow.row()
            case "tc":
                self.flow.cell()
            case "footnoteReference" | "endnoteReference":
                note = name.removesuffix("Reference"), attributes.get("id", "")
                self.flow.text(f"[{self._numbers.setdefault(note, len(self._numbers) + 1)}]")
            case "footnote" | "endnote":
                self._note = (name, attributes.get("id", ""))
                self.aside()
            case "commentReference":
                self.n_comments += 1
            case "docPr":
                self.picture(attributes.get("descr", ""))
            case "rt":
                self.aside()

    def finish(self, name: str) -> None:
        match name:
            case "t":
                self._is_text = False
            case "p":
                self.paragraph()
            case "tc":
                self.flow.end_cell()
            case "tbl":
                self.flow.end_table()
            case "footnote" | "endnote":
                text = self.end_aside()
                if self._note in self._numbers:  # separators of notes are notes too
                    self.note(str(self._numbers[self._note]), text)
            case "rt":  # in front of its word
                self._reading = self.end_aside()
            case "ruby":
                self.flow.text(f"({self._reading})")

    def add(self, text: str) -> None:
        if self._is_text:
            self.flow.text(text)


class _OpenDocument(_Document):
    """The part content.xml of an OpenDocument text."""

    SKIPPED = frozenset(
        "annotation automatic-styles font-face-decls forms note-citation scripts tracked-changes "
        "alphabetical-index-source bibliography-source table-of-content-source".split()
    )

    def __init__(self) -> None:
        super().__init__()
        self._n_notes = self._n_lists = 0
        self._bullet = ""  # of a list item that has no paragraph yet

    def paragraph(self) -> None:
        self.flow.line() if self._n_lists else super().paragraph()

    def begin(self, name: str, attributes: dict[str, str]) -> None:
        match name:
            case "p" | "h":
                self.paragraph()
                self.flow.text(self._bullet)
                self._bullet = ""
            case "s":
                self.flow.verbatim(" " * _spaces(attributes.get("c", "1")))
            case "tab":
                self.flow.verbatim("\t")
            case "line-break":
                self.flow.break_line()
            case "list":
                self._n_lists += 1
            case "list-item":
                self._bullet = "- "
            case "table":
                self.flow.table()
            case "table-row":
                self.flow.row()
            case "table-cell" | "covered-table-cell":
                self.flow.cell()
            case "note-body":
                self._n_notes += 1
                self.flow.text(f"[{self._n_notes}]")
                self.aside()
            case "desc" | "title" | "ruby-text":
                self.aside()
            case "annotation":
                self.n_comments += 1

    def finish(self, name: str) -> None:
        match name:
            case "p" | "h":
                self.paragraph()
            case "list":
                self._n_lists -= 1
                self.paragraph()
            case "table-cell" | "covered-table-cell":
                self.flow.end_cell()
            case "table":
                self.flow.end_table()
            case "note-body":
                self.note(str(self._n_notes), self.end_aside())
            case "desc" | "title":
                self.picture(self.end_aside())
            case "ruby-text":
                self.flow.text(f"({self.end_aside()})")

    def add(self, text: str) -> None:
        self.flow.text(text)


def _spaces(count: str) -> int:
    return min(int(count), MAX_SPACES) if count.isdecimal() else 1
