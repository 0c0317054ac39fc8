"""Words are wrapped at the width of a terminal, however a text is cut into pieces."""

import random

import pytest

from pylongctx.cli.console import Wrapper


def wrap(pieces, width=20):
    wrapper = Wrapper(lambda: width)
    return "".join(map(wrapper.feed, pieces)) + wrapper.flush()


WIDE = "\u8a9e" * 9  # two columns each
TEXT = (
    "It was the best of times, it was\n\n  the worst of times: it-was-the-age-of-wisdom, and so on.\n"
    f"\u65e5\u672c {WIDE} x\n"
)


@pytest.mark.parametrize("seed", range(20))
def test_pieces_do_not_matter(seed):
    chance, left, pieces = random.Random(seed), TEXT, []
    while left:
        n = chance.randint(1, 9)
        pieces.append(left[:n])
        left = left[n:]
    assert wrap(pieces) == wrap([TEXT])


def test_lines_fit_and_nothing_is_lost():
    found = wrap([TEXT])
    assert found.split() == TEXT.split()
    long = [line for line in found.split("\n") if len(line) > 20]
    assert all(" " not in line.strip() for line in long)  # a word that is longer than a line
    assert "\n\n  the" in found
    assert [line for line in found.split("\n") if "\u8a9e" in line] == [f"{WIDE} x"]


def test_code_stays_as_it_is():
    code = "```python\nif a and b and c and d and e:\n    return 1\n```\n"
    assert wrap([code + "and now a long line of words"]) == code + "and now a long line\nof words"


def test_a_line_that_fits_exactly():
    assert wrap(["one two three four", " x"], 20) == "one two three four x"
    assert wrap(["one two three four", " xx"], 20) == "one two three four\nxx"
