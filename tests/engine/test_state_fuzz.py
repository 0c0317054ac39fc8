"""Damaged and crafted states: refused or harmless, never a signal, and the context continues as if none was loaded."""

import json
import logging
import os
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import thinning
from drivers import ATTENTION, CASES, EVICTING, drive, model_of
from llamas import TEXT, new
from session import Session

from pylongctx import LlamaDiskCache, LlamaState
from pylongctx.engine.saved_state import HEAD, MAGIC, TAIL, VERSION
from pylongctx.errors import InvalidInput

SIZES = {"n_ctx": 256, "n_batch": 64, "n_ubatch": 64, "n_seq_max": 3, "n_threads": 1, "n_threads_batch": 1}
N = 2000 if thinning.run_all else 30  # mutations of a case


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("states")


@pytest.mark.parametrize(("model", "method"), CASES["states"])
def test_no_state_ends_the_process(folder, model, method):
    ends = drive("states", folder, model, method, N)
    assert set(ends) == {0, 3}
    assert ends.total() == N


# ---- counters that the memory cannot have ----

COUNTERS = ("seq", "n_pos", "first_live", "first_near", "open0", "open1", "evicted_to", "voted_to", "undo_from")


def crafted(state: LlamaState, **counters: int) -> LlamaState:
    """Return the state with other counters; they come after the method's spec in the header."""
    data = bytearray(state.llama_state.tobytes())
    spec = state.identity["method"].encode()
    at = data.index(struct.pack("<I", len(spec)) + spec) + 4 + len(spec)
    for name, value in counters.items():
        struct.pack_into("<i", data, at + 4 * COUNTERS.index(name), value)
    return replace(state, llama_state=np.frombuffer(data, np.uint8))


WINDOW = "window,n_sink=4,window=40"


@pytest.mark.parametrize(("method", "counters"), [
    (WINDOW, {"first_live": 192}),  # rows that the next query reads
    (WINDOW, {"first_live": -64}),
    (WINDOW, {"first_live": 65}),
    ("full", {"first_live": 64}),
    ("full", {"first_near": 1}),
    ("full", {"evicted_to": 16}),
    ("full", {"voted_to": 1}),
    ("full", {"open0": 0}),
    ("selfextend,group_size=8,neighbor_window=21", {"first_near": 199}),
    (EVICTING, {"evicted_to": 176}),
    (EVICTING, {"evicted_to": 193}),
    (EVICTING, {"voted_to": 201}),
    (EVICTING, {"voted_to": 16}),
    (EVICTING, {"undo_from": 200}),
    (EVICTING, {"undo_from": 16}),
    ("kvzip", {"evicted_to": 201}),
    ("kvzip", {"evicted_to": 64}),
    ("kvzip", {"voted_to": 200}),
    ("kvzip", {"undo_from": 0}),
    (ATTENTION, {"open0": -1, "open1": -1}),
    (ATTENTION, {"open0": 12, "open1": 12}),
    (ATTENTION, {"open0": 2**27}),
])  # fmt: skip
def test_counters_that_no_memory_has_are_refused(model_path, tokens, method, counters):
    with new(model_path("llama"), method=method, n_ctx=256, n_ubatch=16, n_batch=48) as llm:
        llm.eval(tokens[:200])
        state = llm.save_state()
        llm.load_state(crafted(state))  # no counter is another one
        with pytest.raises(InvalidInput, match="counters"):
            llm.load_state(crafted(state, **counters))
        assert llm.n_tokens == 0
        llm.load_state(state)
        assert llm.n_tokens == 200
        llm.eval(tokens[200:230])


def test_numbers_that_are_not_finite_are_refused(model_path, tokens):
    with new(model_path("llama"), method="full") as llm:
        llm.eval(tokens[:70])
        state = llm.save_state()
        data = state.llama_state.copy()
        data[-400:-396] = (0, 0, 0xC0, 0x7F)
        with pytest.raises(InvalidInput, match="not finite"):
            llm.load_state(replace(state, llama_state=data))
        llm.load_state(state)


