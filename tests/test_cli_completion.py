"""The scripts that complete words in a shell: bash runs its own, the others are parsed where they are installed."""

import shutil
import subprocess

import pytest

from pylongctx.catalog import CATALOG
from pylongctx.cli import COMMANDS, make_parser
from pylongctx.cli.completion import table
from pylongctx.cli.shells import SHELLS
from pylongctx.methods import METHODS

ASK = """source ./script
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_pylongctx
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def commands():
    return table(make_parser())


@pytest.fixture(scope="module")
def folder(commands, tmp_path_factory):
    """A folder with the script of bash and two files."""
    folder = tmp_path_factory.mktemp("completion")
    (folder / "script").write_text(SHELLS["bash"](commands))
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
        (["kv", ""], {"ls", "rm", "verify", "stats", "script", "my book.txt", "model.gguf"}),
        (["nonsense", "--m"], set()),
    ],
)
def test_bash_completes(folder, words, found):
    assert completed(folder, *words) == found


@pytest.mark.parametrize("shell", list(filter(shutil.which, SHELLS)))
def test_a_shell_can_read_its_script(shell, commands, tmp_path):
    (tmp_path / "script").write_text(SHELLS[shell](commands))
    done = subprocess.run([shell, "-n", tmp_path / "script"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_fish_asks_for_every_option(commands):
    lines = SHELLS["fish"](commands).splitlines()
    assert [line for line in lines if "-l rope-freq-base -r " in line and "from chat'" in line]
    assert len(lines) > sum(len(command.options) for command in commands.values())
