"""LoCoMo: prompts, the last turns of a chat, and F1 of stems, on chats made here."""

import hashlib
import json
import zipfile

import pytest
from needs import need
from vocabulary import Words, total

from pylongctx.eval.files import published
from pylongctx.eval.locomo import LoCoMo, many_f1, read_chats, stem_f1
from pylongctx.eval.task import Answer

QA = [
    {"question": "What does Ann paint?", "answer": "boats, a house", "category": 1},
    {"question": "When did Ann paint?", "answer": 2022, "category": 2},
    {"question": "What would Ann study?", "answer": "arts; she paints", "category": 3},
    {"question": "Who painted?", "answer": "Ann", "category": 4},
    {"question": "What did Bob paint?", "adversarial_answer": "a boat", "category": 5},
]
CHAT = {"speaker_a": "Ann", "speaker_b": "Bob", "qa": QA, "session_1_summary": "They talk.", "events_session_1": {}}
for i in range(1, 13):
    turns = [{"speaker": "Ann" if j % 2 else "Bob", "text": f"I painted thing {i}-{j}."} for j in range(4)]
    CHAT |= {f"session_{i}_date_time": f"{i} May, 2023", f"session_{i}": turns}
CHAT["session_12"] = [*CHAT["session_12"], {"speaker": "Ann", "text": "Look!", "blip_caption": "a photo of a boat"}]
START = published("locomo")["locomo"]["start"].format("Ann", "Bob")

FIRST = START + '\nDATE: 1 May, 2023\nCONVERSATION:\nBob said, "I painted thing 1-0."\n'


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "26.json"
    path.write_text(json.dumps(CHAT))
    return str(path)


def test_prompts_are_the_published_ones():
    digest = hashlib.sha256(json.dumps(published("locomo"), sort_keys=True).encode()).hexdigest()
    assert digest == "f4a1383617d8233643a331e67b479fb546a74fb0e4e7b08fc13dbf9daf356794"


def test_the_first_chats(tmp_path):
    path = tmp_path / "chats.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("42", "26", "30"):
            archive.writestr(f"{name}.json", json.dumps(CHAT))
    for chats, names in ((1, {"26"}), (2, {"26", "30"}), (None, {"26", "30", "42"})):
        assert {sample.id.split("-")[2] for sample in LoCoMo(str(path), chats=chats).samples(Words(), 4000, 0)} == names


def test_a_chat_is_shown_with_dates_and_pictures(file):
    found = LoCoMo(file).samples(Words(), 4000, 0)
    assert len(found) == 5
    for sample in found:
        assert sample.prompt.startswith(
            START + '\nDATE: 1 May, 2023\nCONVERSATION:\nBob said, "I painted thing 1-0."\n'
        )
        assert sample.prompt[: sample.shared].endswith('Ann said, "Look!" [shares a photo of a boat]\n')
        assert sample.prompt[: sample.shared] == found[0].prompt[: found[0].shared]
        assert sample.facts["turns"] == sample.facts["turns_of_chat"] == 49
    asked = [sample.prompt.split("Question: ")[1] for sample in found]
    assert asked[0] == "What does Ann paint?\n"
    assert asked[1] == "When did Ann paint? Use DATE of CONVERSATION to answer with an approximate date.\n"
    assert [sample.answers for sample in found[:4]] == [("boats, a house",), ("2022",), ("arts",), ("Ann",)]
    assert found[0].max_tokens == 50


def test_choices_of_an_adversarial_question_come_in_either_order(file):
    seen = set()
    for seed in range(20):
        (sample,) = LoCoMo(file, category="adversarial").samples(Words(), 4000, seed)
        asked = sample.prompt.split("paint? ")[-1]
        order = (
            "(a) No information available (b) a boat"
            if sample.facts["right"] == "(a)"
            else ("(a) a boat (b) No information available")
        )
        assert asked == f"{order}. Select the correct answer by writing (a) or (b).\n"
        seen.add(sample.facts["right"])
    assert seen == {"(a)", "(b)"}


@pytest.mark.parametrize("length", [240, 400, 700])
def test_the_last_turns_are_kept(file, length):
    words = Words(n_bos=1)
    found = LoCoMo(file).samples(words, length, 0)
    longest = max(total(words, sample) for sample in found)
    assert length - 8 - 25 < longest <= length  # a turn has at most 25 tokens with its heading
    kept = found[0].prompt[: found[0].shared].removeprefix(START)
    assert kept.startswith("\nDATE: ") and kept.endswith("a photo of a boat]\n")
    assert kept.count(" said, ") == found[0].facts["turns"] < 49
    assert len({sample.prompt[: sample.shared] for sample in found}) == 1


