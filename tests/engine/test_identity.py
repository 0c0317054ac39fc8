"""Rows are those of one model with one set of settings: no other one is served them, from a store or a saved state."""

import logging
import os
import shutil
import threading
from contextlib import suppress
from dataclasses import replace

import gguf
import numpy as np
import pytest
from test_lora import factors, write_adapter
from tiny_gguf import Shape, flip, make_model, set_number, split_model, tensor_ranges

from pylongctx import Llama, LlamaDiskCache, LlamaState
from pylongctx.cli import main
from pylongctx.engine import identity
from pylongctx.errors import ContextFull, InvalidInput
from pylongctx.model_files import digests
from pylongctx.store.layout import BLOCK

N = BLOCK + 77
TOKENS = np.random.default_rng(0).integers(3, 96, N).tolist()
SETTINGS = {"n_ctx": 1024, "n_threads": 1, "n_threads_batch": 1, "verbose": False, "preflight": False}
SHAPE = Shape(n_embd=128, n_head=2, n_head_kv=1)
MODELS = {"llama": 0, "gemma3": 0, "qwen3moe": 5}  # how many tensors a file has; 0: all are in one
EPS = "attention.layer_norm_rms_epsilon"


def new(path, folder=None, **kwargs):
    return Llama(str(path), kv_store=folder, **SETTINGS | kwargs)


def pending(llm):
    """Return how many tokens of the text no source gives; evaluates none of them."""

    def refuse(*args):
        raise ContextFull("not evaluated", 1)

    with pytest.MonkeyPatch.context() as patch, suppress(ContextFull):
        patch.setattr(llm.session.context, "decode", refuse)
        llm.prefill(TOKENS)
    return len(TOKENS) - llm.session.n_tokens


def fill(path, folder, **settings):
    """Read the text, and return the state after it."""
    with new(path, folder, **settings) as llm:
        next(llm.generate(TOKENS, temp=0.0))
        return llm.save_state()


def served(path, folder, state, **settings):
    """Return whether the store serves the text, and the state is accepted; both or neither."""
    with new(path, folder, **settings) as llm:
        n = pending(llm)
        assert n in (0, N)
        try:
            llm.load_state(state)
            accepted = True
        except InvalidInput:
            accepted = False
    assert accepted == (n == 0)
    return accepted


@pytest.fixture(scope="module", params=MODELS)
def filled(request, tmp_path_factory):
    """Return all files of a model, a store with a text, and a state."""
    folder = tmp_path_factory.mktemp(request.param)
    path = make_model(folder / "model.gguf", SHAPE, arch=request.param)
    n = MODELS[request.param]
    paths = split_model(folder / "split.gguf", path, n) if n else [path]
    return paths, folder / "kv", fill(paths[0], folder / "kv")


@pytest.fixture
def copy(filled, tmp_path):
    """Return the files of the model at another place."""
    return [shutil.copyfile(path, tmp_path / path.name) for path in filled[0]]


# ---- files ----


def test_every_tensor_edited_as_a_whole(filled, copy):
    _, *stored = filled
    for path, name, start, end in tensor_ranges(copy):
        flip(path, start, end)
        assert not served(copy[0], *stored), name
        flip(path, start, end)
    assert served(copy[0], *stored)


@pytest.mark.parametrize("where", [0.0, 0.31, 0.5, 0.77, 1.0])
def test_single_bytes(filled, copy, where):
    """Of the largest tensor, at its ends and between the pages that are looked at."""
    _, *stored = filled
    path, _, start, end = max(tensor_ranges(copy), key=lambda found: found[3] - found[2])
    at = start + int(where * (end - start - 1))
    flip(path, at, at + 1)
    assert not served(copy[0], *stored)
    flip(path, at, at + 1)
    assert served(copy[0], *stored)


def test_a_number_of_the_header(filled, copy):
    _, *stored = filled
    arch = gguf.GGUFReader(str(copy[0])).fields["general.architecture"].contents()
    set_number(copy[0], f"{arch}.{EPS}", lambda eps: eps * 2)
    with new(copy[0], stored[0]) as llm:
        assert pending(llm) == N
        with pytest.raises(InvalidInput, match=r"of the same name.*the metadata, vocabulary or shapes"):
            llm.load_state(stored[1])


def test_a_later_file_of_another_model(tmp_path):
    """All files but the last are the same."""
    folders = [tmp_path / name for name in ("one", "other")]
    models = []
    for seed, folder in enumerate(folders):
        folder.mkdir()
        models.append(split_model(folder / "m.gguf", make_model(folder / "whole.gguf", SHAPE, seed=seed), 7))
    one, other = models
    state = fill(one[0], tmp_path / "kv")
    shutil.copyfile(other[-1], one[-1])
    assert not served(one[0], tmp_path / "kv", state)


