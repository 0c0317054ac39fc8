"""BABILong: stories of bAbI's files, facts between the sentences of a novel, and the score."""

import hashlib
import json
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vocabulary import Words, total

from pylongctx.eval.babilong import BabiLong, Story, background, read_babi, spread
from pylongctx.eval.files import published
from pylongctx.eval.haystack import sentences, synthetic_text
from pylongctx.eval.task import Answer

BABI = """1 John travelled to the hallway.
2 Mary journeyed to the bathroom.
3 Where is John? \thallway\t1
4 John moved to the garden.
5 Where is John? \tgarden\t4
1 Sandra went to the office.
2 Where is Sandra? |office|1
"""
FACTS = ("John travelled to the hallway.", "Mary journeyed to the bathroom.", "John moved to the garden.")


@pytest.fixture
def write(tmp_path):
    def write(text, name="qa1_test.txt"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_prompts_are_the_published_ones():
    digest = hashlib.sha256(json.dumps(published("babilong"), sort_keys=True).encode()).hexdigest()
    assert digest == "f5e5145e317c2bcd7c6c50c3b06345d6b26587a136ec398c00eaec5269846ca7"


def test_a_question_has_the_facts_of_its_story_before_it(write):
    assert read_babi(write(BABI)) == [
        Story(FACTS[:2], "Where is John?", "hallway"),
        Story(FACTS, "Where is John?", "garden"),
        Story(("Sandra went to the office.",), "Where is Sandra?", "office"),
    ]


@pytest.mark.parametrize("length", [500, 1000, 4000])
def test_facts_stand_in_the_novel_in_their_order(write, length):
    words = Words(n_bos=1)
    found = BabiLong(write(BABI)).samples(words, length, 0)
    for sample, story in zip(found, read_babi(write(BABI)), strict=True):
        assert length - 20 <= total(words, sample) <= length
        assert sample.prompt.startswith("I will give you context with the facts about positions")
        assert sample.prompt[sample.shared :] == f"\n</context>\n\nQuestion: {story.question}"
        context = sample.prompt.split("<context>\n")[1]
        places = [context.index(fact) for fact in story.facts]
        assert places == sorted(places)
        assert (sample.answers, sample.max_tokens) == ((story.answer,), 20)
    contexts = {sample.prompt.split("<context>\n")[1][:200] for sample in found}
    assert len(contexts) == len(found)  # each begins elsewhere
    assert [s.prompt for s in BabiLong(write(BABI)).samples(words, length, 0)] == [s.prompt for s in found]
    assert [s.prompt for s in BabiLong(write(BABI)).samples(words, length, 1)] != [s.prompt for s in found]


@given(st.integers(0, 300), st.integers(0, 99))
def test_the_novel_has_as_many_tokens_as_are_asked_for(n, seed):
    words, novel = Words(), sentences(synthetic_text(3000, 0))
    found = list(background(words, novel, n, Random(seed)))
    assert sum(len(words.tokenize(" " + sentence)) for sentence in found) in (n, n + 1)  # a cut one has its own space
    assert all(len(words.tokenize(" " + sentence)) >= 10 for sentence in found[:-1])


@given(st.integers(0, 20), st.integers(0, 5), st.integers(0, 99))
def test_nothing_is_lost_between_the_sentences(n, n_facts, seed):
    text, facts = [f"s{i}" for i in range(n)], [f"f{i}" for i in range(n_facts)]
    found = spread(facts, iter(text), Random(seed)).split()
    assert [word for word in found if word[0] == "s"] == text
    assert [word for word in found if word[0] == "f"] == facts


@pytest.mark.parametrize(
    ("name", "question", "right", "said", "score"),
    [
        ("qa1", "Where is John?", "garden", "The most recent location of John is garden.", 1),
        ("qa1", "Where is John?", "garden", "Garden. Not the kitchen.", 1),
        ("qa1", "Where is John?", "garden", "John went from the kitchen to the garden.", 0),
        ("qa1", "Where is John?", "garden", "kitchen", 0),
        ("qa1", "Where is John?", "garden", "", 0),
        ("qa2", "Where is the milk?", "office", "The milk is in the office", 1),
        ("qa5", "What did Fred give to Jeff?", "football", "Fred gave Jeff the football", 1),
        ("qa5", "Who did Fred give the milk to?", "Bill", "Bill, and Jeff", 0),
        ("qa5", "Who did Fred give the milk to?", "Bill", "bill\n<example>\nJeff", 1),
    ],
)
def test_the_right_label_alone_is_right(write, name, question, right, said, score):
    task = BabiLong(write(f"1 John slept.\n2 {question}\t{right}\t1\n", f"{name}_test.txt"))
    assert task.scores(task.samples(Words(), 600, 0)[0], Answer(said, []))["score"] == score


@pytest.mark.parametrize(
    ("text", "length", "message"),
    [
        (
            "John slept.\n",
            600,
            r"line 1: it does not begin with a number and a sentence; --data is",
        ),
        ("1 John slept.\n2 Who slept?\n", 600, r"line 2: the question has no answer after a tab or \|"),
        (BABI, 100, "babilong-qa1, length 100: prompt, facts and answer alone are longer"),
    ],
)
def test_errors(write, text, length, message):
    with pytest.raises(ValueError, match=message):
        BabiLong(write(text)).samples(Words(), length, 0)


def test_the_name_of_the_file_tells_the_task():
    with pytest.raises(ValueError, match=r"qa3_test.txt: the name .* its task and _; available: qa1, qa2, qa5"):
        BabiLong("qa3_test.txt")
