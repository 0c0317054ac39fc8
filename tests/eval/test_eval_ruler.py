"""RULER: prompts to the byte where data are free, the right size and the right answers everywhere."""

import hashlib
import json
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from needs import need
from vocabulary import COUNTED, Words, total

from pylongctx.eval.ruler import NAMES, Common, DocumentQuestions, Pairs, Ruler, invented_words, word_list
from pylongctx.eval.task import Answer

wonderwords = need("eval", "wonderwords")

# Of three samples of RULER's scripts (April 2025), seed 42, with a tokenizer that counts words and marks.
GOLDEN = [
    ("niah_single_1", 2000, "5b7d177ed0a07a05"),
    ("niah_single_1", 4096, "e6b58eb6bb5fbd64"),
    ("niah_multikey_2", 2000, "eb766a056cea523b"),
    ("niah_multikey_2", 4096, "b817e4fcaa2a02a3"),
    ("niah_multikey_3", 2000, "003fdaba21e72c31"),
    ("niah_multikey_3", 4096, "16fa4b39f8861fe5"),
    ("vt", 2000, "634d15c0a79c57c0"),
    ("vt", 4096, "50a283c0854cac91"),
    ("cwe", 2000, "f5a2391caa4dfeb2"),
    ("cwe", 4096, "1433669470687028"),
    ("fwe", 2000, "26fcc34ae1958ee9"),
    ("fwe", 4096, "b8b2927f33bdae67"),
]
GENERATED = [name for name in NAMES if not name.startswith("qa")]
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"


def samples(name, length, tests=3, words=None, seed=42, data=None):
    return Ruler(name, tests, data).samples(words or Words(piece=COUNTED), length, seed)


def text(sample):
    return sample.prompt + sample.prefix


@pytest.mark.parametrize(("name", "length", "digest"), GOLDEN)
def test_prompts_are_rulers_to_the_byte(name, length, digest):
    found = [(text(sample), list(sample.answers)) for sample in samples(name, length)]
    assert hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16] == digest
    assert {sample.facts["label"] for sample in samples(name, length, 1)} == {"RULER"}


@pytest.mark.parametrize("name", GENERATED)
@pytest.mark.parametrize("length", [1024, 3001])
def test_prompts_leave_room_for_the_answer_and_fill_the_rest(name, length):
    words = Words(n_bos=2)
    sizes = [total(words, sample) for sample in samples(name, length, 4, words)]
    assert max(sizes) <= length
    if name != "fwe":  # whose words come by the dozen
        assert max(sizes) > length - 150


@pytest.mark.parametrize("name", GENERATED)
def test_samples_follow_from_the_seed(name):
    a, b, c = (samples(name, 1500, 2, seed=seed) for seed in (1, 1, 2))
    assert [text(sample) for sample in a] == [text(sample) for sample in b]
    assert text(a[0]) not in (text(a[1]), text(c[0]))
    assert len({sample.id for sample in [*a, *c]}) == 4


ASKED = {  # the beginning of what follows the text
    **{
        name: r"\nWhat (is|are all) the special magic \w+ for .* mentioned in the provided text\?"
        for name in GENERATED[:8]
    },
    "vt": r"\nQuestion: Find all variables that are assigned the value \d{5} in the text above\.",
    "cwe": r"\nQuestion: What are the 10 most common words in the above list\?",
    "fwe": r"\nQuestion: Do not provide any explanation\. .*\?",
}


@pytest.mark.parametrize("name", GENERATED)
def test_the_question_follows_the_text(name):
    for sample in samples(name, 1200):
        assert re.fullmatch(ASKED[name], sample.prompt[sample.shared :])


@pytest.mark.parametrize("name", GENERATED)
def test_fewer_samples_are_the_first_ones(name):
    few, many = samples(name, 1200, 1), samples(name, 1200, 3)
    assert [text(few[0]), few[0].answers] == [text(many[0]), many[0].answers]


NEEDLES = [
    ("niah_single_1", 1, r"\d{7}", "RULER"),
    ("niah_single_2", 1, r"\d{7}", "RULER-compatible"),
    ("niah_single_3", 1, UUID, "RULER-compatible"),
    ("niah_multikey_1", 1, r"\d{7}", "RULER-compatible"),
    ("niah_multikey_3", 1, UUID, "RULER"),
    ("niah_multivalue", 4, r"\d{7}", "RULER-compatible"),
    ("niah_multiquery", 4, r"\d{7}", "RULER-compatible"),
]


