"""Which rooms of native/ include which: arrows point down, as docs/internals.md says."""

import re
from collections import defaultdict
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parents[1] / "native"
SMALL = {
    "architectures.h",
    "claim.h",
    "counts.h",
    "firewall.h",
    "hooks.h",
    "kernel-name.h",
    "log.h",
    "refusal.h",
    "rpc-version.h",
}
BELOW = {  # what a room may include beside itself and the small headers of the root
    "root": {"chat", "cpu", "cuda", "graph", "memory", "ops", "rpc"},
    "chat": set(),
    "rpc": set(),
    "graph": {"memory", "methods", "ops"},
    "memory": {"methods", "ops"},
    "methods": {"ops"},
    "ops": set(),
    "cpu": {"ops"},
    "weights": {"cpu", "ops"},
    "cuda": {"ops"},
    "harness": {"cpu", "graph", "memory", "ops", "weights"},
}
ROOMS = sorted(BELOW)
LEFT = {  # arrows that still point up
    ("memory/arena.cpp", "cuda/arena.h"),
    ("cpu/dispatch.cpp", "cuda/dispatch.h"),
    ("harness/run.h", "lctx.h"),
    ("harness/run-check.cpp", "handles.h"),
}


def room(name: str) -> str:
    """Return the folder of a file, ``root`` for those of native/ itself."""
    return name.split("/")[0] if "/" in name else "root"


@pytest.fixture(scope="module")
def includes() -> dict[str, set[tuple[str, str]]]:
    """Return (file, included file) by the room of the file, without those that a room includes of its own."""
    found = defaultdict(set)
    for path in [path for kind in ("*.h", "*.cpp", "*.cu") for path in NATIVE.rglob(kind)]:
        name = path.relative_to(NATIVE).as_posix()
        for other in re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE):
            target = (path.parent / other).resolve()
            if target.is_file() and NATIVE in target.parents:
                other = target.relative_to(NATIVE).as_posix()
                found[room(name)] |= {(name, other)} if room(name) != room(other) else set()
    return found


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_includes_what_is_below(includes, name):
    for file, other in includes[name] - LEFT:
        assert other in SMALL or room(other) in BELOW[name], f"{file} includes {other}"


def test_every_room_is_known_and_nothing_is_left_that_is_gone(includes):
    folders = {path.name for path in NATIVE.iterdir() if path.is_dir() and any(path.rglob("*.h"))}
    assert folders == set(BELOW) - {"root"}
    arrows = set().union(*includes.values())
    assert arrows >= LEFT
    assert {other for _, other in arrows if room(other) == "root"} >= SMALL


def test_there_is_no_circle():
    left = dict(BELOW)
    while done := [name for name, below in left.items() if not below & set(left)]:
        for name in done:
            del left[name]
    assert not left


MEMORY = NATIVE / "memory"
MAX_LINES, MAX_FUNCTIONS = 400, 40


def functions_of(header: str) -> dict[str, int]:
    """Return how many functions the classes of a header declare."""
    code, found = re.sub(r"//.*", "", header), {}
    for match in re.finditer(r"^class (\w+)[^;{]*\{(.*?)^\};", code, re.MULTILINE | re.DOTALL):
        body = match[2]
        while body != (body := re.sub(r"\{[^{}]*\}", ";", body)):
            pass
        found[match[1]] = sum("(" in statement for statement in body.split(";"))
    return found


def test_functions_are_counted():
    lines = (
        "class a {",
        "  a() : x(0) {}",
        "  int f(int) const;",
        "  int g() { if (x) { return 1; } }",
        "  int x;",
        "};",
    )
    header = "\n".join(lines)
    assert functions_of(header) == {"a": 3}


def test_the_memory_is_read_one_class_at_a_time():
    sizes = {}
    for path in [*MEMORY.glob("*.h"), *MEMORY.glob("*.cpp")]:
        assert len(path.read_text().splitlines()) <= MAX_LINES, path.name
        sizes |= functions_of(path.read_text()) if path.suffix == ".h" else {}
    assert len(sizes) > 10
    assert {name: n for name, n in sizes.items() if n > MAX_FUNCTIONS} == {}


def test_no_file_of_the_memory_is_in_a_circle():
    left = defaultdict(set)
    for path in [*MEMORY.glob("*.h"), *MEMORY.glob("*.cpp")]:
        others = re.findall(r'^#include "([\w-]+)\.h"', path.read_text(), re.MULTILINE)
        left[path.stem] |= {name for name in others if name != path.stem and (MEMORY / f"{name}.h").is_file()}
    while done := [name for name, below in left.items() if not below & set(left)]:
        for name in done:
            del left[name]
    assert not left