def test_the_embedded_model_with_one_tensor_edited(embedded_model, tmp_path):
    """The reproducer of the fault: a tensor of which the old sample of 16 pages had none."""
    path = tmp_path / "edited.gguf"
    shutil.copyfile(embedded_model, path)
    state = fill(embedded_model, tmp_path / "kv")
    _, _, start, end = next(found for found in tensor_ranges([path]) if found[1] == "blk.0.attn_k.weight")
    flip(path, start, end)
    with new(path, tmp_path / "kv") as llm:
        assert pending(llm) == N
        with pytest.raises(InvalidInput, match=r"'pylongctx-tiny' .*: their weights differ, such as after a merge"):
            llm.load_state(state)


def test_a_disk_cache_of_an_edited_model(filled, copy, tmp_path):
    paths, _, state = filled
    cache = LlamaDiskCache(str(tmp_path / "cache"))
    cache[TOKENS] = state
    _, _, start, end = list(tensor_ranges(copy))[-1]
    flip(copy[-1], start, end)
    for path, n in ((paths[0], N), (copy[0], 0)):
        with new(path) as llm:
            llm.set_cache(cache)
            assert pending(llm) == N - n


def test_documents_of_an_edited_model(embedded_model, tmp_path):
    path, text = tmp_path / "model.gguf", "It was the best of times, it was the worst of times, said the thief. " * 12
    shutil.copyfile(embedded_model, path)
    _, _, start, end = list(tensor_ranges([path]))[-1]
    for edited, hits in ((False, 0), (False, 1), (True, 0)):
        if edited:
            flip(path, start, end)
        with new(path, tmp_path / "kv", method="full,spans=4+kvzip", n_ctx=2048) as llm:
            llm.read(text, ratio=0.5)
            assert llm.kv_store_usage().hits == hits


def test_files_that_are_replaced_while_they_are_open(tmp_path, monkeypatch, caplog):
    """Before they were read whole: then it is not known which model evaluates."""
    path = make_model(tmp_path / "model.gguf", SHAPE)
    monkeypatch.setattr("pylongctx.model_files.digests.ModelFiles.prepare", lambda files: None)
    with new(path, tmp_path / "kv") as llm, caplog.at_level(logging.WARNING, "pylongctx"):
        make_model(tmp_path / "other.gguf", SHAPE, seed=1)
        os.replace(tmp_path / "other.gguf", path)
        next(llm.generate(TOKENS, temp=0.0))
        with pytest.raises(InvalidInput, match=r"model\.gguf changed after it was opened.*open it again"):
            llm.save_state()
    assert "changed after it was opened" in caplog.text
    assert not list((tmp_path / "kv").rglob("*.rows"))


@pytest.fixture
def slow(monkeypatch):
    """Return an event that lets files be read whole."""
    go, digest_of = threading.Event(), digests.digest_of
    monkeypatch.setattr(digests, "digest_of", lambda paths: (go.wait(60), digest_of(paths))[1])
    yield go
    go.set()


def test_a_new_text_does_not_wait_until_the_files_are_read(tmp_path, slow):
    path, folder = make_model(tmp_path / "model.gguf", SHAPE), tmp_path / "kv"
    with new(path, folder) as llm:
        next(llm.generate(TOKENS, temp=0.0))
        assert pending(llm) == 0 and not list(folder.rglob("*.rows"))
        slow.set()
    assert len(list(folder.rglob("*.rows"))) == 1 and len(list(folder.rglob("*.tail"))) == 1


def test_a_text_that_is_there_waits_until_the_files_are_read(tmp_path, slow):
    path, folder = make_model(tmp_path / "model.gguf", SHAPE), tmp_path / "kv"
    threading.Timer(0.3, slow.set).start()
    fill(path, folder)
    slow.clear()
    with new(path, folder) as llm:
        threading.Timer(0.3, slow.set).start()
        assert pending(llm) == 0 and slow.is_set() and llm.kv_store_usage().tokens == N


# ---- settings ----


@pytest.mark.parametrize(
    "setting",
    [
        {"method": "selfextend"},
        {"method": "selfextend,group_size=64"},
        {"method": None},
        {"type_k": "q8_0"},
        {"type_v": "q8_0"},
        {"rope_freq_base": 5e4},
        {"rope_freq_scale": 0.5},
        {"rope_scaling_type": 2},
        {"yarn_ext_factor": 0.5},
        {"yarn_attn_factor": 1.5},
        {"yarn_beta_fast": 16.0},
        {"yarn_beta_slow": 2.0},
        {"yarn_orig_ctx": 64},
        {"attention_type": 0},
        {"swa_full": True},
        {"kv_overrides": {"llama.rope.freq_base": 5e4}},
        {"kv_overrides": {"llama.attention.layer_norm_rms_epsilon": 1e-3}},
    ],
    ids=str,
)
def test_settings(tmp_path_factory, setting, tmp_path):
    path = make_model(tmp_path / "model.gguf", SHAPE)
    for first, second in (({}, setting), (setting, {})):
        folder = tmp_path_factory.mktemp("kv")
        state = fill(path, folder, **first)
        assert not served(path, folder, state, **second)
        assert served(path, folder, state, **first)


