"""The patch series as commits: ``import`` it, edit and rebase with git, ``export`` it.

python patches/refresh.py import            build/patches: upstream (tag upstream-head), then one commit per patch
python patches/refresh.py export            write the commits since upstream-head to patches/*.patch and series
python patches/refresh.py export --check    write nothing, fail when a file would change
python patches/refresh.py prove [VERSION..] apply the series to older releases (older.txt), compile, say how it went
python patches/refresh.py check DIR         apply the series to a copy of a llama.cpp tree, check that native/ compiles
"""

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

PATCHES = Path(__file__).resolve().parent
BUILD = PATCHES.parent / "build"
BASE = "upstream-head"
BY_HAND = "by hand"
FIELD = "Patch-Filename"  # kept in the commit message only, so that a file keeps its name when the subject changes
# a patch must not depend on who writes it: no settings of the user, no version of git, no abbreviated hashes; with two
# lines of context it applies to more releases than with git's three
EXPORT = "--stdout --no-numbered --no-stat --no-signature --zero-commit --full-index --no-renames -U2".split()
NEUTRAL = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
IDENTITY = ("-c", "user.name=pylongctx", "-c", "user.email=pylongctx@users.noreply.github.com")


def git(work: Path, *arguments: str, text: str | None = None) -> str:
    """Run git in the work folder and return what it prints."""
    command = ["git", *IDENTITY, *arguments]
    done = subprocess.run(
        command, cwd=work, input=text, stdout=subprocess.PIPE, encoding="utf-8", env=os.environ | NEUTRAL
    )
    if done.returncode:
        raise SystemExit(f"git {arguments[0]} failed in {work}")
    return done.stdout


def pins(name: str) -> dict[str, str]:
    """Return version and sha256 of the upstream packages that a file pins."""
    return dict(re.findall(r"==(\S+) --hash=sha256:([0-9a-f]{64})", (PATCHES / name).read_text()))


def find_tarball(version: str, sha256: str) -> Path | None:
    """Return a pinned package if it has been fetched."""
    found = BUILD.glob(f"**/download/*-{version}.tar.gz")
    return next((path for path in found if hashlib.sha256(path.read_bytes()).hexdigest() == sha256), None)


def fetch_tarball(version: str, sha256: str) -> Path:
    """Let pip fetch a pinned package, where find_tarball finds it."""
    folder = BUILD / "download"
    options = ["--quiet", "--no-deps", "--no-binary", "llama-cpp-python", "--require-hashes", "-d", str(folder)]
    with tempfile.TemporaryDirectory() as scratch:
        wanted = Path(scratch) / "wanted.txt"
        wanted.write_text(f"llama-cpp-python=={version} --hash=sha256:{sha256}\n")
        subprocess.run([sys.executable, "-m", "pip", "download", *options, "-r", str(wanted)], check=True)
    return next(folder.glob(f"*-{version}.tar.gz"))


def tarball(version: str, sha256: str) -> Path:
    """Return a pinned package."""
    return find_tarball(version, sha256) or fetch_tarball(version, sha256)


def built_files() -> tuple[str, ...]:
    """Return how the names of the files begin that a build extracts."""
    return tuple(re.findall(r"set\(wanted (.+)\)", (PATCHES / "apply.cmake").read_text())[0].split())


def extract(package: Path, work: Path, wanted: tuple[str, ...]) -> None:
    """Write to the work folder the files of the package whose names begin so."""
    with tarfile.open(package) as archive:
        for member in archive:
            _, _, member.name = member.name.partition("/vendor/llama.cpp/")
            if member.isfile() and member.name.startswith(wanted):
                archive.extract(member, work)


def read_series() -> list[str]:
    """Return the names of the patches, in order."""
    return [line for line in (PATCHES / "series").read_text().splitlines() if line and line[0] != "#"]


def import_series(work: Path, package: Path) -> None:
    """Make a repository of upstream and the series."""
    if work.exists():
        raise SystemExit(f"{work} exists: export what is in it, then delete it")
    work.mkdir(parents=True)
    extract(package, work, built_files())
    git(work, "init", "--quiet", "--initial-branch=main")
    git(work, "add", "--all", "--force")
    git(work, "commit", "--quiet", "--message=upstream")
    git(work, "tag", BASE)
    mails = []
    for name in read_series():
        header, mark, diff = (PATCHES / name).read_text().partition("\n---\n")
        mails.append(f"{header}\n{FIELD}: {name}{mark}{diff}")
    try:
        git(work, "am", "--quiet", "--keep-non-patch", text="\n".join(mails))
    except SystemExit:
        raise SystemExit(f"In {work}: edit, git add, git am --continue until it is through; then export") from None