def test_questions_are_spread_over_chats(tmp_path):
    with zipfile.ZipFile(tmp_path / "chats.zip", "w") as archive:
        for name in ("data/", "data/30.json", "data/26.json"):
            archive.writestr(name, "" if name.endswith("/") else json.dumps(CHAT))
    path = str(tmp_path / "chats.zip")
    found = LoCoMo(path, tests=5).samples(Words(), 4000, 0)
    assert [sample.id for sample in found] == [f"4000-0-{name}" for name in ("26-0", "26-2", "26-4", "30-1", "30-3")]
    assert len(LoCoMo(path).samples(Words(), 4000, 0)) == 10
    assert [s.facts["category"] for s in LoCoMo(path, category="temporal").samples(Words(), 4000, 0)] == [
        "temporal"
    ] * 2


def test_the_released_list_of_chats_is_read(tmp_path, file):
    talk = {key: value for key, value in CHAT.items() if key != "qa"}
    (tmp_path / "locomo10.json").write_text(json.dumps([{"sample_id": "conv-26", "conversation": talk, "qa": QA}]))
    (chat,) = read_chats(str(tmp_path / "locomo10.json")).values()
    assert chat == read_chats(file)["26"]
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "26.json").write_text(json.dumps(CHAT))
    assert read_chats(str(folder)) == {"26": chat}


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ("She painted", "painting", 2 / 3),
        ("The boats and a house.", "boat house", 1.0),
        ("", "boat", 0.0),
        ("1,000", "1000", 1.0),
    ],
)
def test_stems_are_counted(prediction, answer, expected):
    need("eval", "nltk")
    assert stem_f1(prediction, answer) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [("boats, houses", "a house, a boat", 1.0), ("boats", "a house, a boat", 0.5), ("cats", "a house, a boat", 0.0)],
)
def test_several_answers_are_counted_each(prediction, answer, expected):
    need("eval", "nltk")
    assert many_f1(prediction, answer) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("number", "said", "expected"),
    [
        (0, "\nBoats, houses\nmore words", 1.0),
        (1, "Answer: 2022", 1.0),
        (2, "(a) arts", 1.0),
        (3, "It was Ann", 0.5),
    ],
)
def test_the_first_line_counts(file, number, said, expected):
    need("eval", "nltk")
    task = LoCoMo(file)
    sample = task.samples(Words(), 4000, 0)[number]
    assert task.scores(sample, Answer(said, []))["score"] == pytest.approx(expected, abs=1e-6)


def test_an_adversarial_question_is_answered_with_its_letter(file):
    task = LoCoMo(file, category="adversarial")
    for seed in range(8):
        (sample,) = task.samples(Words(), 4000, seed)
        right, wrong = ("(a)", "(b)") if sample.facts["right"] == "(a)" else ("(b)", "(a)")
        scores = [task.scores(sample, Answer(f" {said} it is", []))["score"] for said in (right, wrong)]
        assert scores == [1, 0]


def test_the_summary_is_by_category():
    records = [{"score": s, "category": c} for s, c in ((1, "temporal"), (0, "temporal"), (1, "adversarial"))]
    assert LoCoMo("x.zip").summary(records) == {"score": pytest.approx(2 / 3), "temporal": 0.5, "adversarial": 1}


@pytest.mark.parametrize(
    ("change", "length", "message"),
    [
        ({"qa": [{"question": "Who?", "category": 2}]}, 900, r"26, question 1: it has no 'answer', or its category"),
        ({"qa": [{"question": "Who?"}]}, 900, r"question 1: there is no field 'category'"),
        ({"speaker_b": 1}, 900, r"chat 26: the field 'speaker_b' is a number, not a string"),
        ({"session_3": [{"speaker": "Ann"}]}, 900, r"chat 26, session_3: there is no field 'text'"),
        ({}, 100, "locomo, length 100: question, answer and one turn need more"),
    ],
)
def test_errors(tmp_path, change, length, message):
    path = tmp_path / "26.json"
    path.write_text(json.dumps(CHAT | change))
    with pytest.raises(ValueError, match=message):
        LoCoMo(str(path)).samples(Words(), length, 0)


def test_what_is_not_there_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"nothing.zip does not exist; --data is locomo10.zip"):
        LoCoMo("nothing.zip").samples(Words(), 900, 0)
    with pytest.raises(
        ValueError, match="category is one of multi-hop, temporal, open-domain, single-hop, adversarial"
    ):
        LoCoMo("locomo10.zip", category="hard")
    with pytest.raises(ValueError, match=r"holds no .json files"):
        LoCoMo(str(tmp_path)).samples(Words(), 900, 0)
