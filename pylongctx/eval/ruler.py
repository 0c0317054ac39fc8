"""RULER's 13 tasks (arXiv 2404.06654), made here from a seed.

Random numbers are drawn in RULER's own order, so where a task's data are free the prompts are RULER's to the byte, for
a tokenizer that adds no BOS token. Else they are labelled "RULER-compatible": the haystack of essays is another text,
sentences are split by punctuation and not by nltk, and common words come from a generated list beyond wonderwords'.
"""

from __future__ import annotations

import math
import re
import string
import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from itertools import accumulate, pairwise
from random import Random
from typing import Any, ClassVar, overload

import numpy as np

from pylongctx.eval.files import after_context, check_fields, published, read_json
from pylongctx.eval.haystack import SYNTHETIC, load_text, sentences
from pylongctx.eval.passkey import GARBAGE
from pylongctx.eval.scorers import string_match_all, string_match_part
from pylongctx.eval.task import Answer, Question, Sample, Vocabulary

MAX_TRIES = 200


@dataclass(frozen=True)
class Drawn:
    """A prompt, what its answer begins with, the answers, and the end of the prompt that asks about the text."""

    prompt: str
    prefix: str
    answers: list[str]
    question: str

    @property
    def text(self) -> str:
        """Prompt and prefix."""
        return self.prompt + self.prefix


Draw = Callable[[int], Drawn]  # from units of haystack to a prompt


def largest_size(size: Callable[[int], int], step: int, highest: int, room: int) -> int:
    """Return the largest number of units from ``step`` to ``highest`` with ``size(n) <= room``, or ``step``."""
    low, best = step, step
    while low <= highest:
        middle = (low + highest) // 2
        if size(middle) <= room:
            best, low = middle, middle + 1
        else:
            highest = middle - 1
    return best


def draw_all(draw: Draw, fits: Callable[[Drawn], bool], n_units: int, step: int, n: int) -> Iterator[Drawn]:
    """Yield ``n`` draws that fit: of ``n_units``, and ``step`` fewer after each that does not."""
    for _ in range(n):
        units = n_units
        for _ in range(MAX_TRIES):
            drawn = draw(units)
            if fits(drawn):
                yield drawn
                break
            units = units - step if units > step else units
        else:
            raise ValueError("the length is too short for this task: its smallest prompt does not fit")


# ---- words that are counted ----

N_COMMON = 10
WORD_LENGTH = 6
ZETA_2 = math.pi**2 / 6
N_INVENTED = 200_000


def word_list(name: str) -> list[str]:
    """Return a list of the package wonderwords: "noun", "adjective" or "verb"."""
    try:
        file = resources.files("wonderwords") / "assets" / f"{name}list.txt"
    except ImportError as reason:
        raise ImportError("RULER's words come from the package wonderwords: pip install 'pylongctx[eval]'") from reason
    return [line.rstrip() for line in file.read_text(encoding="utf-8").splitlines()]


class Pairs(Sequence[str]):
    """All ``f"{first}-{second}"`` once, sorted, without holding them: there are millions."""

    def __init__(self, first: Sequence[str], second: Sequence[str]) -> None:
        self._second = sorted(set(second))
        self._groups: list[list[str]] = []
        for word in sorted(set(first), key=lambda word: f"{word}-"):
            # what begins with an earlier word and a hyphen is sorted among the pairs of that one
            if self._groups and word.startswith(f"{self._groups[-1][0]}-"):
                self._groups[-1].append(word)
            else:
                self._groups.append([word])
        self._ends = list(accumulate(len(self._pairs(group)) for group in self._groups))

    def _pairs(self, group: list[str]) -> Sequence[str]:
        return self._second if len(group) == 1 else sorted({f"{a}-{b}" for a in group for b in self._second})

    def __len__(self) -> int:
        return self._ends[-1]

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        i = bisect_right(self._ends, at)
        found = self._pairs(self._groups[i])[at - (self._ends[i - 1] if i else 0)]
        return found if len(self._groups[i]) > 1 else f"{self._groups[i][0]}-{found}"


