"""pylongctx ask: files and a question in, an answer on stdout, what it took on stderr."""

import json
import os
import re
import time

import pytest
from terminal import run

from pylongctx.chat.loops import is_loop, repeats
from pylongctx.cli import make_parser, parse
from pylongctx.cli.ask import changed_last, heads_have_blocks
from pylongctx.models import embedded_model
from pylongctx.readers.files import FileText

YES = ("--grammar", 'root ::= "yes" | "no"', "--temp", "0")
LINES = [f"On day {i} the butler moved the letter to room {7 * i % 50}." for i in range(120)]


def ask(cache, *words, **more):
    return run("ask", *words, "-m", str(embedded_model()), *YES, LCTX_CACHE=str(cache), **more)


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("\n".join(LINES))
    return str(path)


def from_store(done):
    return int(re.search(r"(\d+) of them from the store", done.stderr)[1])


def test_the_next_question_reads_the_question_only(book, tmp_path):
    first, second = (ask(tmp_path / "cache", book, question) for question in ("Where is it?", "Who moved the letter?"))
    for done in (first, second):
        assert done.returncode == 0, done.stderr
        assert done.stdout in ("yes\n", "no\n")
    assert from_store(first) == 0 < 1000 < from_store(second)
    assert (
        re.search(r"text of (\d+) tokens, (\d+) of", second.stderr)[1]
        == re.search(r"of (\d+) tokens,", first.stderr)[1]
    )
    assert (tmp_path / "cache" / "kv").is_dir()


def test_a_pipe_folders_and_nothing_kept(book, tmp_path):
    cache = tmp_path / "cache"
    piped = ask(cache, "Where is it?", "--no-store", input="\n".join(LINES))
    assert piped.returncode == 0 and piped.stdout in ("yes\n", "no\n"), piped.stderr
    assert "store" not in piped.stderr and not (cache / "kv").exists()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_bytes("Gr\u00fc\u00dfe".encode("latin-1"))
    several = ask(cache, book, str(tmp_path / "notes"), "Where is it?", "--no-store")
    assert several.returncode == 0 and "a.txt: read as Windows-1252" in several.stderr


def test_method_and_context_follow_the_text(book, tmp_path):
    long = tmp_path / "long.txt"
    long.write_text("\n".join(LINES * 3))
    short, longer = (ask(tmp_path, path, "Where?", "--no-store") for path in (book, str(long)))
    sizes = [int(re.search(r"(\d+) tokens of context", done.stderr)[1]) for done in (short, longer)]
    assert sizes[0] == 4096 < sizes[1] and sizes[1] % 4096 == 0
    assert ", full," in short.stderr and (", longheads," in longer.stderr) == (sizes[1] > 8192)
    other = ask(tmp_path, book, "Where?", "--no-store", "-c", "8192", "--method", "dca")
    assert "dca" in other.stderr and "8192 tokens of context" in other.stderr


def test_mistakes_say_what_to_do(book, tmp_path):
    assert "the last word must be the question" in ask(tmp_path, book, book).stderr
    missing = ask(tmp_path, str(tmp_path / "none.txt"), "Where?")
    assert missing.returncode == 1 and "none.txt" in missing.stderr
    (tmp_path / "x.bin").write_bytes(b"\0\1")
    assert "is not a text file" in ask(tmp_path, str(tmp_path / "x.bin"), "Where?").stderr


