"""RTF: the text without its control words."""

import re

from pylongctx.readers.extract import Extract, counted, package

NOT_ASCII = re.compile(rb"[\x80-\xff]")
LEFT_OUT = ((rb"\\footnote\b", "note"), (rb"\\pict\b", "picture"), (rb"\\objdata\b", "embedded object"))


def read(data: bytes) -> Extract:
    """Return the text; notes, pictures and embedded objects are counted."""
    striprtf = package("striprtf.striprtf", "striprtf", "RTF files")
    # bytes of a code page as the escapes that RTF has for them
    source = NOT_ASCII.sub(lambda byte: b"\\'%02x" % byte[0][0], data).replace(b"\0", b"")
    text = striprtf.rtf_to_text(source.decode("ascii"), errors="replace")
    whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    found = ((len(re.findall(pattern, data)), title) for pattern, title in LEFT_OUT)
    return Extract(whole, tuple(f"{counted(n, title)} left out" for n, title in found if n))
