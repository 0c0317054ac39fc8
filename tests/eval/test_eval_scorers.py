"""Scorers against small tables, worked out by hand from the published definitions."""

import hashlib
import string
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from needs import need

from pylongctx.eval import scorers


@pytest.mark.parametrize(
    ("prediction", "answers", "score"),
    [
        (" 123 and 456", ["123", "456"], 1.0),
        ("123", ["123", "456"], 0.5),
        ("I see ALPHA-beta\x07gamma", ["alpha-beta", "gamma", "delta", "mma"], 0.75),
        ("al\x01pha", ["alpha"], 0.0),
        ("", ["x"], 0.0),
        ("1234", ["123"], 1.0),  # a part is enough, as published
    ],
)
def test_string_match_all(prediction, answers, score):
    assert scorers.string_match_all(prediction, answers) == score


def test_string_match_part_wants_one():
    assert scorers.string_match_part("It was in Paris.", ["London", "paris"]) == 1
    assert scorers.string_match_part("It was in Rome.", ["London", "Paris"]) == 0


@pytest.mark.parametrize(
    ("prediction", "answers", "score"),
    [
        ("The Cat, sat!", ["a cat sat"], 1.0),
        ("cat", ["the black cat"], 2 / 3),  # precision 1, recall 1/2
        ("cat cat", ["cat"], 2 / 3),
        ("dog", ["cat", "a dog"], 1.0),
        ("", ["cat"], 0.0),
        ("the", ["a"], 0.0),  # nothing is left of both
    ],
)
def test_qa_f1(prediction, answers, score):
    assert scorers.qa_f1(prediction, answers) == pytest.approx(score)


@pytest.mark.parametrize(
    ("prediction", "answers", "score"),
    [("Paragraph 3", ["Paragraph 3"], 1.0), ("3 or 4, not 3", ["Paragraph 3"], 2 / 3), ("none", ["5"], 0.0)],
)
def test_share_of_numbers(prediction, answers, score):
    assert scorers.share_of_numbers(prediction, answers) == pytest.approx(score)


def test_share_of_numbers_reads_chinese_answers():
    assert scorers.share_of_numbers("\u6bb5\u843d12", ["\u6bb5\u843d12"]) == 1


CLASSES = ["City", "State", "Other location", "location", "Date"]


@pytest.mark.parametrize(
    ("prediction", "answer", "score"),
    [
        ("Type: City", "City", 1.0),
        ("City or Date", "City", 0.5),
        ("Other location", "Other location", 1.0),  # "location" is a part of the answer
        ("Other location", "location", 0.5),
        ("Nothing", "City", 0.0),
        ("City", "Date", 0.0),
    ],
)
def test_classification(prediction, answer, score):
    assert scorers.classification(prediction, [answer], CLASSES) == score


def test_classification_skips_the_class_after_a_dropped_one():
    # the published loop removes while it iterates: "a" goes, "ab" is skipped and stays
    assert scorers.classification("abc", ["abc"], ["a", "ab", "abc"]) == 0.5


@pytest.mark.parametrize(
    ("prediction", "answers", "score"),
    [
        ("12345", ["12345"], 1.0),
        ("the key is 12345, not 6", ["12345"], 1.0),
        ("6 or 12345", ["12345"], 0.0),
        ("", ["1"], 0.0),
    ],
)
def test_first_number(prediction, answers, score):
    assert scorers.first_number(prediction, answers) == score


def test_word_overlap_counts_different_words():
    assert scorers.word_overlap("Eat a sandwich a sandwich", ["eat a sandwich and sit"]) == 3 / 5
    assert scorers.word_overlap("sandwich.", ["sandwich"]) == 0  # punctuation belongs to a word, as published