def file_name(mail: str) -> str:
    """Return where a patch goes: its file name at import, or its subject."""
    if known := re.search(rf"^{FIELD}: (\S+)$", mail, re.MULTILINE):
        return known.group(1)
    subject = re.search(r"^Subject: \[PATCH\] (.+)$", mail, re.MULTILINE)
    return re.sub(r"[^a-z0-9]+", "-", subject.group(1).lower() if subject else "patch").strip("-") + ".patch"


def patch_text(mail: str) -> str:
    """Return the text of a patch file: without the file name, and a line between header and diff."""
    header, mark, diff = re.sub(rf"^{FIELD}: .*\n", "", mail, flags=re.MULTILINE).partition("\ndiff --git ")
    # an empty context line may end the diff: strip no spaces
    return header.rstrip() + "\n---" + mark + diff.rstrip("\n") + "\n"


def exported(work: Path) -> dict[str, str]:
    """Return the files of the series, as the commits say."""
    mails = re.split(r"^(?=From 0{40} )", git(work, "format-patch", *EXPORT, f"{BASE}..HEAD"), flags=re.MULTILINE)[1:]
    files = {file_name(mail): patch_text(mail) for mail in mails}
    comments = [line for line in (PATCHES / "series").read_text().splitlines() if line.startswith("#")]
    return files | {"series": "\n".join([*comments, *files]) + "\n"}


def export_series(work: Path, check: bool) -> None:
    """Write the series, or only compare it."""
    new = exported(work)
    old = {path.name: path.read_text() for path in (*PATCHES.glob("*.patch"), PATCHES / "series")}
    changed = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    if check and changed:
        raise SystemExit(f"not as exported: {', '.join(changed)}")
    for name in changed:
        print(f"patches/{name}")
        if name in new:
            (PATCHES / name).write_text(new[name])
        else:
            (PATCHES / name).unlink()


def apply(work: Path, patch: Path) -> str:
    """Apply a patch as a build does, to a tree that may be another; return how: as it is, at shifted lines, or not."""
    # git must not take the tree for a part of the repository around it
    neutral = NEUTRAL | {"GIT_CEILING_DIRECTORIES": str(work.parent), "LC_ALL": "C"}
    command = ["git", "apply", "--verbose", str(patch)]
    done = subprocess.run(command, cwd=work, stderr=subprocess.PIPE, encoding="utf-8", env=os.environ | neutral)
    if done.returncode:
        print(
            f"{patch.name}:",
            *re.findall(r"^error: (?!while).+$", done.stderr, re.MULTILINE),
            sep="\n  ",
            file=sys.stderr,
        )
        return BY_HAND
    return "shifted" if "(offset " in done.stderr else "as it is"


def touched(patch: Path) -> list[str]:
    """Return the files that a patch changes."""
    return re.findall(r"^diff --git a/(\S+) ", patch.read_text(), re.MULTILINE)


def compiles(work: Path, file: str) -> bool:
    """Let the compiler check a file of a tree; it does not optimize or link."""
    folders = ["ggml/include", "ggml/src", "ggml/src/ggml-cpu", "include", "src"]
    options = [*(f"-I{work / folder}" for folder in folders), f"-I{PATCHES.parent}", "-D_GNU_SOURCE"]
    build = ['-DGGML_VERSION="0"', '-DGGML_COMMIT="0"']
    compiler = ["cc", "-std=c11"] if file.endswith(".c") else ["c++", "-std=c++17"]
    command = [*compiler, "-fsyntax-only", "-w", *options, *build, str(work / file)]
    return subprocess.run(command, check=False).returncode == 0


def prove(package: Path) -> dict[str, str]:
    """Return for every patch how it applies to another release, and whether what was patched compiles."""
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch) / "llama.cpp"
        extract(package, work, built_files())
        result = {name: apply(work, PATCHES / name) for name in read_series()}
        for name, how in result.items():
            sources = [file for file in touched(PATCHES / name) if file.endswith((".c", ".cpp"))]
            if how != BY_HAND and not all([compiles(work, file) for file in sources]):
                result[name] = BY_HAND
    return result


