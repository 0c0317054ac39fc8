"""The pages run as they stand: Python blocks on the embedded model, commands by the parser, files and targets by name.

The blocks of a page share their names and run one after the other, in a folder with the files that they name. Before
a block, ``<!-- not run: REASON -->`` leaves it out, and ``<!-- own process: PACKAGE -->`` runs it in a new process.
"""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
from needs import lacks, need

from pylongctx.catalog import CATALOG
from pylongctx.cli import make_parser

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["README.md", "CONTRIBUTING.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in NAMES}
BLOCK = re.compile(r"(?:^<!-- (not run|own process): (.+?) -->\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
URL = "http://127.0.0.1:8080"
FIRST_WORDS = ("cmake", "dask", "export", "gguf-dump", "lm_eval", "make", "pip", "pylongctx", "python", "sh")
NOT_RUN = {"needs a GPU"}  # reasons that are good ones


@dataclass(frozen=True)
class Block:
    """A fenced block, its language, and what its mark says."""

    language: str
    code: str
    mark: str | None
    about: str | None


def blocks(name: str, language: str) -> list[Block]:
    found = [Block(kind, code, mark or None, about or None) for mark, about, kind, code in BLOCK.findall(TEXTS[name])]
    return [block for block in found if block.language == language]


def shared_blocks(name: str) -> list[Block]:
    return [block for block in blocks(name, "python") if block.mark is None]


TESTED_ALONE = "docs/four-tasks.md"  # by test_four_tasks.py
PAGES_THAT_RUN = [name for name in NAMES if shared_blocks(name) and name != TESTED_ALONE]
OWN_PROCESS = [(name, block) for name in NAMES for block in blocks(name, "python") if block.mark == "own process"]


@pytest.fixture
def folder(embedded_model, tmp_path, monkeypatch):
    """Enter a folder with the files that the blocks name; every model is the embedded one, also those with a name."""
    monkeypatch.chdir(tmp_path)
    for file in {"model.gguf", *CATALOG, *re.findall(r'"([\w.-]+\.gguf)"', "".join(TEXTS.values()))}:
        (tmp_path / file).symlink_to(embedded_model)
    (tmp_path / "book.txt").write_text("It was the best of times, it was the worst of times. " * 60)
    return tmp_path


def run(name: str, names: dict, url: str = URL) -> None:
    for i, block in enumerate(shared_blocks(name)):
        exec(compile(block.code.replace(URL, url), f"{name}, block {i + 1}", "exec"), names)


def server_for(name: str):
    """Return a running server for the pages whose blocks ask one, else nothing."""
    if not any(URL in block.code for block in shared_blocks(name)):
        return nullcontext()
    need("server", "fastapi", "uvicorn", "prometheus_client", "openai", "ollama", "httpx")
    from serving import running

    return running(n_ctx=4096, method="longheads")


@pytest.mark.parametrize("name", PAGES_THAT_RUN)
def test_the_blocks_of_a_page_run(name, folder, capsys):
    with server_for(name) as server:
        run(name, {"__name__": "__main__"}, server.url if server else URL)
        if server:  # what the page promises of its request
            assert server.ask(lambda: server.engine.tracer.record).n_prompt > 256
    assert capsys.readouterr().out.strip()


@pytest.mark.peers
@pytest.mark.parametrize(("name", "block"), OWN_PROCESS, ids=[block.about for _, block in OWN_PROCESS])
def test_a_block_runs_in_its_own_process(name, block, folder):
    need("peers", block.about)
    clean = {key: value for key, value in os.environ.items() if key != "LLAMA_CPP_LIB_PATH"}
    ran = subprocess.run([sys.executable, "-c", block.code], env=clean, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip()


def test_a_block_that_is_not_run_has_a_good_reason():
    marked = [block for name in NAMES for block in blocks(name, "python") if block.mark == "not run"]
    assert {block.about for block in marked} <= NOT_RUN


# ---- commands ----


def lines(name: str) -> list[str]:
    """Return the commands of a page's shell blocks and code spans, with continued lines joined."""
    whole = "\n".join(block.code for block in blocks(name, "sh")).replace("\\\n", " ")
    spans = re.findall(r"`((?:pylongctx|python|make|pip) [^`]+)`", BLOCK.sub("", TEXTS[name]).replace("\n", " "))
    return [line.strip() for line in [*whole.splitlines(), *spans] if line.strip() and not line.strip().startswith("#")]


def commands(line: str) -> list[list[str]]:
    """Return the words of the commands of a pipeline, without variables in front and the file it is written to."""
    found: list[list[str]] = [[]]
    for word in shlex.split(line.partition(" > ")[0], comments=True):
        if word in ("|", "&"):
            found.append([])
        elif found[-1] or not re.match(r"[A-Z_]+=", word):
            found[-1].append(word)
    return [words for words in found if words]


COMMANDS = sorted({(tuple(words)) for name in NAMES for line in lines(name) for words in commands(line)})
OURS = [words[1:] for words in COMMANDS if words[0] == "pylongctx"]
SUBCOMMANDS = make_parser().commands()


@pytest.mark.parametrize(
    "words", [words for words in OURS if len(words) > 1 + (words[0] == "eval") and "TASK" not in words], ids=" ".join
)
def test_commands_are_understood(words, folder):
    assert callable(make_parser().parse_args([word.strip("[]") for word in words]).run)


def test_every_subcommand_is_shown():
    assert {words[0] for words in OURS} >= {name for name in SUBCOMMANDS if " " not in name}


def test_files_modules_targets_and_extras_exist():
    makefiles = [ROOT / "Makefile", *sorted((ROOT / "make").glob("*.mk"))]
    text = "".join(path.read_text() for path in makefiles)
    targets = set(re.findall(r"^([a-z-]+)(?: [a-z-]+)*:", text, re.MULTILINE))
    targets |= set(" ".join(re.findall(r"^([a-z -]+):", text, re.MULTILINE)).split())
    extras = set(re.findall(r"^([a-z-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    for words in COMMANDS:
        assert words[0] in FIRST_WORDS or words[0] in ("printf", "echo") or (ROOT / words[0]).parts[-4:-1], words
        if words[0] == "make":
            assert words[1] in targets, words
        if words[0] == "python" and words[1] == "-m":
            assert importlib.util.find_spec(words[2].partition(".")[0]), words
        elif words[0] in ("python", "sh"):
            assert (ROOT / words[1]).is_file(), words
        if words[0] == "pip":
            named = [extra for word in words for extra in re.findall(r"^\.\[([\w,-]+)\]$", word)]
            assert set(",".join(named).split(",")) - {""} <= extras, words


def test_files_that_the_pages_name_exist():
    roots = ("bench", "docs", "native", "patches", "pylongctx", "tests", "training", r"for-llama\.cpp", "make")
    named = {path for text in TEXTS.values() for path in re.findall(rf"`((?:{'|'.join(roots)})/[\w./-]*\w)`", text)}
    assert len(named) > 20
    built = {"pylongctx/lib/libllama.so"}  # an editable install has it elsewhere
    assert not [path for path in named - built if "NAME" not in path and not (ROOT / path).exists()]


# ---- what the pages say ----


@pytest.mark.parametrize("name", NAMES)
def test_pages_are_ascii(name):
    assert re.sub(r"^```console\n.*?^```$", "", TEXTS[name], flags=re.MULTILINE | re.DOTALL).isascii()


def test_the_list_of_models_names_the_proven_architectures():
    from tiny_models import PROVEN

    page = TEXTS["docs/models.md"]
    table = page[: page.index("## Models without a method")]
    named = set(re.findall(r"`([\w.-]+)`", table)) & {recipe.arch or name for name, recipe in PROVEN.items()}
    assert named == {recipe.arch or name for name, recipe in PROVEN.items()}
    assert f"{len(named)} architectures" in table
    assert f"{len(named)} architectures" in TEXTS["README.md"]


def test_the_page_of_models_names_every_architecture_of_llama_cpp():
    sources = [*ROOT.glob("build/*/upstream/*/llama.cpp/src/llama-arch.cpp")]
    if not sources:
        lacks("build", "the source of llama.cpp is not in build/")
    names = re.search(r"LLM_ARCH_NAMES = \{(.*?)^\};", sources[0].read_text(), re.DOTALL | re.MULTILINE).group(1)
    known = set(re.findall(r'LLM_ARCH_\w+, *"([\w.-]+)"', names))
    assert "llama" in known
    assert known <= set(re.findall(r"`([\w.-]+)`", TEXTS["docs/models.md"]))


# ---- tables that are made when the pages are ----


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_option_is_in_a_table(hooks):
    page = hooks.on_page_markdown(TEXTS["docs/command-line.md"])
    actions = [(command, action) for command in SUBCOMMANDS for action in hooks._options(command)]
    assert len(actions) > 200
    assert not [(command, action.dest) for command, action in actions if hooks._names(action) not in page]


def test_an_unknown_group_of_options_is_an_error(hooks):
    with pytest.raises(ValueError, match="has no group"):
        hooks.options("serve: servers")


def test_every_route_says_what_it_answers(hooks):
    need("server", "fastapi")
    table = hooks.routes()
    assert "| POST | `/v1/chat/completions` |" in table
    answers = [line.split(" | ")[2] for line in table.splitlines()[2:]]
    assert all(len(answer.split()) > 2 for answer in answers)


def test_fields_are_listed_with_the_routes_that_have_them(hooks):
    need("server", "fastapi")
    rows = dict(line[2:-2].split(" | ", 1) for line in hooks.fields().splitlines()[2:])
    assert rows["`temperature`"] == " | all | "
    assert rows["`best_of`"] == " | none | refused"
    assert rows["`tools`"].endswith("`/v1/messages`, `/v1/responses`, `/api/chat` | refused")
    assert rows["`max_tokens`"].startswith("`max_length`, `max_new_tokens`, `max_output_tokens`, `n_predict`")
    assert rows["`input_suffix`"] == " | `/infill` | listed"


def test_every_model_with_a_name_is_in_a_table(hooks):
    page = hooks.on_page_markdown(TEXTS["docs/models.md"])
    missing = [entry.name for entry in CATALOG.values() if f"| `{entry.name}` | `{entry.file}` |" not in page]
    assert not missing
    assert "[Apache-2.0](https://www.apache.org/licenses/LICENSE-2.0)" in page


def test_the_home_page_is_the_readme(hooks):
    page = hooks.on_page_markdown(TEXTS["docs/index.md"])
    assert page.startswith("# pylongctx")
    assert "](docs/" not in page
    files = re.findall(r"\]\((?!\w+:)([\w./-]+)", page)
    assert len(files) > 10
    assert not [name for name in files if not (ROOT / "docs" / name).exists()]
