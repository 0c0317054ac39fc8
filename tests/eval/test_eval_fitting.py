"""What fits into a length: documents that lose their end, and parts around the one that is asked for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vocabulary import Words, total

from pylongctx.eval.fitting import MARGIN, fitted, questions_on_parts
from pylongctx.eval.task import Sample

pytestmark = pytest.mark.check


def question(name, text):
    return lambda document: Sample(name, f"{document} {text}", max_tokens=3, shared=len(document))


@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(0, 80), st.integers(30, 100))
def test_all_questions_on_a_document_have_the_same_part_of_it(sizes, n_document, length):
    words, document = Words(n_bos=1), " ".join(f"d{i}" for i in range(n_document))
    asked = [(document, question(str(i), "word " * size)) for i, size in enumerate(sizes)]
    found = fitted(words, asked, length, "here")
    assert [sample.id for sample in found] == [str(i) for i in range(len(sizes))]
    (part,) = {sample.prompt[: sample.shared] for sample in found}
    assert document.startswith(part)
    assert max(total(words, sample) for sample in found) <= length
    if part != document:
        assert max(total(words, sample) for sample in found) >= length - MARGIN - 1


def test_questions_on_a_document_follow_each_other_and_the_first_ones_are_taken():
    asked = [("one", question("0", "a")), ("two", question("1", "b")), ("one", question("2", "c"))]
    assert [sample.id for sample in fitted(Words(), asked, 50, "here")] == ["0", "2", "1"]
    assert [sample.id for sample in fitted(Words(), asked, 50, "here", tests=1)] == ["0"]
    with pytest.raises(ValueError, match=r"here: question and answer alone need 12 tokens; ask for a greater length"):
        fitted(Words(), asked, 12, "here")


@given(st.integers(1, 40), st.data(), st.integers(6, 60))
def test_the_asked_part_stays_at_its_depth(n, data, length):
    words, at = Words(n_bos=1), data.draw(st.integers(0, n - 1))
    parts = [f" p{i}" for i in range(n)]

    def make(part, asked):
        return Sample("0", "Start:" + "".join(parts[part]), max_tokens=2, facts={"part": part})

    (sample,) = questions_on_parts(words, make, parts, at, length, "here", questions=1)
    part = sample.facts["part"]
    n_kept = part.stop - part.start
    assert total(words, sample) <= length
    assert part.start <= at < part.stop <= n
    assert n_kept == min(n, length - 5)  # BOS, "Start:" and the answer have 5
    assert (at - part.start) / max(1, n_kept - 1) == pytest.approx(at / max(1, n - 1), abs=1 / max(1, n_kept - 1))


def test_a_part_that_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match="here: one part and the answer need 5 tokens; ask for a greater length"):
        questions_on_parts(Words(), lambda part, asked: Sample("0", "a b c", max_tokens=2), "abc", 0, 4, "here", 1)


@pytest.mark.parametrize(("at", "count", "length"), [(0, 1, 40), (3, 2, 40), (9, 5, 20), (5, 99, 40), (5, 99, 14)])
def test_questions_on_parts_ask_for_each_part_at_most_once(at, count, length):
    words = Words(n_bos=1)
    asks = [" x" * (1 + i % 3) + f" p{i}" for i in range(10)]

    def make(part, asked):
        text = "".join(f" p{i}" for i in range(part.start, part.stop))
        return Sample(str(asked), text + " ?" + asks[asked], max_tokens=2, shared=len(text), facts={"asked": asked})

    samples = questions_on_parts(words, make, asks, at, length, "here", count)
    asked = [sample.facts["asked"] for sample in samples]
    (text,) = {sample.prompt[: sample.shared] for sample in samples}
    assert asked[0] == at and asked[1:] == sorted(set(asked[1:]) - {at})
    assert len(asked) == min(count, len(text.split()))
    assert all(f"p{i}" in text.split() for i in asked)
    assert max(total(words, sample) for sample in samples) <= length
