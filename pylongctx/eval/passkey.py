"""Pass-key retrieval: a number hidden in a haystack, asked for at the end, in the styles of papers and llama.cpp.

``fill``: prompts that fill a length to the token. ``landmark``: those of Landmark Attention, arXiv 2305.16300, as
LongHeads, arXiv 2402.10685, uses them (its table 6), to the byte, measured in characters. ``selfextend``: whole lines,
as in SelfExtend's example; its figure 6 asks for 5 to 100 digits. ``llama.cpp``: those of its passkey example.

A prompt has five parts. They are joined by newlines in Landmark Attention and by spaces in llama.cpp's example, which
the embedded model was trained on; ``fill`` offers both.
"""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np

from pylongctx.eval.fitting import Tokenize, largest_fit, token_span
from pylongctx.eval.haystack import SENTENCES, Haystack, load_haystack
from pylongctx.eval.task import Answer, Question, Record, Sample, Vocabulary
from pylongctx.llama import Llama

INTRO = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
SEPARATORS = {"space": " ", "newline": "\n"}
GARBAGE = SENTENCES.strip()
ASKED, PREFIX = "What is the pass key?", " The pass key is"
QUESTION = ASKED + PREFIX
STYLES = ("fill", "landmark", "selfextend", "llama.cpp")
LARGEST_KEY = 50000  # of landmark and llama.cpp, when no number of digits is asked for
N_PREDICT = 16  # llama.cpp's


def needle_text(key: int | str) -> str:
    """Return the sentences that hold the key.

    Examples
    --------
    >>> needle_text(123)
    'The pass key is 123. Remember it. 123 is the pass key.'
    """
    return f"The pass key is {key}. Remember it. {key} is the pass key."


# ---- prompts of the style fill, by themselves ----


@dataclass(frozen=True)
class Prompt:
    """One question.

    Attributes
    ----------
    tokens : list of int
        The prompt.
    answer : list of int
        The tokens that a strict match asks for; both together are at most ``length`` tokens.
    depth : float
        Where the key is hidden, 0 to 1.
    needle : tuple of int
        Start and stop of the tokens that hold the sentences with the key; a token across a border counts.
    """

    length: int
    trial: int
    seed: int
    haystack: str
    separator: str
    key: int
    depth: float
    tokens: list[int]
    answer: list[int]
    needle: tuple[int, int]


def make_prompt(
    tokenize: Tokenize,
    haystack: Haystack,
    length: int,
    trial: int,
    seed: int,
    separator: str = "space",
    n_digits: int | None = None,
    depth: float | None = None,
) -> Prompt:
    """Build the longest prompt that, with its answer, has at most ``length`` tokens.

    Key and depth follow from (seed, length, trial) alone, so every method gets the same prompts.

    Parameters
    ----------
    tokenize : callable
        From UTF-8 bytes to token ids, the BOS token included where the model wants one.
    separator : str
        What joins the parts, "space" or "newline".
    n_digits : int or None
        Digits of the key; None: 5.
    depth : float or None
        Where the key is hidden, 0 to 1; None: drawn.

    Raises
    ------
    ValueError
        When the parts without haystack are longer than ``length``.

    Examples
    --------
    >>> prompt = make_prompt(llm.tokenize, load_haystack("sentences"), 300, trial=0, seed=0, depth=0.5)
    >>> len(prompt.tokens) + len(prompt.answer) <= 300
    True
    """
    random = Random(f"{seed}-{length}-{trial}")
    lowest = 10 ** ((n_digits or 5) - 1)
    key, drawn, start = random.randint(lowest, 10 * lowest - 1), random.random(), random.random()
    depth = drawn if depth is None else depth

    needle = needle_text(key)

    def parts(n: int) -> list[str]:
        before, after = haystack.cut(n, depth, start)
        return [INTRO, before, needle, after, QUESTION]

    def build(n: int) -> tuple[list[int], list[int]]:
        return _tokens(tokenize, SEPARATORS[separator].join(parts(n)), f" {key}")

    def fits(n: int) -> bool:
        return sum(map(len, build(n))) <= length

    if not fits(0):
        raise ValueError(
            f"length {length} is too short: the prompt without haystack has {sum(map(len, build(0)))} tokens"
        )
    n = largest_fit(fits, 4 * length)
    tokens, answer = build(n)
    span = token_span(tokenize, tokens, SEPARATORS[separator].join([*parts(n)[:2], ""]), needle)
    return Prompt(length, trial, seed, haystack.name, separator, key, depth, tokens, answer, span)


def _tokens(tokenize: Tokenize, text: str, answer: str) -> tuple[list[int], list[int]]:
    prompt, whole = tokenize(text.encode()), tokenize((text + answer).encode())
    if whole[: len(prompt)] == prompt:
        return prompt, whole[len(prompt) :]
    # The tokenizer joins the answer's beginning with the prompt's end: take what both have in common.
    n = next(i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b)
    return whole[:n], whole[n:]