@pytest.mark.parametrize(("name", "n_answers", "pattern", "label"), NEEDLES)
def test_needles_are_in_the_text_and_asked_for(name, n_answers, pattern, label):
    for sample in samples(name, 2000):
        assert len(sample.answers) == n_answers
        assert sample.facts["label"] == label
        for answer in sample.answers:
            assert re.fullmatch(pattern, answer)
            key = re.search(rf"One of the special magic \w+ for (\S+) is: {answer}\.", sample.prompt)[1]
            assert key in sample.prefix
    plural = "are" if n_answers > 1 else "is"
    assert sample.prefix.endswith(f" mentioned in the provided text {plural}")
    assert sample.prompt.startswith(f"{'Some' if n_answers > 1 else 'A'} special magic")


def test_multikey_1_hides_three_other_keys():
    found = re.findall(
        r"One of the special magic numbers for (\S+) is: \d{7}\.", samples("niah_multikey_1", 2000)[0].prompt
    )
    assert len(set(found)) == 4


def test_an_essay_may_be_given(tmp_path):
    file = tmp_path / "PaulGrahamEssays.json"
    file.write_text(json.dumps({"text": "Wealth is what people want. " * 300}))
    sample = samples("niah_single_2", 1500, 1, data=str(file))[0]
    assert "Wealth is what people want. Wealth" in sample.prompt
    assert sample.facts["label"] == "RULER-compatible"


def test_the_variables_of_a_chain_are_the_answer():
    sample = samples("vt", 2000, 1)[0]
    value = re.search(r"assigned the value (\d{5}) in the text above\.$", sample.prompt)[1]
    body = sample.prompt.rsplit("Memorize and track", 1)[1]
    names = re.findall(rf"VAR (\w+) = {value}\n", body)
    for _ in range(4):
        names += re.findall(rf"VAR (\w+) = VAR {names[-1]} ", body)
    assert tuple(names) == sample.answers
    assert sample.prompt.count("Memorize and track") == 2  # a solved example stands before


def test_common_words_are_the_most_common():
    sample = samples("cwe", 2000, 1)[0]
    words = re.findall(r"\d+\. (\S+)", sample.prompt.rsplit("Below is a numbered list", 1)[1])
    assert {word for word in words if words.count(word) == 6} == set(sample.answers)
    assert all(words.count(word) in (1, 6) for word in words)


def test_frequent_words_are_the_most_frequent_but_dots():
    sample = samples("fwe", 3000, 1)[0]
    words = re.findall(r"[a-z]{6}(?= )", sample.prompt.split("coded words. ")[1].split("\nQuestion")[0] + " ")
    ranked = sorted(set(words), key=words.count, reverse=True)
    assert tuple(ranked[:3]) == sample.answers


def test_more_words_than_wonderwords_has_are_invented():
    prompts = {"template": "{context}", "answer_prefix": ""}
    common = Common(prompts, 42, 4096, None)
    assert common.exact
    common(9000)
    assert not common.exact
    words = invented_words(5000)
    assert len(set(words)) == 5000
    assert invented_words(100) == words[:100]


# ---- questions ----

SQUAD = {
    "data": [
        {
            "paragraphs": [
                {
                    "context": f"Town {town} lies by lake {i}.",
                    "qas": [
                        {"question": f"Where is {town}?", "answers": [{"text": f"lake {i}"}], "is_impossible": False},
                        {"question": "Why?", "answers": [], "is_impossible": True},
                    ],
                }
                for i, town in enumerate(towns)
            ]
        }
        for towns in ([f"a{i}" for i in range(4)], [f"b{i}" for i in range(30)])
    ]
}
HOTPOT = [
    {"question": f"Q{i}?", "answer": f"yes {i}", "context": [[f"T{i}-{j}", [f"One {i}.", " Two."]] for j in range(10)]}
    for i in range(6)
]


@pytest.fixture
def squad(tmp_path):
    file = tmp_path / "squad.json"
    file.write_text(json.dumps(SQUAD))
    return str(file)


@pytest.fixture
def hotpot(tmp_path):
    file = tmp_path / "hotpot.json"
    file.write_text(json.dumps(HOTPOT))
    return str(file)


