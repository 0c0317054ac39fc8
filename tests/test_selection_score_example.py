"""The recipes of CONTRIBUTING.md: each names just the files in which something of its kind is written down already."""

import json
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from needs import lacks

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("native", "pylongctx", "tests", "docs", "patches/*.patch")
MEASURED = re.compile(r"docs/(benchmarks|reproduction|research/.*)\.md|docs/assets/")  # not a part of adding something
PATH = re.compile(r"`((?:\w+/)+[\w.-]+\.\w+)`")


@dataclass(frozen=True)
class Witness:
    """Something that was added by a recipe.

    Attributes
    ----------
    recipe : str
        Heading of the recipe.
    name : str
        What the recipe calls NAME.
    marks : str
        Regular expression of the names that adding such a thing requires.
    elsewhere : dict
        Files with a mark that are not part of the recipe, and why.
    """

    recipe: str
    name: str
    marks: str
    elsewhere: dict[str, str] = field(default_factory=dict)


WITNESSES = (
    Witness("Add a method", "dca", r"\bdca\b|\bDualChunk\b|\blctx_dca_create\b", {
        "docs/drafts.md": "it says which methods draft by themselves",
        "docs/memory.md": "it says with which methods keys keep their bias",
        "docs/methods/longheads.md": "a table compares it",
        "docs/results.md": "a table compares it",
        "docs/gpu.md": "it says which methods have Vulkan kernels",
        "docs/internals.md": "an example of a base",
        "docs/quickstart.md": "the log of longheads names its base",
        "docs/models.md": "it says on which models methods do nothing or are refused",
        "native/methods/longheads.cpp": "it chooses chunks of it",
        "native/ops/chunks.h": "it chooses chunks of it",
        "pylongctx/loading/opening.py": "it may be verified by it",
        "pylongctx/llama.py": "an argument names it",
        "pylongctx/eval/advice.py": "it compares longheads with a method that reads every token",
        "pylongctx/methods/longheads.py": "it chooses chunks of it",
        "tests/cases_chunks.py": "it chooses chunks of it",
        "tests/oracle_filter.py": "it chooses chunks of it",
        "tests/page_machine.py": "any order of operations is tried with it",
        "tests/mutations.py": "an error is put into it to see that tests find it",
        "tests/gpu/features.py": "states and steps are tried with it",
    }),
    Witness("Add an eviction rule", "tova", r"\btova\b|\bTova\b|\blctx_tova_create\b", {
        "docs/methods/compress.md": "a table compares it",
    }),
    Witness("Add a score", "h2o", r"\bLCTX_SCORE_(COUNT|SUM)\b|\bscore_type\b|[(]``scores[.]view", {
        "native/methods/scissorhands.cpp": "a rule with the other score",
        "native/methods/snapkv.cpp": "another rule with the score",
        "native/methods/tova.cpp": "another rule with the score",
    }),
    Witness("Add a selection score", "minmax", r"\bminmax\b(?![(])|\bLCTX_REPRESENT_MINMAX\b", {
        "docs/internals.md": "it says how summaries are stored",
        "tests/cases.py": "a method of its own in the tests of models",
        "tests/cases_evict.py": "a base for rules",
        "tests/selection_score.patch": "lines next to those of the example",
    }),
    Witness("Add an architecture", "xverse", r"\bxverse\b|\bLLM_ARCH_XVERSE\b"),
    Witness("Add a memory kind", "hybrid_iswa", r"hybrid_iswa"),
    Witness("Add an evaluation task", "leval", r"\bleval\b|\bLEval\b", {
        "pylongctx/cli/__init__.py": "it was a command of its own",
    }),
    Witness("Add a sub-op", "fetch", r"\bLCTX_OP_FETCH\b|\blctx_((cpu|cuda)_)?fetch(_[a-z]+)*\b|[*]fetch[*]"),
)  # fmt: skip


def recipe(heading: str) -> str:
    """Return a section of CONTRIBUTING.md."""
    found = re.search(rf"^## {heading}\n(.+?)(?=^## |\Z)", (ROOT / "CONTRIBUTING.md").read_text(), re.M | re.S)
    assert found, f"no recipe {heading!r}"
    return found[1]


def files_to_touch(witness: Witness) -> set[str]:
    """Return the files that a recipe names, with the witness for NAME."""
    return {path.replace("NAME", witness.name) for path in PATH.findall(recipe(witness.recipe))}


def files_with_marks(witness: Witness) -> set[str]:
    """Return the files that name the witness. Of tests those that are called after it: others use it as an example."""
    command = ["git", "grep", "--untracked", "-lIP", witness.marks, "--", *PLACES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        lacks("build", f"not a git checkout: {done.stderr}")
    examples = re.compile(rf"tests/test_(?!\w*{witness.name})")
    return {path for path in done.stdout.splitlines() if not examples.match(path) and not MEASURED.match(path)}


def test_every_recipe_has_a_witness():
    headings = re.findall(r"^## (Add .+)$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert headings == [witness.recipe for witness in WITNESSES]


@pytest.mark.parametrize("witness", WITNESSES, ids=lambda witness: witness.name)
def test_a_recipe_names_the_files(witness):
    found = files_with_marks(witness)
    assert witness.elsewhere.keys() <= found, "these no longer name it"
    assert files_to_touch(witness) == found - witness.elsewhere.keys()
    assert f"**{len(files_to_touch(witness))} files" in recipe(witness.recipe)


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
    example = ROOT / "tests/selection_score.patch"
    witness = next(one for one in WITNESSES if one.recipe == "Add a selection score")
    assert set(re.findall(r"^[+]{3} b/(.+)$", example.read_text(), re.MULTILINE)) < files_to_touch(witness)
    shutil.copytree(ROOT / "native", tmp_path / "native")
    subprocess.run(["git", "apply", str(example)], cwd=tmp_path, check=True)
    assert [compiled(tmp_path, name, commands[name]) for name in EXAMPLE_SOURCES] == [""] * len(EXAMPLE_SOURCES)
    source = tmp_path / "native/cpu/summarize.cpp"
    source.write_text(re.sub(r".*case LCTX_REPRESENT_MEAN.*\n", "", source.read_text()))
    errors = compiled(tmp_path, "cpu/summarize.cpp", commands["cpu/summarize.cpp"])
    assert "'LCTX_REPRESENT_MEAN' not handled in switch" in errors