def prove_series(versions: list[str]) -> None:
    """Print a table of patches and older releases, or the newest of them; fail when a patch needs a hand."""
    older = pins("older.txt")
    versions = versions or list(older)[:1]
    if unknown := [version for version in versions if version not in older]:
        raise SystemExit(f"not in older.txt: {', '.join(unknown)}")
    found = {version: prove(tarball(version, older[version])) for version in versions}
    rows = [["patch", *found], ["---"] * (1 + len(found))]
    rows += [[f"`{name.removesuffix('.patch')}`", *(how[name] for how in found.values())] for name in read_series()]
    print("\n".join(f"| {' | '.join(row)} |" for row in rows))
    if any(BY_HAND in row for row in rows):
        raise SystemExit(1)


def copied_tree(source: Path, work: Path) -> Path:
    """Copy the files that a build needs of a llama.cpp tree, or of the one in a source package of llama-cpp-python."""
    if (source / "vendor/llama.cpp").is_dir():
        source = source / "vendor/llama.cpp"
    if not (source / "src/llama.cpp").is_file():
        raise SystemExit(f"{source} is not a tree of llama.cpp")
    shutil.rmtree(work, ignore_errors=True)
    for name in built_files():
        if (source / name).is_dir():
            shutil.copytree(source / name, work / name)
        elif (source / name).is_file():
            work.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, work / name)
    return work


def compile_commands(tree: Path, build: Path) -> dict[str, list[str]]:
    """Let CMake configure a build of a patched tree; return how files of native/ and patched ones are compiled."""
    options = [f"-DLCTX_UPSTREAM_DIR={tree}", "-DLCTX_HARNESS=ON", "-DCMAKE_BUILD_TYPE=Release"]
    done = subprocess.run(
        ["cmake", "-S", PATCHES.parent, "-B", build, "-G", "Ninja", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
    )
    if done.returncode:
        raise SystemExit(f"CMake cannot configure a build of this tree:\n{done.stdout}")
    patched = {str(tree / file) for name in read_series() for file in touched(PATCHES / name)}
    found = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        file = entry["file"]
        if file.startswith(str(PATCHES.parent / "native")) or file in patched:
            found[file] = shlex.split(entry["command"])
    return found


def syntax_errors(command: list[str], folder: Path) -> list[str]:
    """Let the compiler check a file without warnings, optimization and output; return its errors."""
    at = command.index("-o")
    words = [*command[:at], *command[at + 2 :], "-fsyntax-only", "-w"]
    done = subprocess.run(words, cwd=folder, stderr=subprocess.PIPE, encoding="utf-8", env=os.environ | {"LC_ALL": "C"})
    return re.findall(r"^.*error: .*$", done.stderr, re.MULTILINE) or ["it failed"] * (done.returncode != 0)


def check_tree(source: Path, work: Path) -> None:
    """Print how the series applies to a tree, and the files that do not compile with it; fail when there is any."""
    tree, build = copied_tree(source, work / "llama.cpp"), work / "build"
    applied = {name: apply(tree, PATCHES / name) for name in read_series()}
    for name, how in applied.items():
        print(f"{name}: {how}", flush=True)
    commands = compile_commands(tree, build)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        errors = dict(zip(commands, pool.map(partial(syntax_errors, folder=build), commands.values()), strict=True))
    failed = {file: found for file, found in errors.items() if found}
    for file, found in failed.items():
        print(f"{Path(file).relative_to(PATCHES.parent)}: {len(found)} errors", *found[:3], sep="\n  ")
    n_applied = sum(how != BY_HAND for how in applied.values())
    print(f"{n_applied} of {len(applied)} patches apply, {len(errors) - len(failed)} of {len(errors)} files compile")
    if failed or n_applied < len(applied):
        raise SystemExit(1)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["import", "export", "prove", "check"])
    help = "prove: versions of older.txt, else the first of it; check: the folder of a tree"
    parser.add_argument("sources", nargs="*", metavar="SOURCE", help=help)
    parser.add_argument("--work", type=Path, default=BUILD / "patches", help="folder of the repository")
    parser.add_argument("--tarball", type=Path, help="the pinned source package, instead of a build's or pip's")
    parser.add_argument("--check", action="store_true", help="export: change nothing, fail on a difference")
    arguments = parser.parse_args()
    if arguments.action == "import":
        import_series(arguments.work, arguments.tarball or tarball(*next(iter(pins("upstream.txt").items()))))
    elif arguments.action == "prove":
        prove_series(arguments.sources)
    elif arguments.action == "check":
        if len(arguments.sources) != 1:
            parser.error("check takes one folder")
        check_tree(Path(arguments.sources[0]).resolve(), BUILD / "upstream-check")
    else:
        export_series(arguments.work, arguments.check)


if __name__ == "__main__":
    main()
