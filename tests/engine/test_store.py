"""The KV store: what was read once is not read again, and nothing that happens to its files gives a wrong answer."""

import errno
import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from stored import SETTINGS, SHAPE, N, damage, files, fill, found, new, read, text, warnings
from thinning import thin
from tiny_gguf import make_model

from pylongctx import Llama
from pylongctx.cli import main
from pylongctx.engine.reuse import Piece
from pylongctx.engine.saved_state import read_identity
from pylongctx.store.folder import UNFINISHED, Folder
from pylongctx.store.layout import BLOCK, SPACING, chain

ROWS = [
    "full",
    "selfextend,group_size=8,neighbor_window=100",
    "longheads,chunk_size=16,window=128,representation=attention",
    "longheads,chunk_size=16,window=128,position=dca",
    "dca,chunk_size=93,local_window=29",
]
METHODS = [
    *ROWS,
    "longheads,chunk_size=48,window=144,representation=attention",  # blocks end within chunks
    "window,n_sink=4,window=200",
    "corm,window=64",
    "h2o,budget=256",
    "longheads,chunk_size=16,window=128+corm,window=64",
    None,
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "model.gguf", SHAPE)


@pytest.fixture
def filled(model, tmp_path):
    """Return a store in which a text is, and the logits after it."""
    return tmp_path / "kv", fill(model, tmp_path / "kv")


# ---- what is found ----


@thin
@pytest.mark.parametrize("kv", ["f16", "q8_0"])
@pytest.mark.parametrize("method", METHODS)
def test_a_later_process_continues_with_the_same_bits(model, tmp_path, method, kv):
    settings = {"method": method, "type_k": kv, "type_v": kv if method else "f16"}
    with new(model, tmp_path, **settings) as llm:
        logits, n = read(llm, text())
        assert n == N
    with new(model, tmp_path, **settings) as llm:
        again, n = read(llm, text())
        n_tail = 77 if "attention" in str(method) and method in ROWS else 0  # the queries of the open chunk are missing
        assert (n, found(llm).hits, found(llm).tokens) == (n_tail, 1, N - n_tail)
        np.testing.assert_array_equal(again, logits)
    with new(model, tmp_path, **settings) as llm:
        assert read(llm, [*text(), 5])[1] == 1 + n_tail
    for path in files(tmp_path, "tail"):
        path.unlink()
    with new(model, tmp_path, **settings) as llm:
        again, n = read(llm, text())
        assert (n, found(llm).tokens) == (N - 2 * BLOCK, 2 * BLOCK)
        np.testing.assert_array_equal(again, logits)
    with new(model, tmp_path, **settings) as llm:
        other, n = read(llm, [*text()[: BLOCK + 5], *text(N, seed=1)])
        assert n == N + 5 + (0 if method in ROWS else BLOCK)
    with Llama(str(model), **SETTINGS | settings) as llm:
        want, _ = read(llm, [*text()[: BLOCK + 5], *text(N, seed=1)])
        np.testing.assert_array_equal(other, want)


@pytest.mark.parametrize("arch", ["gemma3", "qwen3next", "jamba", "gpt-oss"])
@pytest.mark.parametrize("method", ["full", None])
def test_windows_and_recurrent_states_are_kept_at_points(tmp_path, arch, method):
    path = make_model(tmp_path / "model.gguf", arch=arch)
    tokens = text(SPACING + BLOCK + 9)
    with new(path, tmp_path / "kv", n_ctx=4096, method=method) as llm:
        logits, _ = read(llm, tokens)
    with new(path, tmp_path / "kv", n_ctx=4096, method=method) as llm:
        again, n = read(llm, tokens)
        assert n == 9
        np.testing.assert_array_equal(again, logits)
    with new(path, tmp_path / "kv", n_ctx=4096, method=method) as llm:
        read(llm, [*tokens[: SPACING + 3], *text(20, seed=3)])
        assert found(llm).tokens == SPACING


