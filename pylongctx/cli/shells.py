"""The completion scripts of bash, zsh and fish."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pylongctx.cli.completion import CommandWords, Option, Value

    Table = Mapping[str, CommandWords]

BASH = """# completion of pylongctx in {shell}, made by: pylongctx completion {shell}
_pylongctx() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" command="${{COMP_WORDS[1]}}"
    local first=2 options= words= files=
    if [[ $command == eval ]]; then
        command="eval ${{COMP_WORDS[2]}}" first=3
    fi
    case $command in
{commands}
    esac
    if ((COMP_CWORD == 1)); then
        words={names} files=
    elif ((COMP_CWORD < first)); then
        words={tasks} files=
    else
        case "$command $before" in
{values}
        *) [[ $word != -* ]] || {{ words=$options files=; }} ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    if [[ $files ]]; then
        local IFS=$'\\n'
        COMPREPLY+=($(compgen -f -- "$word"))
        compopt -o filenames 2> /dev/null
    fi
}}
"""
BASH_END = "complete -F _pylongctx pylongctx\n"
ZSH_BEGIN = "autoload -U +X bashcompinit && bashcompinit\n"


def bash(table: Table) -> str:
    """Return the script of bash."""
    return _function(table, "bash") + BASH_END


def zsh(table: Table) -> str:
    """Return the script of zsh, which runs the one of bash."""
    return _function(table, "zsh") + ZSH_BEGIN + BASH_END


def _function(table: Table, shell: str) -> str:
    return BASH.format(
        shell=shell,
        names=_quoted(name for name in table if " " not in name),
        tasks=_quoted(name.split()[1] for name in table if " " in name),
        commands="\n".join(_bash_commands(table)),
        values="\n".join(_bash_values(table)),
    )


def _bash_commands(table: Table) -> Iterator[str]:
    for name, command in table.items():
        options = _quoted(word for option in command.options for word in option.names)
        yield f"    {shlex.quote(name)}) options={options} {_bash_value(command.arguments)} ;;"


def _bash_values(table: Table) -> Iterator[str]:
    """Yield the completions of options with a value, grouped by command and value."""
    for command, facts in table.items():
        groups: dict[Value, list[str]] = {}
        for option in facts.options:
            if option.value is not None:
                groups.setdefault(option.value, []).extend(shlex.quote(f"{command} {name}") for name in option.names)
        for value, names in groups.items():
            yield f"        {' | '.join(names)}) {_bash_value(value)} ;;"


def _bash_value(value: Value) -> str:
    return f"words={_quoted(value.words)} files={'1' * value.files}"


def _quoted(words: Iterator[str] | tuple[str, ...]) -> str:
    return shlex.quote(" ".join(words))


# ---- fish ----


def fish(table: Table) -> str:
    """Return the script of fish."""
    return "\n".join(["# completion of pylongctx in fish, made by: pylongctx completion fish", *_fish_lines(table), ""])


def _fish_lines(table: Table) -> Iterator[str]:
    yield "complete -c pylongctx -f"
    for name, command in table.items():
        *above, last = name.split()
        begins = f"__fish_seen_subcommand_from {above[0]}; and not {_fish_seen(table)}" if above else _FISH_FIRST
        yield f"complete -c pylongctx -n {_fish_quoted(begins)} -a {last} -d {_fish_quoted(command.help)}"
        where = _fish_quoted("; and ".join(f"__fish_seen_subcommand_from {part}" for part in name.split()))
        yield from (f"complete -c pylongctx -n {where} {_fish_option(option)}" for option in command.options)
        if words := _fish_value(command.arguments):
            yield f"complete -c pylongctx -n {where} {words}"


_FISH_FIRST = "__fish_use_subcommand"


def _fish_seen(table: Table) -> str:
    return "__fish_seen_subcommand_from " + " ".join(name.split()[1] for name in table if " " in name)


def _fish_option(option: Option) -> str:
    names = " ".join(map(_fish_name, option.names))
    value = "" if option.value is None else f" -r {_fish_value(option.value)}"
    return f"{names}{value} -d {_fish_quoted(option.help)}"


def _fish_name(name: str) -> str:
    if name.startswith("--"):
        return f"-l {name[2:]}"
    return f"-s {name[1:]}" if len(name) == 2 else f"-o {name[1:]}"


def _fish_value(value: Value) -> str:
    return " ".join(filter(None, (f"-a {_fish_quoted(' '.join(value.words))}" * bool(value.words), "-F" * value.files)))


def _fish_quoted(text: str) -> str:
    """Return a text in single quotes, in which fish processes two escapes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS: dict[str, Callable[[Table], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