@pytest.mark.parametrize(
    ("response", "several", "letters"),
    [
        ("B", False, "B"),
        ("The answer is (C).", False, "C"),
        ("none of them", False, "A"),
        ("AC", True, "AC"),
        ("CA", True, "AC"),
        ("A and C. B) Question D.", True, "ABC"),
        ("Probably B. or D)", True, "BD"),
        ("", True, "A"),
    ],
)
def test_chosen_letters(response, several, letters):
    assert scorers.chosen_letters(response, several) == letters


@pytest.mark.parametrize(
    ("prediction", "answer", "several", "score"),
    [
        ("B", "(B) They were tired", False, 1.0),
        ("C", "(B) They were tired", False, 0.0),
        ("AC", "AC", True, 1.0),
        ("A", "AC", True, 0.25),
        ("AB", "AC", True, 0.0),
        ("B", "42", False, 0.0),  # an answer without a letter is A, as published
    ],
)
def test_multiple_choice(prediction, answer, several, score):
    assert scorers.multiple_choice(prediction, [answer], several) == score


# ---- scores of other packages ----


def test_rouge_l_is_the_f_of_the_longest_common_subsequence():
    need("eval", "rouge")
    # 3 of 4 words and 3 of 6
    assert scorers.rouge_l("the cat sat down", ["the cat quickly sat on mats"]) == pytest.approx(0.6, abs=1e-6)
    assert scorers.rouge_l("", ["something"]) == 0
    assert scorers.rouge_l("a b", ["x y", "a b"]) == pytest.approx(1, abs=1e-6)


def test_code_similarity_reads_the_first_line_of_code():
    need("eval", "rapidfuzz")
    assert scorers.code_similarity("\n# a comment\nreturn x\nreturn y", ["return x"]) == 1
    assert scorers.code_similarity("A L I E N S", ["A S A L"]) == 0.44  # fuzzywuzzy's, with python-Levenshtein
    assert scorers.code_similarity("```", ["x"]) == 0


def test_chinese_words_are_found_before_they_are_compared():
    need("eval", "jieba", "rouge")
    assert scorers.qa_f1_zh("\u5317\u4eac\u3002", ["\u5317\u4eac"]) == 1
    assert scorers.qa_f1_zh("\u4e0a\u6d77", ["\u5317\u4eac"]) == 0
    assert scorers.rouge_l_zh(
        "\u6211\u7231\u5317\u4eac\u5929\u5b89\u95e8", ["\u6211\u7231\u5317\u4eac\u5929\u5b89\u95e8"]
    ) == pytest.approx(1, abs=1e-6)


def test_an_absent_package_names_the_extra(monkeypatch):
    for module, call in (("rouge", scorers.rouge_l), ("rapidfuzz.fuzz", scorers.code_similarity)):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ImportError, match=r"pip install 'pylongctx\[eval\]'"):
            call("x", ["x"])


def test_chinese_punctuation_is_complete():
    # of the published string
    assert hashlib.sha256(scorers.CHINESE_PUNCTUATION.encode()).hexdigest()[:16] == "6cedb86897f26f25"


# ---- what holds for all ----

ANY = [scorers.string_match_all, scorers.string_match_part, scorers.exact_match, scorers.first_number, scorers.qa_f1]


@given(st.text(), st.lists(st.text(alphabet=string.ascii_letters, min_size=1), min_size=1))
def test_scores_are_shares(prediction, answers):
    assert all(0 <= score(prediction, answers) <= 1 for score in ANY)


@given(st.lists(st.text(alphabet=string.ascii_letters, min_size=3), min_size=1))
def test_an_answer_in_the_prediction_is_found(answers):
    assert scorers.string_match_all("; ".join(answers), answers) == 1
    assert scorers.string_match_part(f"xx {answers[-1]} yy", answers) == 1


@given(st.text(alphabet="abcde ", min_size=1), st.text(alphabet="abcde ", min_size=1))
def test_qa_f1_does_not_know_which_is_the_answer(a, b):
    assert scorers.qa_f1(a, [b]) == scorers.qa_f1(b, [a])
