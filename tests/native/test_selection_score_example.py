"""The example of a recipe in CONTRIBUTING.md: a patch of a selection score, which is built."""

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from needs import lacks

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE_SOURCES = ("cpu/summarize.cpp", "cpu/select.cpp", "cuda/summarize.cu", "cuda/select.cu")


@pytest.fixture(scope="module")
def commands() -> dict[str, list[str]]:
    """Return how the last build with LCTX_HARNESS compiled the files of native/, without its output."""
    found = sorted(ROOT.glob("build/*/compile_commands.json"), key=lambda path: path.stat().st_mtime)
    entries = json.loads(found[-1].read_text()) if found else []
    commands = {one["file"].removeprefix(f"{ROOT}/native/"): shlex.split(one["command"]) for one in entries}
    if not set(EXAMPLE_SOURCES) <= commands.keys():
        lacks("harness", "build/ has no commands of a build with LCTX_HARNESS=ON")
    return {name: command[: command.index("-o")] for name, command in commands.items() if "-o" in command}


def compiled(folder: Path, name: str, command: list[str]) -> str:
    """Return what the compiler says to a file of a copy of native/ in ``folder``."""
    command = [f"-I{folder}" if word == f"-I{ROOT}" else word for word in command]
    command += ["-fsyntax-only", str(folder / "native" / name)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}).stderr


def test_the_example_of_a_selection_score_is_built(tmp_path, commands):
    """And the compiler reports a case that is missing."""
    example = Path(__file__).with_name("selection_score.patch")
    shutil.copytree(ROOT / "native", tmp_path / "native")
    subprocess.run(["git", "apply", str(example)], cwd=tmp_path, check=True)
    assert [compiled(tmp_path, name, commands[name]) for name in EXAMPLE_SOURCES] == [""] * len(EXAMPLE_SOURCES)
    source = tmp_path / "native/cpu/summarize.cpp"
    source.write_text(re.sub(r".*case LCTX_REPRESENT_MEAN.*\n", "", source.read_text()))
    errors = compiled(tmp_path, "cpu/summarize.cpp", commands["cpu/summarize.cpp"])
    assert "'LCTX_REPRESENT_MEAN' not handled in switch" in errors