def test_json_has_the_answer_and_its_passages(book, tmp_path):
    done = ask(tmp_path, book, "Who moved the letter to room 21 on day 3?", "--no-store", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["answer"] in ("yes", "no") and found["answered"] and found["tokens"] > 1000
    assert found["model"] == embedded_model().name and found["method"] == "full" and found["n_ctx"] == 4096
    assert found["quotes"][0]["text"] == LINES[3] and found["quotes"][0]["line"] == 4
    assert found["quotes"][0]["file"] == book and not found["repeated_itself"]
    assert (found["type_k"], found["type_v"]) == ("q8_0", "q8_0")
    wished = json.loads(ask(tmp_path, book, "Where?", "--no-store", "--json", "-ctv", "f32").stdout)
    assert (wished["type_k"], wished["type_v"]) == ("f16", "f32")


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"embedding_length": "576", "attention.head_count": "9"}, True),
        ({"embedding_length": "2560", "attention.head_count": "32"}, False),  # 80 channels
        ({"embedding_length": "2560", "attention.head_count": "[32, 16]"}, False),
        ({"attention.key_length": "192", "attention.value_length": "128"}, True),
        ({"attention.key_length": "576", "attention.key_length_mla": "192", "attention.value_length_mla": "72"}, False),
        ({}, False),
    ],
)
def test_heads_of_whole_blocks(facts, expected):
    given = {f"some.{name}": value for name, value in facts.items()} | {"general.architecture": "some"}
    assert heads_have_blocks(given) == expected


def test_quotes_have_places(book, tmp_path):
    done = ask(tmp_path, book, "Who moved the letter to room 21 on day 3?", "--no-store", "--quote")
    assert f'{book}, line 4: "{LINES[3]}"' in done.stderr
    assert "line 4" not in ask(tmp_path, book, "Where is it on day 3?", "--no-store").stderr


def test_no_answer_is_status_1(book, tmp_path):
    words = ("ask", book, "Where?", "--no-store", "-m", str(embedded_model()), "--grammar", 'root ::= " "')
    assert run(*words, LCTX_CACHE=str(tmp_path)).returncode == 1
    done = run(*words, "--json", LCTX_CACHE=str(tmp_path))
    assert done.returncode == 1 and not json.loads(done.stdout)["answered"]


def test_what_does_not_fit_is_named(book, tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()
    for i in range(6):
        (folder / f"{i}.txt").write_text("\n".join(LINES[: 3 if i % 2 else 120]))
    done = ask(tmp_path, str(folder), "Where?", "--no-store", "-c", "4096")
    assert done.returncode == 0, done.stderr
    kept, left_out = ("1.txt", "3.txt", "5.txt"), ("2.txt", "4.txt")
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("left out")]
    assert "4096 tokens are the most" in line and "raise -c" in line
    assert all(name in line for name in left_out) and not any(name in line for name in kept)
    none = ask(tmp_path, str(folder / "0.txt"), str(folder / "2.txt"), "Where?", "--no-store", "-c", "1200")
    assert none.returncode == 1 and "none of 2 files fits into 1200 tokens" in none.stderr


# ---- folders ----


