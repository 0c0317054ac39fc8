"""The examples run as they stand, as processes, with the embedded model under the names that they take by default."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from needs import need
from serving import running
from terminal import environment

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))
MODELS = ("smollm2-135m", "qwen2.5-coder-1.5b")  # of the scripts, and of the notebook
BOOK = "It was the best of times, it was the worst of times. " * 60
LINES = 60


@pytest.fixture
def folder(embedded_model, tmp_path):
    """Return a folder as a checkout: the book of the notebook, and in examples/ a model and a book."""
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "emma.txt").write_text(BOOK)
    (tmp_path / "examples").mkdir()
    for name in MODELS:
        (tmp_path / "examples" / name).symlink_to(embedded_model)
    (tmp_path / "examples" / "book.txt").write_text(BOOK)
    return tmp_path / "examples"


def run(folder, script, *words):
    """Return what an example prints."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / script, *words],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_book_is_asked(folder):
    answer, last = run(folder, "ask_a_book.py", "book.txt", "Who is the thief?").rstrip().rsplit("\n", 1)
    assert answer.strip()
    n_tokens = int(re.fullmatch(r"(\d+) tokens in [\d.]+ MiB of KV memory", last)[1])
    assert n_tokens > 512  # longer than the trained context


def test_a_second_process_takes_the_text_from_the_store(folder):
    said = run(folder, "store.py", "book.txt", "Who is the thief?", "-c", "2048")
    first, second = re.findall(r"^(?:first|second) process: (\d+) tokens from the store", said, re.MULTILINE)
    assert (int(first), int(second) > 512) == (0, True)
    answers = re.findall(r"first token after [\d.]+ s: (.*?)(?=\nsecond process|\Z)", said.rstrip(), re.DOTALL)
    assert answers[0] == answers[1]


def test_a_text_is_compressed(folder):
    said = run(folder, "compress.py", "book.txt", "Which times?", "Who was there?", "--keep", "0.5")
    n_tokens, before, after = re.match(r"(\d+) tokens: ([\d.]+) MiB of KV memory, ([\d.]+) MiB after", said).groups()
    assert int(n_tokens) > 512
    assert float(after) < 0.7 * float(before)
    assert "\nWhich times?" in said
    assert "\nWho was there?" in said


def test_methods_are_compared(folder):
    said = run(folder, "compare_methods.py", "--method", "full", "--method", "longheads", "--length", "2048")
    found = dict(re.findall(r"(full|longheads) .*?(\d) of 3", said))
    assert found == {"full": "0", "longheads": "3"}


def test_the_client_of_openai_starts_a_server(folder):
    need("server", "fastapi", "openai")
    assert run(folder, "openai_client.py", "Name a color.").strip()


def test_the_client_of_openai_takes_a_server_that_runs(folder):
    need("server", "fastapi", "openai", "httpx")
    with running() as server:
        assert run(folder, "openai_client.py", "Name a color.", "--url", server.url).strip()
        assert server.metric("prompt_tokens_total") > 0


@pytest.mark.peers
def test_langchain_chats(folder):
    need("peers", "langchain_community")
    assert run(folder, "langchain_chat.py", "book.txt", "Who is the thief?", "-c", "2048").strip()


def test_the_notebook_runs(folder):
    notebook = json.loads((EXAMPLES / "book.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    program = "import json, sys\nnames = {}\nfor cell in json.load(sys.stdin): exec(cell, names)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=environment(),
        input=json.dumps(cells),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"MiB of KV memory hold \d+ tokens", done.stdout)


def test_the_notebook_has_its_outputs():
    notebook = json.loads((EXAMPLES / "book.ipynb").read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["language"]) == (4, "python")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert all(output["output_type"] == "stream" for cell in code for output in cell["outputs"])
    assert sum(bool(cell["outputs"]) for cell in code) >= 3


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_short_and_says_how_it_is_run(name):
    text = (EXAMPLES / name).read_text()
    assert len(text.splitlines()) < LINES
    assert f"python examples/{name} " in text
    assert f'default="{MODELS[0]}"' in text


def test_the_list_names_every_example():
    named = re.findall(r"^\| `([\w.]+)` \|", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
    assert set(named) == files
