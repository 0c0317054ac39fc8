"""Subtitles, SRT and WebVTT: what is said, with the time of every minute."""

import re
from html import unescape

from pylongctx.readers.encoding import decode
from pylongctx.readers.extract import Extract

TIMES = re.compile(r"(?:(\d+):)?(\d\d):(\d\d)[.,]\d{3}[ \t]+-->[ \t]+(?:\d+:)?\d\d:\d\d[.,]\d{3}")
START = re.compile(r"\s*(?:WEBVTT\b.*|\d+[ \t]*\r?\n" + TIMES.pattern + ")")
SPEAKER = re.compile(r"<v(?:\.[^ \t<>]*)?[ \t]+([^<>]*)>")
STYLE = re.compile(r"</?[a-zA-Z][^<>]*>|<[\d:.]*>|\{\\[^{}]*\}")


def is_subtitles(head: str) -> bool:
    """Return whether a text begins as SRT or WebVTT does."""
    return bool(START.match(head))


def read(data: bytes) -> Extract:
    """Return the lines without numbers and styles, a paragraph for every minute."""
    text, notes = decode(data)
    minutes: dict[str, list[str]] = {}
    last = ""
    for block in re.split(r"\n[ \t]*\n", text):
        times = TIMES.search(block)
        if not times:
            continue
        said = minutes.setdefault(_minute(times), [])
        for line in map(_plain, block[times.end() :].partition("\n")[2].splitlines()):
            if line and line != last:  # rolling captions repeat the line before
                said.append(line)
                last = line
    return Extract("\n\n".join(f"[{at}] " + "\n".join(said) for at, said in minutes.items() if said), notes)


def _minute(times: re.Match[str]) -> str:
    return f"{int(times[1] or 0):02}:{times[2]}:00"


def _plain(line: str) -> str:
    return unescape(STYLE.sub("", SPEAKER.sub(r"\1: ", line))).strip()
