"""Made-up questions whose answers stand in the text before: what a model learns to retrieve from.

Wordings are those of the evaluations in ``pylongctx.eval``, and variations of them.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from random import Random

from pylongctx.eval import haystack
from pylongctx.eval.haystack import SENTENCES
from pylongctx.eval.needle import Needle
from pylongctx.eval.passkey import ASKED, INTRO, PREFIX, needle_text
from pylongctx.eval.ruler import NEEDLE

N_TOKENS_PER_KEY = 48  # of a text, at least: short texts get few keys
KEY_WORDS = ("key", "code", "number", "secret", "address", "password")
PLACES = "San Francisco|Paris|London|the old town|the village|Moscow|the harbour|the mountains|Bath|New York"
DOINGS = "eat|sit in|walk to|look at|read about|listen to|buy|paint|visit|play with|wait for|sing about"
DAYS = "on a sunny day|in the evening|with a friend|before breakfast|in the rain|on Sunday"


@dataclass(frozen=True)
class Quiz:
    """Needles for a haystack, and what is asked about them.

    Attributes
    ----------
    intro : str
        What stands first.
    needles : list of str
        Hidden in this order.
    questions : list of (question, answer)
        Each answer begins with a space.
    separator : str
        Between the parts.
    lines : callable or None
        Draws a line of a haystack that looks like the needles; None: any text will do.
    """

    intro: str
    needles: list[str]
    questions: list[tuple[str, str]]
    separator: str = " "
    lines: Callable[[], str] | None = None


@dataclass(frozen=True)
class Source:
    """What a quiz is drawn from: random numbers, words that serve as names, the number of keys that have room."""

    random: Random
    words: Sequence[str]
    n_keys: int

    def choose(self, words: str) -> str:
        return self.random.choice(words.split("|"))

    def number(self, common: int, longest: int) -> str:
        """Return digits: mostly ``common`` of them, else up to ``longest``."""
        n = common if self.random.random() < 0.75 else self.random.randint(1, longest)
        return str(self.random.randint(1, 9)) + "".join(self.random.choices("0123456789", k=n - 1))

    def names(self, n: int) -> list[str]:
        """Return different names, one or two words each, all lower case or all capitalized."""
        join, title = self.random.choice(" -"), self.random.random() < 0.5
        first, second = self.random.sample(self.words, n), self.random.sample(self.words, n)
        two = self.random.random() < 0.3
        names = [f"{a}{join}{b}" if two else a for a, b in zip(first, second, strict=True)]
        return [name.title() if title else name for name in names]

    def some(self) -> int:
        """Return a number of keys."""
        return self.random.randint(1, max(1, self.n_keys))

    def separator(self) -> str:
        return self.random.choice(" \n")


def pass_key(source: Source) -> Quiz:
    """One pass key without a name."""
    key = source.number(5, 12)
    return Quiz(INTRO, [needle_text(key)], [(ASKED + PREFIX, f" {key}")], source.separator())


def named_keys(source: Source) -> Quiz:
    """Keys of several names, all asked for in another order."""
    what = "pass key" if source.random.random() < 0.6 else source.random.choice(KEY_WORDS)
    names = source.names(source.some())
    keys = {name: source.number(5, 8) for name in names}
    repeats = source.random.random() < 0.5
    needles = [
        f"The {what} of {name} is {key}." + f" Remember it. {key} is the {what} of {name}." * repeats
        for name, key in keys.items()
    ]
    asked = source.random.sample(names, len(names))
    return Quiz(
        INTRO if source.random.random() < 0.5 else "",
        needles,
        [(f"What is the {what} of {name}? The {what} of {name} is", f" {keys[name]}") for name in asked],
        source.separator(),
    )


def magic_numbers(source: Source) -> Quiz:
    """RULER's needles: numbers of words, in any text or among others of their kind."""
    prompts = json.loads((resources.files("pylongctx.eval") / "data" / "ruler.json").read_text())["tasks"]["niah"]
    names = source.names(source.some() + 1)
    numbers = {name: source.number(7, 7) for name in names}

    def needle(name: str, number: str) -> str:
        return NEEDLE.format(type_needle_v="numbers", key=name, value=number)

    def fill(text: str, name: str) -> str:
        for plural, singular in (("Some", "A"), ("are all", "is"), ("are", "is")):
            text = text.replace(plural, singular)
        return text.format(type_needle_v="number", context="{context}", query=name)

    asked = source.random.choice(names)
    intro, question = fill(prompts["template"], asked).split("{context}")
    return Quiz(
        intro.rstrip("\n"),
        [needle(name, number) for name, number in numbers.items()],
        [(question.lstrip("\n") + fill(prompts["answer_prefix"], asked), f" {numbers[asked]}")],
        "\n",
        (lambda: needle(source.names(1)[0], source.number(7, 7))) if source.random.random() < 0.5 else None,
    )


def key_values(source: Source) -> Quiz:
    """A list of keys and their values."""
    form = source.choose("{}: {}|{} = {}|- {}: {}|The value of {} is {}.")
    names = source.names(2 * source.some())
    values = {name: source.number(4, 8) if source.random.random() < 0.7 else source.names(1)[0] for name in names}
    asked = source.random.sample(names, min(3, len(names)))
    return Quiz(
        source.choose("Here is a list of keys and values.|Memorize these values.|"),
        [form.format(name, value) for name, value in values.items()],
        [(f"What is the value of {name}? The value of {name} is", f" {values[name]}") for name in asked],
        "\n",
        lambda: form.format(source.names(1)[0], source.number(4, 8)),
    )


def sentence(source: Source) -> Quiz:
    """A sentence that says what is best done at a place; often that of the needle evaluation."""
    task = Needle()
    places = source.random.sample(PLACES.split("|"), source.random.randint(1, 2))
    doing = {place: _doing(source) for place in places}
    if source.random.random() < 0.1:
        needles, questions = [task.needle.strip()], [(task.retrieval_question, task.expected)]
    else:
        needles = [f"The best thing to do in {place} is {best}." for place, best in doing.items()]
        questions = [(f"What is the best thing to do in {place}?", doing[place]) for place in places]
    separator = source.random.choice(["\n", "\n\n"])
    asked = [(f"Question: {question}{task.prefix}", f" {answer}") for question, answer in questions]
    return Quiz("", needles, asked, separator)


def _doing(source: Source) -> str:
    parts = [source.choose(DOINGS), "the", *source.random.sample(source.words, source.random.randint(1, 2))]
    if source.random.random() < 0.5:
        parts += ["and", source.choose(DOINGS), "a", source.random.choice(source.words)]
    return " ".join([*parts, source.choose(DAYS)])


QUIZZES: dict[Callable[[Source], Quiz], float] = {
    pass_key: 0.25,
    named_keys: 0.35,
    magic_numbers: 0.15,
    key_values: 0.15,
    sentence: 0.10,
}  # and how often each is drawn


def draw_quiz(random: Random, words: Sequence[str], n_tokens: int) -> Quiz:
    """Return a quiz for a text of about ``n_tokens``."""
    make = random.choices([*QUIZZES], [*QUIZZES.values()])[0]
    return make(Source(random, words, min(6, n_tokens // N_TOKENS_PER_KEY - 1)))


def made_up_text(random: Random, n_characters: int) -> str:
    """Return a haystack that no book has: repeated sentences, or synthetic ones."""
    if random.random() < 0.5:
        return SENTENCES * (n_characters // len(SENTENCES) + 1)
    return haystack.synthetic_text(n_characters, random.getrandbits(32))
