"""What begins a lazy grammar in an answer: the same as with std::regex on all of it, at a cost that does not grow."""

import json
import random
import re
import time

import numpy as np
import pytest

from pylongctx.engine.sampling.params import SamplingParams
from pylongctx.engine.sampling.sampler import Sampler
from pylongctx.errors import InvalidInput

WORD, PATTERN, FULL = 1, 2, 3
GPT_OSS = [
    r"^\s+to$",
    r"^<\|channel\|>(?:commentary|analysis)\s+to=functions$",
    r"<\|start\|>assistant(\s+to)",
    r"<\|start\|>assistant(<\|channel\|>(?:commentary|analysis)\s+to)",
]
FUNCTIONARY = [r">>>(?!all)"]
MUSE = [r"(?:^|<\|start\|>assistant)( to=(?!self<\|message\|>)(?!user<\|message\|>)[^<]*?<\|message\|>)"]
OTHERS = [
    [r"(?:x|yy)*(z+)$", r"[^a-f =]{2,3}q"],
    [r"o(a|as*)n", r"\d+\.\w{2,}", r"\[\^\]"],
    [r"(?:s|ss)*(t?)o", r"all(?!.a)"],
    [r"a(?:na)+?(l*)y", r"[\s\S]{40}"],
    [r"^[ -;x]*=$"],
]
PARTS = [
    *(
        "<|start|>assistant",
        "<|start|>",
        "assistant",
        " ",
        "  ",
        "\n",
        "to",
        " to",
        " to=",
        "=functions",
        "<|channel|>",
    ),
    *("commentary", "analysis", "<|message|>", "self<|message|>", "user", ">>>", ">", "all", "<", "x", "yy", "zz", "q"),
    *("12.", "ab", "ss", "[^]", "naan", "so"),
]
MUSE_PARTS = ["<|start|>assistant", " to=", " to=", "self", "user", "q", " ", "<|message|>", "<|message|>"]
SEVENS = "root ::= (. . . . . . .)*"  # it may end after every seventh character


def lazy(patterns, grammar=SEVENS, kind=PATTERN) -> str:
    triggers = [{"type": kind, "value": pattern} for pattern in patterns]
    return json.dumps({"grammar": grammar, "lazy": True, "triggers": triggers})


def make(llm, constraint: str) -> Sampler:
    return Sampler(llm._model, SamplingParams(seed=0, temp=0.0), constraint)


def choose(sampler, n_vocab: int, *wanted: int) -> int:
    """Sample where the tokens are wanted more than all others, the first of them most."""
    row = np.zeros(n_vocab, np.float32)
    for i, token in enumerate(wanted):
        row[token] = 2.0 + len(wanted) - i
    return sampler.sample(row)


def start_of(patterns, pieces: list[str]) -> int | None:
    """Return where the grammar begins, by the search of llama.cpp: all of the text again for every token."""
    text = ""
    for piece in pieces:
        text += piece
        for pattern in patterns:
            if found := re.compile(re.sub(r"\$$", r"\\Z", pattern), re.ASCII).search(text):
                return next((found.start(i) for i in range(1, found.re.groups + 1) if found[i]), found.start())
    return None


def text_of(rng: random.Random, parts: list[str]) -> str:
    """Return parts in a row, some of them cut."""
    some = rng.choices(parts, k=rng.randrange(1, 8))
    return "".join(part if rng.random() < 0.8 else part[: rng.randrange(len(part)) + 1] for part in some)


def pieces_of(rng: random.Random, text: str, known) -> list[str]:
    """Return the text in pieces that are tokens."""
    pieces = []
    while text:
        n = rng.choice([n for n in range(1, 12) if text[:n] in known])
        pieces.append(text[:n])
        text = text[n:]
    return pieces


@pytest.fixture(scope="module")
def by_piece(shared) -> dict[str, int]:
    return {shared._model.piece(token).decode("latin-1"): token for token in range(shared.n_vocab())}


@pytest.mark.parametrize(
    ("patterns", "parts"),
    [(MUSE, MUSE_PARTS), *((patterns, PARTS) for patterns in (GPT_OSS, FUNCTIONARY, *OTHERS))],
    ids=range(3 + len(OTHERS)),
)
def test_a_grammar_begins_where_it_would_with_llama_cpp(llm, by_piece, patterns, parts):
    """EOS is allowed before the grammar begins, and then after every seventh character."""
    rng, begun = random.Random(str(patterns)), 0
    for _ in range(60):
        pieces = pieces_of(rng, text_of(rng, parts), by_piece)
        sampler = make(llm, lazy(patterns))
        assert all(choose(sampler, llm.n_vocab(), by_piece[piece]) == by_piece[piece] for piece in pieces)
        start = start_of(patterns, pieces)
        begun += start is not None
        length = 0 if start is None else len("".join(pieces)) - start
        assert (choose(sampler, llm.n_vocab(), llm.token_eos()) == llm.token_eos()) == (length % 7 == 0)
    assert begun


@pytest.mark.parametrize("filler", [" ", "\n", "x"])
@pytest.mark.parametrize("patterns", [GPT_OSS, MUSE])
def test_a_token_costs_as_much_after_a_long_answer(llm, patterns, filler):
    """std::regex reads all of it again, and recurses as deep as there are spaces."""
    (token,) = llm.tokenize(filler.encode(), False, False)[-1:]
    sampler, times = make(llm, lazy(patterns)), []
    for _ in range(4):
        start = time.process_time()
        assert all(choose(sampler, llm.n_vocab(), token) == token for _ in range(5000))
        times.append(time.process_time() - start)
    assert times[-1] < 3 * times[0]
    assert sum(times) < 10


REFUSED = [
    *(
        "(a)(b)",
        r"\bto",
        "(?=x)to",
        "(?!a|b)",
        r"(?!\s)",
        r"(a)\1",
        "[[:alpha:]]",
        "[b-a]",
        "[a",
        "(a",
        "a)",
        "*a",
        "a{2,1}",
    ),
    *("a{2", "a{99999}", "(?:(?:a{64}){64}){64}", "a" * 5000, "a**", "(?<=a)b", r"\u0041", "(?:" * 3000),
]


@pytest.mark.parametrize("pattern", REFUSED, ids=range(len(REFUSED)))
def test_a_pattern_that_cannot_be_read_is_refused(llm, pattern):
    with pytest.raises(InvalidInput, match="the trigger of the grammar cannot be read at character") as caught:
        make(llm, lazy([pattern]))
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("kind", "value", "text", "begins"),
    [
        (WORD, "(a|b)*", "aab", False),
        (WORD, "(a|b)*", "x(a|b)*", True),
        (FULL, "a|bc", "xbc", False),
        (FULL, "a|bc", "bc", True),
        (PATTERN, "", "x", True),
    ],
)
def test_kinds_of_triggers(llm, by_piece, kind, value, text, begins):
    """After the trigger only the end is allowed, since its text completes the grammar."""
    sampler = make(llm, lazy([value], 'root ::= "(a|b)*" | "bc" | "x"', kind))
    assert all(choose(sampler, llm.n_vocab(), by_piece[c]) == by_piece[c] for c in text)
    assert (choose(sampler, llm.n_vocab(), by_piece["x"], llm.token_eos()) == llm.token_eos()) == begins