def test_squad_questions_stand_among_documents(squad):
    words = Words(piece=COUNTED)
    for i, sample in enumerate(samples("qa_1", 400, 5, words, data=squad)):
        town = f"a{i}" if i < 4 else "b0"
        number = i if i < 4 else 0
        assert sample.prompt.endswith(f"Question: Where is {town}?")
        assert sample.prompt[sample.shared :].startswith("\n\nAnswer the question based on the given documents.")
        assert f"Town {town} lies by lake {number}." in sample.prompt
        assert sample.answers == (f"lake {number}",)
        assert sample.prefix == " Answer:"
        assert total(words, sample) <= 400


def test_hotpot_questions_have_ten_documents(hotpot):
    drawn = DocumentQuestions("qa_2", {"template": "{context}|{query}", "answer_prefix": ""}, 42, hotpot).draw(2, 10)
    assert sorted(re.findall(r"(T2-\d)\nOne 2\. Two\.", drawn.prompt)) == [f"T2-{j}" for j in range(10)]
    assert drawn.prompt.startswith("Document 1:\nT2-")
    assert drawn.answers == ["yes 2"]


def test_questions_in_the_form_of_the_quality_demo_have_the_same_documents(tmp_path, hotpot):
    other = []
    for item in HOTPOT:
        (title_a, para_a), (title_b, para_b), *distractors = item["context"]
        pair = {"title_a": title_a, "para_a": para_a, "title_b": title_b, "para_b": para_b}
        asked = {"question": item["question"], "answer": item["answer"]}
        other.append(asked | pair | {"distractors": [[*one, 63.5] for one in distractors]})
    file = tmp_path / "demo.json"
    file.write_text(json.dumps(other))
    prompts = {"template": "{context}|{query}", "answer_prefix": ""}
    drawn = [DocumentQuestions("qa_2", prompts, 42, name).draw(2, 10) for name in (hotpot, str(file))]
    assert drawn[0] == drawn[1]
    file.write_text(json.dumps([*other, {"question": "Who?", "answer": "He", "title_a": "He"}]))
    with pytest.raises(ValueError, match=rf"demo.json, item {len(other) + 1}: there is no field 'title_b'"):
        DocumentQuestions("qa_2", prompts, 42, str(file))


def test_few_documents_are_repeated(hotpot):
    drawn = DocumentQuestions("qa_2", {"template": "{context}{query}", "answer_prefix": ""}, 42, hotpot).draw(0, 120)
    assert drawn.prompt.count("T3-3") == 2


def test_questions_want_one_of_the_answers(squad):
    sample = samples("qa_1", 400, 1, data=squad)[0]
    assert Ruler("qa_1", 1, squad).scores(sample, Answer(" By LAKE 0.", [])) == {"string_match": 1}


def test_other_tasks_want_all_answers():
    task = Ruler("niah_multivalue", 1)
    sample = task.samples(Words(), 1500, 42)[0]
    found = f"{sample.answers[0]} and {sample.answers[2]}"
    assert task.scores(sample, Answer(found, [])) == {"string_match": 0.5}


# ---- words ----


@given(
    st.sets(st.sampled_from(["a", "a-b", "a-b-c", "ab", "b", "b c", "c"]), min_size=1),
    st.sets(st.text("bc-", min_size=1), min_size=1),
)
def test_pairs_are_sorted_and_different(first, second):
    pairs = Pairs(list(first), list(second))
    assert list(pairs) == sorted({f"{a}-{b}" for a in first for b in second})
    assert pairs[-1] == list(pairs)[-1]


def test_word_lists_name_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "wonderwords", None)
    with pytest.raises(ImportError, match=r"pip install 'pylongctx\[eval\]'"):
        word_list("noun")


@pytest.mark.parametrize(
    ("name", "length", "data", "message"),
    [
        ("niah_single_9", 2000, None, "RULER has no task 'niah_single_9'; available: niah_single_1"),
        ("niah_single_1", 200, None, "niah_single_1, length 200: the length is too short"),
        ("fwe", 200, None, "fwe, length 200: the length is too short"),
        ("qa_1", 2000, None, "qa_1 needs the questions of SQuAD: --data FILE"),
    ],
)
def test_errors(name, length, data, message):
    with pytest.raises(ValueError, match=message):
        samples(name, length, data=data)


def test_a_file_of_something_else_is_an_error(tmp_path, squad):
    file = tmp_path / "other.json"
    file.write_text("{}")
    with pytest.raises(ValueError, match=r"other.json: there is no field 'data'; it has none"):
        samples("qa_1", 1000, data=str(file))
    with pytest.raises(ValueError, match="has 34 questions, not 99"):
        samples("qa_1", 1000, 99, data=squad)
