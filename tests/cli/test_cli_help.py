"""Help: commands in groups, the common options of a command, and all of them."""

import argparse

import pytest

from pylongctx.cli import COMMANDS, GROUPS, main, make_parser
from pylongctx.cli.arguments import COMMON

pytestmark = pytest.mark.check

PARSERS = make_parser().commands()


def said(*words, capsys):
    with pytest.raises(SystemExit) as reason:
        main(words)
    assert reason.value.code == 0
    return capsys.readouterr().out


def names(command):
    """Return the names of the options that a command has and does not hide, those of an option together."""
    return [one.option_strings for one in PARSERS[command]._actions if one.help != argparse.SUPPRESS]


def test_every_command_is_in_one_group(capsys):
    assert sorted(name for group in GROUPS.values() for name in group) == sorted(COMMANDS)
    lines = said("--help", capsys=capsys).splitlines()
    titles = [lines.index(f"{title}:") for title in GROUPS]
    assert titles == sorted(titles)
    for name, (_, what) in COMMANDS.items():
        assert [line.split(maxsplit=1) for line in lines].count([name, what]) == 1


@pytest.mark.parametrize("command", ["chat", "serve", "ask", "complete", "inspect", "eval passkey"])
def test_the_short_help_has_the_common_options(command, capsys):
    short, full = (said(*command.split(), word, capsys=capsys) for word in ("--help", "--help-all"))
    n_options = len(list(filter(None, names(command))))
    assert short.splitlines()[-1] == f"--help-all shows all {n_options} options."
    assert "--rope-freq-base" not in short and "[LLAMA_ARG_" not in short
    assert all(name in short and name in full for name in ("--model FILE", "--threads N"))
    assert not [group for group in names(command) if not all(name in full for name in group)]
    assert len(short.splitlines()) < len(full.splitlines()) - 10
    assert "--help-all" not in full


@pytest.mark.parametrize("command", ["kv", "bench", "doctor"])
def test_a_command_with_few_options_shows_all(command, capsys):
    assert said(command, "--help", capsys=capsys) == said(command, "--help-all", capsys=capsys)


def test_common_options_exist():
    known = {name for command in ("chat", "serve") for group in names(command) for name in group}
    assert known >= COMMON