def test_what_is_in_the_cache_already_is_not_loaded(filled, model):
    with new(model, filled[0]) as llm:
        read(llm, text()[: BLOCK + 1])
        assert found(llm).tokens == BLOCK
        read(llm, text())
        read(llm, text())
        assert (found(llm).hits, found(llm).tokens) == (2, N - 1)


def test_generated_tokens_are_kept_too(model, tmp_path):
    with new(model, tmp_path) as llm:
        said = llm.create_completion(text(BLOCK - 5), max_tokens=8, temperature=0.0, logprobs=None)
        assert said["usage"]["completion_tokens"] == 8
    assert len(files(tmp_path)) == 1


class Lost:
    """A source that offers the beginning of a prompt, and then has nothing."""

    name, slow, whole = "nothing", False, False

    def covers(self, tokens, held):
        n = min(len(tokens), N - 1)
        return Piece(self, 0, n) if n > held else None

    def fetch(self, piece):
        return iter(())

    def planned(self, tokens, pieces):
        pass


def test_a_stored_end_completes_what_was_evaluated(filled, model):
    folder, logits = filled
    with new(model, folder) as llm:
        llm._solo.engine._loader._states = [Lost()]
        llm.prefill(text())
        assert (llm.session.n_evaluated, found(llm).hits) == (2 * BLOCK, 1)
        np.testing.assert_array_equal(llm.session.last_logits, logits)


def test_usage_counts_what_was_found(filled, model):
    with new(model, filled[0]) as llm:
        done = llm.create_completion(text(), max_tokens=1)
    assert done["usage"]["prompt_tokens"] == N


def test_other_batches_read_what_was_stored(filled, model):
    folder, logits = filled
    with new(model, folder, n_batch=96, n_ubatch=32, n_ctx=1536) as llm:
        again, n = read(llm, text())
    assert n == 0
    np.testing.assert_allclose(again, logits, atol=1e-3 * np.abs(logits).max())


def test_earlier_logits_are_not_known(filled, model):
    with new(model, filled[0], logits_all=True) as llm:
        read(llm, text())
        scores = llm.scores
    assert np.isnan(scores[:-1]).all() and np.isfinite(scores[-1]).all()


@pytest.mark.parametrize("other", [{"method": "dca"}, {"type_k": "q8_0"}, {"rope_freq_base": 5e4}])
def test_what_was_read_otherwise_is_not_found(filled, model, other):
    with new(model, filled[0], **other) as llm:
        assert read(llm, text())[1] == N
        assert found(llm).misses == 1


def test_another_model_of_the_same_shape(filled, tmp_path):
    path = make_model(tmp_path / "other.gguf", seed=77)
    with new(path, filled[0]) as llm:
        assert read(llm, text())[1] == N


def test_a_context_that_is_too_small(filled, model):
    with new(model, filled[0], n_ctx=BLOCK + 64) as llm:
        assert read(llm, text()[: BLOCK + 9])[1] == 9
        with pytest.raises(ValueError, match="exceed context window"):
            read(llm, text())


def test_names_follow_the_tokens_before():
    one, other = np.array(text()), np.array([5, *text()[1:]])
    names = chain({"a": 1}, one, BLOCK)
    assert names == chain({"a": 1}, one[: 2 * BLOCK], BLOCK)
    assert len({*names, *chain({"a": 1}, other, BLOCK), *chain({"a": 2}, one, BLOCK)}) == 6


# ---- what happens to files ----


