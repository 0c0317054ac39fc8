"""The transcripts of docs/four-tasks.md, run with the embedded model under the names that they use."""

import re
import shlex
from contextlib import ExitStack
from pathlib import Path

import pytest
from needs import need
from terminal import PASTE, Terminal, run
from test_serve_process import started

PAGE = (Path(__file__).parents[2] / "docs" / "four-tasks.md").read_text(encoding="utf-8")
MODEL, BOOK = "qwen2.5-coder-1.5b", "bohemia.txt"
URL = "http://127.0.0.1:8080"
NUMBER = re.compile(r"\d+(?:\.\d+)?")
STORY = "".join(f"On day {i} the butler moved the letter to room {7 * i % 50}.\n" for i in range(700))


def transcripts():
    """Return the commands of the page, each with the lines that followed."""
    found = []
    for block in re.findall(r"^```console\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        for entry in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *lines = entry.splitlines()
            found.append((shlex.split(command)[1:], lines))
    return found


ASKED = [entry for entry in transcripts() if entry[0][0] == "ask"]
((CHAT, CHAT_LINES),) = [entry for entry in transcripts() if entry[0][0] == "chat"]
((SERVE, SERVE_LINES),) = [entry for entry in transcripts() if entry[0][0] == "serve"]
((EVAL, EVAL_LINES),) = [entry for entry in transcripts() if entry[0][0] == "eval"]


def shape(line):
    """Return a line without its numbers."""
    return NUMBER.sub("N", re.sub(r"\x1b\[[\d;]*m", "", line).strip())


@pytest.fixture
def folder(tmp_path, monkeypatch, embedded_model):
    monkeypatch.chdir(tmp_path)
    (tmp_path / MODEL).symlink_to(embedded_model)
    (tmp_path / BOOK).write_text(STORY)
    return tmp_path


def test_ask(folder):
    tokens = []
    for words, lines in ASKED:
        done = run(*words, "-n", "5", LCTX_CACHE=str(folder / "cache"))
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
        last = done.stderr.strip().splitlines()[-1]
        said = " ".join(lines)
        assert shape(last) == shape(said[said.rindex(MODEL) :])
        tokens.append([int(n) for n in re.search(r"text of (\d+) tokens, (\d+) of", last).groups()])
    assert tokens == [[tokens[0][0], 0], [tokens[0][0], tokens[0][0]]]


def test_chat(folder):
    end = next(i for i, line in enumerate(CHAT_LINES) if line.endswith("?"))
    message = "\n".join(CHAT_LINES[1 : end + 1]).removeprefix("> ")
    with Terminal(*CHAT, "-n", "5", "--temp", "0") as terminal:
        assert shape(CHAT_LINES[0]) in shape(terminal.until("> "))
        terminal.type(PASTE.format(message) + "\n")
        answered = terminal.until("\n> ").splitlines()
        assert sum("answer" in line and "context" in line for line in answered) == 1  # one message
        kinds = [re.sub(r"N [KM]iB", "N MiB", shape(line)) for line in (answered[-2], CHAT_LINES[-2])]
        assert kinds[0] == kinds[1]
        terminal.type(CHAT_LINES[-1].removeprefix("> ") + "\n")
        assert terminal.end() == 0


def test_serve(folder, capsys):
    need("server", "openai")
    with ExitStack() as stack:
        server = stack.enter_context(started(*SERVE[1:]))
        assert shape(server.said[-1]).replace(server.url, "") == shape(SERVE_LINES[-1]).replace(URL, "")
        (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
        exec(compile(code.replace(URL, server.url), "docs/four-tasks.md", "exec"), {})
        assert capsys.readouterr().out.strip()


def test_eval(folder):
    done = run(*EVAL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[: len(EVAL_LINES)] == EVAL_LINES
