"""Batches to train on: pieces of text, random tokens to be copied, quizzes; which ones follows from seed and step."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray

from tiny.tasks import Quiz, draw_quiz, made_up_text
from tiny.tokenizer import BOS, Tokenizer, load_tokenizer, train_tokenizer

HELD_OUT = 50  # the last one of so many parts of every text, where no other text is held out
N_WORDS = 3000  # that serve as names: the most common ones
N_EXAMPLES = 2000  # quizzes that the tokenizer is trained on, beside the texts
ANSWER_WEIGHT = 8.0
ORDINARY = 3 + 256  # the first token that is neither special nor a byte
Row = tuple[list[int], list[float]]  # tokens, and what the loss of each counts


@dataclass(frozen=True)
class Stage:
    """What is trained on until a share of all steps is done."""

    until: float
    divisor: int  # of the context's length
    batch: int  # divisor of the tokens of a step
    copies: float  # share of the rows
    quizzes: float  # the rest is text


# short rows first, many steps of few tokens: there heads learn to copy, which longer rows then only have to stretch
STAGES = (
    Stage(0.22, divisor=16, batch=4, copies=0.75, quizzes=0.00),
    Stage(0.32, divisor=8, batch=4, copies=0.50, quizzes=0.20),
    Stage(0.42, divisor=4, batch=2, copies=0.25, quizzes=0.40),
    Stage(0.57, divisor=2, batch=1, copies=0.15, quizzes=0.42),
    Stage(0.76, divisor=1, batch=1, copies=0.03, quizzes=0.30),
    Stage(1.00, divisor=1, batch=1, copies=0.05, quizzes=0.60),  # at small steps, for keys that are named once
)


def stage_at(progress: float) -> Stage:
    """Return the stage of a share of all steps, 0 to 1."""
    return next((stage for stage in STAGES if progress < stage.until), STAGES[-1])


@dataclass(frozen=True)
class Corpus:
    """Texts and their tokenizer."""

    texts: list[str]
    held_out: str
    tokenizer: Tokenizer

    @cached_property
    def tokens(self) -> NDArray[np.uint16]:
        """All tokens of the texts, one text after the other."""
        return np.concatenate([np.array(self.tokenizer.encode(text), np.uint16) for text in self.texts])

    @cached_property
    def digest(self) -> str:
        """Tells these tokens from all others."""
        return sha256(self.tokens.tobytes()).hexdigest()

    @cached_property
    def words(self) -> list[str]:
        """What things are named after."""
        return common_words(self.texts)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, BOS first."""
        return [BOS, *self.tokenizer.encode(text)]

    def window(self, random: Random, n: int) -> list[int]:
        """Return ``n`` tokens from anywhere."""
        start = random.randrange(max(1, len(self.tokens) - n))
        return self.tokens[start : start + n].tolist()


def read_texts(path: Path) -> list[str]:
    """Return the texts of a file, or of all ``*.txt`` below a folder.

    Raises
    ------
    ValueError
        When there is no text.
    """
    files = sorted(path.rglob("*.txt")) if path.is_dir() else [path] if path.is_file() else []
    texts = [text for file in files if (text := file.read_text(encoding="utf-8").strip())]
    if not texts:
        raise ValueError(f"{path} is neither a text file nor a folder with .txt files that hold text")
    return texts


