"""The Python snippets of the README run as they stand, on the embedded model; its commands are understood."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from needs import need

from pylongctx.cli import make_parser

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
# Sections whose snippets share their names, one after the other, in this process.
SECTIONS = {"Chat, tools, JSON": 3, "Does it fit?": 1, "Evaluate": 1}
URL = "http://127.0.0.1:8080"
COMMANDS = re.findall(r"^(?: {4})?(?:[^#\n]*\| )?(pylongctx [a-z-]+(?: .*)?)$", README, re.MULTILINE)


def snippets(section: str) -> list[str]:
    """Return the fenced Python blocks of a section."""
    text = re.search(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL).group(1)
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(embedded_model, tmp_path, monkeypatch):
    """Enter a folder with the files that the snippets name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").symlink_to(embedded_model)
    (tmp_path / "book.txt").write_text("It was the best of times, it was the worst of times. " * 20)
    return tmp_path


def run(section: str, names: dict, replace: tuple[str, str] = ("", "")) -> None:
    for i, code in enumerate(snippets(section)):
        exec(compile(code.replace(*replace), f"README.md, {section}, snippet {i + 1}", "exec"), names)


@pytest.mark.parametrize("section", SECTIONS)
def test_snippets_run(section, folder, capsys):
    assert len(snippets(section)) >= SECTIONS[section]
    run(section, {})
    assert capsys.readouterr().out


def test_the_client_of_the_server(folder, capsys):
    need("server", "fastapi", "uvicorn", "prometheus_client", "openai", "httpx")
    from serving import running

    with running(n_ctx=2048, method="longheads") as server:
        run("Server", {}, (URL, server.url))
        assert server.http.get("/v1/longctx").json()["chunk_map"]["n_prompt"] > 256
    assert "tokens are read" in capsys.readouterr().out


def words(command: str) -> list[str]:
    """Return the arguments of a command line, of "a|b" the first choice."""
    found = shlex.split(command, comments=True)
    return [word.strip("[]").partition("|")[0] for word in found[1:] if word != "&"]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_understood(command, folder):
    args = make_parser().parse_args(words(command))
    assert callable(args.run)


def test_every_command_is_shown():
    shown = {words(command)[0] for command in COMMANDS}
    assert shown == set(make_parser()._subparsers._group_actions[0].choices)


@pytest.mark.peers
def test_a_program_that_imports_llama_cpp(folder):
    need("peers", "langchain_community")
    (code,) = snippets("Programs that import llama_cpp")
    clean = {name: value for name, value in os.environ.items() if name != "LLAMA_CPP_LIB_PATH"}
    ran = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip()
