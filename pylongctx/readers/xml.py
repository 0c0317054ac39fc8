"""Events of XML in untrusted files: nothing is fetched, and no entity expands."""

from typing import Protocol
from xml.parsers import expat

from pylongctx.readers.extract import Refused


class Handler(Protocol):
    """What is called for the parts of a document; names are without namespaces."""

    def start(self, name: str, attributes: dict[str, str]) -> None:
        """An element begins."""

    def end(self, name: str) -> None:
        """An element ends."""

    def data(self, text: str) -> None:
        """Text of an element, maybe a part of it."""


class Elements:
    """A handler that keeps the names and attributes of all elements."""

    def __init__(self) -> None:
        self.found: list[tuple[str, dict[str, str]]] = []

    def start(self, name: str, attributes: dict[str, str]) -> None:
        """Keep an element."""
        self.found.append((name, attributes))

    def end(self, name: str) -> None:
        """Nothing is nested here."""

    def data(self, text: str) -> None:
        """Text is not kept."""

    def named(self, name: str) -> list[dict[str, str]]:
        """Return the attributes of the elements with a name."""
        return [attributes for found, attributes in self.found if found == name]


def parse(data: bytes, handler: Handler) -> None:
    """Call a handler for a document; Refused when it declares entities, ExpatError when it is not well-formed."""
    parser = expat.ParserCreate(namespace_separator=" ")
    parser.buffer_text = True
    parser.StartElementHandler = lambda name, attributes: handler.start(
        _local(name), {_local(key): value for key, value in attributes.items()}
    )
    parser.EndElementHandler = lambda name: handler.end(_local(name))
    parser.CharacterDataHandler = handler.data
    parser.EntityDeclHandler = _refuse
    parser.Parse(data, True)


def elements(data: bytes) -> Elements:
    """Return all elements of a document."""
    found = Elements()
    parse(data, found)
    return found


def _refuse(name: str, *declaration: object) -> None:
    raise Refused(f"declares the XML entity {name[:40]!r}, which no document needs: save it again with another program")


def _local(name: str) -> str:
    return name.rpartition(" ")[2]
