"""The patch series: small, documented, complete."""

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from needs import lacks

ROOT = Path(__file__).resolve().parents[2]
PATCHES = ROOT / "patches"
README = (PATCHES / "README.md").read_text()
FILES = sorted(path.name for path in PATCHES.glob("*.patch"))
FIELDS = ("Description", "Origin", "Forwarded", "Last-Update", "Touches", "Removal")
REFRESH = runpy.run_path(str(PATCHES / "refresh.py"))
TREE = "".join(f"line {i}\n" for i in range(20))
INSERT = """diff --git a/src/a.cpp b/src/a.cpp
--- a/src/a.cpp
+++ b/src/a.cpp
@@ -9,6 +9,7 @@
 line 8
 line 9
 line 10
+int added;
 line 11
 line 12
 line 13
"""


def series() -> list[str]:
    lines = (PATCHES / "series").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def split(name: str) -> tuple[str, str]:
    """Return header and diff of a patch."""
    header, mark, diff = (PATCHES / name).read_text().partition("\ndiff --git ")
    assert mark, "no diff"
    return header, mark.lstrip() + diff


def fields(header: str) -> dict[str, str]:
    """Return the fields of a header; indented lines continue the one before."""
    unfolded = re.sub(r"\n[ \t]+", " ", header)
    return dict(re.findall(r"^([A-Z][\w-]*): (.+)$", unfolded, re.MULTILINE))


def added(name: str) -> list[str]:
    return [line for line in split(name)[1].splitlines() if line.startswith("+") and not line.startswith("+++ ")]


def test_series_and_files_agree():
    assert series(), "the series is empty"
    assert sorted(series()) == FILES
    assert len(set(series())) == len(series())


