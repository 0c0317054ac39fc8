"""The map of native/: its rooms, what they include and call of each other, and circles.

    python tests/native_map.py                  # a row for each room, then the circles of files
    python tests/native_map.py --source DIR     # of another checkout
    python tests/native_map.py --dot | dot -Tsvg > rooms.svg

A room is a folder of native/, and *root* are the files in native/ itself. A call is a function of ours that is declared
in a header of one room and named in a source of another. A header and the source with its name are one file here.
"""

import argparse
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("*.h", "*.cpp", "*.cu", "*.comp", "*.glsl")
INCLUDE = re.compile(r'^#include "(.+)"', re.MULTILINE)
COMMENT = re.compile(r"//.*")
DECLARED = re.compile(r"^(?:\w[\w:<>*& ]* [*&]*)(lctx_\w+)\(", re.MULTILINE)
CALLED = re.compile(r"\b(lctx_\w+)\(")
CLASS = re.compile(r"^class (\w+)[^;{]*\{(.*?)^\};", re.MULTILINE | re.DOTALL)
Arrow = tuple[str, str]  # from a file or room to another


@dataclass
class Room:
    """What is known of a folder."""

    files: int = 0
    lines: int = 0
    largest: int = 0
    class_functions: int = 0
    includes: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)


class NativeMap:
    """The sources in the folder native/ of a checkout."""

    def __init__(self, root: Path = ROOT):
        self.folder = root / "native"

    @cached_property
    def texts(self) -> dict[str, str]:
        """The text of each source by its path."""
        paths = sorted(path for kind in KINDS for path in self.folder.rglob(kind))
        return {path.relative_to(self.folder).as_posix(): path.read_text(encoding="utf-8") for path in paths}

    def ours(self, file: str, other: str) -> str | None:
        """Return the source of native/ that is meant where ``file`` includes ``other``, None for a header of others."""
        parent = (self.folder / file).parent
        folders = (parent,) if parent.name == "common" else (parent, self.folder)  # as CMakeLists.txt has them
        targets = ((folder / other).resolve() for folder in folders)
        found = next((target for target in targets if target.is_file() and self.folder in target.parents), None)
        return found.relative_to(self.folder).as_posix() if found else None

    @cached_property
    def includes(self) -> set[Arrow]:
        """(file, included file) of all sources."""
        pairs = ((file, self.ours(file, other)) for file, text in self.texts.items() for other in INCLUDE.findall(text))
        return {(file, other) for file, other in pairs if other}

    @cached_property
    def homes(self) -> dict[str, str]:
        """The room whose headers declare a function, for functions that only one room declares."""
        found: dict[str, set[str]] = defaultdict(set)
        for file, text in self.texts.items():
            for name in DECLARED.findall(text) if file.endswith(".h") else ():
                found[name].add(room(file))
        return {name: rooms.pop() for name, rooms in found.items() if len(rooms) == 1}

    @cached_property
    def calls(self) -> set[Arrow]:
        """(file, function) for each function of another room that a file names."""
        found = set()
        for file, text in self.texts.items():
            names = set(CALLED.findall(COMMENT.sub("", text))) & self.homes.keys()
            found |= {(file, name) for name in names if self.homes[name] != room(file)}
        return found

    @cached_property
    def rooms(self) -> dict[str, Room]:
        """The rooms by name."""
        found: dict[str, Room] = defaultdict(Room)
        for file, text in self.texts.items():
            here, lines = found[room(file)], len(text.splitlines())
            here.files, here.lines, here.largest = here.files + 1, here.lines + lines, max(here.largest, lines)
            here.class_functions = max([here.class_functions, *functions_of(text).values()])
        for file, other in self.includes:
            found[room(file)].includes[room(other)] += room(file) != room(other)
        for file, name in self.calls:
            found[room(file)].calls[self.homes[name]] += 1
        return dict(sorted(found.items()))


def room(name: str) -> str:
    """Return the folder of a file, ``root`` for those of native/ itself."""
    return name.split("/")[0] if "/" in name else "root"


def circles(arrows: dict[str, set[str]]) -> set[str]:
    """Return the names that are in a circle of arrows, or from which one is reached."""
    left = dict(arrows)
    while done := [name for name, below in left.items() if not below & set(left)]:
        for name in done:
            del left[name]
    return set(left)


def files_in_circles(includes: set[Arrow]) -> set[str]:
    """Return the files, without endings, that are in a circle or include one that is."""
    arrows: dict[str, set[str]] = defaultdict(set)
    for pair in includes:
        file, other = (name.rsplit(".", 1)[0] for name in pair)
        arrows[file] |= {other} - {file}
    return circles(arrows)


def functions_of(header: str) -> dict[str, int]:
    """Return how many functions the classes of a header declare."""
    found = {}
    for match in CLASS.finditer(COMMENT.sub("", header)):
        body = match[2]
        while body != (body := re.sub(r"\{[^{}]*\}", ";", body)):
            pass
        found[match[1]] = sum("(" in statement for statement in body.split(";"))
    return found


def table(rooms: dict[str, Room]) -> str:
    """Return a row per room."""
    rows = ["| room | files | lines | longest file | functions of a class | includes | calls |",
            "|---|---:|---:|---:|---:|---|---|"]  # fmt: skip
    for name, one in rooms.items():
        arrows = (", ".join(f"{other} {n}" for other, n in sorted(found.items()) if n)
                  for found in (one.includes, one.calls))  # fmt: skip
        rows.append(
            f"| {name} | {one.files} | {one.lines} | {one.largest} | {one.class_functions} | {' | '.join(arrows)} |"
        )
    total = (sum(one.files for one in rooms.values()), sum(one.lines for one in rooms.values()))
    return "\n".join([*rows, f"| all | {total[0]} | {total[1]} | | | | |"])


def dot(rooms: dict[str, Room]) -> str:
    """Return the rooms and their includes as a graph of Graphviz."""
    nodes = [f'  "{name}" [label="{name}\\n{one.lines} lines"];' for name, one in rooms.items()]
    edges = [
        f'  "{name}" -> "{other}" [label="{n}"];'
        for name, one in rooms.items() for other, n in sorted(one.includes.items()) if n
    ]  # fmt: skip
    head = 'digraph native {\n  node [shape=box, fontname="sans-serif"];\n  edge [fontname="sans-serif", fontsize=10];'
    return "\n".join([head, *nodes, *edges, "}"])


def main() -> None:
    """Print the map."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=ROOT, metavar="DIR", help="another checkout")
    parser.add_argument("--dot", action="store_true", help="a graph for Graphviz instead of a table")
    args = parser.parse_args()
    found = NativeMap(args.source.resolve())
    print(dot(found.rooms) if args.dot else table(found.rooms))
    if not args.dot:
        print("\nfiles in circles, or that include one:", ", ".join(sorted(files_in_circles(found.includes))) or "none")


if __name__ == "__main__":
    main()
