"""What is packed: the source package and the wheel."""

import json
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from needs import lacks

ROOT = Path(__file__).resolve().parents[2]
NEEDED = {"CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE", "native/lctx.h", "native/lctx.map",
          "native/base/counts.h", "native/lctx-sampling.h", "patches/apply.cmake",
          "patches/series", "patches/upstream.txt", "native/build_ffi.py",
          "pylongctx/models/pylongctx-tiny-q8_0.gguf"}  # fmt: skip
NOT_PACKED = {".ci/run"}


def tool(module: str) -> None:
    if find_spec(module) is None:
        lacks("build", f"{module} is not installed")


def run(*command: object) -> str:
    done = subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def files_of_git(*options: str) -> set[str]:
    try:
        done = subprocess.run(["git", "ls-files", "-z", *options], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        lacks("build", "not a git checkout: nothing to compare the package with")
    return {name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> set[str]:
    """Names in a source package that is built now."""
    tool("scikit_build_core")
    folder = tmp_path_factory.mktemp("sdist")
    run("-c", "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])", folder)
    (path,) = folder.iterdir()
    top = f"{path.name.removesuffix('.tar.gz')}/"
    with tarfile.open(path) as archive:
        names = archive.getnames()
    assert all(name.startswith(top) for name in names)
    return {name.removeprefix(top) for name in names}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Return a wheel of the tree that is built already: seconds when nothing has changed."""
    for module in ("pip", "scikit_build_core", "cffi", "cmake", "ninja"):
        tool(module)
    if not list((ROOT / "build").glob("py3-none-*/libllama.so")):
        lacks("build", "the library is not built in build/")
    folder = tmp_path_factory.mktemp("wheel")
    run("-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--wheel-dir", folder, ".")
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def packed(wheel) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_sdist_holds_our_files_only(sdist):
    assert sdist - files_of_git("--cached", "--others", "--exclude-standard") == {"PKG-INFO"}


def test_sdist_holds_every_file_of_the_project(sdist):
    assert files_of_git() - sdist == NOT_PACKED


def test_sdist_holds_what_a_build_needs(sdist):
    series = [line for line in (ROOT / "patches/series").read_text().splitlines() if line and line[0] != "#"]
    needed = NEEDED | {f"patches/{name}" for name in series}
    for folder, pattern in (("native", "*.cpp"), ("native", "*.h"), ("pylongctx", "*.py")):
        needed |= {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob(pattern)}
    assert needed - sdist == {"pylongctx/_ffi_generated.py"} & needed


def test_wheel_is_for_every_python_and_one_platform(wheel):
    from pylongctx import __version__

    assert re.fullmatch(rf"pylongctx-{re.escape(__version__)}-py3-none-(?!any)\w+\.whl", wheel.name)


def test_wheel_holds_exactly_one_library(packed):
    assert [name for name, data in packed.items() if data[:4] == b"\x7fELF"] == ["pylongctx/lib/libllama.so"]
    assert not [name for name in packed if re.search(r"\.(so\..+|a|o|h|cmake|pc)$", name)]


def test_wheel_holds_the_package(packed):
    names = {path.relative_to(ROOT).as_posix() for path in (ROOT / "pylongctx").rglob("*.py")}
    names |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "pylongctx/eval/data").iterdir()}
    assert names <= packed.keys()
    assert {"pylongctx/_ffi_generated.py", "pylongctx/py.typed"} <= packed.keys()
    model = "pylongctx/models/pylongctx-tiny-q8_0.gguf"
    assert packed[model] == (ROOT / model).read_bytes()


def test_wheel_holds_nothing_else(packed):
    assert {re.sub(r"^pylongctx-[\d.]+\.dist-info", "dist-info", name).split("/")[0] for name in packed} == {
        "pylongctx",
        "dist-info",
    }
    assert not [name for name in packed if "__pycache__" in name]


def test_wheel_holds_both_licences(packed):
    ours = next(data for name, data in packed.items() if re.search(r"\.dist-info/licenses/LICENSE$", name))
    assert ours == (ROOT / "LICENSE").read_bytes()
    assert b"The ggml authors" in packed["pylongctx/lib/LICENSE.llama.cpp"]


def test_wheel_has_the_command_and_the_requirements(packed):
    entry = next(data for name, data in packed.items() if name.endswith("entry_points.txt"))
    metadata = next(data for name, data in packed.items() if name.endswith("METADATA")).decode()
    assert b"pylongctx=pylongctx.cli:main" in entry.replace(b" ", b"")
    needed = set(re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", metadata, re.MULTILINE))
    assert needed == {"cffi", "numpy"}


@pytest.fixture(scope="module")
def for_all() -> dict[str, bytes]:
    """Return what the wheel of ``make wheel`` holds."""
    wheels = sorted(
        (ROOT / "dist").glob("pylongctx-*-manylinux_2_28_x86_64.whl"), key=lambda path: path.stat().st_mtime
    )
    if not wheels:
        lacks("wheel", "make wheel was not run")
    with zipfile.ZipFile(wheels[-1]) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_a_wheel_for_all_has_a_library_for_each_kind_of_cpu(for_all):
    kinds = json.loads(for_all["pylongctx/lib/kinds.json"])
    libraries = {f"pylongctx/lib/{kind}/libllama.so" for kind in kinds} | {"pylongctx/lib/libllama.so"}
    assert {name for name, data in for_all.items() if data[:4] == b"\x7fELF"} == libraries


def test_a_wheel_for_all_needs_an_old_glibc_only(for_all):
    data = for_all["pylongctx/lib/libllama.so"]
    versions = {tuple(map(int, found.split(b"."))) for found in re.findall(rb"GLIBC_([\d.]+)\0", data)}
    assert max(versions) <= (2, 28)
    assert b"GLIBCXX_" not in data


# zig's libraries do not run destructors when they are closed, but when the process ends: so they must stay
CLOSE = """
import _ctypes, ctypes, sys
library = ctypes.CDLL(sys.argv[1])
library.lctx_build_info()
_ctypes.dlclose(library._handle)
"""


def test_a_process_that_closed_the_library_ends_well(for_all, tmp_path):
    (tmp_path / "libllama.so").write_bytes(for_all["pylongctx/lib/libllama.so"])
    run("-c", CLOSE, tmp_path / "libllama.so")
