"""Which blocks leave a KV store: no block before those that follow it, and a shared beginning after all its texts."""

import errno
import os
import random
from pathlib import Path

import numpy as np
import pytest
from stored import SHAPE, files, fill, new, read, text
from tiny_gguf import make_model

from pylongctx.cli import main
from pylongctx.engine.saved_state import LlamaState
from pylongctx.store.folder import TARGET_FILL, Folder, Link, StoredFile, leaving
from pylongctx.store.layout import BLOCK


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "model.gguf", SHAPE)


def entry(name, used, kind="rows"):
    return StoredFile(Path(f"{name}.{kind}"), name, kind, 10, used)


def names(entries):
    return [entry.name for entry in entries]


# ---- the order ----


def forest(rng, n=60):
    """Return blocks of texts that part at random, used at random times, some twice."""
    links, entries = {}, []
    for i in range(n):
        before = rng.choice(["", *links])
        links[f"b{i}"] = Link(before, links.get(before, Link()).end + rng.choice([77, 512]))
        entries += [entry(f"b{i}", rng.randrange(20), kind) for kind in rng.sample(["rows", "point", "tail"], 2)]
    rng.shuffle(entries)
    return entries, links


@pytest.mark.parametrize("seed", range(8))
def test_no_block_leaves_before_one_that_follows_it(seed):
    entries, links = forest(random.Random(seed))
    order = leaving(entries, links)
    assert sorted(names(order)) == sorted(names(entries))
    last = {name: i for i, name in enumerate(names(order))}
    first = {name: i for i, name in reversed(list(enumerate(names(order))))}
    for name, link in links.items():
        assert not link.before or last[name] < first[link.before]


@pytest.mark.parametrize("seed", range(8))
def test_texts_leave_by_their_last_use(seed):
    rng = random.Random(seed)
    entries, links = forest(rng)
    order = leaving(entries, links)
    assert [one.used for one in order] == sorted(one.used for one in order)
    through = {name: max(one.used for one in entries if one.name == name) for name in links}
    for name in sorted(links, key=lambda name: -links[name].end):
        if before := links[name].before:
            through[before] = max(through[before], through[name])
    assert all(one.used == through[one.name] for one in order)


def test_a_point_leaves_before_its_rows():
    assert [one.kind for one in leaving([entry("a", 5), entry("a", 5, "point")], {})] == ["point", "rows"]


def test_links_that_lie_do_no_harm():
    entries = [entry(name, used) for name, used in (("a", 1), ("b", 2), ("c", 3))]
    ring = {"a": Link("b", 5), "b": Link("a", 5), "c": Link("gone", 9)}
    assert sorted(names(leaving(entries, ring))) == ["a", "b", "c"]


# ---- the folder ----


def put(folder, name, before, end, used):
    """Write a block of 1000 bytes or a little more that was used at a time."""
    about = {"first": end - 512, "end": end, "before": before}
    state = LlamaState(np.empty(0, np.int32), np.empty(0, np.float32), np.zeros(1000, np.uint8), about)
    n = folder.write(name, "rows", state)
    os.utime(folder.file(name, "rows"), (used, used))
    return n


def test_a_beginning_that_many_share_leaves_last(tmp_path):
    folder, shared = Folder(tmp_path, 1 << 30), [f"{i:040x}" for i in (1, 2)]
    put(folder, shared[0], "", 512, used=1)  # old by themselves, as after a crash between writing and recording a use
    put(folder, shared[1], shared[0], 1024, used=2)
    for i in range(10):
        put(folder, f"{100 + i:040x}", shared[1], 1536, used=100 + i)
        n = put(folder, f"{200 + i:040x}", "", 512, used=99.5 + i)
    order = names(folder.leaving())
    assert order[-2:] == [shared[1], shared[0]], "as used as the last conversation, and after it"
    folder.trim(int((3 * n + n // 2) / TARGET_FILL))
    assert {path.stem for path in files(tmp_path)} == set(order[-3:])


def test_a_file_that_cannot_be_removed_keeps_no_other(tmp_path, monkeypatch):
    folder, unlink = Folder(tmp_path, 1 << 30), Path.unlink
    for i in range(6):
        n = put(folder, f"{i:040x}", "", 512, used=i)

    def refuse(path, **kwargs):
        if path == folder.file(f"{0:040x}", "rows"):
            raise PermissionError(errno.EACCES, "Permission denied")
        unlink(path, **kwargs)

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(PermissionError):
        folder.trim(3 * n)
    assert [int(path.stem, 16) for path in files(tmp_path)] == [0, 5]


def test_links_are_read_once(tmp_path, monkeypatch):
    folder = Folder(tmp_path, 1 << 30)
    for i in range(3):
        put(folder, f"{i:040x}", "", 512, used=i)
    assert len(folder.leaving()) == 3
    monkeypatch.setattr("pylongctx.store.folder.read_identity", lambda path: 1 / 0)
    assert len(folder.leaving()) == 3


# ---- conversations ----


def age(folder):
    for path in files(folder):
        os.utime(path, (1, 1))


def is_used(folder):
    return {path.name for path in files(folder) if path.stat().st_mtime > 1}


def test_a_conversation_that_is_in_memory_uses_its_blocks(model, tmp_path):
    with new(model, tmp_path) as llm:
        read(llm, text())
        llm._opened.store.flush()
        age(tmp_path)
        assert read(llm, [*text()[: 2 * BLOCK], 5])[1] == 1, "all comes from memory, and nothing is written"
        assert llm._opened.store.flush()
    assert is_used(tmp_path) == {path.name for path in files(tmp_path, "rows")}


def test_a_text_uses_only_its_own_blocks(model, tmp_path):
    fill(model, tmp_path)
    with new(model, tmp_path) as llm:
        read(llm, [*text()[:BLOCK], *text(BLOCK, seed=3)])
    before = {path.name for path in files(tmp_path)}
    age(tmp_path)
    with new(model, tmp_path) as llm:
        read(llm, text())
    used = is_used(tmp_path)
    assert len(used) == 3 and used < before, "two blocks and the tail"


def test_many_conversations_keep_what_they_share(model, tmp_path):
    fill(model, tmp_path)
    n = files(tmp_path, "rows")[0].stat().st_size
    shared = text()[: 2 * BLOCK]
    with new(model, tmp_path, kv_store_limit=7 * n) as llm:
        for seed in range(1, 9):
            read(llm, [*shared, *text(BLOCK + 9, seed=seed)])
            read(llm, text(BLOCK + 9, seed=100 + seed))
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 7 * n
    with new(model, tmp_path) as llm:
        assert read(llm, [*shared, *text(9, seed=77)])[1] == 9
        assert read(llm, [*shared, *text(BLOCK + 9, seed=1)])[1] > 9, "the first conversation has left"


def test_rm_keeps_old_blocks_of_texts_in_use(model, tmp_path, capsys):
    fill(model, tmp_path)
    for path in files(tmp_path, "rows"):
        os.utime(path, (1, 1))
    assert main(["kv", "rm", str(tmp_path), "--unused", "1"]) == 0
    assert len(files(tmp_path)) == 3
    age(tmp_path)
    assert main(["kv", "rm", str(tmp_path), "--unused", "1"]) == 0
    assert not files(tmp_path)
