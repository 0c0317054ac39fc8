"""Decoding of text: UTF-8, UTF-16 and UTF-32 with or without a byte order mark, and older encodings."""

import codecs
import re
import unicodedata

from pylongctx.readers.extract import Extract, Refused, counted, package

MARKS = (  # UTF-32 first: its mark begins with that of UTF-16
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
# what programs write when they claim the encoding on the left
SUPERSETS = {
    "ascii": "cp1252",
    "iso8859-1": "cp1252",
    "iso8859-9": "cp1254",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "shift_jis": "cp932",
    "euc_kr": "cp949",
    "big5": "cp950",
}
TITLES = {
    "cp932": "Shift-JIS",
    "shift_jis_2004": "Shift-JIS",
    "euc_jp": "EUC-JP",
    "euc_jis_2004": "EUC-JP",
    "cp949": "EUC-KR",
    "cp950": "Big5",
    "big5hkscs": "Big5",
    "mac-roman": "Mac Roman",
}
# in Windows-1252: quotes, dashes and signs, and letters of Western languages
SIGNS = frozenset(bytes.fromhex("80 82 84 85 91 92 93 94 95 96 97 99 a3 a7 a9 ab ae b0 bb"))
LETTERS = frozenset(
    bytes.fromhex(
        "a1 bf c0 c1 c4 c5 c7 c8 c9 cd d1 d3 d6 da dc df e0 e1 e2 e4 e5 e7 e8 e9 ea eb ed ee ef f1 f3 f4 f6 f9 fa fb fc"
    )
)
SHORT = 40  # bytes, too few for statistics
# encodings that few files have, and that are easily taken for others
RARE = (
    "cp424 cp720 cp856 cp860 cp861 cp862 cp863 cp864 cp865 cp1006 cp1125 hp-roman8 iso8859-10 iso8859-14 iso8859-16 "
    "kz1048 mac-greek mac-iceland mac-latin2 mac-turkish ptcp154"
).split()
SAMPLE = 1 << 16  # bytes or characters by which an encoding is recognized
MAX_ODD = 0.02  # share of characters that a text does not have, for a file to be one
CONTROLS = re.compile(rb"[\x00-\x06\x0e-\x1a\x1c-\x1f\x7f]")
NAMED = re.compile(rb"(?:encoding|coding|charset)\s*[=:]\s*[\"']?([A-Za-z][A-Za-z0-9._-]{1,30})")
NAMED_WITHIN = 1024  # bytes
NOT_ASCII = re.compile(rb"[\x80-\xff]")
SIGN_IN_WORD = re.compile(rb"[A-Za-z][\x80-\x90\x93-\x95][a-z]")  # a letter of another encoding
LETTERS_ALONE = re.compile(rb"(?<![A-Za-z\x80-\xff])[\xc0-\xff]{2,}(?![A-Za-z\x80-\xff])")  # a word of another alphabet


def decode(data: bytes, declared: str | None = None) -> Extract:
    """Return the text in bytes, with newlines as line ends.

    ``declared`` is the encoding that a header names; a byte order mark and valid UTF-8 override it. Raises Refused when
    the bytes are not text, and ImportError without the package that recognizes older encodings.
    """
    text, notes = _decode(data, declared)
    return Extract(text.replace("\r\n", "\n").replace("\r", "\n"), notes)


def head_of(data: bytes) -> str:
    """Return the beginning of a text, of whose letters only those of ASCII are certain."""
    head = data[:SAMPLE]
    encoding, start = _marked(head) or (_unmarked(data), 0)
    return head[start:].decode(encoding or "latin-1", "replace")


def _decode(data: bytes, declared: str | None) -> Extract:
    if marked := _marked(data):
        encoding, start = marked
        return _lenient(data[start:], encoding)
    if unmarked := _unmarked(data):
        text = data.decode(unmarked)
        return Extract(text, (f"read as {_title(unmarked)}, although it has no byte order mark",))
    _check(data)
    if data.isascii() and declared and (found := _declared(data, declared)):
        return found
    try:
        return Extract(data.decode("iso2022_jp" if b"\x1b$" in data else "utf-8"))
    except UnicodeDecodeError:  # a declaration may be out of date, while few other texts are valid UTF-8
        return _declared(data, declared or _named(data)) or _nearly_utf8(data) or _legacy(data)


def _marked(data: bytes) -> tuple[str, int] | None:
    """Return the encoding of a byte order mark and the length of the mark."""
    return next(((encoding, len(mark)) for mark, encoding in MARKS if data.startswith(mark)), None)


def _named(data: bytes) -> str:
    """Return the encoding that a text names itself, as XML and source code do."""
    found = NAMED.search(data[:NAMED_WITHIN])
    return found[1].decode() if found else ""


def _declared(data: bytes, name: str) -> Extract | None:
    """Return the text in a declared encoding; None for an unknown one, and for bytes that are not in it."""
    try:
        encoding = _superset(codecs.lookup(name).name)
        # a header in ASCII shows that these are wrong
        return None if encoding.startswith(("utf-16", "utf-32")) else Extract(data.decode(encoding))
    except (LookupError, UnicodeError):  # also of codecs that are not for text
        return None


def _unmarked(data: bytes) -> str | None:
    """Return UTF-16 or UTF-32 when the bytes are valid in it, and give letters that texts have."""
    head = data[:SAMPLE]
    if b"\0" not in head:
        return None
    # ASCII, of which every text has some, has the NUL first in big-endian UTF-16
    order = "be" if head[::2].count(0) > head[1::2].count(0) else "le"
    for encoding in ("utf-32-le", "utf-32-be", f"utf-16-{order}"):
        try:
            if _odd(data.decode(encoding)[:SAMPLE]) <= MAX_ODD:
                return encoding
        except UnicodeDecodeError:
            continue
    return None


def _odd(text: str) -> float:
    """Return the share of characters that texts do not have."""
    odd = sum(unicodedata.category(c) in ("Cc", "Cn", "Co", "Cs") and c not in "\t\n\r\f\v\b\x1b" for c in text)
    return odd / len(text)


def _check(data: bytes) -> None:
    if b"\0" in data:
        raise Refused("is not a text file: it contains NUL bytes, so it is binary")
    head = data[:SAMPLE]
    if len(CONTROLS.findall(head)) > MAX_ODD * len(head):
        raise Refused("is not a text file: it contains many control characters, so it is binary")


def _lenient(data: bytes, encoding: str) -> Extract:
    """Decode, with U+FFFD for wrong bytes."""
    try:
        return Extract(data.decode(encoding))
    except UnicodeDecodeError:
        text = data.decode(encoding, "replace")
        places = counted(text.count("\ufffd"), "place is", "places are")
        return Extract(text, (f"{places} not {_title(encoding)} and read as U+FFFD",))


def _nearly_utf8(data: bytes) -> Extract | None:
    """Return the text of UTF-8 with a few wrong bytes: other encodings seldom have two bytes that UTF-8 could have."""
    found = _lenient(data, "utf-8")
    wrong = found.text.count("\ufffd")
    right = sum(c > "\x7f" for c in found.text) - wrong
    return found if wrong <= right else None


def _legacy(data: bytes) -> Extract:
    """Return the text in the older encoding that fits best."""
    encoding = "cp1252" if _is_western(data) else _guess(data)
    text, notes = _lenient(data, encoding)
    return Extract(text, (f"read as {_title(encoding)}, as it is not UTF-8", *notes))


def _is_western(data: bytes) -> bool:
    """Return whether a text is Windows-1252 without doubt: with typographic signs only, or short and Western."""
    high = {byte[0] for byte in NOT_ASCII.findall(data)}
    if SIGN_IN_WORD.search(data):
        return False
    is_short = len(data) < SHORT and not LETTERS_ALONE.search(data)
    return SIGNS.issuperset(high) or (is_short and (SIGNS | LETTERS).issuperset(high))


def _guess(data: bytes) -> str:
    chardet = package("chardet", "chardet", "texts in encodings older than Unicode")
    first = next((found.start() for found in NOT_ASCII.finditer(data)), 0)
    found = chardet.detect(
        data[max(0, first - SAMPLE // 2) :][:SAMPLE],
        encoding_era=chardet.EncodingEra.ALL & ~chardet.EncodingEra.MAINFRAME,
        exclude_encodings=RARE,
        no_match_encoding="cp1252",
    )
    return _superset(codecs.lookup(found["encoding"] or "cp1252").name)


def _superset(encoding: str) -> str:
    return SUPERSETS.get(encoding, encoding)


def _title(encoding: str) -> str:
    """Return the usual name of an encoding."""
    if encoding in TITLES:
        return TITLES[encoding]
    name = re.sub(r"^cp(125\d)$", r"Windows-\1", encoding).replace("iso8859", "ISO-8859")
    name = re.sub(r"-[lb]e$", "", name)
    return name if name.startswith("Windows") else name.upper()