def adjective_nouns() -> Pairs:
    """Return the keys and values of needles."""
    return Pairs(word_list("adjective"), word_list("noun"))


class Common:
    """Draw lists in which ten words are more common than others.

    ``more`` is RULER's english_words.json, for lists that are longer than wonderwords has words. None: invented words.
    """

    def __init__(self, prompts: dict[str, Any], seed: int, length: int, more: str | None) -> None:
        self._template, self._prefix, self._seed = prompts["template"], prompts["answer_prefix"], seed
        self._random, self._is_long, self._more_file = Random(seed), length >= 4096, more
        self._words = sorted({*word_list("noun"), *word_list("adjective"), *word_list("verb")})
        Random(seed).shuffle(self._words)
        self._more: list[str] = []
        self.exact = True

    def _list(self, n: int) -> list[str]:
        if n <= len(self._words):
            return self._words
        if not self._more and self._more_file:
            words = read_json(self._more_file, "--data for cwe is RULER's english_words.json")
            if not isinstance(words, dict):
                raise ValueError(f"{self._more_file} is not an object of words, as RULER's english_words.json is")
            self._more = list(words.values())
        if not self._more:
            self._more, self.exact = invented_words(N_INVENTED), False
        return self._more

    def _example(self, n: int, common: int, uncommon: int) -> tuple[str, list[str]]:
        chosen = self._random.sample(self._list(n), n)
        words = chosen[:N_COMMON] * common + chosen[N_COMMON:] * uncommon
        Random(self._seed).shuffle(words)
        return numbered(words), chosen[:N_COMMON]

    def __call__(self, n: int) -> Drawn:
        """Return a prompt with ``n`` different words, after a solved example."""
        shown, right = self._example(*((40, 10, 3) if self._is_long else (20, 3, 1)))
        context, answers = self._example(n, *((30, 3) if self._is_long else (6, 1)))
        example = self._template.format(context=shown) + self._prefix + " " + numbered(right)
        prompt = f"{example}\n{self._template.format(context=context)}"
        return Drawn(prompt, self._prefix, answers, after_context(self._template))


def numbered(words: Sequence[str]) -> str:
    """Return ``"1. word 2. word"``."""
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


def invented_words(n: int) -> list[str]:
    """Return ``n`` different words that can be spoken."""
    random, found = Random(0), dict[str, None]()
    while len(found) < n:
        syllables = (random.choice("bdfgklmnprstvz") + random.choice("aeiou") for _ in range(random.randint(2, 4)))
        found["".join(syllables) + random.choice("lmnrst")] = None
    return list(found)


class Frequent:
    """Draw texts of coded words whose frequencies fall with the square of the rank."""

    def __init__(self, prompts: dict[str, Any], seed: int, room: int) -> None:
        self._template, self._prefix, self._seed = prompts["template"], prompts["answer_prefix"], seed
        self._random, self._room = Random(seed), room
        self._n_coded = room // 50
        self._step = room // 32
        if self._n_coded < 4:
            raise ValueError("the length is too short for this task: it needs more than 250 tokens")

    def _coded_words(self) -> list[str]:
        words = [self._word() for _ in range(self._n_coded)]
        while len(set(words)) < self._n_coded:
            words.append(self._word())
        words = sorted(set(words))
        Random(self._seed).shuffle(words)
        words[0] = "..."
        return words

    def _word(self) -> str:
        return "".join(self._random.choices(string.ascii_lowercase, k=WORD_LENGTH))

    def _text(self, words: list[str], n: int) -> Drawn:
        ranks = np.arange(1, len(words) + 1)
        counts = (n * (ranks**-2.0) / ZETA_2).astype(int)
        text = [word for word, count in zip(words, counts, strict=True) for _ in range(count)]
        Random(self._seed).shuffle(text)
        prompt = self._template.format(context=" ".join(text))
        return Drawn(prompt, self._prefix, words[1:4], after_context(self._template))

    def n_words(self, size: Callable[[Drawn], int]) -> int:
        """Return how many words a prompt holds."""
        words, n = self._coded_words(), self._room // WORD_LENGTH
        while size(self._text(words, n)) < self._room:
            n += self._step
        return n - self._step

    def draw(self, n: int, size: Callable[[Drawn], int]) -> Drawn:
        """Return a prompt with ``n`` words, or fewer where they are longer than others."""
        words = self._coded_words()
        while size(drawn := self._text(words, n)) > self._room:
            n -= self._step
            if n <= 0:
                raise ValueError("the length is too short for this task")
        return drawn


