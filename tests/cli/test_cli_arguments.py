"""How the values of options are read: lists and ranges."""

import pytest

from pylongctx.cli.arguments import int_list

pytestmark = pytest.mark.check


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("512", [512]),
        ("1,2", [1, 2]),
        ("1-4", [1, 2, 3, 4]),
        ("0-100+50", [0, 50, 100]),
        ("0-100+40,7", [0, 40, 80, 7]),
        ("256-2048*2", [256, 512, 1024, 2048]),
        ("7-7", [7]),
    ],
)
def test_lists_and_ranges(text, numbers):
    assert int_list(text) == numbers


@pytest.mark.parametrize("text", ["", "x", "1,", "1-", "1-2x3", "1-8*", "-1", "1 2"])
def test_what_is_not_a_list(text):
    with pytest.raises(ValueError, match=r"not a number|neither a number nor a range|below 0"):
        int_list(text)


def test_an_empty_range():
    with pytest.raises(ValueError, match="ends before it begins"):
        int_list("512,3-2")


@pytest.mark.parametrize("text", ["0-8*2", "1-8*1", "1-8+0"])
def test_a_range_that_never_ends(text):
    with pytest.raises(ValueError, match="never ends"):
        int_list(text)
