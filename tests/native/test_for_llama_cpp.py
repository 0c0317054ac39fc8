"""The patches for stock ggml apply to the pinned source and need nothing of ours; for-llama.cpp/check.py has cases."""

import re
import runpy
import subprocess
from pathlib import Path

from upstream import tarball

ROOT = Path(__file__).resolve().parents[2]
PATCHES = sorted((ROOT / "for-llama.cpp").glob("*.patch"))
extract = runpy.run_path(str(ROOT / "patches/refresh.py"))["extract"]


def test_the_series_applies_to_the_pinned_source(tmp_path):
    touched = {name for patch in PATCHES for name in re.findall(r"^\+\+\+ b/(.+)$", patch.read_text(), re.MULTILINE)}
    assert {name.partition("/")[0] for name in touched} == {"ggml", "tests"}
    extract(tarball(), tmp_path, tuple(touched))
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    for patch in PATCHES:
        subprocess.run(["git", "apply", str(patch)], cwd=tmp_path, check=True)


def test_the_series_needs_nothing_of_ours():
    text = "".join(patch.read_text() for patch in PATCHES)
    added = re.findall(r"^\+(?!\+\+ )(.*)$", text, re.MULTILINE)
    assert len(added) > 100
    assert not [line for line in added if re.search("lctx", line, re.IGNORECASE)]