# ---- needles ----

NEEDLE = "One of the special magic {type_needle_v} for {key} is: {value}."
DEPTHS = [int(depth) for depth in np.round(np.linspace(0, 100, 40))]


@dataclass(frozen=True)
class Kind:
    """The needles and the haystack of a variant, with RULER's names of the options."""

    type_haystack: str = "essay"
    type_needle_k: str = "words"
    type_needle_v: str = "numbers"
    num_needle_k: int = 1
    num_needle_v: int = 1
    num_needle_q: int = 1

    @property
    def n_keys(self) -> int:
        """As many keys as are asked for, at least."""
        return max(self.num_needle_k, self.num_needle_q)


KINDS = {
    "niah_single_1": Kind("noise"),
    "niah_single_2": Kind("essay"),
    "niah_single_3": Kind("essay", type_needle_v="uuids"),
    "niah_multikey_1": Kind("essay", num_needle_k=4),
    "niah_multikey_2": Kind("needle"),
    "niah_multikey_3": Kind("needle", type_needle_k="uuids", type_needle_v="uuids"),
    "niah_multivalue": Kind("essay", num_needle_v=4),
    "niah_multiquery": Kind("essay", num_needle_q=4),
}


class Niah:
    """Draw prompts of one variant; ``essay`` is the haystack of those that want one."""

    def __init__(self, kind: Kind, prompts: dict[str, Any], seed: int, essay: str) -> None:
        self._kind, self._seed, self._random = kind, seed, Random(seed)
        self._template, self._prefix = prompts["template"], prompts["answer_prefix"]
        self._essay = re.sub(r"\s+", " ", essay).split(" ") if kind.type_haystack == "essay" else []
        wanted = {kind.type_needle_k, kind.type_needle_v}
        self._words = adjective_nouns() if "words" in wanted else None

    def steps(self, length: int) -> tuple[int, int]:
        """Return by how many units of haystack a prompt shrinks, and with how many the search begins."""
        is_long = length >= 4096
        if self._kind.type_haystack == "essay":
            return (500, 500) if is_long else (20, 100)  # RULER: always 500, which leaves no short prompts
        return (25, 25) if is_long else (5, 5)

    def _value(self, kind: str) -> str:
        if kind == "numbers":
            return str(self._random.randint(10**6, 10**7 - 1))
        if kind == "uuids":
            return str(uuid.UUID(int=self._random.getrandbits(128), version=4))
        assert self._words is not None
        return self._random.choice(self._words)

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(type_needle_v=self._kind.type_needle_v, key=key, value=value)

    def __call__(self, n: int) -> Drawn:
        """Return a prompt with ``n`` units of haystack."""
        kind = self._kind
        values: dict[str, list[str]] = {}
        keys, needles = [], []
        for _ in range(kind.n_keys):
            keys.append(self._value(kind.type_needle_k))
            values[keys[-1]] = [self._value(kind.type_needle_v) for _ in range(kind.num_needle_v)]
            needles += [self._needle(keys[-1], value) for value in values[keys[-1]]]
        Random(self._seed).shuffle(needles)
        context = self._in_essay(needles, n) if self._essay else self._in_lines(needles, n)
        asked = [keys[i] for i in self._random.sample(range(kind.n_keys), kind.num_needle_q)]
        answers = [value for key in asked for value in values[key]]
        query = ", ".join(asked[:-1]) + ", and " + asked[-1] if len(asked) > 1 else asked[0]
        filled = [self._fill(t, context, query) for t in (self._template, self._prefix, after_context(self._template))]
        prompt, prefix, question = filled
        return Drawn(prompt, prefix, answers, question)

    def _in_essay(self, needles: list[str], n: int) -> str:
        words = self._essay * -(-n // len(self._essay))
        parts = sentences(" ".join(words[:n]))
        places = sorted(int(len(parts) * (depth / 100)) for depth in self._random.sample(DEPTHS, len(needles)))
        pieces, start = [], 0
        for place, needle in zip(places, needles, strict=True):
            pieces += [" ".join(parts[start:place]), needle]
            start = place
        return " ".join([*pieces, " ".join(parts[start:])])

    def _in_lines(self, needles: list[str], n: int) -> str:
        kind = self._kind
        if kind.type_haystack == "noise":
            lines = [GARBAGE] * n
        else:
            lines = [self._needle(self._value(kind.type_needle_k), self._value(kind.type_needle_v)) for _ in range(n)]
        places = sorted(self._random.sample(range(n), len(needles)), reverse=True)
        for place, needle in zip(places, needles, strict=True):
            lines.insert(place, needle)
        return "\n".join(lines)

    def _fill(self, template: str, context: str, query: str) -> str:
        what = self._kind.type_needle_v
        if self._kind.num_needle_q * self._kind.num_needle_v == 1:
            what = what[:-1]
            for plural, singular in (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer")):
                template = template.replace(plural, singular)
        return template.format(type_needle_v=what, context=context, query=query)


# ---- variables that are tracked ----

N_HOPS = 4
EXAMPLE_LENGTH, EXAMPLE_STEP = 500, 5
EXAMPLE_VALUE = "12345"


class Tracking:
    """Draw prompts; ``example`` is a solved prompt, made once, which every prompt shows with other names."""

    def __init__(self, prompts: dict[str, Any], seed: int) -> None:
        self._template, self._prefix = prompts["template"], prompts["answer_prefix"]
        self._random, self._state = Random(seed), np.random.RandomState(seed)
        self.example = ""

    def step(self, length: int) -> int:
        """Return by how many lines of haystack a prompt shrinks."""
        return 10 if length >= 4096 else 5

    def solve(self, drawn: Drawn) -> None:
        """Take a prompt as the example."""
        self.example = f"{drawn.text} {' '.join(drawn.answers)}\n"

    def _names(self, length: int) -> list[str]:
        def draw() -> str:
            return "".join(self._random.choices(string.ascii_uppercase, k=length))

        names = [draw() for _ in range(N_HOPS + 1)]
        while len(set(names)) < N_HOPS + 1:
            names.append(draw())
        return list(dict.fromkeys(names))

    def _number(self) -> str:
        return str(self._state.randint(10000, 99999))

    def __call__(self, n: int) -> Drawn:
        """Return a prompt with ``n`` lines of haystack, without the example."""
        names = self._names(5 if self.example else 3)
        value = self._number() if self.example else EXAMPLE_VALUE
        chain = [f"VAR {names[0]} = {value}"]
        chain += [f"VAR {new} = VAR {old} " for old, new in pairwise(names)]
        lines = [GARBAGE] * n
        for i, place in enumerate(sorted(self._random.sample(range(n), len(chain)))):
            lines.insert(place + i, chain[i])
        context = "\n".join(lines).replace(". \n", ".\n")
        fields = {"context": context, "query": value, "num_v": N_HOPS + 1}
        filled = [t.format(**fields) for t in (self._template, self._prefix, after_context(self._template))]
        prompt, prefix, question = filled
        return Drawn(prompt, prefix, names, question)

    def shown(self, n: int) -> Drawn:
        """Return a prompt after the example, which has other random names and another value."""
        drawn, example = self(n), self.example
        for name in example.split()[-N_HOPS - 1 :]:
            example = example.replace(name, "".join(self._random.choices(string.ascii_uppercase, k=len(name))))
        return replace(drawn, prompt=example.replace(EXAMPLE_VALUE, self._number()) + "\n" + drawn.prompt)


# ---- questions on documents ----

N_PUBLISHED = {"qa_1": 5928, "qa_2": 7405}  # questions in RULER's own files: of SQuAD 2.0 dev, of HotpotQA dev


@dataclass(frozen=True)
class Asked:
    """A question, its answers, the documents that hold them, and others about the same."""

    query: str
    answers: list[str]
    documents: list[int]
    related: list[int]


def read_squad(data: Any, file: str) -> tuple[list[Asked], list[str]]:
    """Return the questions and the documents of SQuAD's JSON; unanswerable ones are left out."""
    articles = check_fields(data, {"data": list}, file)["data"]
    for i, article in enumerate(articles, 1):
        for paragraph in check_fields(article, {"paragraphs": list}, f"{file}, article {i}")["paragraphs"]:
            for qa in check_fields(paragraph, {"context": str, "qas": list}, f"{file}, article {i}")["qas"]:
                check_fields(qa, {"question": str, "answers": list}, f"{file}, article {i}, a question")
    documents = sorted({p["context"] for d in articles for p in d["paragraphs"]})
    number = {text: i for i, text in enumerate(documents)}
    asked = []
    for article in articles:
        all_here = [number[p["context"]] for p in article["paragraphs"]]
        for paragraph in article["paragraphs"]:
            own = number[paragraph["context"]]
            others = [i for i in all_here if i != own]
            possible = (qa for qa in paragraph["qas"] if not qa.get("is_impossible"))
            asked += [Asked(qa["question"], [a["text"] for a in qa["answers"]], [own], others) for qa in possible]
    return asked, documents


def read_hotpotqa(data: Any, file: str) -> tuple[list[Asked], list[str]]:
    """Return the questions and the documents of HotpotQA's JSON, in its own form or in that of the QuALITY demo."""
    if not isinstance(data, list):
        raise ValueError(f"{file} is not a list of questions")
    items = [(_contexts(item, f"{file}, item {i}"), item) for i, item in enumerate(data, 1)]
    texts = [[f"{title}\n{''.join(lines)}" for title, lines in contexts] for contexts, _ in items]
    documents = sorted({text for one in texts for text in one})
    number = {text: i for i, text in enumerate(documents)}
    pairs = zip(texts, items, strict=True)
    return [
        Asked(item["question"], [item["answer"]], [number[t] for t in one], []) for one, (_, item) in pairs
    ], documents


def _contexts(item: Any, where: str) -> list[Any]:
    """Return titles and sentences of an item: of "context", or of "title_a", "para_a", ... and "distractors"."""
    check_fields(item, {"question": str, "answer": str}, where)
    if "title_a" in item:
        pairs = dict.fromkeys(("title_a", "title_b"), str) | dict.fromkeys(("para_a", "para_b", "distractors"), list)
        check_fields(item, pairs, where)
        pair = [(item["title_a"], item["para_a"]), (item["title_b"], item["para_b"])]
        return [*pair, *(distractor[:2] for distractor in item["distractors"])]  # the third is a score
    found: list[Any] = check_fields(item, {"context": list}, where)["context"]
    return found


READERS = {"qa_1": read_squad, "qa_2": read_hotpotqa}


class DocumentQuestions:
    """Draw prompts: question number ``index`` among ``n`` documents."""

    def __init__(self, name: str, prompts: dict[str, Any], seed: int, data: str | None) -> None:
        what = "SQuAD" if name == "qa_1" else "HotpotQA"
        if data is None:
            raise ValueError(f"{name} needs the questions of {what}: --data FILE, its JSON file")
        self._asked, self._documents = READERS[name](read_json(data, f"--data is a JSON file of {what}"), data)
        self.exact = len(self._asked) == N_PUBLISHED[name]
        self._template, self._prefix, self._seed = prompts["template"], prompts["answer_prefix"], seed
        self._random = Random(seed)

    def __len__(self) -> int:
        return len(self._asked)

    def draw(self, index: int, n: int) -> Drawn:
        """Return a prompt; the documents are repeated when there are fewer than ``n``."""
        asked = self._asked[index]
        chosen = [self._documents[i] for i in self._choose(asked, n)] if n < len(self._documents) else self._repeated(n)
        Random(self._seed).shuffle(chosen)
        context = "\n\n".join(f"Document {i}:\n{text}" for i, text in enumerate(chosen, 1))
        question = after_context(self._template).format(query=asked.query)
        prompt = self._template.format(context=context, query=asked.query)
        return Drawn(prompt, self._prefix, asked.answers, question)

    def _choose(self, asked: Asked, n: int) -> list[int]:
        n_more = n - len(asked.documents)
        if n_more <= len(asked.related):
            return asked.documents + self._random.sample(asked.related, max(0, n_more))
        near = {*asked.documents, *asked.related}
        far = [i for i in range(len(self._documents)) if i not in near]
        n_far = max(0, n_more - len(asked.related))
        return asked.documents + asked.related + self._random.sample(far, n_far)

    def _repeated(self, n: int) -> list[str]:
        return (self._documents * -(-n // len(self._documents)))[:n]


# ---- the task ----

FAMILIES = {
    **dict.fromkeys(KINDS, "niah"),
    "vt": "variable_tracking",
    "cwe": "common_words_extraction",
    "fwe": "freq_words_extraction",
    **dict.fromkeys(READERS, "qa"),
}
NAMES = tuple(FAMILIES)
ESSAY_CHARACTERS = 650_000  # about what RULER's essays have
CWE_PROBE = 4096
STEP = 10  # words, or documents, by which a prompt shrinks


@dataclass(frozen=True)
class Ruler(Question):
    """One of RULER's tasks.

    Attributes
    ----------
    name : str
        One of ``NAMES``.
    tests : int
        Samples; RULER takes 500 and the seed 42.
    data : str or None
        The task's data: essays (text, a folder of texts or RULER's PaulGrahamEssays.json), SQuAD's or HotpotQA's JSON
        for qa_1 and qa_2, english_words.json for cwe.
    """

    headline: ClassVar[str] = "string_match"
    name: str = "niah_single_1"
    tests: int = 500
    data: str | None = None

    def __post_init__(self) -> None:
        if self.name not in FAMILIES:
            raise ValueError(f"RULER has no task {self.name!r}; available: {', '.join(NAMES)}")

    def samples(self, vocabulary: Vocabulary, length: int, seed: int) -> list[Sample]:
        """Return the samples; the tokens of the answer are part of the length."""
        prompts = published("ruler")[FAMILIES[self.name]]
        sizes = _Sizes(vocabulary, length, prompts["tokens_to_generate"])
        try:
            drawn, exact = self._draw(prompts, sizes, seed)
            found = list(drawn)
        except ValueError as reason:
            raise ValueError(f"{self.name}, length {length}: {reason}") from None
        label = "RULER" if exact() else "RULER-compatible"
        return [self._sample(i, d, length, seed, prompts["tokens_to_generate"], label) for i, d in enumerate(found)]

    def _sample(self, index: int, drawn: Drawn, length: int, seed: int, n: int, label: str) -> Sample:
        facts, shared = {"label": label, "index": index}, len(drawn.prompt) - len(drawn.question)
        name, answers = f"{length}-{seed}-{index}", tuple(drawn.answers)
        return Sample(name, drawn.prompt, drawn.prefix, answers, n, facts=facts, shared=shared)

    def _draw(self, prompts: dict[str, Any], sizes: _Sizes, seed: int) -> tuple[Iterable[Drawn], Callable[[], bool]]:
        """Return the prompts, and what tells afterwards whether they are RULER's own."""
        if self.name in KINDS:
            niah = Niah(KINDS[self.name], prompts, seed, self._essay(seed))
            step, probe = niah.steps(sizes.length)
            return sizes.fitted(niah, step, self.tests, probe=probe), lambda: not self._wants_essay
        if self.name == "vt":
            return self._tracked(Tracking(prompts, seed), sizes), lambda: True
        if self.name == "cwe":
            common = Common(prompts, seed, sizes.length, self.data)
            return self._common(common, sizes), lambda: common.exact
        if self.name == "fwe":
            frequent = Frequent(prompts, seed, sizes.room)
            n_words = frequent.n_words(sizes.of)
            return (frequent.draw(n_words, sizes.of) for _ in range(self.tests)), lambda: True
        documents = DocumentQuestions(self.name, prompts, seed, self.data)
        return self._among_documents(documents, sizes), lambda: documents.exact

    @property
    def _wants_essay(self) -> bool:
        return self.name in KINDS and KINDS[self.name].type_haystack == "essay"

    def _essay(self, seed: int) -> str:
        if not self._wants_essay:
            return ""
        if self.data is not None and self.data.endswith(".json"):
            essays = read_json(self.data, "--data is a text, a folder of texts, or RULER's PaulGrahamEssays.json")
            return str(check_fields(essays, {"text": str}, self.data)["text"])
        return load_text(self.data or SYNTHETIC, ESSAY_CHARACTERS if self.data is None else 1, seed)

    def _tracked(self, tracking: Tracking, sizes: _Sizes) -> Iterator[Drawn]:
        short = _Sizes(sizes.vocabulary, EXAMPLE_LENGTH, 0)
        tracking.solve(next(iter(short.fitted(tracking, EXAMPLE_STEP, 1))))
        n_example = len(sizes.vocabulary.tokenize(tracking.example))
        yield from sizes.fitted(tracking, tracking.step(sizes.length), self.tests, n_example, tracking.shown)

    def _common(self, common: Common, sizes: _Sizes) -> Iterator[Drawn]:
        per_word = sizes.of(common(CWE_PROBE)) / CWE_PROBE
        highest = max(int(sizes.most // per_word) * 2, 2 * STEP)
        n = largest_size(lambda n: sizes.of(common(n)), STEP, highest, sizes.room)
        yield from draw_all(common, sizes.fits, n, STEP, self.tests)

    def _among_documents(self, documents: DocumentQuestions, sizes: _Sizes) -> Iterator[Drawn]:
        if self.tests > len(documents):
            raise ValueError(f"--data has {len(documents)} questions, not {self.tests}")
        n = sizes.units(partial(documents.draw, 0), STEP)
        for index in range(self.tests):
            yield from draw_all(partial(documents.draw, index), sizes.fits, n, STEP, 1)

    def scores(self, sample: Sample, answer: Answer) -> dict[str, float]:
        """Return the score of RULER: the share of the answers found, or for questions whether one is."""
        match = string_match_part if FAMILIES[self.name] == "qa" else string_match_all
        return {"string_match": round(match(answer.text, sample.answers), 4)}


class _Sizes:
    """The lengths of prompts, in tokens."""

    def __init__(self, vocabulary: Vocabulary, length: int, n_answer: int) -> None:
        self.vocabulary, self.length = vocabulary, length
        self.most = length - vocabulary.overhead
        self.room = self.most - n_answer

    def of(self, drawn: Drawn) -> int:
        """Return the tokens of a prompt without BOS and chat template."""
        return len(self.vocabulary.tokenize(drawn.text))

    def fits(self, drawn: Drawn) -> bool:
        """Return whether a prompt leaves room for the answer."""
        return self.of(drawn) <= self.room

    def units(self, draw: Draw, step: int, n_shown: int = 0, probe: int = 0) -> int:
        """Return how many units of haystack to begin with; ``n_shown`` tokens stand before."""
        probe = probe or step
        per_unit = self.of(draw(probe)) / probe
        highest = max(int(self.most / per_unit * 3), 2 * step)
        return largest_size(lambda n: self.of(draw(n)), step, highest, self.room - n_shown)

    def fitted(
        self, draw: Draw, step: int, n: int, n_shown: int = 0, last: Draw | None = None, probe: int = 0
    ) -> Iterator[Drawn]:
        """Yield ``n`` prompts of the largest size; ``last`` draws them, where the search does it another way."""
        n_units = self.units(draw, step, n_shown, probe)
        yield from draw_all(last or draw, self.fits, n_units, step, n)


__all__ = ["NAMES", "Ruler"]
