"""Pass-key retrieval: five digits hidden in a haystack, asked for at the end.

The prompt of Landmark Attention, arXiv 2305.16300, as LongHeads, arXiv 2402.10685, uses it: five parts, the haystack
cut by characters. They are joined by newlines there and by spaces in llama.cpp's passkey example, which the embedded
model was trained on; both are offered. Lengths are in tokens here, the tokens of the answer included.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

from pylongctx.engine.session import longest_prefix
from pylongctx.llama import Llama

INTRO = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
SENTENCES = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
SEPARATORS = {"space": " ", "newline": "\n"}
QUESTION = "What is the pass key? The pass key is"

Tokenize = Callable[[bytes], list[int]]


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
        Whether the text after the key goes on where the text before it ended, as a book does; else it begins anew,
        and every prompt begins at the same place.

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
    """Return the haystack "sentences", or one made of a UTF-8 text file.

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
    text = Path(name).read_text(encoding="utf-8").strip()
    if not text:
        raise ValueError(f"haystack {name!r} is empty")
    return Haystack(Path(name).name, text + "\n", continues=True)


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

    Examples
    --------
    >>> prompt = make_prompt(llm.tokenize, load_haystack("sentences"), 300, trial=0, seed=0)
    >>> llm.detokenize(prompt.answer).decode().strip() == str(prompt.key)
    True
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

    needle = f"The pass key is {key}. Remember it. {key} is the pass key."

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


def token_span(tokenize: Tokenize, tokens: list[int], before: str, needle: str) -> tuple[int, int]:
    """Return start and stop of the tokens that hold ``needle``, which follows ``before``.

    Examples
    --------
    >>> whole = llm.tokenize(b"It rained. The key is 12345.")
    >>> start, stop = token_span(llm.tokenize, whole, "It rained. ", "The key is 12345.")
    >>> llm.detokenize(whole[start:stop]).decode().strip()
    'The key is 12345.'
    """
    until = tokenize((before + needle).encode())
    stop = longest_prefix(tokens, until)
    return longest_prefix(tokens, tokenize(before.encode())), stop + (stop < len(until))


def largest_fit(fits: Callable[[int], bool], guess: int) -> int:
    """Return the largest n that fits, by doubling and bisection; ``fits(0)`` holds.

    Examples
    --------
    >>> largest_fit(lambda n: n * n <= 50, guess=2)
    7
    """
    low, high = 0, guess
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


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

    Examples
    --------
    >>> prompt = make_prompt(llm.tokenize, load_haystack("sentences"), 300, trial=0, seed=0)
    >>> trial = run_trial(llm, prompt)
    >>> trial.strict, trial.key == prompt.key
    (True, True)
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
    return Trial(
        model=Path(llm.model_path).name,
        method=str(llm.method or ""),
        length=prompt.length,
        n_tokens=len(prompt.tokens) + len(prompt.answer),
        haystack=prompt.haystack,
        separator=prompt.separator,
        seed=prompt.seed,
        trial=prompt.trial,
        depth=round(prompt.depth, 4),
        key=prompt.key,
        answer=text,
        strict=output == prompt.answer,
        regex=number is not None and number.group() == str(prompt.key),
        seconds=round(seconds, 4),
    )
