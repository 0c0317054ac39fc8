"""E-mail: one message, or the messages of an mbox file."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pylongctx.readers import html
from pylongctx.readers.encoding import decode
from pylongctx.readers.extract import Extract, counted, listed

if TYPE_CHECKING:
    from email.message import EmailMessage

SHOWN = ("From", "To", "Cc", "Date", "Subject")
HEADER = re.compile(r"([!-9;-~]+):|[ \t]+\S")
KNOWN = set("from to cc date subject received message-id mime-version return-path delivered-to reply-to".split())
ENOUGH = 2  # known headers that make a text an e-mail
ENVELOPE = re.compile(r"From \S{1,200}.{1,50}\d\d:\d\d.{1,50}\d{4}")  # the line before each message of an mbox file
SEPARATOR = re.compile(rb"(?:\A|\r?\n\r?\n)From \S{1,200}.{1,50}\d\d:\d\d.{1,50}\d{4}.*\r?\n")
QUOTED = re.compile(rb"^>(>*From )", re.MULTILINE)


def is_mail(head: str) -> bool:
    """Return whether a text begins with the headers of a message."""
    lines = head.lstrip("\r\n").splitlines()
    if lines and ENVELOPE.match(lines[0]):
        del lines[0]
    names = set()
    for line in lines:
        if not line.strip():
            break
        header = HEADER.match(line)
        if not header:
            return False
        names.add((header[1] or "").lower())
    return len(names & KNOWN) >= ENOUGH


def read(data: bytes) -> Extract:
    """Return the headers and the text of every message; attachments are named in a note."""
    texts: list[str] = []
    attached: list[str] = []
    notes: list[str] = []
    for one in _messages(data):
        message = _parsed(one)
        text, found = _text(message)
        headers = [f"{name}: {' '.join(str(value).split())}" for name in SHOWN if (value := _header(message, name))]
        texts.append("\n".join(headers) + f"\n\n{text.strip()}")
        attached += _attached(message)
        notes += found
    if attached:
        notes.append(f"{counted(len(attached), 'attachment')} left out: {listed(attached)}")
    return Extract("\n\n".join(texts), tuple(dict.fromkeys(notes)))


def _messages(data: bytes) -> list[bytes]:
    data = data.lstrip(b"\r\n")
    if not data.startswith(b"From "):
        return [data]
    return [QUOTED.sub(rb"\1", one) for one in SEPARATOR.split(data) if one.strip()]


def _parsed(data: bytes) -> "EmailMessage":
    from email import message_from_bytes, policy  # takes as long as a third of the package
    from email.message import EmailMessage

    return message_from_bytes(data, _class=EmailMessage, policy=policy.default)


def _header(message: "EmailMessage", name: str) -> str:
    """Return a header; the unchanged one when it cannot be parsed."""
    try:
        return str(message.get(name, ""))
    except Exception:  # the parser of headers raises what it meets in damaged ones
        return next((str(value) for key, value in message.raw_items() if key.lower() == name.lower()), "")


def _text(message: "EmailMessage") -> Extract:
    body = message.get_body(("plain", "html"))
    if body is None:
        return Extract("")
    payload = body.get_payload(decode=True)
    text, notes = decode(payload if isinstance(payload, bytes) else b"", body.get_content_charset())
    return Extract(html.plain(text) if body.get_content_type() == "text/html" else text, notes)


def _attached(message: "EmailMessage") -> Iterator[str]:
    for part in message.iter_attachments() if message.is_multipart() else ():
        yield part.get_filename() or part.get_content_type()