def load_corpus(folder: Path, held_out: Path | None, model: Path, n_vocab: int) -> Corpus:
    """Read texts and the tokenizer ``model``, which is trained on them first if it is not there."""
    texts = read_texts(folder)
    if held_out:
        kept = "\n".join(read_texts(held_out))
    else:
        kept = "\n".join(text[-(len(text) // HELD_OUT) :] for text in texts)
        texts = [text[: -(len(text) // HELD_OUT)] for text in texts]
    if not model.exists():
        model.write_bytes(train_tokenizer(_lines(texts), n_vocab))
    return Corpus(texts, kept, load_tokenizer(model))


def common_words(texts: list[str]) -> list[str]:
    """Return common words of lower-case letters."""
    counts = Counter(word for text in texts for word in re.findall(r"\b[a-z]{3,9}\b", text))
    return sorted(word for word, _ in counts.most_common(N_WORDS))


def _lines(texts: list[str]) -> Iterator[str]:
    for text in texts:
        yield from filter(None, text.split("\n"))
    words, random = common_words(texts), Random(0)
    for _ in range(N_EXAMPLES):
        quiz = draw_quiz(random, words, 512)
        yield from filter(None, "\n".join(text for text, _ in _pieces(quiz, [""])).split("\n"))


# ---- rows ----


def draw_row(corpus: Corpus, random: Random, stage: Stage, n: int) -> Row:
    """Return a row of ``n`` tokens and their weights."""
    kind = random.random()
    if kind < stage.copies:
        return copy_row(corpus, random, n)
    if kind < stage.copies + stage.quizzes:
        return quiz_row(corpus, random, draw_quiz(random, corpus.words, n), n)
    return [BOS, *corpus.window(random, n - 1)], [1.0] * n


def copy_row(corpus: Corpus, random: Random, n: int) -> Row:
    """Return random tokens again and again; only what can be known counts."""
    rng = np.random.default_rng(random.getrandbits(64))
    segment = rng.integers(ORDINARY, corpus.tokenizer.get_piece_size(), random.randint(4, n // 2)).tolist()
    tokens = [BOS, *(segment * (n // len(segment) + 1))][:n]
    return tokens, [float(i > len(segment)) for i in range(n)]


def quiz_row(corpus: Corpus, random: Random, quiz: Quiz, n: int, fill: float | None = None) -> Row:
    """Return a quiz in a haystack, and text after it.

    Parameters
    ----------
    fill : float or None
        How much of the room for a haystack is used; None: all of it or a random part.
    """
    fill = random.choice([1.0, random.random()]) if fill is None else fill
    fixed = "".join(text for text, _ in _pieces(quiz, [""]))
    room = int(fill * max(0, n - len(corpus.encode(fixed))))
    tokens, weights = _hide(corpus, random, quiz, room)
    while len(tokens) > n and room:  # a haystack that is cut within words has more tokens
        room = max(0, room - (len(tokens) - n))
        tokens, weights = _hide(corpus, random, quiz, room)
    if len(tokens) < n:
        tokens += corpus.window(random, n - len(tokens))
    return tokens[:n], (weights + [1.0] * n)[:n]


def _hide(corpus: Corpus, random: Random, quiz: Quiz, n: int) -> Row:
    """Return a quiz in a haystack of about ``n`` tokens."""
    hay = _haystack(corpus, random, quiz, n)
    return _weighted(corpus, _pieces(quiz, _cut(random, quiz, hay)))


def _haystack(corpus: Corpus, random: Random, quiz: Quiz, n: int) -> str:
    """Return a text of about ``n`` tokens."""
    if n == 0:
        return ""
    if quiz.lines:
        lines, n_tokens = list[str](), 0
        while n_tokens < n:
            lines.append(quiz.lines())
            n_tokens += len(corpus.tokenizer.encode(lines[-1])) + 1
        return "\n".join(lines[:-1])
    if random.random() < 0.5:
        return corpus.tokenizer.decode(corpus.window(random, n))
    text = made_up_text(random, 4 * n)
    return text[: int(len(text) * n / len(corpus.tokenizer.encode(text)))]


def _cut(random: Random, quiz: Quiz, text: str) -> list[str]:
    """Cut a haystack in random places, one for each needle: half of the time between words, in lists between lines."""
    between = "\n" if quiz.lines else random.choice([" ", ""])
    places = sorted(random.randint(0, len(text)) for _ in quiz.needles)
    if between:
        places = [text.find(between, place) if between in text[place:] else len(text) for place in places]
    return [text[a:b].strip("\n") for a, b in pairwise([0, *places, len(text)])]


def _pieces(quiz: Quiz, hay: list[str]) -> list[tuple[str, bool]]:
    """Return the pieces of a text and whether each is an answer."""
    hay = hay + [""] * (len(quiz.needles) + 1 - len(hay))
    parts = [quiz.intro, hay[0]]
    for needle, after in zip(quiz.needles, hay[1:], strict=True):
        parts += [needle, after]
    pieces = [(quiz.separator.join(filter(None, parts)), False)]
    for question, answer in quiz.questions:
        pieces += [(quiz.separator + question, False), (answer, True)]
    return [*pieces, ("\n", False)]


def _weighted(corpus: Corpus, pieces: list[tuple[str, bool]]) -> Row:
    """Tokenize pieces as one text; answers begin with a space, so no token belongs to two pieces."""
    text, tokens, weights = "", [BOS], [1.0]
    for piece, is_answer in pieces:
        text += piece
        tokens = corpus.encode(text)
        weights += [ANSWER_WEIGHT if is_answer else 1.0] * (len(tokens) - len(weights))
    return tokens, weights


def draw_batch(
    corpus: Corpus, seed: int, step: int, stage: Stage, n_tokens: int, n_ctx: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the rows of a step: tokens and the weights of their losses, [row, length + 1] each."""
    length, random = n_ctx // stage.divisor, Random(f"{seed}-{step}")
    n_rows = max(1, n_tokens // stage.batch // length)
    rows = [draw_row(corpus, random, stage, length + 1) for _ in range(n_rows)]
    return np.array([row[0] for row in rows], np.int64), np.array([row[1] for row in rows], np.float32)