@dataclass(frozen=True)
class Trial:
    """One answer, as a JSON line holds it.

    Attributes
    ----------
    method : str
        Spec string with every automatic choice filled in.
    strict : bool
        Whether all answer tokens are right.
    regex : bool
        Whether the first number in the answer is the key.
    seconds : float
        Prompt and answer together.
    """

    model: str
    method: str
    length: int
    n_tokens: int
    haystack: str
    separator: str
    seed: int
    trial: int
    depth: float
    key: int
    answer: str
    strict: bool
    regex: bool
    seconds: float


def run_trial(llm: Llama, prompt: Prompt) -> Trial:
    """Answer one prompt greedily, from an empty cache.

    Examples
    --------
    >>> prompt = make_prompt(llm.tokenize, load_haystack("sentences"), 1024, trial=0, seed=0)
    >>> run_trial(llm, prompt).strict
    True
    """
    start = time.perf_counter()
    llm.reset()
    output = list(islice(llm.generate(prompt.tokens, temp=0.0), len(prompt.answer)))
    seconds = time.perf_counter() - start
    text = llm.detokenize(output).decode("utf-8", "ignore")
    number = re.search(r"\d+", text)
    asked = {name: getattr(prompt, name) for name in ("length", "haystack", "separator", "seed", "trial", "key")}
    return Trial(
        **asked,
        model=Path(llm.model_path).name,
        method=str(llm.method or ""),
        n_tokens=len(prompt.tokens) + len(prompt.answer),
        depth=round(prompt.depth, 4),
        answer=text,
        strict=output == prompt.answer,
        regex=number is not None and number.group() == str(prompt.key),
        seconds=round(seconds, 4),
    )


# ---- the task ----


