"""Which rooms of native/ include which: arrows point down, as docs/internals.md says."""

import re
from collections import defaultdict
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parents[1] / "native"
SMALL = {
    "architectures.h",
    "backend.h",
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
    "vulkan": {"ops"},
    "harness": {"cpu", "graph", "memory", "ops", "weights"},
}
ROOMS = sorted(BELOW)
SOURCES = [path for kind in ("*.h", "*.cpp", "*.cu") for path in NATIVE.rglob(kind)]


def headers_of(path: Path) -> set[str]:
    """Return what a file includes of ours and of llama.cpp: all that is in quotes."""
    return set(re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE))


def ours(path: Path, other: str) -> Path | None:
    """Return the file of native/ that is meant where `path` includes `other`; None where it is a header of others."""
    folders = (path.parent,) if path.parent.name == "common" else (path.parent, NATIVE)  # as CMakeLists.txt has them
    targets = ((folder / other).resolve() for folder in folders)
    return next((target for target in targets if target.is_file() and NATIVE in target.parents), None)


def room(name: str) -> str:
    """Return the folder of a file, ``root`` for those of native/ itself."""
    return name.split("/")[0] if "/" in name else "root"


@pytest.fixture(scope="module")
def pairs() -> set[tuple[str, str]]:
    """Return (file, included file) of native/: beside the file, else from the root of native/."""
    found = set()
    for path in SOURCES:
        for other in headers_of(path):
            if target := ours(path, other):
                found.add((path.relative_to(NATIVE).as_posix(), target.relative_to(NATIVE).as_posix()))
    return found


@pytest.fixture(scope="module")
def includes(pairs) -> dict[str, set[tuple[str, str]]]:
    """Return (file, included file) by the room of the file, without those that a room includes of its own."""
    found = defaultdict(set)
    for file, other in pairs:
        found[room(file)] |= {(file, other)} if room(file) != room(other) else set()
    return found


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_includes_what_is_below(includes, name):
    for file, other in includes[name]:
        assert other in SMALL or room(other) in BELOW[name], f"{file} includes {other}"


def test_every_room_and_small_header_is_known(includes):
    folders = {path.name for path in NATIVE.iterdir() if path.is_dir() and any(path.rglob("*.h"))}
    assert folders == set(BELOW) - {"root"}
    assert {other for _, other in set().union(*includes.values()) if room(other) == "root"} >= SMALL


def circles(arrows: dict[str, set[str]]) -> set[str]:
    """Return the names that are in a circle of arrows, or from which one is reached."""
    left = dict(arrows)
    while done := [name for name, below in left.items() if not below & set(left)]:
        for name in done:
            del left[name]
    return set(left)


def test_a_circle_is_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == set()
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == {"a", "b", "c"}


def test_no_room_is_in_a_circle():
    assert circles(BELOW) == set()


def test_no_file_is_in_a_circle(pairs):
    """A header and the source with its name are one: neither may include what includes the other."""
    arrows = defaultdict(set)
    for file, other in pairs:
        file, other = (name.rsplit(".", 1)[0] for name in (file, other))
        arrows[file] |= {other} - {file}
    assert len(arrows) > 150
    assert circles(arrows) == set()


PUBLIC = re.compile(r"(ggml|ggml-backend|ggml-cpp|ggml-cpu|ggml-cuda|ggml-rpc|llama)\.h")


def test_private_headers_of_llama_cpp_are_listed():
    readme = (NATIVE.parent / "patches/README.md").read_text()
    section = re.search(r"## Non-public things.*?(?=\n## )", readme, re.DOTALL)
    assert section
    rows = re.findall(r"^\| (`.+?) \|", section[0], re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`([\w/.-]+)`", row)}
    others = {other for path in SOURCES for other in headers_of(path) if not ours(path, other)}
    made_or_patched = ("lctx-", "native/")  # the shaders' words, and what patches include
    assert listed == {name for name in others if not PUBLIC.fullmatch(name) and not name.startswith(made_or_patched)}


HIDDEN = re.compile(r"^namespace \{.*?^\}  // namespace", re.MULTILINE | re.DOTALL)
TYPE = re.compile(r"^(?:struct|class|union) (?:alignas\(\d+\) )?(\w+)(?: final)?(?: : [^;{]+)? \{", re.MULTILINE)
ONE_OF = {"lctx_super_32"}  # a file for each kind of CPU, of which one is included


def test_no_type_is_defined_twice():
    """One library links all rooms, so two global types of one name would be taken for the same."""
    found = defaultdict(set)
    for path in SOURCES:
        for name in TYPE.findall(HIDDEN.sub("", path.read_text())):
            found[name].add(path.relative_to(NATIVE).as_posix())
    assert len(found) > 150
    assert {name: files for name, files in found.items() if len(files) > 1 and name not in ONE_OF} == {}


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


QUESTION = re.compile(r"^\| (.+\?) \| `native/(.+)` \| `(\w+)` \|$", re.MULTILINE)


def test_ten_questions_are_answered_three_steps_from_the_readme():
    root = NATIVE.parent
    assert "(../docs/internals.md)" in (NATIVE / "README.md").read_text()
    section = re.search(
        r"^## Native code\n.*?(?=\n## )", (root / "docs/internals.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert section
    questions = QUESTION.findall((root / "CONTRIBUTING.md").read_text())
    assert len(questions) == 10
    for question, file, function in questions:
        place = f"`{room(file)}/`" if "/" in file else f"`{Path(file).stem}.*`"
        assert f"| {place} |" in section[0], question
        definition = rf"^\w[^\n;]*\b{function}\([^;{{}}]*\{{$"
        assert re.search(definition, (NATIVE / file).read_text(), re.MULTILINE), question
