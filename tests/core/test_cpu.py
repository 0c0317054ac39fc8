"""``pylongctx/_cpu.py``: the library of a wheel that fits the CPU."""

import json
import re
import struct
from pathlib import Path

import pytest

from pylongctx._cpu import VARIABLE, cpu_features, cpu_kind, cpu_kinds

pytestmark = pytest.mark.check

ROOT = Path(__file__).resolve().parents[2]
KINDS = {"zen4": ["avx2", "avx512f", "avx512_bf16"], "skylakex": ["avx2", "avx512f"], "haswell": ["avx2"], "x64": []}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    (tmp_path / "kinds.json").write_text(json.dumps(KINDS))
    return tmp_path


@pytest.mark.parametrize(
    ("features", "kind"),
    [
        ("fpu avx2 avx512f avx512_bf16", "zen4"),
        ("avx2 avx512f", "skylakex"),
        ("avx2 avx512_bf16", "haswell"),
        ("sse4_2", ""),
        ("", ""),
    ],
)
def test_the_best_that_runs(folder, features, kind):
    assert cpu_kind(folder, set(features.split())) == kind


def test_all_that_run(folder):
    assert cpu_kinds(folder, {"avx2", "avx512f"}) == ["skylakex", "haswell", "x64"]


def test_a_library_that_was_built_here_has_no_kinds(tmp_path):
    assert cpu_kind(tmp_path, {"avx2"}) == ""
    assert cpu_kinds(tmp_path, {"avx2"}) == []


def test_a_kind_by_name(folder, monkeypatch):
    monkeypatch.setenv(VARIABLE, "haswell")
    assert cpu_kind(folder, {"avx2", "avx512f"}) == "haswell"
    monkeypatch.setenv(VARIABLE, "x64")
    assert cpu_kind(folder, {"avx2", "avx512f"}) == ""


@pytest.mark.parametrize(
    ("kind", "why"), [("zen5", "zen4, skylakex, haswell, x64"), ("zen4", "no avx512f, avx512_bf16")]
)
def test_a_kind_that_does_not_run(folder, monkeypatch, kind, why):
    monkeypatch.setenv(VARIABLE, kind)
    with pytest.raises(ImportError, match=why):
        cpu_kind(folder, {"avx2"})


def test_features_are_those_of_the_first_core(tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nflags\t\t: fpu avx2 avx_vnni\nbugs\t: none\n\nprocessor : 1\nflags\t: fpu\n")
    assert cpu_features("x86_64", tmp_path) == {"fpu", "avx2", "avx_vnni"}
    assert cpu_features("x86_64", tmp_path / "none") == set()


def test_features_of_arm_are_those_of_the_process(tmp_path):
    (tmp_path / "self").mkdir()
    entries = [(6, 4096), (16, 0x1004FF), (26, 1 << 13), (0, 0)]  # a page's size, both words, the end
    (tmp_path / "self/auxv").write_bytes(b"".join(struct.pack("=QQ", *entry) for entry in entries))
    assert cpu_features("aarch64", tmp_path) == {"crc32", "asimdhp", "asimddp", "i8mm"}
    assert cpu_features("aarch64", tmp_path / "none") == set()


def test_the_page_lists_the_kinds_in_the_order_in_which_they_are_tried():
    lists = re.findall(r"set\(LCTX_KINDS ([^)]*)\)", (ROOT / "native/cpu/kinds.cmake").read_text())
    arm, x86 = (kinds.split() for kinds in lists)
    tables = (ROOT / "docs/install.md").read_text().partition("| kind |")[2]
    assert re.findall(r"^\| `([\w.]+)` \|", tables, re.MULTILINE) == x86 + arm
