"""Scorers: numbers from 0 to 1 for a prediction and its answers, as published benchmarks define them.

The definitions are those of RULER (arXiv 2404.06654), LongBench (arXiv 2308.14508), L-Eval (arXiv 2307.11088) and
BABILong (arXiv 2406.10149), odd cases included, so that scores can be compared with published ones. ROUGE, edit ratio
and Chinese words come from the packages of the extra ``eval``.
"""

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

CONTROL = re.compile(r"[\x00-\x1f]")
CHINESE_PUNCTUATION = (
    "\uff01\uff1f\uff61\u3002\uff02\uff03\uff04\uff05\uff06\uff07\uff08\uff09\uff0a\uff0b\uff0c\uff0d\uff0f\uff1a"
    "\uff1b\uff1c\uff1d\uff1e\uff20\uff3b\uff3c\uff3d\uff3e\uff3f\uff40\uff5b\uff5c\uff5d\uff5e\uff5f\uff60\uff62"
    "\uff63\uff64\u3001\u3003\u300b\u300c\u300d\u300e\u300f\u3010\u3011\u3014\u3015\u3016\u3017\u3018\u3019\u301a"
    "\u301b\u301c\u301d\u301e\u301f\u3030\u303e\u303f\u2013\u2014\u2018\u2019\u201b\u201c\u201d\u201e\u201f\u2026"
    "\u2027\ufe4f."
)


def readable(text: str) -> str:
    """Return the text in lower case with line ends for control characters, as RULER has it."""
    return CONTROL.sub("\n", text.strip()).strip().lower()


def chinese_words(jieba: Any, text: str) -> list[str]:
    """Return the words that the package jieba finds."""
    words: Iterable[str] = jieba.cut(text, cut_all=False)
    return list(words)


def bare_words(jieba: Any, text: str) -> list[str]:
    """Return these words in lower case without punctuation and space, as LongBench has it."""
    dropped = frozenset(string.punctuation + CHINESE_PUNCTUATION)
    bare = ("".join(c for c in word.lower() if c not in dropped) for word in chinese_words(jieba, text))
    return [word for word in ("".join(word.split()) for word in bare) if word]


def first_line_of_code(text: str) -> str:
    """Return the first line that is not a comment, as LongBench has it; empty: there is none."""
    lines = (line for line in text.lstrip("\n").split("\n") if not re.search("`|#|//", line))
    return next(lines, "")


def final_digits(text: str) -> str:
    """Return the digits before a point after "The answer is", or of the last number of the first paragraph (L-Eval)."""
    given = re.search(r"The answer is (\S+)", text)
    words = [given.group(1)] if given else reversed(text.split("\n\n")[0].split(" "))
    word = next((word for word in words if re.search(r"\d", word)), "")
    return re.sub(r"\D", "", word.split(".")[0])


# ---- scores ----

ARTICLES = re.compile(r"\b(a|an|the)\b")
CHOICES = "ABCD"


def mean(values: Iterable[float]) -> float:
    """Return the mean, NaN of nothing.

    Examples
    --------
    >>> mean([0.0, 1.0])
    0.5
    """
    found = [float(value) for value in values]
    return sum(found) / len(found) if found else float("nan")


def package(name: str) -> Any:
    """Return a package that a score needs, of the extra ``eval``.

    Raises
    ------
    ImportError
        When it is not installed.
    """
    try:
        return import_module(name)
    except ImportError as reason:
        needed = name.partition(".")[0]
        raise ImportError(f"this score needs the package {needed}: pip install 'pylongctx[eval]'") from reason


# ---- pass keys and needles ----


def first_number(prediction: str, answers: Sequence[str]) -> float:
    """Return whether the first number is the answer.

    Examples
    --------
    >>> first_number("It is 12345, not 6.", ["12345"])
    1.0
    """
    number = re.search(r"\d+", prediction)
    return float(number is not None and number.group() in answers)


def last_number(prediction: str, answers: Sequence[str]) -> float:
    """Return whether the last number is an answer, as LongEval has it.

    Examples
    --------
    >>> last_number("The number in line 3 is <12345>.", ["12345"])
    1.0
    """
    numbers = re.findall(r"\d+", prediction)
    return float(bool(numbers) and int(numbers[-1]) in map(int, answers))


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """Return whether the prediction is an answer, after normalization.

    Examples
    --------
    >>> exact_match("The Butler.", ["butler"])
    1.0
    """
    return float(normalize(prediction) in map(normalize, answers))


