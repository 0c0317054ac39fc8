"""Keeps the texts of special tokens in user and tool messages plain text through the template."""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import count
from typing import Any

from pylongctx.chat.request import texts_of

BEGIN = 3  # characters that are indexed to find marks
GUESTS = ("user", "tool", "function")  # roles whose text is plain

Span = tuple[int, int]


class Marks:
    """Replaces texts of special tokens in messages before a template is rendered, and restores them afterwards.

    Parameters
    ----------
    messages : sequence
        The messages; other values stay unchanged.
    texts : frozenset of str
        The texts of the special tokens.
    is_plain : callable
        Called as ``(role, text)``; returns whether the text is plain.

    Attributes
    ----------
    messages : sequence
        The messages with marks instead of these texts.

    Examples
    --------
    >>> marks = Marks([{"role": "user", "content": "a<s>b"}], frozenset({"<s>"}), lambda role, text: True)
    >>> marks.messages[0]["content"]
    'azq0mark0qb'
    >>> marks.restored("<s>azq0mark0qb</s>")
    ('<s>a<s>b</s>', [(4, 7)])
    """

    def __init__(self, messages: Any, texts: frozenset[str], is_plain: Callable[[Any, str], bool]) -> None:
        self._found: list[str] = []
        self._is_plain = is_plain
        self._texts = texts
        self.messages = messages
        if isinstance(messages, list | tuple):
            said = "\n".join(text for message in messages for text in texts_of(message)).lower()
            self._word = next(word for i in count() if (word := f"zq{i}mark") not in said)
            self.messages = [self._without(message) for message in messages]

    def _without(self, message: Any) -> Any:
        if not isinstance(message, Mapping):
            return message
        role, content = message.get("role"), message.get("content")
        if isinstance(content, str):
            return {**message, "content": self._hide(role, content)}
        if not isinstance(content, list | tuple):
            return message
        return {**message, "content": [self._part(role, part) for part in content]}

    def _part(self, role: Any, part: Any) -> Any:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            return part
        return {**part, "text": self._hide(role, part["text"])}

    def _hide(self, role: Any, text: str) -> str:
        if not self._is_plain(role, text):
            return text
        parts, done = [], 0
        for first, end in find_marks(text, self._texts):
            parts += [text[done:first], f"{self._word}{len(self._found)}q"]
            self._found.append(text[first:end])
            done = end
        return "".join(parts) + text[done:] if parts else text

    def restored(self, prompt: str) -> tuple[str, list[Span]] | None:
        """Return a rendered text with these texts restored, and their positions; None: the template changed them."""
        if not self._found:
            return prompt, []
        words = list(re.finditer(rf"{self._word}(\d+)q", prompt))
        if len(words) != prompt.lower().count(self._word):
            return None
        parts: list[str] = []
        spans, done, n = [], 0, 0
        for word in words:
            before, mark = prompt[done : word.start()], self._found[int(word[1])]
            parts += [before, mark]
            spans.append((n + len(before), n + len(before) + len(mark)))
            n, done = n + len(before) + len(mark), word.end()
        return "".join([*parts, prompt[done:]]), spans


def find_marks(text: str, marks: frozenset[str]) -> Iterator[Span]:
    """Yield the positions of marks in a text from left to right, the longest one at each position."""
    if not marks:
        return
    begins, sizes = _search(marks)
    found = begins.search(text)
    while found:
        start = found.start()
        end = start + next((len(mark) for n in sizes if (mark := text[start : start + n]) in marks), 0)
        if end > start:
            yield start, end
        found = begins.search(text, max(end, start + 1))


@lru_cache(maxsize=8)
def _search(marks: frozenset[str]) -> tuple[re.Pattern[str], list[int]]:
    """Return an index of the beginnings of marks with their lengths, descending; vocabularies have up to 6000."""
    begins = sorted({mark[:BEGIN] for mark in marks})
    return re.compile("|".join(map(re.escape, begins))), sorted({len(mark) for mark in marks}, reverse=True)


def split(prompt: str, plain: Sequence[Span], marks: frozenset[str]) -> Iterator[tuple[str, bool]]:
    """Yield a prompt in parts, and whether special tokens are parsed in them.

    A part without them extends from one special token to the next, so that its words are tokenized like a whole text.
    """
    if not plain:
        yield prompt, True
        return
    starts = [first for first, _ in plain]
    read = [span for span in find_marks(prompt, marks) if not _overlaps(span, plain, starts)]
    done = start = 0
    for first, end in [*read, (len(prompt), len(prompt))]:
        i = bisect_left(starts, start)
        if i < len(starts) and starts[i] < first:
            yield prompt[done:start], True
            yield prompt[start:first], False
            done = first
        start = end
    yield prompt[done:], True


def _overlaps(span: Span, plain: Sequence[Span], starts: Sequence[int]) -> bool:
    i = bisect_left(starts, span[1]) - 1
    return i >= 0 and plain[i][1] > span[0]