@dataclass(frozen=True)
class Passkey(Question):
    """Find a number that is hidden in repeated sentences.

    Attributes
    ----------
    digits : int or None
        Digits of the key. None: as the style has it.
    depths : tuple of float
        Depths of the key, 0 to 1, which the trials take in turns. Empty: random; ``landmark`` has random ones only.
    haystack, separator : str
        Of the style ``fill``, see ``load_haystack`` and ``SEPARATORS``.
    junk, position : int or None
        How many times the sentences are repeated, and before which the key is hidden, in the styles of whole lines.
        None: as often as the length allows; by depth.

    Examples
    --------
    >>> task = Passkey("landmark", tests=3, digits=8)
    >>> task.name, task.headline
    ('passkey-8-digits', 'strict')
    """

    headline: ClassVar[str] = "strict"
    style: str = "fill"
    tests: int = 20
    digits: int | None = None
    depths: tuple[float, ...] = ()
    haystack: str = "sentences"
    separator: str = "space"
    junk: int | None = None
    position: int | None = None

    def __post_init__(self) -> None:
        if self.style not in STYLES:
            raise ValueError(f"unknown style {self.style!r}; available: {', '.join(STYLES)}")
        if self.digits is not None and self.digits < 1:
            raise ValueError(f"digits must be at least 1, not {self.digits}")
        if self.style == "landmark" and self.depths:
            raise ValueError("the style landmark draws its depths itself; choose another style, or no depths")

    @property
    def name(self) -> str:
        """The task, and the digits that are asked for."""
        return "passkey" if self.digits is None else f"passkey-{self.digits}-digits"

    def samples(self, vocabulary: Vocabulary, length: int, seed: int) -> list[Sample]:
        """Return one sample per trial."""
        if self.style == "fill" and vocabulary.overhead != len(vocabulary.bos):
            raise ValueError("the style fill counts tokens without a chat template; choose another style, or no --chat")
        make = {"fill": self._fill, "landmark": self._landmark}.get(self.style, self._lines)
        return [make(vocabulary, length, seed, trial) for trial in range(self.tests)]

    def scores(self, sample: Sample, answer: Answer) -> dict[str, float]:
        """Return ``strict``: the answer begins with the key, and ``regex``: its first number is the key."""
        begin, first = re.match(r" ?(\d+)", answer.text), re.search(r"(\d+)", answer.text)
        return {name: bool(m and m[1] in sample.answers) for name, m in (("strict", begin), ("regex", first))}

    def cell_text(self, records: Sequence[Record]) -> str:
        """Return the share of keys that were found."""
        return f"{100 * self.summary(records)['strict']:.0f} %"

    def n_ctx(self, vocabulary: Vocabulary, samples: Sequence[Sample], length: int) -> int:
        """Return the length, or more where a style does not count tokens."""
        if self.style == "fill":
            return length
        return max([length, *(len(vocabulary.tokens(sample)) + sample.max_tokens for sample in samples)])

    def _depth(self, random: Random, trial: int) -> float:
        drawn = random.random()
        return self.depths[trial % len(self.depths)] if self.depths else drawn

    def _sample(self, key: str, depth: float, where: tuple[int, int, int], needle: Any, **fields: Any) -> Sample:
        length, seed, trial = where
        facts = {"style": self.style, "trial": trial, "depth": round(depth, 4), "key": int(key), "needle": list(needle)}
        name = f"{self.style}-{length}-{seed}-{trial}"
        return Sample(name, answers=(key,), facts=facts | fields.pop("facts", {}), **fields)

    def _fill(self, vocabulary: Vocabulary, length: int, seed: int, trial: int) -> Sample:
        def tokenize(text: bytes) -> list[int]:
            return [*vocabulary.bos, *vocabulary.tokenize(text.decode())]

        depth = self.depths[trial % len(self.depths)] if self.depths else None
        haystack = load_haystack(self.haystack)
        prompt = make_prompt(tokenize, haystack, length, trial, seed, self.separator, self.digits, depth)
        return self._sample(
            str(prompt.key),
            prompt.depth,
            (length, seed, trial),
            prompt.needle,
            prompt=np.array(prompt.tokens, np.int32),
            max_tokens=len(prompt.answer),
            facts={"haystack": prompt.haystack, "separator": prompt.separator},
        )

    def _landmark(self, vocabulary: Vocabulary, length: int, seed: int, trial: int) -> Sample:
        n_characters = landmark_characters(length)
        if n_characters < 1:
            raise ValueError(f"length {length} is too short: the style landmark counts in 273 tokens")
        state = np.random.RandomState(seed + trial + n_characters)
        n_before = int(state.randint(0, n_characters))
        key = int(state.randint(1, LARGEST_KEY))
        text = str(key) if self.digits is None else _digits(self.digits, lambda a, b: int(state.randint(a, b)))
        garbage = " ".join([GARBAGE] * (n_characters // len(GARBAGE) + 1))
        parts = [INTRO, garbage[:n_before], needle_text(text), garbage[: n_characters - n_before], ASKED]
        prompt = "\n".join(parts)
        needle = _span(vocabulary, prompt, "\n".join([*parts[:2], ""]), parts[2])
        n_answer = len(vocabulary.tokenize(f"{QUESTION} {text}")) - len(vocabulary.tokenize(QUESTION))
        fields = {"prompt": prompt, "prefix": PREFIX, "max_tokens": n_answer, "shared": len(prompt) - len(ASKED)}
        return self._sample(text, n_before / n_characters, (length, seed, trial), needle, **fields)

    def _lines(self, vocabulary: Vocabulary, length: int, seed: int, trial: int) -> Sample:
        random = Random(f"{seed}-{length}-{trial}")
        depth = self._depth(random, trial)
        common = self.style == "llama.cpp" and self.digits is None
        key = str(random.randint(1, LARGEST_KEY)) if common else _digits(self.digits or 5, random.randrange)
        spaced = self.style == "llama.cpp"
        prefix, max_tokens = (PREFIX, N_PREDICT) if spaced else (PREFIX + " ", len(key))

        def text(n: int) -> tuple[str, str]:
            at = int(depth * n) if self.position is None else min(self.position, n)
            intro = INTRO if spaced else INTRO.replace("memorize them", "memorize it")
            between = " " if spaced else "\n"
            before = between.join([intro, *[GARBAGE] * at, ""])
            return before, between.join([before + needle_text(key), *[GARBAGE] * (n - at), ASKED])

        def size(n: int) -> int:
            return len(vocabulary.tokens(Sample("", text(n)[1], prefix))) + max_tokens

        n = self.junk
        if n is None:
            if size(1) > length:
                raise ValueError(f"length {length} is too short: one line of haystack makes {size(1)} tokens")
            n = largest_fit(lambda n: size(n) <= length, length // 16)
        before, prompt = text(n)
        needle = _span(vocabulary, prompt, before, needle_text(key))
        fields = {"prompt": prompt, "prefix": prefix, "max_tokens": max_tokens, "shared": len(prompt) - len(ASKED)}
        return self._sample(key, depth, (length, seed, trial), needle, **fields)


def landmark_characters(length: int) -> int:
    """Return the characters of LongHeads' haystack for a length in tokens.

    Examples
    --------
    >>> landmark_characters(4096)
    15360
    """
    return int(3.75 * (length / 1024) * 1024 // 1024 * 1024)


def _digits(n: int, draw: Callable[[int, int], int]) -> str:
    """Return a number of ``n`` digits; ``draw(a, b)`` returns a random integer from a to b - 1."""
    return str(draw(1, 10)) + "".join(str(draw(0, 10)) for _ in range(n - 1))


def _span(vocabulary: Vocabulary, prompt: str, before: str, needle: str) -> tuple[int, int]:
    """Return start and stop of the tokens of the needle, BOS counted, a chat template not."""
    tokens, n_bos = vocabulary.tokenize(prompt), len(vocabulary.bos)
    start, stop = token_span(lambda text: vocabulary.tokenize(text.decode()), tokens, before, needle)
    return start + n_bos, stop + n_bos