def word_overlap(prediction: str, answers: Sequence[str]) -> float:
    """Return the share of the different words of an answer that the prediction has; the best answer counts.

    Examples
    --------
    >>> word_overlap("sit in the park", ["eat in the park"])
    0.75
    """
    said = set(prediction.lower().split())
    return max(len(said & wanted) / len(wanted) for wanted in (set(answer.lower().split()) for answer in answers))


# ---- RULER ----


def string_match_all(prediction: str, answers: Sequence[str]) -> float:
    """Return the share of the answers that the prediction contains.

    Examples
    --------
    >>> round(string_match_all("It was Ann and Bob.", ["Ann", "Bob", "Eve"]), 2)
    0.67
    """
    text = readable(prediction)
    return mean(answer.lower() in text for answer in answers)


def string_match_part(prediction: str, answers: Sequence[str]) -> float:
    """Return whether the prediction contains one of the answers.

    Examples
    --------
    >>> string_match_part("It was Ann.", ["Ann", "Bob"])
    1.0
    """
    text = readable(prediction)
    return float(any(answer.lower() in text for answer in answers))


# ---- LongBench ----


def normalize(text: str) -> str:
    """Return the text in lower case without punctuation, articles and superfluous space.

    Examples
    --------
    >>> normalize("The  Butler, of course!")
    'butler of course'
    """
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(ARTICLES.sub(" ", bare).split())


def token_f1(prediction: Sequence[str], answer: Sequence[str]) -> float:
    """Return the harmonic mean of precision and recall of two bags of words.

    Examples
    --------
    >>> token_f1(["a", "b"], ["b", "c"])
    0.5
    """
    n_same = (Counter(prediction) & Counter(answer)).total() if prediction and answer else 0
    return 2 * n_same / (len(prediction) + len(answer)) if n_same else 0.0


def qa_f1(prediction: str, answers: Sequence[str]) -> float:
    """Return the F1 of normalized words; the best answer counts.

    Examples
    --------
    >>> round(qa_f1("the old butler", ["Butler"]), 2)
    0.67
    """
    said = normalize(prediction).split()
    return max(token_f1(said, normalize(answer).split()) for answer in answers)


def qa_f1_zh(prediction: str, answers: Sequence[str]) -> float:
    """Return the F1 of the words that jieba finds, punctuation left out; the best answer counts.

    Examples
    --------
    >>> qa_f1_zh("\u5317\u4eac", ["\u5317\u4eac"])
    1.0
    """
    jieba = package("jieba")
    said = bare_words(jieba, prediction)
    return max(token_f1(said, bare_words(jieba, answer)) for answer in answers)


def rouge_l(prediction: str, answers: Sequence[str]) -> float:
    """Return F of ROUGE-L by the package rouge; the best answer counts; 0 where it cannot read the texts.

    Examples
    --------
    >>> round(rouge_l("the thief ran", ["the thief ran"]), 2)
    1.0
    """
    rouge = package("rouge").Rouge(metrics=["rouge-l"])

    def one(answer: str) -> float:
        try:
            return float(rouge.get_scores([prediction], [answer], avg=True)["rouge-l"]["f"])
        except (ValueError, RecursionError):  # an empty text; the package recurses over long sentences
            return 0.0

    return max(map(one, answers))


def rouge_l_zh(prediction: str, answers: Sequence[str]) -> float:
    """Return F of ROUGE-L on the words that jieba finds; the best answer counts.

    Examples
    --------
    >>> rouge_l_zh("\u5317\u4eac", ["\u5317\u4eac"]) > 0.99
    True
    """
    jieba = package("jieba")
    return rouge_l(" ".join(chinese_words(jieba, prediction)), [" ".join(chinese_words(jieba, a)) for a in answers])


def classification(prediction: str, answers: Sequence[str], classes: Sequence[str]) -> float:
    """Return 1 / number of the classes that the prediction names, when the answer is among them.

    A class that is a part of the answer does not count; as published, the one after a dropped class is not looked at.

    Examples
    --------
    >>> classification("It is a question about a number.", ["number"], ["number", "person"])
    1.0
    """

    def one(answer: str) -> float:
        named = [name for name in classes if name in prediction]
        for name in named:  # the published loop, which changes the list that it iterates over
            if name in answer and name != answer:
                named.remove(name)
        return 1 / len(named) if answer in named else 0.0

    return max(map(one, answers))


def share_of_numbers(prediction: str, answers: Sequence[str]) -> float:
    """Return how many of the numbers in the prediction are the number in the answer; the best answer counts.

    Examples
    --------
    >>> share_of_numbers("Paragraph 3 or 4", ["Paragraph 3"])
    0.5
    """
    numbers = re.findall(r"\d+", prediction)

    def one(answer: str) -> float:
        wanted = re.findall(r"\d+", answer)[0]
        return numbers.count(wanted) / len(numbers) if numbers else 0.0

    return max(map(one, answers))


