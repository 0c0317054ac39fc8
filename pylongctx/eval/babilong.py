"""BABILong (arXiv 2406.10149): facts of a bAbI task among the sentences of a novel, from the user's files.

Prompts, the places of the facts and the score are those of https://github.com/booydar/babilong. Other than there, the
length counts the whole prompt and the answer, and sentences are split by punctuation, not by nltk.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from pylongctx.eval.files import after_context, published, read_lines, stem
from pylongctx.eval.haystack import N_PER_TOKEN, SYNTHETIC, load_text, sentences
from pylongctx.eval.scorers import only_label
from pylongctx.eval.task import Answer, FileQuestion, Sample, Vocabulary

HINT = "--data is a test file of bAbI, such as qa1_single-supporting-fact_test.txt"
SEPARATOR = re.compile(r"\s*[\t|]\s*")  # between question, answer and numbers of facts
MIN_SENTENCE_TOKENS = 10  # tokens of a sentence of the novel; shorter ones are left out


@dataclass(frozen=True)
class Story:
    """A question of bAbI, its answer, and all facts before it."""

    facts: tuple[str, ...]
    question: str
    answer: str


@dataclass(frozen=True)
class BabiLong(FileQuestion):
    """Answer a question about facts that are spread over a novel.

    Attributes
    ----------
    data : str
        A test file of bAbI; its name begins with the task: qa1, qa2 or qa5.
    haystack : str
        The novel: "synthetic", a text file or a folder of them.

    Examples
    --------
    >>> BabiLong("qa1_single-supporting-fact_test.txt").name
    'babilong-qa1'
    """

    tests: int | None = 100
    max_tokens: int = 20
    haystack: str = SYNTHETIC

    def __post_init__(self) -> None:
        if self._number not in published("babilong"):
            known = ", ".join(published("babilong"))
            raise ValueError(f"{self.data}: the name of the file must begin with its task and _; available: {known}")

    @property
    def name(self) -> str:
        """The task of bAbI."""
        return f"babilong-{self._number}"

    @property
    def _number(self) -> str:
        return stem(self.data).split("_")[0]

    @property
    def _task(self) -> dict[str, Any]:
        task: dict[str, Any] = published("babilong")[self._number]
        return task

    def samples(self, vocabulary: Vocabulary, length: int, seed: int) -> list[Sample]:
        """Return one sample per question; each begins at another sentence of the novel, which follows from the seed."""
        stories = read_babi(self.data)[: self.tests]
        novel = sentences(load_text(self.haystack, 2 * length * N_PER_TOKEN, seed))
        return [self._sample(vocabulary, story, novel, length, seed, i) for i, story in enumerate(stories)]

    def _sample(
        self, vocabulary: Vocabulary, story: Story, novel: Sequence[str], length: int, seed: int, i: int
    ) -> Sample:
        facts, template = {"question": story.question, "n_facts": len(story.facts)}, self._task["template"]
        asked = after_context(template).format(**self._task, question=story.question).rstrip()

        def sample(n: int) -> Sample:
            random = Random(f"{self.name}-{seed}-{length}-{i}")
            text = spread(story.facts, background(vocabulary, novel, n, random), random)
            prompt = template.format(**self._task, context=text.strip(), question=story.question).strip()
            shared, name = len(prompt) - len(asked), f"{length}-{seed}-{i}"
            return Sample(name, prompt, "", (story.answer,), self.max_tokens, facts=facts, shared=shared)

        room = length
        while room > 0:
            found = sample(room)
            excess = len(vocabulary.tokens(found)) + self.max_tokens - length
            if excess <= 0:
                return found
            room -= excess
        raise ValueError(f"{self.name}, length {length}: prompt, facts and answer alone are longer")

    def scores(self, sample: Sample, answer: Answer) -> dict[str, float]:
        """Return whether the answer names the right place, person or thing, and no other."""
        return {"score": only_label(answer.text, sample.answers, self._task["labels"], sample.facts["question"])}


def read_babi(path: str) -> list[Story]:
    """Return the questions of a file of bAbI, each with all facts of its story that come before.

    Raises
    ------
    ValueError
        When a line has no number, or a question no answer.
    """
    facts: list[str] = []
    found = []
    for number, line in enumerate(read_lines(path, HINT), 1):
        index, _, text = line.strip().partition(" ")
        if not index.isdigit() or not text:
            raise ValueError(f"{path}, line {number}: it does not begin with a number and a sentence; {HINT}")
        facts = [] if index == "1" else facts
        parts = SEPARATOR.split(text.strip())
        if len(parts) == 1 and not text.endswith("?"):
            facts = [*facts, text.strip()]
        elif len(parts) < 2 or not parts[1]:
            raise ValueError(f"{path}, line {number}: the question has no answer after a tab or |; {HINT}")
        else:
            found.append(Story(tuple(facts), parts[0], parts[1]))
    return found


def background(vocabulary: Vocabulary, novel: Sequence[str], n: int, random: Random) -> Iterator[str]:
    """Yield sentences of a novel from a random one on, ``n`` tokens in all; the last one is cut."""
    start = random.randrange(len(novel))
    for i in range(n):  # every sentence has a token at least
        sentence = novel[(start + i) % len(novel)]
        tokens = vocabulary.tokenize(" " + sentence)
        if len(tokens) < MIN_SENTENCE_TOKENS:
            continue
        yield sentence if len(tokens) <= n else vocabulary.detokenize(tokens[:n])
        n -= len(tokens)
        if n <= 0:
            break


def spread(facts: Sequence[str], sentences: Iterator[str], random: Random) -> str:
    """Return a text with facts at random places between its sentences, in their order."""
    text = list(sentences)
    places = sorted(random.choices(range(len(text) + 1), k=len(facts)))
    for fact, place in zip(reversed(facts), reversed(places), strict=True):
        text.insert(place, fact)
    return " ".join(text)
