"""Questions about files: the prompt, and the passages that an answer rests on."""

import pytest

from pylongctx.chat.asking import MOST_PASSAGE, prompt, quotes
from pylongctx.readers.files import FileText

RAIN = "It rained on the day of the wedding, as it often does in May."
FILLER = "Nobody in the village had ever seen the sea or a ship before."


def test_questions_on_a_text_share_its_beginning():
    first, second = prompt("A text.", "Who?"), prompt("A text.", "Where is it?")
    assert first.startswith("A text.\n") and second.startswith("A text.\n") and first.endswith("Who?")


@pytest.mark.parametrize("n", [0, 1, 63, 65, 257])
def test_the_passage_is_found_wherever_it_is(n):
    text = "\n".join([FILLER] * n + [RAIN] + [FILLER] * 3)
    (found,) = quotes([FileText("a.txt", text)], "What was the weather at the wedding?", "It rained.", most=1)
    assert (found.file, found.line, found.text) == ("a.txt", n + 1, RAIN)
    assert str(found) == f'a.txt, line {n + 1}: "{RAIN}"'


def test_it_is_of_the_right_file():
    files = [FileText("a.txt", FILLER), FileText("b.txt", f"{FILLER}\n\n{RAIN}"), FileText("", FILLER)]
    assert quotes(files, "When did it rain?", "In May, on the day of the wedding.")[0].file == "b.txt"


def test_nothing_in_common_quotes_nothing():
    assert quotes([FileText("a.txt", FILLER)], "xyzzy?", "plugh") == []
    assert quotes([], "Who?", "Nobody.") == quotes([FileText("a.txt", " \n ")], "Who?", "Nobody.") == []


def test_a_long_passage_is_cut():
    (found,) = quotes([FileText("a.txt", "rain " * 1000)], "rain?", "rain", most=1)
    assert len(found.text) == MOST_PASSAGE + 3


def test_an_abbreviation_ends_no_passage_and_other_alphabets_work():
    text = "The letters H. B. are on the lining of the hat that he wore. 雨が降った日は五月だった。 " + FILLER
    assert "H. B. are on" in quotes([FileText("", text)], "Which letters are on the lining?", "H. B.")[0].text
    assert "五月" in quotes([FileText("", text)], "雨が降った日は五月だった", "")[0].text
