"""The check of words (docs/words.py): what it finds, what it leaves out, and what an exception takes back."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def words():
    spec = importlib.util.spec_from_file_location("docs_words", ROOT / "docs" / "words.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It is read anew.", [(1, "anew")]),
        ("One.\n\nTwo\nand so\nmany.", [(4, "so many")]),
        ("This is no file, and there is no other.", [(1, "is no")]),
        ("It is no longer here.", []),
        ("The text behind it, a library behind the Python interface.", [(1, "behind")]),
        ("- Somebody\n  goes on.", [(1, "Somebody"), (2, "goes on")]),
        ("Use `anew`, [a page](anew.md) or <!-- anew --> nothing.", []),
        ("```sh\necho anew\n```\n\nText.", []),
        ("<!-- words: behind: a place, not a time -->\nThe queue behind it, anew.", [(2, "anew")]),
        ("<!-- words: behind: a place, not a time -->\nOne.\n\nTwo behind it.", [(4, "behind")]),
    ],
)
def test_words_in_a_page(words, text, found):
    assert sorted((line, word) for line, word, _ in words.in_markdown(text)) == found


def test_messages_of_exceptions_are_read(words, tmp_path, monkeypatch):
    (tmp_path / "pylongctx").mkdir()
    source = 'def f(n):\n    """Not anew."""\n    raise ValueError(f"{n} is no file", *["read it anew"])\n'
    source += '\n\ndef g():\n    raise OSError("behind it")  # words: behind: a place\n'
    (tmp_path / "pylongctx" / "a.py").write_text(source)
    monkeypatch.setattr(words, "ROOT", tmp_path)
    assert [(found.place, found.word) for found in words.messages()] == [
        ("pylongctx/a.py:3", "is no"),
        ("pylongctx/a.py:3", "anew"),
    ]


def test_comments_are_read(words, tmp_path, monkeypatch):
    for folder in ("tests", "native"):
        (tmp_path / folder).mkdir()
    source = '"""Read\nit anew."""\n\nx = "anew"  # so many of them, `anew`\ny = 1  # nobody  # words: nobody: a name\n'
    (tmp_path / "tests" / "a.py").write_text(source)
    source = 'int a;  // it goes\n  // on here\nconst char * a = "no // comment, told", b = \'"\';\n/* 1\nbeside */\n'
    (tmp_path / "native" / "a.cpp").write_text(source)
    monkeypatch.setattr(words, "ROOT", tmp_path)
    assert [(found.place, found.word) for found in words.comments()] == [
        ("tests/a.py:4", "so many"),
        ("tests/a.py:2", "anew"),
        ("native/a.cpp:1", "goes on"),
        ("native/a.cpp:3", "told"),
        ("native/a.cpp:5", "beside"),
    ]


def test_help_is_read(words, monkeypatch):
    monkeypatch.setattr(words, "WORDS", [(words.re.compile(r"\bmodel\b"), "another word")])
    found = {finding.place for finding in words.helps()}
    assert {"pylongctx chat --help", "pylongctx eval passkey --help"} <= found
