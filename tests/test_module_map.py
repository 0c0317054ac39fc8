"""Who imports whom: no cycles and no private parts of other modules in pylongctx, and the script finds both."""

import ast
import subprocess
import sys
from collections import Counter

import module_map
import pytest
from module_map import cycles, faults, read

ONE = """
from typing import TYPE_CHECKING

import pkg_outer

if TYPE_CHECKING:
    from pylongctx.three import Three

_own = 1


class One:
    def __init__(self, other):
        self._mine = other._mine
        self._theirs = super()._theirs

    def call(self, two):
        from pylongctx.two import _hidden, shown

        return two._other, two.__dict__, two._own, two._replace(x=1)
"""
TWO = """
import pylongctx.one
from pylongctx.inner import _deep
from pylongctx.inner._deep import shown
"""


@pytest.fixture
def modules(tmp_path):
    folder = tmp_path / "pylongctx"
    (folder / "inner").mkdir(parents=True)
    files = {"__init__": "", "one": ONE, "two": TWO, "three": "from pylongctx import one", "inner/__init__": ""}
    for name, text in (files | {"inner/_deep": "shown = 1"}).items():
        (folder / f"{name}.py").write_text(text)
    return read(tmp_path)


def test_the_package_has_no_cycles_and_no_private_accesses():
    """What is allowed must be there, or the list is too long."""
    assert sorted(faults(read(module_map.ROOT))) == sorted(module_map.allowed())


def test_imports_in_functions_are_arrows_and_those_for_type_checkers_are_not(modules):
    assert modules["pylongctx.one"].imports == {"pylongctx.two"}
    assert modules["pylongctx.two"].imports == {"pylongctx.one", "pylongctx.inner._deep"}
    assert modules["pylongctx.three"].imports == {"pylongctx.one"}


def test_private_accesses_are_those_of_other_modules(modules):
    assert modules["pylongctx.one"].private == ["from pylongctx.two import _hidden", "two._other"]
    assert modules["pylongctx.two"].private == ["import pylongctx.inner._deep"] * 2


def test_cycles_are_found_each_once():
    arrows = {"a": "b", "b": "c", "c": "ad", "d": "e", "e": "d", "f": "a"}
    assert cycles(arrows) == [["a", "b", "c"], ["d", "e"]]
    assert cycles({"a": "b", "b": "c", "c": ""}) == []


def test_the_command_fails_on_a_cycle(tmp_path, modules):
    command = [sys.executable, module_map.__file__, "--source", str(tmp_path)]
    done = subprocess.run([*command, "--check"], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "cycle: pylongctx.one pylongctx.two" in done.stdout
    assert "6 modules, 4 arrows, 1 cycles, 4 private accesses" in done.stdout
    assert subprocess.run(command, capture_output=True).returncode == 0


def test_public_classes_have_distinct_names():
    """Only the drop-in class has the name of another one."""
    found = Counter(
        node.name
        for path in (module_map.ROOT / "pylongctx").rglob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in found.items() if count > 1] == ["Llama"]
