"""Facts to hide in a text: what is said, how it is asked for, and what resembles it.

``NUMBERS`` are asked for in the words that state them. ``PEOPLE`` are also asked for in other words: statement and
paraphrase share no word with a meaning, so that only what they mean leads from one to the other (NoLiMa, arXiv
2502.05167).
"""

from dataclasses import dataclass
from random import Random

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

PEOPLE = (
    Fact(
        "{answer} keeps a sailing boat in the harbour of {what}.",
        "Who keeps a sailing boat in the harbour of {what}?",
        "Marseille",
        ("Hamburg", "Oslo", "Lisbon", "Genoa"),
        "Which person owns a vessel on the south coast of France?",
    ),
    Fact(
        "{answer} cannot eat anything made from {what}.",
        "Who cannot eat anything made from {what}?",
        "milk",
        ("peanuts", "shrimps", "strawberries", "mustard"),
        "Which person has to avoid cheese?",
    ),
    Fact(
        "{answer} plays the {what} every Friday.",
        "Who plays the {what} every Friday?",
        "violin",
        ("trumpet", "drums", "flute", "organ"),
        "Which person needs an instrument with four strings and a bow?",
    ),
    Fact(
        "{answer} lives right next to the {what}.",
        "Who lives right next to the {what}?",
        "Eiffel Tower",
        ("Brandenburg Gate", "Colosseum", "Kremlin", "Acropolis"),
        "Which person has a home in Paris?",
    ),
    Fact(
        "{answer} was bitten by a {what} last summer.",
        "Who was bitten by a {what} last summer?",
        "cobra",
        ("hamster", "parrot", "pony", "squirrel"),
        "Which person met a poisonous snake?",
    ),
    Fact(
        "{answer} studied the {what} for six years.",
        "Who studied the {what} for six years?",
        "stars and planets",
        ("beetles of Africa", "laws of Rome", "poems of Homer", "bridges of Prague"),
        "Which person became an astronomer?",
    ),
    Fact(
        "{answer} never learned to {what}.",
        "Who never learned to {what}?",
        "swim",
        ("ride a bicycle", "read music", "cook rice", "drive a car"),
        "Which person would drown in deep water?",
    ),
    Fact(
        "{answer} repairs {what} for a living.",
        "Who repairs {what} for a living?",
        "clocks",
        ("shoes", "roofs", "pianos", "bicycles"),
        "Which person could help me when my watch has stopped?",
    ),
    Fact(
        "{answer} bought a dozen {what} at the market.",
        "Who bought a dozen {what} at the market?",
        "roses",
        ("eggs", "herrings", "candles", "towels"),
        "Which person came home with flowers?",
    ),
    Fact(
        "{answer} speaks fluent {what}.",
        "Who speaks fluent {what}?",
        "Portuguese",
        ("Finnish", "Hungarian", "Korean", "Turkish"),
        "Which person could work as an interpreter in Brazil?",
    ),
    Fact(
        "{answer} once won a race on {what}.",
        "Who once won a race on {what}?",
        "skis",
        ("horseback", "a camel", "a tricycle", "stilts"),
        "Which person is good at a sport that needs snow?",
    ),
    Fact(
        "{answer} dreams of travelling to the {what}.",
        "Who dreams of travelling to the {what}?",
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

    Examples
    --------
    >>> Stated("Kofi speaks Korean.", (), "Who speaks Korean?", "Kofi", "").answer
    'Kofi'
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
