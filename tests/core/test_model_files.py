"""Which model the files hold: whatever is edited in them, the digests differ, and a copy has the same."""

import os
import shutil
import time
from itertools import pairwise

import gguf
import numpy as np
import pytest
from tiny_gguf import Shape, flip, make_model, split_model, tensor_ranges

from pylongctx import Llama
from pylongctx.errors import InvalidInput, ModelRefused
from pylongctx.model_files import digests
from pylongctx.model_files.digests import N_PAGES, PAGE, ModelFiles, pages

SHAPE = Shape(n_embd=128, n_head=2, n_head_kv=1)  # large tensors have more pages than are looked at
MODELS = {"llama": 0, "gemma3": 0, "qwen3moe": 5}  # how many tensors a file has; 0: all are in one


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LCTX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "weights"


@pytest.fixture(params=MODELS)
def paths(request, tmp_path):
    """Return all files of a model."""
    path = make_model(tmp_path / "model.gguf", SHAPE, arch=request.param)
    return split_model(tmp_path / "split.gguf", path, MODELS[request.param]) if MODELS[request.param] else [path]


def seen(paths):
    """Return what is seen at once, and what by reading all."""
    files = ModelFiles(str(paths[0]))
    return files.header, files.pages, files.weights()


def test_every_file_counts(paths):
    assert [*map(str, paths)] == ModelFiles(str(paths[0])).paths
    assert len(paths) == 1 or len(paths) > 3


def test_every_tensor(paths):
    known = {seen(paths)[1:]}
    for path, _, start, end in tensor_ranges(paths):
        flip(path, start, end)
        known.add(seen(paths)[1:])
        flip(path, start, end)
    n = sum(1 for _ in tensor_ranges(paths)) + 1
    assert len({quick for quick, _ in known}) == n and len({weights for _, weights in known}) == n


def test_single_bytes_on_pages_that_are_looked_at(paths):
    before, n = ModelFiles(str(paths[0])), 0
    for path, _, start, end in tensor_ranges(paths):
        for offset, length in pages(start, end):
            at, n = offset + n * 997 % length, n + 1
            flip(path, at, at + 1)
            now = ModelFiles(str(paths[0]))
            flip(path, at, at + 1)
            assert now.header == before.header and now.pages != before.pages
    assert n > 60 and ModelFiles(str(paths[0])).pages == before.pages


def test_single_bytes_anywhere(paths):
    before, rng = seen(paths), np.random.default_rng(0)
    for path in paths:
        for at in rng.integers(0, path.stat().st_size, 40).tolist():
            flip(path, at, at + 1)
            weights = digests.digest_of([str(path) for path in paths])
            flip(path, at, at + 1)
            assert weights != before[2]


def test_every_byte_of_a_header(paths, tmp_path):
    """As long as the file can be read: else it is refused."""
    before, n = ModelFiles(str(paths[0])), 0
    for path in {paths[0], paths[-1]}:
        end = int(gguf.GGUFReader(str(path)).tensors[0].data_offset)
        for at in range(24, end, end // 60):
            flip(path, at, at + 1)
            try:
                assert ModelFiles(str(paths[0])).header != before.header
                n += 1
            except InvalidInput:
                pass
            flip(path, at, at + 1)
    assert n > 30 and ModelFiles(str(paths[0])).header == before.header


@pytest.mark.parametrize("n", [0, 1, PAGE, N_PAGES * PAGE - 1, N_PAGES * PAGE, N_PAGES * PAGE + 1, 10**9 + 7])
def test_pages_begin_and_end_where_the_tensor_does(n):
    found = [*pages(100, 100 + n)]
    assert found[0][0] == 100 and sum(found[-1]) == 100 + n
    assert len(found) == 1 or (len(found) == N_PAGES and {length for _, length in found} == {PAGE})
    assert all(offset + length <= later for (offset, length), (later, _) in pairwise(found))


def test_a_copy_is_the_same_model(paths, tmp_path):
    (tmp_path / "there").mkdir()
    names = [path.name.replace("split", "other") for path in paths]
    copies = [shutil.copyfile(path, tmp_path / "there" / name) for path, name in zip(paths, names, strict=True)]
    assert seen(copies) == seen(paths)


def test_a_missing_file(tmp_path):
    paths = split_model(tmp_path / "split.gguf", make_model(tmp_path / "model.gguf", SHAPE), 7)
    paths[-1].unlink()
    with pytest.raises(InvalidInput, match=paths[-1].name):
        ModelFiles(str(paths[0]))
    with pytest.raises(ModelRefused, match="split"):
        Llama(str(paths[0]), n_ctx=64, verbose=False)


# ---- what is remembered ----


@pytest.fixture
def whole(monkeypatch):
    """Return a list that grows when files are read whole."""
    read, digest_of = [], digests.digest_of
    monkeypatch.setattr(digests, "digest_of", lambda paths: (read.append(paths), digest_of(paths))[1])
    return read


@pytest.fixture
def old(paths, monkeypatch):
    """Return files that were not written a moment ago."""
    monkeypatch.setattr(digests, "SETTLED", 0)
    time.sleep(0.05)
    return paths


def test_files_are_read_whole_once(old, cache, whole):
    first = seen(old)
    assert seen(old) == first and len(whole) == 1 and len([*cache.iterdir()]) == 1


def test_files_that_were_just_written_are_not_remembered(paths, cache, whole):
    assert seen(paths) == seen(paths)
    assert len(whole) == 2 and not cache.exists()


def test_what_was_edited_is_read_again(old, whole):
    """The same size, inode and mtime, and no byte that is looked at: the time of the last change is another."""
    first = seen(old)
    time.sleep(0.05)
    path, offset = next(
        (path, offset + length)
        for path, _, start, end in tensor_ranges(old)
        for (offset, length), (later, _) in pairwise(pages(start, end))
        if later > offset + length
    )
    flip(path, offset, offset + 1)
    now = seen(old)
    assert now[:2] == first[:2] and now[2] != first[2] and len(whole) == 2


@pytest.mark.parametrize("data", [b"", b"0" * 63, b"\xff" * 64, b"0" * 65])
def test_a_damaged_memory_is_not_believed(old, cache, whole, data):
    first = seen(old)
    (note,) = cache.iterdir()
    note.write_bytes(data)
    assert seen(old) == first and len(whole) == 2


def test_a_folder_that_cannot_be_made(old, cache, whole):
    cache.parent.write_text("a file")
    assert seen(old) == seen(old) and len(whole) == 2


# ---- files that change ----


def test_files_that_change_have_no_name(paths):
    files = ModelFiles(str(paths[0]))
    files.prepare()
    known = files.weights()
    os.utime(paths[-1])
    assert files.weights() == known, "that of what was opened"
    files = ModelFiles(str(paths[0]))
    paths[-1].write_bytes(paths[-1].read_bytes() + b"x")
    with pytest.raises(InvalidInput, match=f"{paths[-1].name} changed after it was opened"):
        files.weights()


def test_a_model_that_is_written_while_it_is_opened(paths, monkeypatch):
    from pylongctx import loading

    model = loading.Model
    monkeypatch.setattr(loading, "Model", lambda *args: (os.utime(paths[-1]), model(*args))[1])
    with pytest.raises(ModelRefused, match="changed after it was opened"):
        Llama(str(paths[0]), n_ctx=64, verbose=False, preflight=False)
