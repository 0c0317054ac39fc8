"""The parts of a text that scorers compare, as published benchmarks take them out of it."""

import re
import string
from collections.abc import Iterable
from typing import Any

CONTROL = re.compile(r"[\x00-\x1f]")
CHINESE_PUNCTUATION = (
    "\uff01\uff1f\uff61\u3002\uff02\uff03\uff04\uff05\uff06\uff07\uff08\uff09\uff0a\uff0b\uff0c\uff0d\uff0f\uff1a"
    "\uff1b\uff1c\uff1d\uff1e\uff20\uff3b\uff3c\uff3d\uff3e\uff3f\uff40\uff5b\uff5c\uff5d\uff5e\uff5f\uff60\uff62"
    "\uff63\uff64\u3001\u3003\u300b\u300c\u300d\u300e\u300f\u3010\u3011\u3014\u3015\u3016\u3017\u3018\u3019\u301a"
    "\u301b\u301c\u301d\u301e\u301f\u3030\u303e\u303f\u2013\u2014\u2018\u2019\u201b\u201c\u201d\u201e\u201f\u2026"
    "\u2027\ufe4f."
)


def readable(text: str) -> str:
    """Return the text in lower case with line ends for control characters, as RULER has it."""
    return CONTROL.sub("\n", text.strip()).strip().lower()


def chinese_words(jieba: Any, text: str) -> list[str]:
    """Return the words that the package jieba finds."""
    words: Iterable[str] = jieba.cut(text, cut_all=False)
    return list(words)


def bare_words(jieba: Any, text: str) -> list[str]:
    """Return these words in lower case without punctuation and space, as LongBench has it."""
    dropped = frozenset(string.punctuation + CHINESE_PUNCTUATION)
    bare = ("".join(c for c in word.lower() if c not in dropped) for word in chinese_words(jieba, text))
    return [word for word in ("".join(word.split()) for word in bare) if word]


def first_line_of_code(text: str) -> str:
    """Return the first line that is not a comment, as LongBench has it; empty: there is none."""
    lines = (line for line in text.lstrip("\n").split("\n") if not re.search("`|#|//", line))
    return next(lines, "")


def final_digits(text: str) -> str:
    """Return the digits before a point after "The answer is", or of the last number of the first paragraph (L-Eval)."""
    given = re.search(r"The answer is (\S+)", text)
    words = [given.group(1)] if given else reversed(text.split("\n\n")[0].split(" "))
    word = next((word for word in words if re.search(r"\d", word)), "")
    return re.sub(r"\D", "", word.split(".")[0])
