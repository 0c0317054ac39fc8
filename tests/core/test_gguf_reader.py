"""Headers that announce what their files cannot hold: refused in bounded time and memory, whatever the file's size."""

import os
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf_mutator import ARRAY, SIZES, STRING, Gguf
from tiny_gguf import Shape, make_model, sparse_model, split_model

from pylongctx import Llama
from pylongctx.errors import ModelRefused
from pylongctx.model_files.gguf import MAX_TEXTS, Damaged, Reader, _opened, check_gguf

HUGE = 8 << 30  # bytes of a file, of which nearly all is a hole
WRONG = [0, 1, 2**16, 2**17, 2**20, 2**21, 2**24, 2**26, 2**32, HUGE - 2**20, HUGE, 2**40, 2**63, 2**64 - 8, 2**64 - 1]
CPU_SECONDS, PEAK = 10, 100 * 2**20  # ten times what is promised, for slow machines, and what is


class Spots(Gguf):
    """A reader that notes where a file has counts and lengths."""

    def __init__(self, *parts) -> None:
        super().__init__(*parts)
        self.spots: list[int] = [8, 16]

    def _string(self) -> bytes:
        self.spots.append(self.at)
        return super()._string()

    def _value(self, kind: int) -> object:
        if kind == ARRAY:
            self.spots.append(self.at + 4)
        return super()._value(kind)


@pytest.fixture(scope="module")
def huge(tmp_path_factory) -> Path:
    path = sparse_model(tmp_path_factory.mktemp("huge") / "huge.gguf", Shape(n_vocab=300))
    os.truncate(path, HUGE)
    return path


@pytest.fixture(scope="module")
def spots(tmp_path_factory) -> list[int]:
    """Return the offsets of all counts and lengths of the header of ``huge``, those of few tokens among them."""
    path = sparse_model(tmp_path_factory.mktemp("spots") / "small.gguf", Shape(n_vocab=300))
    found = Spots.read(path).spots
    return found[:40] + found[40:-100:25] + found[-100:]


def changed(path: Path, at: int, value: int) -> Iterator[None]:
    with path.open("r+b") as file:
        file.seek(at)
        before = file.read(8)
        file.seek(at)
        file.write(struct.pack("<Q", value))
        file.flush()
        yield
        file.seek(at)
        file.write(before)


def test_every_count_and_length_is_bounded(huge, spots):
    """A hole reads as texts without bytes: what is walked is bounded by numbers, not by where the file ends."""
    assert len(spots) > 120
    refused, slowest = 0, 0.0
    for at in spots:
        for value in WRONG:
            for _ in changed(huge, at, value):
                started = time.process_time()
                with _opened(str(huge)) as (_, data):
                    try:
                        Reader(data).header()
                    except Damaged:
                        refused += 1
                slowest = max(slowest, time.process_time() - started)
    assert refused > 0.95 * len(spots) * len(WRONG) and slowest < CPU_SECONDS
    check_gguf(str(huge))  # as it was


@pytest.mark.parametrize("value", [2**17, 2**64 - 1])
@pytest.mark.parametrize("at", [8, 16])
def test_memory_does_not_grow_with_the_file(huge, at, value):
    tracemalloc.start()
    for _ in changed(huge, at, value):
        with pytest.raises(ModelRefused, match="its header is damaged"):
            check_gguf(str(huge))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < PEAK


CODE = """
import resource, sys
from pylongctx import Llama
used = lambda: sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
before = used(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    Llama(sys.argv[1], verbose=False)
except ValueError as reason:
    assert "its header is damaged" in str(reason), reason
    print(used() - before[0], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before[1], sep="\\n")
"""


def texts_without_end(path: Path) -> int:
    """Return where a file announces how many texts a list has that is not kept, before a hole."""
    file = Gguf.read(path)
    file.meta.append((b"tokenizer.ggml.merges", ARRAY, (STRING, [])))
    head = Gguf(file.version, file.meta, [], b"").write()
    path.write_bytes(head[:8] + struct.pack("<Q", len(file.tensors)) + head[16:])
    os.truncate(path, HUGE)
    return head.rindex(b"merges") + len("merges") + 8


def test_opening_a_damaged_file_takes_no_time(tmp_path):
    path = sparse_model(tmp_path / "m.gguf", Shape(n_vocab=300))
    at = texts_without_end(path)
    for _ in changed(path, at, MAX_TEXTS - 300):
        done = subprocess.run(
            [sys.executable, "-c", CODE, path], capture_output=True, text=True, timeout=100, check=False
        )
    assert done.returncode == 0, done.stderr
    seconds, kib = map(float, done.stdout.split())
    assert seconds < CPU_SECONDS and kib * 1024 < PEAK


def test_a_file_that_is_cut_off_in_its_header_says_so(tmp_path):
    path = make_model(tmp_path / "m.gguf")
    header = path.read_bytes()[:600]
    path.write_bytes(header)
    with pytest.raises(ModelRefused, match=r"its header is damaged: .*600 bytes"):
        Llama(str(path), verbose=False)


def test_other_files_of_a_model_are_checked_too(tmp_path):
    first, second, *_ = split_model(tmp_path / "split.gguf", make_model(tmp_path / "whole.gguf"), 8)
    data = bytearray(second.read_bytes())
    data[8:16] = b"\xff" * 8
    second.write_bytes(data)
    with pytest.raises(ModelRefused, match=rf"{second.name} cannot be used: its header is damaged: it declares"):
        Llama(str(first), verbose=False)


def test_the_reader_and_the_mutator_read_the_same(tmp_path):
    path = make_model(tmp_path / "m.gguf")
    file = Gguf.read(path)
    with _opened(str(path)) as (_, data):
        header = Reader(data).header()
    assert [(t.name.encode(), list(t.dims), t.kind, t.offset) for t in header.tensors] == file.tensors
    for key, kind, value in file.meta:
        found = header.meta[key.decode()]
        if kind != ARRAY:
            assert found == value or SIZES.get(kind) == "B"
        elif value[0] != STRING or key == b"tokenizer.ggml.tokens":
            assert found == value[1]