@pytest.mark.parametrize("name", FILES)
def test_header_is_complete(name):
    header = split(name)[0]
    assert re.match(r"From [0-9a-f]{40} ", header), "no mailbox line"
    found = fields(header)
    assert re.fullmatch(r".+ <.+@.+>", found["From"])
    assert re.match(r"\[PATCH\] [\w-]+ : \S", found["Subject"])
    for field in FIELDS:
        assert found.get(field, "").strip(), f"no {field}"
    assert re.fullmatch(r"no|not-needed|https://\S+", found["Forwarded"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["Last-Update"])


@pytest.mark.parametrize("name", FILES)
def test_touches_names_the_files_of_the_diff(name):
    header, diff = split(name)
    in_diff = re.findall(r"^diff --git a/(\S+) b/(\S+)$", diff, re.MULTILINE)
    assert all(old == new for old, new in in_diff), "a patch never moves a file"
    assert sorted(re.split(r"[,\s]+", fields(header)["Touches"])) == sorted(old for old, _ in in_diff)


@pytest.mark.parametrize("name", FILES)
def test_patch_adds_lines_and_no_files(name):
    assert added(name)
    assert not re.search(r"^(new file mode|--- /dev/null|deleted file)", split(name)[1], re.MULTILINE)


def test_the_readme_names_patches_and_files():
    rows = re.findall(r"^\| `([\w-]+)` \| ((?:`[\w.-]+`(?:, )?)+) \|", README, re.MULTILINE)
    assert [f"{name}.patch" for name, _ in rows] == series()
    for name, files in rows:
        touches = fields(split(f"{name}.patch")[0])["Touches"].split()
        assert sorted(re.findall(r"`(.+?)`", files)) == sorted(Path(file).name for file in touches)


def test_the_readme_names_what_native_uses():
    section = README.partition("## Non-public things")[2].partition("\n## ")[0]
    sources = "".join(path.read_text() for path in sorted((ROOT / "native").rglob("*.*")) if path.suffix != ".md")
    names = re.findall(r"`(\w+)`|`(\w+)\*`", section)
    assert len(names) > 20
    assert not [name for name in map("".join, names) if not re.search(rf"\b{name}", sources)]


@pytest.mark.parametrize("name", FILES)
def test_no_trailing_whitespace_is_added(name):
    assert not [line for line in added(name) if line != line.rstrip()]
    assert not [line for line in split(name)[0].splitlines() if line != line.rstrip()]


@pytest.mark.parametrize("name", FILES)
def test_hunks_have_the_lengths_they_announce(name):
    """A hand-edited hunk would be applied with fuzz, or not at all."""
    for counts, body in re.findall(r"^@@ -(\S+ \+\S+) @@.*\n((?:[ +\\-].*\n|\n)*)", split(name)[1], re.MULTILINE):
        old, new = (int(part.partition(",")[2] or 1) for part in counts.split(" +"))
        lines = [line[:1] for line in body.splitlines()]
        assert (lines.count(" ") + lines.count("-"), lines.count(" ") + lines.count("+")) == (old, new), counts


def test_upstream_is_one_pinned_line():
    lines = [line for line in (PATCHES / "upstream.txt").read_text().splitlines() if line and line[0] != "#"]
    assert len(lines) == 1
    assert re.fullmatch(r"llama-cpp-python==[\d.]+ --hash=sha256:[0-9a-f]{64}", lines[0])


def test_older_releases_are_pinned_and_older():
    [pinned] = REFRESH["pins"]("upstream.txt")
    older = REFRESH["pins"]("older.txt")
    lines = [line for line in (PATCHES / "older.txt").read_text().splitlines() if line[0] != "#"]
    assert len(older) == len(lines) > 0
    numbers = [tuple(map(int, version.split("."))) for version in (pinned, *older)]
    assert numbers == sorted(set(numbers), reverse=True)


@pytest.mark.parametrize(("tree", "how"), [
    (TREE, "as it is"),
    ("".join(f"new {i}\n" for i in range(5)) + TREE, "shifted"),
    (TREE.replace("line 13\n", "line thirteen\n"), "by hand"),
    (TREE.replace("line 11\n", "new\nline 11\n"), "by hand"),
], ids=["same", "shifted", "context", "between"])  # fmt: skip
def test_how_a_patch_applies(tmp_path, tree, how):
    git_or_skip()
    work = tmp_path / "work"
    (work / "src").mkdir(parents=True)
    (work / "src" / "a.cpp").write_text(tree)
    (tmp_path / "insert.patch").write_text(INSERT)
    assert REFRESH["apply"](work, tmp_path / "insert.patch") == how
    assert ("int added;" in (work / "src" / "a.cpp").read_text()) == (how != "by hand")


def test_the_series_applies_to_an_older_release():
    """It stands on context that lasts, and nothing in it counts what upstream counts."""
    git_or_skip()
    older = REFRESH["pins"]("older.txt")
    version, sha256 = next(iter(older.items()))
    if not REFRESH["find_tarball"](version, sha256):
        lacks("older", f"llama-cpp-python {version} is not in build/download: python patches/refresh.py prove")
    command = [sys.executable, str(PATCHES / "refresh.py"), "prove"]
    done = subprocess.run(command, capture_output=True, text=True)
    found = column(done.stdout, version)
    assert done.returncode == ("by hand" in found.values()), done.stdout + done.stderr
    assert [f"{name.strip('`')}.patch" for name in found] == series()
    assert found == column(README, version)


def column(text: str, version: str) -> dict[str, str]:
    """Return how each patch applies to a release, as the table of refresh.py says."""
    [table] = re.findall(rf"(?:^\|.*{re.escape(version)}.*\n)(?:^\|.*\n)+", text, re.MULTILINE)
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    return {row[0]: row[head.index(version)] for row in rows}


def git_or_skip() -> None:
    if not shutil.which("git"):
        lacks("build", "git is not installed")


def test_the_series_survives_import_and_export(tmp_path):
    """It applies to the pinned package commit by commit, and the files are just as git writes them."""
    [(version, sha256)] = REFRESH["pins"]("upstream.txt").items()
    found = REFRESH["find_tarball"](version, sha256)
    if not found:
        lacks("build", "no build has fetched the upstream package (build/*/download)")
    git_or_skip()
    work = tmp_path / "work"
    for action in (["import", "--tarball", str(found)], ["export", "--check"]):
        command = [sys.executable, str(PATCHES / "refresh.py"), *action, "--work", str(work)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    (work / "include" / "llama.h").write_text("")
    commit = ["git", "-c", "user.name=x", "-c", "user.email=x@y", "commit", "-qam", "other"]
    subprocess.run(commit, cwd=work, check=True)
    assert subprocess.run(command, capture_output=True).returncode != 0, "a new commit is no difference"


def test_a_folder_without_llama_cpp_is_not_checked(tmp_path):
    with pytest.raises(SystemExit, match=r"is not a tree of llama\.cpp"):
        REFRESH["copied_tree"](tmp_path, tmp_path / "copy")


def test_errors_of_the_compiler_are_reported(tmp_path):
    for name, text in (("good.cpp", "int f() { return 0; }"), ("bad.cpp", "int f() { return missing; }")):
        (tmp_path / name).write_text(text)
    found = [
        REFRESH["syntax_errors"](["c++", "-Wall", "-o", f"{name}.o", "-c", f"{name}.cpp"], tmp_path)
        for name in ("good", "bad")
    ]
    assert found[0] == [] and len(found[1]) == 1 and "missing" in found[1][0]
