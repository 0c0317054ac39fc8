"""Texts to hide things in: files, or sentences made from a seed.

Facts to hide in a text: what is said, how it is asked for, and what resembles it.

``NUMBERS`` are asked for in the words that state them. ``PEOPLE`` are also asked for in other words: statement and
paraphrase share no word with a meaning, so that only what they mean leads from one to the other (NoLiMa, arXiv
2502.05167).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from pylongctx.readers.files import plain_text

SENTENCES = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
SYNTHETIC = "synthetic"
N_PER_TOKEN = 8  # characters to take for each token wanted
WHO = "The baker|The captain|A gardener|My neighbour|The old teacher|A young clerk|The miller|Our doctor"
DID = "carried|painted|repaired|sold|found|borrowed|measured|counted|washed|forgot|described|bought"
HOW = "small|heavy|broken|green|wooden|silver|borrowed|narrow|dusty|painted|quiet|round"
WHAT = "basket|clock|ladder|blanket|lantern|bottle|carpet|window|wagon|violin|kettle|letter|saddle|mirror"
WHERE = "near the river|behind the church|at the market|in the orchard|by the bridge|on the hill|under the roof"
WHEN = "in the morning|after the rain|before supper|last winter|on a Tuesday|every spring|at noon|years ago"
WHY = "because the road was long|while the children slept|and nobody asked about it|so the dog could rest"
SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"')\]]))\s+(?=[\"'(\[]?[A-Z0-9])")


def synthetic_sentences(seed: int) -> Iterator[str]:
    """Yield plain sentences without end; they follow from the seed and hold no digits."""
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


# ---- facts ----

NAMES = (
    "Amara Aziz Bjorn Chiyo Diego Dmitri Esra Farid Gunnar Hassan Ingrid Ishaan Jorge Keiko Kofi"
    " Leilani Lupita Manoj Mehmet Nkechi Olga Pavel Priya Rashid Svetlana Thabo Tomasz Xavier Yuki Zofia"
).split()
OWNERS = ("anchor", "bell", "carpet", "harp", "ladder", "mill", "safe", "statue", "telescope", "wagon")
KINDS = ("age", "code", "height", "length", "number", "price", "weight", "width", "range", "speed")


@dataclass(frozen=True)
class Fact:
    """A sentence that answers a question.

    Attributes
    ----------
    statement, literal : str
        The sentence and its question. ``{what}`` stands for what the question is about, ``{answer}`` for its answer.
    right : str
        What the question is about.
    others : tuple of str
        What similar sentences are about, which the question does not ask for.
    paraphrase : str
        The question in other words, "" where there is none.
    prefix : str
        What the answer begins with.

    Examples
    --------
    >>> fact = PEOPLE[0]
    >>> fact.statement.format(what=fact.right, answer="Kofi")
    'Kofi keeps a sailing boat in the harbour of Marseille.'
    """

    statement: str
    literal: str
    right: str
    others: tuple[str, ...]
    paraphrase: str = ""
    prefix: str = ""


def _number(kind: str, owner: str) -> Fact:
    thing = f"{kind} of the {{what}}"
    statement = f"The {thing} is {{answer}}. Remember it. {{answer}} is the {thing}."
    others = tuple(other for other in OWNERS if other != owner)
    return Fact(statement, f"What is the {thing}?", owner, others, prefix=f" The {thing} is")


NUMBERS = tuple(_number(kind, owner) for kind, owner in zip(KINDS, OWNERS, strict=False))


def _person(did: str, what: str, others: tuple[str, ...], paraphrase: str) -> Fact:
    return Fact(f"{{answer}} {did}.", f"Who {did}?", what, others, paraphrase)


PEOPLE = (
    _person(
        "keeps a sailing boat in the harbour of {what}",
        "Marseille",
        ("Hamburg", "Oslo", "Lisbon", "Genoa"),
        "Which person owns a vessel on the south coast of France?",
    ),
    _person(
        "cannot eat anything made from {what}",
        "milk",
        ("peanuts", "shrimps", "strawberries", "mustard"),
        "Which person has to avoid cheese?",
    ),
    _person(
        "plays the {what} every Friday",
        "violin",
        ("trumpet", "drums", "flute", "organ"),
        "Which person needs an instrument with four strings and a bow?",
    ),
    _person(
        "lives right next to the {what}",
        "Eiffel Tower",
        ("Brandenburg Gate", "Colosseum", "Kremlin", "Acropolis"),
        "Which person has a home in Paris?",
    ),
    _person(
        "was bitten by a {what} last summer",
        "cobra",
        ("hamster", "parrot", "pony", "squirrel"),
        "Which person met a poisonous snake?",
    ),
    _person(
        "studied the {what} for six years",
        "stars and planets",
        ("beetles of Africa", "laws of Rome", "poems of Homer", "bridges of Prague"),
        "Which person became an astronomer?",
    ),
    _person(
        "never learned to {what}",
        "swim",
        ("ride a bicycle", "read music", "cook rice", "drive a car"),
        "Which person would drown in deep water?",
    ),
    _person(
        "repairs {what} for a living",
        "clocks",
        ("shoes", "roofs", "pianos", "bicycles"),
        "Which person could help me when my watch has stopped?",
    ),
    _person(
        "bought a dozen {what} at the market",
        "roses",
        ("eggs", "herrings", "candles", "towels"),
        "Which person came home with flowers?",
    ),
    _person(
        "speaks fluent {what}",
        "Portuguese",
        ("Finnish", "Hungarian", "Korean", "Turkish"),
        "Which person could work as an interpreter in Brazil?",
    ),
    _person(
        "once won a race on {what}",
        "skis",
        ("horseback", "a camel", "a tricycle", "stilts"),
        "Which person is good at a sport that needs snow?",
    ),
    _person(
        "dreams of travelling to the {what}",
        "moon",
        ("Amazon", "Himalayas", "Sahara", "Black Sea"),
        "Which person would like to be an astronaut?",
    ),
)


@dataclass(frozen=True)
class Stated:
    """A fact with an answer, as it stands in a text.

    Attributes
    ----------
    text : str
        The sentence.
    decoys : tuple of str
        Similar sentences with other answers.
    question, answer, prefix : str
        What is asked, what is right, and what the answer begins with.
    """

    text: str
    decoys: tuple[str, ...]
    question: str
    answer: str
    prefix: str


def draw_facts(n: int, asked: str, n_decoys: int, random: Random) -> list[Stated]:
    """Return ``n`` facts, the answers all different; ``asked`` is "number", "literal" or "paraphrase".

    Raises
    ------
    ValueError
        When the table has fewer facts, similar sentences or names.

    Examples
    --------
    >>> (fact,) = draw_facts(1, "paraphrase", 0, Random(0))
    >>> fact.answer in fact.text, fact.answer in fact.question
    (True, False)
    """
    table = NUMBERS if asked == "number" else PEOPLE
    n_each, n_others = 1 + n_decoys, min(len(fact.others) for fact in table)
    answers = _numbers(n * n_each, random) if asked == "number" else random.sample(NAMES, min(n * n_each, len(NAMES)))
    if n > len(table) or n_decoys > n_others or len(answers) < n * n_each:
        raise ValueError(
            f"there are {len(table)} facts, {n_others} similar sentences for each, and {len(answers)} answers: ask for"
            f" fewer than {n} questions with {n_decoys} decoys"
        )
    parts = [answers[i : i + n_each] for i in range(0, n * n_each, n_each)]
    return [_stated(fact, asked, part, random) for fact, part in zip(random.sample(table, n), parts, strict=True)]


def _numbers(n: int, random: Random) -> list[str]:
    return [str(number) for number in random.sample(range(10000, 100000), n)]


def _stated(fact: Fact, asked: str, answers: list[str], random: Random) -> Stated:
    others = random.sample(fact.others, len(answers) - 1)
    decoys = tuple(fact.statement.format(what=w, answer=a) for w, a in zip(others, answers[1:], strict=True))
    text = fact.statement.format(what=fact.right, answer=answers[0])
    question = fact.paraphrase if asked == "paraphrase" else fact.literal.format(what=fact.right)
    return Stated(text, decoys, question, answers[0], fact.prefix.format(what=fact.right))