@pytest.mark.parametrize("how", ["flip", "torn", "zeros"])
@pytest.mark.parametrize("method", ["full", "corm"])
def test_a_damaged_block_costs_reading_it_again(model, tmp_path, method, how, caplog):
    with new(model, tmp_path, method=method) as llm:
        logits, _ = read(llm, text())
    rng = random.Random(how)
    for _ in range(12):
        path = rng.choice(files(tmp_path))
        damage(path, how, rng)
        caplog.clear()
        with new(model, tmp_path, method=method) as llm, caplog.at_level(logging.WARNING, "pylongctx"):
            again, n = read(llm, text())
            assert path.suffix != ".rows" or (n > 0 and found(llm).lost == 1)
            np.testing.assert_array_equal(again, logits)
            assert len([record for record in caplog.records if "removed" in record.message]) == found(llm).lost
        assert files(tmp_path), "it was read again and stored"


def test_a_block_under_a_wrong_name(filled, model):
    folder, logits = filled
    first, second = files(folder, "rows")
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)
    with new(model, folder) as llm:
        again, n = read(llm, text())
    assert n == N
    np.testing.assert_array_equal(again, logits)


def test_a_full_disk_is_reported_once(model, tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with new(model, tmp_path) as llm, caplog.at_level(logging.WARNING, "pylongctx"):
        read(llm, text())
        llm._opened.store.flush()
        assert found(llm).lost == 3
    assert len(warnings(caplog)) == 1 and "No space left" in caplog.text
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_the_least_used_leave(model, tmp_path):
    with new(model, tmp_path, kv_store_limit=1 << 30) as llm:
        read(llm, text())
    n_bytes = files(tmp_path, "rows")[0].stat().st_size
    with new(model, tmp_path, kv_store_limit=6 * n_bytes) as llm:
        read(llm, text(seed=1))
        llm._opened.store.flush()
        read(llm, text())  # used again
        read(llm, text(seed=2))
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 6 * n_bytes
    with new(model, tmp_path) as llm:
        assert read(llm, text())[1] == 0
        assert read(llm, text(seed=1))[1] > 0


SUPPORT = Path(__file__).resolve().parents[1] / "support"
WRITER = """
import sys
sys.path[:0] = [sys.argv[3], sys.argv[3] + "/../../bench"]
from stored import new, read, text
with new(sys.argv[1], sys.argv[2]) as llm:
    for seed in range(int(sys.argv[4]), 1000):
        read(llm, text(seed=seed))
        print(seed, flush=True)
"""


def writer(model, folder, first=0):
    command = [sys.executable, "-c", WRITER, model, folder, SUPPORT, first]
    return subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE)


def test_killed_writers_leave_nothing_wrong(model, tmp_path):
    rng = random.Random(5)
    for i in range(4):
        process = writer(model, tmp_path, first=10 * i)
        process.stdout.readline()
        time.sleep(rng.random() / 20)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    with Llama(str(model), **SETTINGS) as llm:
        want = [read(llm, text(seed=seed))[0] for seed in (0, 10, 11, 20)]
    with new(model, tmp_path) as llm:
        for seed, logits in zip((0, 10, 11, 20), want, strict=True):
            np.testing.assert_array_equal(read(llm, text(seed=seed))[0], logits)
        assert found(llm).lost == 0 and found(llm).hits >= 3
    Folder(tmp_path, 1 << 40).trim()
    assert not list(tmp_path.rglob(f"{UNFINISHED}*"))


def test_a_file_that_is_being_written_stays(tmp_path):
    import fcntl

    folder = Folder(tmp_path, 1 << 30)
    (tmp_path / "ab").mkdir()
    left, busy = tmp_path / "ab" / f"{UNFINISHED}1", tmp_path / "ab" / f"{UNFINISHED}2"
    left.touch()
    with busy.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        folder.trim()
        assert busy.exists() and not left.exists()


def test_two_writers_share_a_store(model, tmp_path):
    processes = [writer(model, tmp_path), writer(model, tmp_path)]
    for process in processes:
        for _ in range(3):
            process.stdout.readline()
        process.kill()
        process.wait()
        process.stdout.close()
    with new(model, tmp_path) as llm:
        again, n = read(llm, text(seed=1))
        assert n == 0 and found(llm).lost == 0
    with Llama(str(model), **SETTINGS) as llm:
        np.testing.assert_array_equal(read(llm, text(seed=1))[0], again)


