"""A question about files: the prompt that asks it, and the passages that an answer rests on."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pylongctx.readers.files import FileText

# With it as many answers are right as without, and they are shorter (docs/evaluate.md).
INSTRUCTION = (
    "You answer questions about a text. Answer from the text alone, in one or two sentences. "
    "If the text does not say, say so."
)
LEAST_PASSAGE = 40  # characters, so that an abbreviation does not end a passage
MOST_PASSAGE = 400  # characters that are shown
# A sentence ends with a mark and a blank, but for the point of an initial or a title; a blank line ends one, too.
END = re.compile(r"(?<=[^A-Z][.!?])(?<!Mr\.)(?<!Mrs\.)(?<!Dr\.)(?<!St\.)[\"'\u201d\u2019)]*\s+|\n\s*\n")
WORD = re.compile(r"\w+")
ENDINGS = ("'s", "ing", "ed", "es", "s")
LEAST_STEM = 3  # characters that remain of a word
NEIGHBOUR = 0.3  # of a passage's words count for the passages beside it
SATURATION, LENGTH = 1.2, 0.75  # k1 and b of BM25


@dataclass(frozen=True)
class Quote:
    """A passage of a file: its first line, from 1, and its text in one line."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        """The place, then the text."""
        place = f"{self.file}, line {self.line}" if self.file else f"line {self.line}"
        return f'{place}: "{self.text}"'


def prompt(text: str, question: str) -> str:
    """Return the message that asks a question about a text; questions on one text share its beginning.

    Examples
    --------
    >>> prompt("It rains.", "Does it rain?")
    'It rains.\\nQuestion: Does it rain?'
    """
    return f"{text}\nQuestion: {question}"


def quotes(files: Sequence[FileText], question: str, answer: str, most: int = 3) -> list[Quote]:
    """Return the passages that have most to do with a question and its answer, best first.

    Passages are sentences. They are ranked by the rare words that they share with both (BM25; Robertson and Zaragoza
    2009, equation 3.15), and by those of the passages beside them.

    Examples
    --------
    >>> text = "The sun shone on all of us that day. The thief was the gardener, of all people. Nobody had seen it."
    >>> quotes([FileText("a.txt", text)], "Who is the thief?", "The gardener.", most=1)[0].text
    'The thief was the gardener, of all people.'
    """
    places = [(file, start, end) for file in files for start, end in _passages(file.text)]
    asked = Counter([*set(_stems(question)), *set(_stems(answer))])
    scores = _scores([Counter(_stems(file.text[start:end])) for file, start, end in places], asked)
    best = sorted(range(len(places)), key=lambda i: -scores[i])[:most]
    return [_quote(*places[i]) for i in best if scores[i] > 0]


def _quote(file: FileText, start: int, end: int) -> Quote:
    text = " ".join(file.text[start:end].split())
    shown = text if len(text) <= MOST_PASSAGE else f"{text[:MOST_PASSAGE]}..."
    return Quote(file.name, file.text.count("\n", 0, start) + 1, shown)


def _passages(text: str) -> Iterator[tuple[int, int]]:
    """Yield where sentences begin and end."""
    start = 0
    for found in END.finditer(text):
        if found.end() - start >= LEAST_PASSAGE:
            yield start, found.end()
            start = found.end()
    if text[start:].strip():
        yield start, len(text)


def _stems(text: str) -> list[str]:
    return [_stem(word) for word in WORD.findall(text.lower())]


def _stem(word: str) -> str:
    for ending in ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= LEAST_STEM:
            return word[: -len(ending)]
    return word


def _scores(passages: Sequence[Counter[str]], asked: Counter[str]) -> list[float]:
    """Return a score for each passage."""
    n, total = len(passages), sum(words.total() for words in passages)
    own = [0.0] * n
    for word, weight in asked.items():
        holding = [i for i, words in enumerate(passages) if word in words]
        rarity = math.log(1 + (n - len(holding) + 0.5) / (len(holding) + 0.5))
        for i in holding:
            times, length = passages[i][word], passages[i].total() * n / total
            saturated = times + SATURATION * (1 - LENGTH + LENGTH * length)
            own[i] += weight * rarity * times * (1 + SATURATION) / saturated
    around = [*own[1:], 0.0], [0.0, *own[:-1]]
    return [score + NEIGHBOUR * (after + before) for score, after, before in zip(own, *around, strict=False)]