def test_a_file_that_changes_again_is_read_alone(tmp_path):
    notes, cache = tmp_path / "notes", tmp_path / "cache"
    notes.mkdir()
    for i in range(3):
        (notes / f"{i}.txt").write_text("\n".join(line.replace("butler", f"clerk {i}") for line in LINES[:30]))
    words = (str(notes), "Who?", "--json", "-c", "8192")
    first, second = (json.loads(ask(cache, *words).stdout) for _ in range(2))
    assert first["tokens_stored"] == 0 and first["tokens_evaluated"] == first["tokens"] > 2000
    assert second["tokens_evaluated"] == 0 and second["answer"] == first["answer"]
    evaluated = []
    for text in ("Nobody moved a letter. " * 60, "Nobody moved a parcel. " * 60):
        (notes / "0.txt").write_text(text)
        evaluated.append(json.loads(ask(cache, *words).stdout)["tokens_evaluated"])
    n_blocks = -(-len(text.split()) * 2 // 512) + 1
    assert evaluated[1] <= 512 * n_blocks < first["tokens"] <= evaluated[0] + 512


def test_files_that_are_named_stay_where_they_are(tmp_path, monkeypatch):
    monkeypatch.setenv("LCTX_CACHE", str(tmp_path / "cache"))
    paths = [tmp_path / f"{i}.txt" for i in range(4)]
    for path in paths:
        path.write_text("x")
    files, names = [FileText(str(path), "x") for path in paths], [str(paths[0]), str(tmp_path)]
    assert changed_last(files, names) == files
    for i, later in ((0, 30), (2, 20), (1, 10)):
        os.utime(paths[i], (time.time() + later,) * 2)
    assert changed_last(files, names) == [files[0], files[3], files[1], files[2]]


# ---- loops ----


@pytest.mark.parametrize("period", [1, 3, 17, 63, 65, 128])
def test_the_second_round_of_a_loop_is_known_early(period):
    piece = [*range(1000, 1000 + period)]
    assert repeats([9, 8, 7, *piece, *(piece * 12)[:12]])
    assert not repeats([9, 8, 7, *piece, *(piece * 12)[:11]]) or period < 12
    assert not repeats([*range(300)]) and not repeats(piece[:11]) and not repeats([])


@pytest.mark.parametrize("period", [1, 3, 17, 63, 65, 128])
def test_a_piece_over_and_over_is_a_loop(period):
    piece, times = list(range(period)), max(4, -(-64 // period))
    assert is_loop([9, 8, 7, *piece * times])
    assert not is_loop((piece * times)[: 63 if period <= 15 else 4 * period - 1])  # less than a loop has
    assert not is_loop([*piece * times, 500])
    changed = piece * times
    changed[-2 * period] = 501
    assert not is_loop(changed)


def test_long_pieces_and_short_answers_are_not_loops():
    assert not is_loop(list(range(129)) * 4)
    assert not is_loop([])
    assert not is_loop([5] * 63)


@pytest.mark.parametrize("command", ["ask", "chat"])
def test_an_answer_that_repeats_itself_is_ended(book, tmp_path, command):
    loop = ("--grammar", 'root ::= "the thief and " root', "--temp", "0", "-n", "600", "-m", str(embedded_model()))
    words = ("ask", book, "Where?", "--no-store") if command == "ask" else ("chat", "-p", "Where?", "-c", "1024")
    done = run(*words, *loop, input="")
    assert done.returncode == 0, done.stderr
    assert "the answer repeats itself" in done.stderr and "--repeat-penalty 1.1" in done.stderr
    assert 64 <= int(re.search(r"answer (\d+) tokens", done.stderr)[1]) < 200
    assert 1 <= done.stdout.count("the thief and") <= 8  # it is cut where it begins to repeat itself
    on = run(*words, *loop[:-4], "-n", "220", *loop[-2:], "--no-loop-stop", input="")
    assert "repeats itself" not in on.stderr and "answer 220 tokens" in on.stderr


def test_a_prompt_a_file_and_a_pipe_are_one_message(book):
    plain, file, piped = (
        run("chat", *YES, "-c", "8192", "-p", "Where?", *more, input=text)
        for more, text in (((), ""), (("-f", book), ""), ((), "\n".join(LINES)))
    )
    n = [int(re.search(r"prompt (\d+) tokens", done.stderr)[1]) for done in (plain, file, piped)]
    assert n[0] < 100 and min(n[1:]) > 1000
    assert [len(done.stdout.split()) for done in (plain, file, piped)] == [1, 1, 1]


@pytest.mark.parametrize(
    "line",
    [
        "a.txt b.txt Who? -c 4096 -m x",
        "-c 4096 a.txt b.txt -m x Who?",
        "a.txt -c 4096 -m x b.txt Who?",
        "a.txt -c 4096 b.txt -m x Who?",
        "a.txt -m x b.txt Who? -c 4096",
        "-m x -c 4096 a.txt b.txt Who?",
    ],
)
def test_options_may_stand_anywhere(line):
    args = parse(make_parser("ask"), ["ask", *line.split()])
    assert (args.words, args.ctx_size, args.model) == (["a.txt", "b.txt", "Who?"], 4096, "x")


@pytest.mark.parametrize("words", [["a.txt", "-c", "1", "Who?", "--nothing"], ["a.txt", "--nothing", "Who?"]])
def test_unknown_options_are_no_words(words, capsys):
    with pytest.raises(SystemExit):
        parse(make_parser("ask"), ["ask", *words])
    assert "there is no option --nothing" in capsys.readouterr().err
