"""Texts to hide things in: files, or sentences made from a seed."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from pylongctx.files import plain_text

SENTENCES = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
SYNTHETIC = "synthetic"
WHO = "The baker|The captain|A gardener|My neighbour|The old teacher|A young clerk|The miller|Our doctor"
DID = "carried|painted|repaired|sold|found|borrowed|measured|counted|washed|forgot|described|bought"
HOW = "small|heavy|broken|green|wooden|silver|borrowed|narrow|dusty|painted|quiet|round"
WHAT = "basket|clock|ladder|blanket|lantern|bottle|carpet|window|wagon|violin|kettle|letter|saddle|mirror"
WHERE = "near the river|behind the church|at the market|in the orchard|by the bridge|on the hill|under the roof"
WHEN = "in the morning|after the rain|before supper|last winter|on a Tuesday|every spring|at noon|years ago"
WHY = "because the road was long|while the children slept|and nobody asked about it|so the dog could rest"
SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"')\]]))\s+(?=[\"'(\[]?[A-Z0-9])")


def synthetic_sentences(seed: int) -> Iterator[str]:
    """Yield plain sentences without end; they follow from the seed and hold no digits.

    Examples
    --------
    >>> next(synthetic_sentences(0)) == next(synthetic_sentences(0))
    True
    """
    random = Random(f"haystack-{seed}")

    def choose(words: str) -> str:
        return random.choice(words.split("|"))

    while True:
        parts = [choose(WHO), choose(DID), "the", choose(HOW), choose(WHAT), choose(WHERE)]
        parts += [choose(more) for more in (WHEN, WHY) if random.random() < 0.5]
        yield " ".join(parts) + "."


def synthetic_text(n_characters: int, seed: int) -> str:
    """Return paragraphs of at least ``n_characters``; a longer text begins with the shorter one of the same seed.

    Examples
    --------
    >>> synthetic_text(500, seed=0).startswith(synthetic_text(100, seed=0))
    True
    """
    random, parts, n = Random(f"paragraphs-{seed}"), [], 0
    for sentence in synthetic_sentences(seed):
        parts.append(sentence + ("\n\n" if random.random() < 0.1 else " "))
        n += len(parts[-1])
        if n >= n_characters:
            break
    return "".join(parts)


def load_text(name: str, n_characters: int, seed: int = 0) -> str:
    """Return at least ``n_characters`` of a haystack: "synthetic", a text file, or a folder of ``*.txt``.

    A text that is too short is repeated.

    Raises
    ------
    ValueError
        When there is no such file or folder, or no text in it.

    Examples
    --------
    >>> len(load_text("book.txt", 10_000)) >= 10_000
    True
    """
    if name == SYNTHETIC:
        return synthetic_text(n_characters, seed)
    text = _read(Path(name))
    if not text:
        raise ValueError(f"haystack {name!r} is neither {SYNTHETIC!r} nor a text file nor a folder of .txt files")
    return (text + "\n") * (n_characters // (len(text) + 1) + 1)


def _read(path: Path) -> str:
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path] if path.is_file() else []
    return "\n".join(plain_text(file).strip() for file in files)


def sentences(text: str) -> list[str]:
    """Return the sentences of a text, split by punctuation alone.

    Examples
    --------
    >>> sentences("It rained. Who knows why? I do.")
    ['It rained.', 'Who knows why?', 'I do.']
    """
    return [part for part in SENTENCE_END.split(text.strip()) if part]


@dataclass(frozen=True)
class Haystack:
    """Text to hide a key in.

    Attributes
    ----------
    name : str
        For reports.
    text : str
        Repeated as often as a length needs.
    continues : bool
        Whether the text after the key continues the text before it, as in a book; otherwise it starts again from
        the beginning, and every prompt begins at the same place.

    Examples
    --------
    >>> Haystack("words", "one two three four ", continues=True).cut(10, depth=0.5, start=0.0)
    ('one t', 'wo th')
    """

    name: str
    text: str
    continues: bool

    def cut(self, n: int, depth: float, start: float) -> tuple[str, str]:
        """Return the text before and after the key, ``n`` characters in all, the key at ``depth`` (0 to 1)."""
        n_before = int(depth * n)
        offset = int(start * len(self.text)) if self.continues else 0
        text = self.text * ((offset + n) // len(self.text) + 1)
        after = offset + n_before if self.continues else 0
        return text[offset : offset + n_before], text[after : after + n - n_before]


def load_haystack(name: str) -> Haystack:
    """Return the haystack "sentences", or one made of a text file.

    Raises
    ------
    ValueError
        When there is no such file or it is empty.

    Examples
    --------
    >>> load_haystack("sentences").text[:19]
    'The grass is green.'
    """
    if name == "sentences":
        return Haystack(name, SENTENCES, continues=False)
    if not Path(name).is_file():
        raise ValueError(f"haystack {name!r} is neither 'sentences' nor a file")
    text = plain_text(name).strip()
    if not text:
        raise ValueError(f"haystack {name!r} is empty")
    return Haystack(Path(name).name, text + "\n", continues=True)
