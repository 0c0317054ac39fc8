"""The scripts that complete words in a shell: bash runs its own, the others are parsed where they are installed."""

import shutil
import subprocess
import sys

import pytest

from pylongctx.catalog import CATALOG
from pylongctx.cli import COMMANDS, make_parser
from pylongctx.cli.completion import SHELLS, script
from pylongctx.eval.registry import TASKS
from pylongctx.methods import METHODS

pytest.importorskip("shtab")
ASK = """source ./script
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_shtab_pylongctx pylongctx "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the script of bash and two files."""
    folder = tmp_path_factory.mktemp("completion")
    (folder / "script").write_text(script(make_parser(), "bash"))
    (folder / "my book.txt").touch()
    (folder / "model.gguf").touch()
    return folder


def completed(folder, *words):
    done = subprocess.run(["bash", "-c", ASK, "bash", "pylongctx", *words], cwd=folder, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return set(filter(None, done.stdout.splitlines()))


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ([""], set(COMMANDS)),
        (["comp"], {"complete", "completion"}),
        (["eval", "pass"], {"passkey"}),
        (["eval", "passkey", "--meth"], {"--method", "--methods"}),
        (["eval", "passkey", "--method", ""], {*METHODS, "none"}),
        (["chat", "--no-auto"], {"--no-autosave"}),
        (["chat", "--color", ""], {"on", "off", "auto"}),
        (["chat", "-sm", "l"], {"layer"}),
        (["chat", "-c", ""], set()),
        (["chat", "m"], {"my book.txt", "model.gguf"}),
        (["serve", "-m", "smol"], {name for name in CATALOG if name.startswith("smol")}),
        (["complete", "-f", "my"], {"my book.txt"}),
        (["bench", "-f", "my"], set()),
        (["kv", ""], {"ls", "rm", "verify", "stats"}),
        (["kv", "ls", ""], {"script", "my book.txt", "model.gguf"}),
        (["nonsense", "--m"], set()),
    ],
)
def test_bash_completes(folder, words, found):
    assert completed(folder, *words) == found


@pytest.mark.parametrize("shell", list(filter(shutil.which, SHELLS)))
def test_a_shell_can_read_its_script(shell, tmp_path):
    (tmp_path / "script").write_text(script(make_parser(), shell))
    done = subprocess.run([shell, "-n", tmp_path / "script"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_fish_asks_for_every_option():
    lines = script(make_parser(), "fish").splitlines()
    assert [line for line in lines if "-l rope-freq-base" in line and "_using chat" in line]
    commands = make_parser().commands()
    assert set(commands) == {*COMMANDS} | {f"eval {name}" for name, task in TASKS.items() if not task.plans_only}
    shown = sum(bool(action.option_strings) for one in commands.values() for action in one.shown())
    assert sum("complete -c pylongctx" in line for line in lines) > shown
    assert [line for line in lines if "-o sm " in line] and not [line for line in lines if " -s sm " in line]


def test_without_shtab_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(ImportError, match=r"pip install 'pylongctx\[cli\]'"):
        script(make_parser(), "bash")