def code_similarity(prediction: str, answers: Sequence[str]) -> float:
    """Return the indel ratio of the first line that is not a comment, in hundredths; the best answer counts.

    The published scorer calls fuzzywuzzy, which gives this number only where python-Levenshtein is installed; else
    difflib's, which differs by some hundredths.

    Examples
    --------
    >>> code_similarity("return x", ["return y"])
    0.88
    """
    line, fuzz = first_line_of_code(prediction), package("rapidfuzz.fuzz")
    return max(float(round(fuzz.ratio(line, answer))) / 100 for answer in answers)


# ---- L-Eval ----


def chosen_letters(response: str, several: bool) -> str:
    """Return the letters A to D that a response chooses; A where it names none, as published.

    Examples
    --------
    >>> chosen_letters("(B) because", several=False)
    'B'
    """
    if response and response in CHOICES:
        return response
    if not several and (single := re.search(f"[{CHOICES}]", response)):
        return single.group()
    leading = response[: len(response) - len(response.lstrip(CHOICES))]
    if len(leading) > 1:
        return "".join(sorted(set(leading)))
    rest = response[len(leading) :].split("Question")[0]
    found = "".join(sorted({*leading, *re.findall(f"[{CHOICES}](?=[\\s.)])", rest)}))
    together = re.search(f"[{CHOICES}]+", rest)
    return found or (together.group() if together else "A")


def right_letters(answer: str) -> str:
    """Return the letters of the right choice, given as ``"(B) Because"`` or ``"AC"``; A where there is none.

    Examples
    --------
    >>> right_letters("(B) Because")
    'B'
    """
    return re.sub(f"[^{CHOICES}]", "", answer.split()[0]) or "A"


def multiple_choice(prediction: str, answers: Sequence[str], several: bool = False) -> float:
    """Return 1 for the right letters and 0.25 for some of them; the best answer counts.

    Examples
    --------
    >>> multiple_choice("A", ["AC"])
    0.25
    """
    if not prediction.strip():
        return 0.0
    said = chosen_letters(prediction, several)

    def one(answer: str) -> float:
        wanted = right_letters(answer)
        return 1.0 if said == wanted else 0.25 * (set(said) <= set(wanted))

    return max(map(one, answers))


def same_number(prediction: str, answers: Sequence[str]) -> float:
    """Return whether the number after "The answer is", or the last one of the first paragraph, is an answer.

    Only the digits before a point count, as published.

    Examples
    --------
    >>> same_number("5 + 13 = 18. The answer is $18.00", ["18"])
    1.0
    """
    said = final_digits(prediction)
    return float(bool(said) and any(int(said) == int(final_digits(answer) or -1) for answer in answers))


def contained(prediction: str, answers: Sequence[str]) -> float:
    """Return whether the prediction contains an answer; case and spaces do not count.

    Examples
    --------
    >>> contained("It was Space Tourism.", ["space tourism"])
    1.0
    """
    text = prediction.lower().replace(" ", "")
    return float(any(answer.lower().replace(" ", "") in text for answer in answers))


# ---- BABILong ----


def only_label(prediction: str, answers: Sequence[str], labels: Sequence[str], question: str) -> float:
    """Return whether the first sentence of the prediction has the right label and no other, but those of the question.

    Examples
    --------
    >>> only_label("Mary is in the garden. Not the kitchen.", ["garden"], ["garden", "kitchen"], "Where is Mary?")
    1.0
    """
    text = re.split(r"\.|<context>|<example>", prediction.lower())[0]
    known = {label.lower() for label in labels}
    named = {label for label in known if label in text and label not in question.lower()}
    return float(len(named) == 1 and any(answer.lower() in named for answer in answers))


# ---- BAMBOO ----


def first_letter(prediction: str, answers: Sequence[str]) -> float:
    """Return whether the prediction begins with the right letter, A to D, of either case.

    Examples
    --------
    >>> first_letter("b) because", ["B"])
    1.0
    """
    return float(prediction.strip()[:1].upper() in answers)


def same_code(prediction: str, answers: Sequence[str]) -> float:
    """Return whether the prediction is an answer, spaces and line ends aside.

    Examples
    --------
    >>> same_code(" f(a,b)", ["f(a, b)"])
    1.0
    """
    return float("".join(prediction.split()) in {"".join(answer.split()) for answer in answers})
