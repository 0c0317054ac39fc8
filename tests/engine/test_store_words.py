"""What ``pylongctx kv ls`` shows of a text: how it begins, its source, age and bytes; and how that is hidden."""

import os
import time

import numpy as np
import pytest
from stored import SETTINGS, files

from pylongctx import Llama
from pylongctx._units import age_text
from pylongctx.cli import main
from pylongctx.engine.saved_state import LlamaState, read_identity
from pylongctx.store.folder import Folder
from pylongctx.store.layout import MAX_CHARACTERS, shown

pytestmark = pytest.mark.check

WORDS = "It was the best of times, it was the worst of times, it was the age of wisdom. "
COLUMNS = ["text", "tokens", "size", "age", "used", "source"]


@pytest.fixture
def listed(capsys, monkeypatch):
    """Return a function that lists a store on a wide terminal."""
    monkeypatch.setenv("COLUMNS", "200")

    def listed(folder, *options):
        capsys.readouterr()
        assert main(["kv", "ls", str(folder), *options]) == 0
        return capsys.readouterr().out

    return listed


def start(path, folder, **kwargs):
    return Llama(str(path), kv_store=folder, **SETTINGS | kwargs)


@pytest.mark.parametrize("method", ["full", "corm,window=64", None])
def test_first_words_source_age_and_bytes(embedded_model, tmp_path, listed, method):
    with start(embedded_model, tmp_path, method=method) as llm:
        llm(WORDS * 60, max_tokens=1)
    for path in files(tmp_path):
        os.utime(path, (time.time() - 7300, time.time() - 7300))
    title, head, *rows = listed(tmp_path).splitlines()
    assert head.split() == [*COLUMNS, "begins"] and (method or "llama.cpp").split(",")[0] in title
    assert rows and all(WORDS[:60] in row and " 2 h  prompt" in row and "iB" in row for row in rows)
    assert {row.split()[0] for row in rows} <= {path.stem[:12] for path in files(tmp_path)}


def test_every_file_has_them_and_when_it_was_written(embedded_model, tmp_path):
    before = int(time.time())
    with start(embedded_model, tmp_path) as llm:
        llm(WORDS * 60, max_tokens=1)
    about = [read_identity(path) for path in files(tmp_path)]
    assert len(about) > 1 and {one["words"] for one in about} == {shown(WORDS * 9)}
    assert all(before <= one["written"] <= time.time() for one in about)


def test_words_that_are_hidden(embedded_model, tmp_path, listed):
    with start(embedded_model, tmp_path) as llm:
        llm(WORDS * 60, max_tokens=1)
    assert "best of times" in listed(tmp_path)
    hidden = listed(tmp_path, "--no-words")
    assert "best" not in hidden and hidden.splitlines()[1].split() == COLUMNS and "prompt" in hidden


def test_words_that_are_not_kept(embedded_model, tmp_path, listed):
    with start(embedded_model, tmp_path, kv_store_words=False) as llm:
        llm(WORDS * 60, max_tokens=1)
        assert llm._opened.store.flush()
    assert all("words" not in read_identity(path) for path in files(tmp_path))
    assert not [path for path in files(tmp_path) if b"best of" in path.read_bytes()]
    assert "prompt" in listed(tmp_path) and "best" not in listed(tmp_path)
    with start(embedded_model, tmp_path) as llm:
        llm(WORDS * 60, max_tokens=1)
        assert llm.kv_store_usage().hits == 1, "it is the same text"


@pytest.mark.parametrize("words", [True, False])
def test_documents_have_a_name(embedded_model, tmp_path, listed, words):
    settings = {"method": "full,spans=2+kvzip", "kv_store_words": words, "type_k": "f32", "type_v": "f32"}
    with start(embedded_model, tmp_path, **settings) as llm:
        llm.read(WORDS * 30, name="two cities", ratio=0.5)
    assert len(files(tmp_path, "document")) == 1
    (row,) = [row for row in listed(tmp_path).splitlines() if "document" in row]
    assert ("document two cities" in row and WORDS[:40] in row) if words else row.rstrip().endswith("document")
    hidden = listed(tmp_path, "--no-words")
    assert "cities" not in hidden and "document" in hidden


def put(folder, name="a" * 40, **about):
    state = LlamaState(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.uint8), about)
    Folder(folder, 1 << 30).write(name, "rows", state)


@pytest.mark.parametrize("words", ["[red]a[/red]", "[/]", 5, None])
def test_what_files_say_is_printed_as_it_is(tmp_path, listed, words):
    said = dict.fromkeys(("words", "source", "model"), words)
    put(tmp_path, first=0, end=512, before="", written="long ago", owner="0" * 16, **said)
    title, _, row = listed(tmp_path).splitlines()
    assert title.startswith(f"{words}, ") and row.split()[7:] == [f"{words},", "user", "00000000", str(words)]
    assert " -  " in row, "no age"


@pytest.mark.parametrize("action", ["ls", "stats"])
def test_long_methods_are_distinguished(tmp_path, capsys, action):
    for name in ("a", "b"):
        put(tmp_path, name * 40, first=0, end=512, before="", method="x" * 90 + name)
    assert main(["kv", action, str(tmp_path)]) == 0
    out = "".join(capsys.readouterr().out.split())
    assert out.count("xa,") == out.count("xb,") == 1


def test_a_store_without_texts(tmp_path, listed):
    assert listed(tmp_path) == "no texts\n"


def test_files_of_an_earlier_release(tmp_path, listed):
    put(tmp_path, first=0, end=512, before="")
    assert "aaaaaaaaaaaa" in listed(tmp_path)


def test_a_terminal_prints_what_is_shown():
    assert shown("a\x1b[31m\r\n\tb\u202ec\x00 d") == "a [31m b c d"
    assert shown("x" * MAX_CHARACTERS) == "x" * MAX_CHARACTERS
    assert shown("y" * (MAX_CHARACTERS + 1)) == "y" * (MAX_CHARACTERS - 3) + "..."


@pytest.mark.parametrize(
    ("seconds", "words"), [(-5, "0 s"), (0.9, "0 s"), (59, "59 s"), (61, "1 min"), (7300, "2 h"), (86400 * 40, "40 d")]
)
def test_ages(seconds, words):
    assert age_text(seconds) == words


@pytest.mark.parametrize("action", ["rm", "verify", "stats"])
def test_only_ls_has_words(tmp_path, capsys, action):
    assert main(["kv", action, str(tmp_path), "--no-words"]) == 1
    assert "--no-words is for ls" in capsys.readouterr().err
