"""Rooms of native/ include and call what is below them, as docs/internals.md says, and can be read."""

import re
from collections import defaultdict
from pathlib import Path

import pytest
from native_map import INCLUDE, NativeMap, circles, dot, files_in_circles, functions_of, room, table

NATIVE = Path(__file__).resolve().parents[2] / "native"
SMALL = {"hooks.h", "rpc-version.h"}  # what the patches include, in the root
BELOW = {  # what a room may include in addition to itself and the small headers of the root
    "root": {"base", "chat", "cpu", "cuda", "foreign", "graph", "memory", "mtp", "ops", "overrides", "platform"}
    | {"rpc", "trace"},
    "foreign": {"base", "memory"},
    "mtp": {"base"},
    "overrides": {"base", "chat"},
    "trace": {"base", "ops"},
    "chat": {"base"},
    "rpc": {"base", "platform"},
    "vocab": set(),
    "graph": {"base", "memory", "methods", "ops"},
    "memory": {"base", "methods", "ops", "platform"},
    "methods": {"base", "ops"},
    "ops": set(),
    "cpu": {"base", "ops", "platform"},
    "weights": {"cpu", "ops", "platform"},
    "cuda": {"base", "ops", "platform"},
    "vulkan": {"base", "ops"},
    "harness": {"base", "cpu", "graph", "memory", "methods", "ops", "platform", "weights"},
    "platform": {"base", "ops"},
    "base": set(),
}
ROOMS = sorted(BELOW)


@pytest.fixture(scope="module")
def native() -> NativeMap:
    return NativeMap()


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_includes_what_is_below(native, name):
    for file, other in native.includes:
        if room(file) == name != room(other):
            assert other in SMALL or room(other) in BELOW[name], f"{file} includes {other}"


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_calls_what_is_below(native, name):
    """The small headers of the root declare what a room defines for it: hooks, kernels, a barrier."""
    assert len(native.calls) > 200
    assert set(native.rooms[name].calls) <= BELOW[name] | {"root", "methods"}


def test_every_room_and_small_header_is_known(native):
    assert set(native.rooms) == set(BELOW) | {"common"}
    assert {other for file, other in native.includes if room(other) == "root" != room(file)} >= SMALL


def test_a_circle_is_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == set()
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == {"a", "b", "c"}
    assert files_in_circles({("a.h", "b.h"), ("b.cpp", "a.h"), ("c.cpp", "c.h")}) == {"a", "b"}


def test_no_room_is_in_a_circle():
    assert circles(BELOW) == set()


def test_no_file_is_in_a_circle(native):
    assert len(native.includes) > 500
    assert files_in_circles(native.includes) == set()


PUBLIC = re.compile(r"(ggml|ggml-backend|ggml-cpp|ggml-cpu|ggml-cuda|ggml-rpc|llama)\.h")


def test_private_headers_of_llama_cpp_are_listed(native):
    readme = (NATIVE.parent / "patches/README.md").read_text()
    section = re.search(r"## Non-public things.*?(?=\n## )", readme, re.DOTALL)
    assert section
    rows = re.findall(r"^\| (`.+?) \|", section[0], re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`([\w/.-]+)`", row)}
    others = {
        other for file, text in native.texts.items() for other in INCLUDE.findall(text) if not native.ours(file, other)
    }
    made_or_patched = ("lctx-", "native/")  # the shaders' words, and what patches include
    assert listed == {name for name in others if not PUBLIC.fullmatch(name) and not name.startswith(made_or_patched)}


HIDDEN = re.compile(r"^namespace \{.*?^\}  // namespace", re.MULTILINE | re.DOTALL)
TYPE = re.compile(r"^(?:struct|class|union) (?:alignas\(\d+\) )?(\w+)(?: final)?(?: : [^;{]+)? \{", re.MULTILINE)
ONE_OF = {"lctx_super_32"}  # a file for each kind of CPU, of which one is included


def test_no_type_is_defined_twice(native):
    """One library links all rooms, so two global types of one name would be taken for the same."""
    found = defaultdict(set)
    for file, text in native.texts.items():
        for name in TYPE.findall(HIDDEN.sub("", text)):
            found[name].add(file)
    assert len(found) > 150
    assert {name: files for name, files in found.items() if len(files) > 1 and name not in ONE_OF} == {}


def test_functions_are_counted():
    lines = (
        "class a {",
        "  a() : x(0) {}",
        "  int f(int) const;",
        "  int g() { if (x) { return 1; } }",
        "  int x;",
        "};",
    )
    assert functions_of("\n".join(lines)) == {"a": 3}


def test_the_map_is_printed(native):
    rows = table(native.rooms).splitlines()
    assert len(rows) == 2 + len(native.rooms) + 1
    assert dot(native.rooms).count("->") == sum(
        len([n for n in one.includes.values() if n]) for one in native.rooms.values()
    )


QUESTION = re.compile(r"^\| (.+\?) \| `native/(.+)` \| `(\w+)` \|$", re.MULTILINE)


def test_questions_lead_to_a_place_and_a_function():
    root = NATIVE.parent
    assert "(../docs/internals.md)" in (NATIVE / "README.md").read_text()
    section = re.search(
        r"^## Native code\n.*?(?=\n## )", (root / "docs/internals.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert section
    questions = QUESTION.findall((root / "docs/where-things-are.md").read_text())
    assert questions
    for question, file, function in questions:
        place = f"`{room(file)}/`" if "/" in file else f"`{Path(file).stem}.*`"
        assert f"| {place} |" in section[0], question
        definition = rf"^\w[^\n;]*\b{function}\([^;{{}}]*\{{$"
        assert re.search(definition, (NATIVE / file).read_text(), re.MULTILINE), question
