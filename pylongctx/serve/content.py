"""Content of messages: texts, and what a model cannot read, such as pictures, in whose place a note may stand."""

from collections.abc import Iterable, Mapping
from typing import Any

from pylongctx.serve.errors import invalid
from pylongctx.serve.unserved import Unserved

Part = dict[str, Any]
UNREAD = "unread"  # the type of a part that stands for one of another API
WHY = "only text can be read"


def text_of(content: Any, kinds: tuple[str, ...], where: str) -> str | list[Part]:
    """Return the text of a string or of content parts, or parts if one of them is not of one of the kinds."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ValueError(f"{where}: content must be a string or a list of parts, not {type(content).__name__}")
    return joined(text_part(part, kinds, f"{where}.content[{i}]") for i, part in enumerate(content))


def text_part(part: Any, kinds: tuple[str, ...], where: str) -> Part:
    """Return a part of another API as a text, or as one that is unread."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in kinds and isinstance(part.get("text"), str):
        return text(part["text"])
    return unread(kind, where, part.get("filename") if isinstance(part, Mapping) else None)


def text(said: str) -> Part:
    """Return a text as a part."""
    return {"type": "text", "text": said}


def unread(kind: Any, where: str, name: Any = None, why: str = WHY) -> Part:
    """Return what stands for a part that cannot be read; ``where`` is its path, ``name`` that of its file."""
    return {"type": UNREAD, "kind": kind, "where": where, "name": name, "why": why}


def parts_of(content: str | list[Part]) -> list[Part]:
    """Return content as parts."""
    return content if isinstance(content, list) else [text(content)] if content else []


def joined(parts: Iterable[Part]) -> str | list[Part]:
    """Return parts as one text if all are texts.

    Examples
    --------
    >>> joined([text("It "), text("rains.")])
    'It rains.'
    """
    found = list(parts)
    return "".join(part["text"] for part in found) if all(map(_is_text, found)) else found


def readable(messages: list[dict[str, Any]], unserved: Unserved) -> list[dict[str, Any]]:
    """Return the messages of a chat with notes in the place of parts that cannot be read.

    ApiError when such a part is in or after the last message of the user, which is about it, or is refused everywhere.
    """
    last = max((i for i, message in enumerate(messages) if message.get("role") == "user"), default=0)
    return [_readable(message, i, i < last, unserved) for i, message in enumerate(messages)]


def _readable(message: dict[str, Any], i: int, is_old: bool, unserved: Unserved) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list) or all(map(_is_read, content)):
        return message
    parts = (_noted(part, f"messages[{i}].content[{j}]", is_old, unserved) for j, part in enumerate(content))
    return {**message, "content": joined(parts)}


def _noted(part: Any, where: str, is_old: bool, unserved: Unserved) -> Part:
    """Return a part, or the note in its place."""
    if _is_read(part):
        return dict(part)
    if part.get("type") == "refusal" and isinstance(part.get("refusal"), str):
        return text(part["refusal"])
    kind, why, where = part.get("kind", part.get("type")), part.get("why", WHY), part.get("where", where)
    if not (is_old and unserved.notes_content):
        way = "leave it out" if is_old else "send it as text"
        raise invalid(f"{where}: a content part of type {kind!r} cannot be read, {why}: {way}", where)
    name = f' "{part["name"]}"' if part.get("name") else ""
    unserved.tell(where, f"{where}: a content part of type {kind!r} cannot be read, a note is in its place")
    return text(f"[{str(kind).removeprefix('input_').removesuffix('_url')}{name} left out: {why}]")


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_read(part: Any) -> bool:
    """Return True for what the chat reads, or refuses itself because it is damaged."""
    if not isinstance(part, Mapping) or part.get("type") == "text":
        return True
    return part.get("type") == "document" and any(isinstance(part.get(name), str) for name in ("text", "name"))