# ---- arguments and the command ----


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"kv_store_limit": 5}, "needs kv_store"),
        ({"kv_store_words": False}, "needs kv_store"),
        ({"kv_store": "x", "kv_store_limit": 0}, "number of bytes"),
        ({"kv_store": "x", "kv_store_limit": True}, "number of bytes"),
        ({"kv_store": "x", "embedding": True}, "cannot be combined with embedding"),
        ({"kv_store": "x", "vocab_only": True}, "cannot be combined with embedding"),
    ],
)
def test_refusals(model, tmp_path, monkeypatch, arguments, reason):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=reason):
        Llama(str(model), verbose=False, **arguments)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made(model, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        new(model, tmp_path / "file" / "kv")


def test_ls_and_stats(filled, model, capsys):
    with new(model, filled[0]) as llm:
        read(llm, [*text()[:BLOCK], *text(BLOCK + 3, seed=4)])
    assert main(["kv", "ls", str(filled[0])]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if "1,024" in line or "1,101" in line]) == 2
    assert main(["kv", "stats", str(filled[0])]) == 0
    assert f"{3 * BLOCK + 77:,}" in capsys.readouterr().out


def test_rm(filled, model, capsys):
    folder = filled[0]
    with new(model, folder) as llm:
        read(llm, [*text()[:BLOCK], *text(BLOCK + 3, seed=4)])
    assert main(["kv", "rm", str(folder), files(folder, "tail")[0].name[:8]]) == 0
    assert len(files(folder)) == 2, "the block that another text begins with stays"
    assert main(["kv", "rm", str(folder)]) == 1
    assert main(["kv", "rm", str(folder), "--unused", "1"]) == 0 and len(files(folder)) == 2
    assert main(["kv", "rm", str(folder), "--all"]) == 0 and not files(folder)
    assert main(["kv", "ls", str(folder / "none")]) == 1


def test_verify(filled, capsys):
    assert main(["kv", "verify", str(filled[0])]) == 0
    damage(files(filled[0])[0], "flip", random.Random(1))
    assert main(["kv", "verify", str(filled[0])]) == 1
    assert "3 files, 1 damaged" in capsys.readouterr().out
    assert main(["kv", "verify", str(filled[0])]) == 0


# ---- the server ----


def test_a_server_finds_what_an_earlier_one_has_read(tmp_path):
    pytest.importorskip("fastapi")
    from serving import running

    words, keys = "It was the best of times, it was the worst of times. " * 40, {"api_keys": ("one", "two")}
    for first in (True, False):
        with running(kv_store=str(tmp_path), n_ctx=2048, n_ubatch=512, settings=keys) as server:
            for key in ("one", "two"):
                headers = {"Authorization": f"Bearer {key}"}
                body = {"prompt": words, "max_tokens": 1}
                done = server.http.post("/v1/completions", json=body, headers=headers).json()
                n = done["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert (n == 0) if first else (n >= BLOCK), "users share nothing"
            metrics = server.http.get("/metrics", headers=headers).text
            facts = server.http.get("/v1/longctx", headers=headers).json()
            slots = server.http.get("/slots", headers=headers).json()
            assert "best of times" not in metrics + str(facts), "first words are for who has the folder"
        hits = 0 if first else 2
        assert f"pylongctx_kv_store_hits_total {hits}\n" in metrics
        assert facts["store"]["hits"] == hits and facts["store"]["limit"] == 20 << 30
        assert sum(slot.get("n_prompt_tokens_stored", 0) for slot in slots) == facts["store"]["tokens"]
    about = [read_identity(path) for path in files(tmp_path)]
    assert len({one["owner"] for one in about}) == 2 and all("best of times" in one["words"] for one in about)