# ---- files ----


def pack(header: object) -> bytes:
    """Return a state file with any header and nothing after it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    body = HEAD.pack(MAGIC, VERSION, len(text)) + text
    return body + TAIL.pack(zlib.crc32(body))


DEEP = b'{"identity": ' + b"[" * 100_000 + b"]" * 100_000 + b', "sizes": [0, 0, 0]}'
HEADERS = [
    DEEP,
    b"",
    b"\xff\xfe{}",
    b'{"identity": {}}',
    b"[" * 50,
    {"identity": {}, "sizes": [10**30, 0, 0]},
    {"identity": {}, "sizes": [2**62, 0, 0]},
    {"identity": {}, "sizes": [-4, 4, 0]},
    {"identity": {}, "sizes": [4, 0, 0]},
    {"identity": {}, "sizes": 3},
    {"identity": [], "sizes": [0, 0, 0]},
]


@pytest.mark.parametrize("header", HEADERS, ids=range(len(HEADERS)))
def test_a_crafted_header_is_refused_and_hides_no_other_file(embedded_model, tmp_path, caplog, header):
    path = tmp_path / "crafted.lctxstate"
    path.write_bytes(pack(header))
    with pytest.raises(InvalidInput, match=r"crafted\.lctxstate: the saved state cannot be used"):
        LlamaState.load(path)
    with new(embedded_model) as llm:
        tokens = llm.tokenize(TEXT)
        llm.eval(tokens)
        cache = LlamaDiskCache(str(tmp_path))
        cache[tokens] = llm.save_state()
    with caplog.at_level(logging.WARNING, logger="pylongctx"):
        for _ in range(2):
            assert tokens in cache
            assert cache[tokens].input_ids.tolist() == tokens
    assert [record.message.split(":")[0] for record in caplog.records] == [f"skipped {path}"]


@pytest.mark.parametrize("length", [0, 7, 15, 16, 100])
def test_what_is_not_a_file_hides_no_other(embedded_model, tmp_path, length):
    (tmp_path / "short.lctxstate").write_bytes(pack({"identity": {}, "sizes": [0, 0, 0]})[:length])
    (tmp_path / "folder.lctxstate").mkdir()
    (tmp_path / "nowhere.lctxstate").symlink_to(tmp_path / "missing")
    os.mkfifo(tmp_path / "pipe.lctxstate")
    with new(embedded_model) as llm:
        llm.eval([1, 2, 3])
        cache = LlamaDiskCache(str(tmp_path))
        cache[[1, 2, 3]] = llm.save_state()
        assert cache[[1, 2, 3, 4]].n_tokens == 3
        assert cache.cache_size > 0


def test_the_folder_is_its_owners(tmp_path):
    folder = tmp_path / "states"
    LlamaDiskCache(str(folder))
    assert folder.stat().st_mode & 0o777 == 0o700


# ---- empty states ----


@pytest.mark.parametrize(("model", "method"), [
    ("llama", ""),
    ("llama", "full"),
    ("gemma3", ""),
    ("gemma3", "full"),
    ("qwen3next", ""),
    ("qwen3next", EVICTING),
    ("mamba", ""),
    ("deepseek32", ""),
    ("deepseek4", ""),
    ("dots3note", ""),
    ("qwen4exp", ""),
])  # fmt: skip
def test_an_empty_state_empties_the_sequence(ffi, lib, folder, tokens, model, method):
    """llama.cpp leaves the cells that were there, and the next text would read them."""
    with Session(ffi, lib, model_of(folder, model), method, **SIZES) as session:
        empty, everything = session.save(0), session.save(-1)
        want = session.decode(tokens[:30])
        session.clear()
        for state, seq in ((empty, 0), (everything, -1)):
            session.decode(tokens[60:100])
            assert session.restore(state, seq), session.error
            assert session.length(0) == 0
            assert session.save(seq) == state
            np.testing.assert_array_equal(session.decode(tokens[:30]), want)
            session.clear()
