"""EPUB: the chapters of a book in their order."""

import posixpath
from urllib.parse import unquote
from xml.parsers.expat import ExpatError

from pylongctx.readers import html
from pylongctx.readers.archive import Archive
from pylongctx.readers.extract import Extract, Refused, counted, listed
from pylongctx.readers.xml import Elements, elements

CONTAINER = "META-INF/container.xml"
ENCRYPTION = "META-INF/encryption.xml"
PAGES = ("application/xhtml+xml", "text/html", "application/x-dtbook+xml", "text/x-oeb1-document", "")
SYSTEMS = {
    "META-INF/license.lcpl": "Readium LCP",
    "META-INF/rights.xml": "Adobe ADEPT",
    "META-INF/sinf.xml": "Apple FairPlay",
}


def read(archive: Archive) -> Extract:
    """Return the chapters of a book; parts that are missing are named in a note."""
    root = _xml(archive, CONTAINER).named("rootfile")
    if not root or not root[0].get("full-path"):
        raise Refused("is a damaged EPUB: its container does not name the book")
    package = root[0]["full-path"]
    parts = [posixpath.normpath(posixpath.join(posixpath.dirname(package), href)) for href in _spine(archive, package)]
    _refuse_encrypted(archive, parts)
    texts: list[str] = []
    missing: list[str] = []
    notes: list[str] = []
    for href in parts:
        name = next((one for one in (href, unquote(href)) if one in archive.names), None)
        if name is None:
            missing.append(unquote(posixpath.basename(href)))
            continue
        text, found = html.read(archive.read(name), titled=False)
        texts.append(text)
        notes += [f"{posixpath.basename(name)}: {note}" for note in found]
    if missing:
        notes.insert(0, f"{counted(len(missing), 'part')} of the book {_are(missing)} missing: {listed(missing)}")
    return Extract("\n\n".join(filter(None, texts)), tuple(notes))


def _spine(archive: Archive, package: str) -> list[str]:
    """Return the addresses of the chapters in their order."""
    book = _xml(archive, package)
    items = {item["id"]: item for item in book.named("item") if "id" in item}
    chapters = [(one.get("idref", ""), items.get(one.get("idref", ""))) for one in book.named("itemref")]
    return [
        (item.get("href", "") if item else idref).partition("#")[0]
        for idref, item in chapters
        if not item or item.get("media-type", "") in PAGES
    ]


def _refuse_encrypted(archive: Archive, parts: list[str]) -> None:
    """Refuse a book with DRM; fonts alone may be obfuscated."""
    if ENCRYPTION not in archive.names:
        return
    hidden = {unquote(one.get("URI", "")) for one in _xml(archive, ENCRYPTION).named("CipherReference")}
    if hidden.intersection(unquote(part) for part in parts):
        system = next((title for name, title in SYSTEMS.items() if name in archive.names), "unknown")
        raise Refused(
            f"is protected by DRM ({system}): only the programs of its shop can read it; "
            "buy or borrow it without DRM, or copy the text out of such a program"
        )


def _xml(archive: Archive, name: str) -> Elements:
    try:
        return elements(archive.read(name))
    except KeyError:
        raise Refused(f"is a damaged EPUB: its part {name} is missing; download it again") from None
    except ExpatError as reason:
        raise Refused(f"is a damaged EPUB: its part {name} is not XML ({reason}); download it again") from reason


def _are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"
