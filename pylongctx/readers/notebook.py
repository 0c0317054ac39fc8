"""Jupyter notebooks: the cells, and what the code printed."""

import json
from collections.abc import Iterator
from typing import Any

from pylongctx.readers.encoding import decode
from pylongctx.readers.extract import Extract, Refused, counted


def is_notebook(head: str) -> bool:
    """Return whether a text may be a notebook: only ``read`` sees all of it."""
    return head.lstrip().startswith("{") and '"cells"' in head


def read(data: bytes) -> Extract:
    """Return the cells with code in fences; JSON of another kind stays as it is."""
    text, notes = decode(data)
    try:
        book = json.loads(text)
    except ValueError as reason:
        if '"nbformat"' not in text:
            return Extract(text, notes)
        raise Refused("is a damaged notebook: save it again") from reason
    if not isinstance(book, dict) or "nbformat" not in book or not isinstance(book.get("cells"), list):
        return Extract(text, notes)
    language = _get(_get(book, "metadata"), "kernelspec").get("language", "")
    cells = [part for cell in book["cells"] if isinstance(cell, dict) for part in _parts(cell, language)]
    pictures = sum(_has_picture(output) for cell in book["cells"] for output in _outputs(cell))
    left_out = (f"{counted(pictures, 'picture')} in outputs left out",) if pictures else ()
    return Extract("\n\n".join(cells), (*notes, *left_out))


def _parts(cell: dict[str, Any], language: str) -> Iterator[str]:
    source = _joined(cell.get("source")).strip("\n")
    if source:
        yield f"```{language}\n{source}\n```" if cell.get("cell_type") == "code" else source
    printed = "".join(filter(None, map(_printed, _outputs(cell)))).strip("\n")
    if printed:
        yield f"Output:\n{printed}"


def _outputs(cell: Any) -> list[dict[str, Any]]:
    found = cell.get("outputs") if isinstance(cell, dict) else None
    return [output for output in found if isinstance(output, dict)] if isinstance(found, list) else []


def _printed(output: dict[str, Any]) -> str:
    if output.get("output_type") == "error":
        return f"{output.get('ename')}: {output.get('evalue')}\n"
    text = _joined(output.get("text")) or _joined(_get(output, "data").get("text/plain"))
    return "" if _has_picture(output) else text


def _has_picture(output: dict[str, Any]) -> bool:
    return any(kind.startswith("image/") for kind in _get(output, "data"))


def _joined(lines: Any) -> str:
    """Return text, which may be a list of its lines."""
    return "".join(line for line in lines if isinstance(line, str)) if isinstance(lines, (list, str)) else ""


def _get(found: dict[str, Any], name: str) -> dict[str, Any]:
    inner = found.get(name)
    return inner if isinstance(inner, dict) else {}