def test_overridden_metadata_in_a_saved_file(tmp_path):
    """Values have other types in a file than in memory; their order makes no difference."""
    path, one = make_model(tmp_path / "model.gguf", SHAPE), {"llama.rope.freq_base": 5e4, "general.name": "x"}
    state = LlamaState.from_bytes(fill(path, tmp_path / "kv", kv_overrides=one).to_bytes())
    assert served(path, tmp_path / "kv", state, kv_overrides=dict(reversed(one.items())))
    assert not served(path, tmp_path / "kv", state, kv_overrides=one | {"llama.rope.freq_base": 5e5})


@pytest.mark.parametrize("method", ["full", None])
def test_factors_of_long_texts(tmp_path, method):
    """Which of two sets of RoPE factors a model uses depends on n_ctx alone."""
    path = make_model(tmp_path / "model.gguf", arch="phi3")
    set_number(path, "phi3.rope.scaling.original_context_length", lambda _: 1000)
    _, _, start, end = next(found for found in tensor_ranges([path]) if found[1].startswith("rope_factors_long"))
    data = bytearray(path.read_bytes())
    data[start:end] = (4 * np.frombuffer(data[start:end], np.float32)).tobytes()
    path.write_bytes(data)
    rows = {}
    for n_ctx in (600, 1000):  # 768 and 1024
        with new(path, method=method, n_ctx=n_ctx) as llm:
            llm.eval(TOKENS)
            rows[n_ctx] = llm.scores[-1].copy()
    assert np.abs(rows[600] - rows[1000]).max() > 0.01 * np.abs(rows[600]).max()
    state = fill(path, tmp_path / "kv", method=method, n_ctx=600)
    assert not served(path, tmp_path / "kv", state, method=method, n_ctx=1000)
    assert served(path, tmp_path / "kv", state, method=method, n_ctx=700)


@pytest.mark.parametrize("method", ["full", None])
def test_the_hadamard_transform(tmp_path, monkeypatch, method):
    path = make_model(tmp_path / "model.gguf", SHAPE)
    quantized = {"method": method, "type_k": "q8_0"}
    for settings, same in ((quantized, False), ({"method": method}, True)):
        monkeypatch.delenv("LLAMA_ATTN_ROT_DISABLE", raising=False)
        folder = tmp_path / str(same)
        state = fill(path, folder, **settings)
        for value, is_set in (("1", True), ("0", False), ("no", False), (" 2x", True)):
            monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", value)
            assert served(path, folder, state, **settings) == (same or not is_set)


def test_adapters_and_scales(tmp_path):
    path = make_model(tmp_path / "model.gguf", SHAPE)
    pairs = factors(gguf.GGUFReader(str(path)), 0)
    one, copied, other = (tmp_path / f"{name}.gguf" for name in ("one", "copied", "other"))
    write_adapter(one, pairs)
    write_adapter(
        other, {name: (a, np.where(np.arange(b.size).reshape(b.shape) == 5, 1, b)) for name, (a, b) in pairs.items()}
    )
    shutil.copyfile(one, copied)
    state = fill(path, tmp_path / "kv", lora_path=str(one), lora_scale=0.5)
    for adapter, scale, same in ((one, 0.5, True), (copied, 0.5, True), (one, 0.25, False), (other, 0.5, False)):
        assert served(path, tmp_path / "kv", state, lora_path=str(adapter), lora_scale=scale) == same
    assert not served(path, tmp_path / "kv", state)


# ---- formats ----


def test_blocks_of_another_format_are_ignored(tmp_path, monkeypatch, caplog, capsys):
    path, folder = make_model(tmp_path / "model.gguf", SHAPE), tmp_path / "kv"
    with monkeypatch.context() as patch:
        patch.setattr(identity, "FORMAT", identity.FORMAT - 1)
        old = fill(path, folder)
    files = sorted(folder.rglob("*.*"))
    caplog.clear()
    with caplog.at_level(logging.WARNING, "pylongctx"), new(path, folder) as llm:
        assert pending(llm) == N and llm.kv_store_usage().lost == 0
        with pytest.raises(InvalidInput, match="another release of pylongctx saved it, in format 1; this one reads 2"):
            llm.load_state(old)
        before = {"model": "llama", "sample": "0a1b2c3d", "method": "full"}
        with pytest.raises(InvalidInput, match="in format 1; this one reads 2"):
            llm.load_state(replace(old, identity=before))
    assert not caplog.records and sorted(folder.rglob("*.*")) == files
    for action in ("ls", "stats", "verify"):
        assert main(["kv", action, str(folder)]) == 0
    assert "2 files, 0 damaged" in capsys.readouterr().out


@pytest.mark.parametrize("value", [None, 5, [], {}, "x" * 9])
def test_states_with_another_identity_are_refused(filled, value):
    paths, _, state = filled
    with new(paths[0]) as llm:
        for name in state.identity:
            if state.identity[name] != value:
                lie = LlamaState.from_bytes(replace(state, identity={**state.identity, name: value}).to_bytes())
                with pytest.raises(InvalidInput, match="does not fit"):
                    llm.load_state(lie)
        llm.load_state(state)
