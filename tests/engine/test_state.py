"""Saved states: a restored object continues with the same logits, and what does not fit is refused."""

import pickle
import random
import struct
from dataclasses import replace

import numpy as np
import pytest
from thinning import thin
from tiny_gguf import Shape, make_model

from pylongctx import Llama, LlamaState
from pylongctx.errors import InvalidInput

METHODS = [
    "full",
    "window,n_sink=4,window=24",
    "selfextend,group_size=4,neighbor_window=16",
    "longheads,chunk_size=16,window=64,representation=attention",
    "longheads,chunk_size=16,window=64,representation=minmax",
    "longheads,chunk_size=16,window=64,position=dca",  # the index of keys is made again
    "longheads,chunk_size=16,window=64,representation=keys1,position=selfextend",
    "dca,chunk_size=23,local_window=9",
    None,
]
TEXT = b"It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. "


SETTINGS = {"n_ctx": 200, "n_ubatch": 16, "n_batch": 64, "n_threads": 1, "n_threads_batch": 1, "verbose": False}


def new(path, **kwargs):
    return Llama(str(path), **SETTINGS | kwargs)


def continued(llm, tokens):
    """Return the logits after each of some tokens, one step per token."""
    rows = []
    for token in tokens:
        llm.eval([token])
        rows.append(llm.scores[-1].copy())
    return np.array(rows)


# ---- identical logits ----


# llama.cpp's own cache wants flash attention for a quantized V
KV_TYPES = [("f32", 16), ("f16", 7), ("q8_0", 13)]
OF_METHODS = [(method, *kv) for method in METHODS for kv in KV_TYPES if method or kv[0] != "q8_0"]


@thin
@pytest.mark.parametrize(("method", "kv", "n_ubatch"), OF_METHODS)
def test_a_restored_object_continues_with_the_same_logits(model_path, tokens, method, kv, n_ubatch):
    settings = {"method": method, "n_ubatch": n_ubatch, "type_k": kv, "type_v": kv}
    with new(model_path("llama-wide"), **settings) as one, new(model_path("llama-wide"), **settings) as other:
        for n in (1, 63, 65, 149):
            one.reset()
            one.eval(tokens[:n])
            state = pickle.loads(pickle.dumps(one.save_state()))
            other.load_state(state)
            assert list(other.eval_tokens) == tokens[:n]
            np.testing.assert_array_equal(other.scores[-1], one.scores[-1])
            np.testing.assert_array_equal(continued(one, tokens[n : n + 6]), continued(other, tokens[n : n + 6]))


@pytest.mark.parametrize("method", METHODS)
def test_half_way_through_a_prompt(model_path, tokens, method):
    with new(model_path("llama"), method=method) as one, new(model_path("llama"), method=method) as other:
        one.eval(tokens[:70])
        other.load_state(one.save_state())
        for llm in (one, other):
            llm.eval(tokens[70:150])
        np.testing.assert_array_equal(one.scores, other.scores)


@pytest.mark.parametrize("method", METHODS)
def test_loading_replaces_what_was_there(model_path, tokens, method):
    with new(model_path("llama"), method=method) as llm:
        llm.eval(tokens[:40])
        state, expected = llm.save_state(), continued(llm, tokens[40:44])
        llm.eval(tokens[:150])
        llm.load_state(state)
        np.testing.assert_array_equal(continued(llm, tokens[40:44]), expected)


def test_a_state_after_going_back(model_path, tokens):
    with new(model_path("llama")) as llm, new(model_path("llama")) as other:
        llm.eval(tokens[:50])
        llm.n_tokens = 33
        other.load_state(llm.save_state())
        assert list(other.eval_tokens) == tokens[:33]
        assert len(other.scores) == 0
        np.testing.assert_array_equal(continued(other, tokens[33:36]), continued(llm, tokens[33:36]))


@pytest.mark.parametrize("method", METHODS)
def test_a_state_after_an_interrupt(model_path, tokens, method, monkeypatch):
    with new(model_path("llama"), method=method) as llm, new(model_path("llama"), method=method) as other:
        llm.eval(tokens[:70])
        decode = llm.session.context.decode

        def interrupted(*args):
            decode(*args)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(llm.session.context, "decode", interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.eval(tokens[70:80])
        assert llm.n_tokens == 70
        other.load_state(llm.save_state())
        np.testing.assert_array_equal(continued(other, tokens[70:74]), continued(llm, tokens[70:74]))


@pytest.mark.parametrize("method", METHODS)
def test_an_empty_state(model_path, tokens, method):
    with new(model_path("llama"), method=method) as llm:
        state = LlamaState.from_bytes(llm.save_state().to_bytes())
        llm.eval(tokens[:9])
        llm.load_state(state)
        assert (llm.n_tokens, len(llm.scores), state.n_tokens) == (0, 0, 0)
        llm.eval(tokens[:9])


def test_scores_before_the_last_row_are_unknown(model_path, tokens):
    with new(model_path("llama"), logits_all=True) as llm:
        llm.eval(tokens[:70])
        last = llm.scores[-1].copy()
        llm.load_state(llm.save_state())
        assert llm.scores.shape == (70, llm.n_vocab())
        assert np.isnan(llm.scores[:-1]).all()
        np.testing.assert_array_equal(llm.scores[-1], last)


def test_the_size_is_that_of_what_was_used(embedded_model):
    with new(embedded_model, n_ctx=512) as llm:
        llm.eval(llm.tokenize(TEXT))
        state = llm.save_state()
        assert state.nbytes < llm.kv_usage().bytes + 4 * (llm.n_vocab() + llm.n_tokens) + 4096
        assert state.nbytes == state.llama_state_size + state.input_ids.nbytes + state.logits.nbytes


# ---- files and refusals ----


@pytest.fixture(scope="module")
def used(model_path, tokens):
    with new(model_path("llama")) as llm:
        llm.eval(tokens[:40])
        yield llm, llm.save_state()


def test_a_file_and_back(used, tmp_path):
    llm, state = used
    path = tmp_path / "one.state"
    state.save(path)
    state.save(str(path))
    assert [entry.name for entry in tmp_path.iterdir()] == ["one.state"]
    read = LlamaState.load(path)
    assert read.identity == state.identity
    for name in ("input_ids", "logits", "llama_state"):
        np.testing.assert_array_equal(getattr(read, name), getattr(state, name))
    llm.load_state(read)
    assert llm.n_tokens == 40


@pytest.mark.parametrize(
    ("model", "settings", "named"),
    [
        ("llama-mha", {}, r"belongs to another model: 'unnamed' \(llama.*; this model is 'unnamed' \(llama"),
        ("llama", {"method": "window"}, "method='full'.*method='window"),
        ("llama", {"method": None}, "method"),
        ("llama", {"type_k": "f32"}, "type_k='f16'.*type_k='f32'"),
        ("llama", {"type_v": "f32"}, "type_v"),
        ("llama", {"rope_freq_base": 5e5}, "rope_freq_base"),
        ("llama", {"n_ctx": 32}, r"Requested tokens \(40\) exceed"),
    ],
)
def test_what_does_not_fit_is_refused(model_path, tokens, used, model, settings, named):
    with new(model_path(model), **settings) as llm:
        llm.eval(tokens[:20])
        with pytest.raises(ValueError, match=named):
            llm.load_state(used[1])
        assert (llm.n_tokens, len(llm.scores)) == (0, 0)
        llm.eval(tokens[:20])


def test_weights_of_the_same_shape_are_distinguished(tmp_path, tokens, used):
    sibling = make_model(tmp_path / "sibling.gguf", Shape(), seed=99)
    with new(sibling) as llm, pytest.raises(InvalidInput, match=r"of the same name.*their weights differ"):
        llm.load_state(used[1])


@pytest.mark.parametrize("settings", [{"rope_freq_base": 5e5}, {"rope_scaling_type": 1, "rope_freq_scale": 0.25}])
def test_the_bytes_say_with_which_rope_settings_keys_were_rotated(model_path, tokens, used, settings):
    with new(model_path("llama"), **settings) as llm, pytest.raises(InvalidInput, match="other RoPE settings"):
        llm.session.context.set_state(np.frombuffer(used[1].llama_state, np.uint8))


def test_rows_that_were_stored_transformed_are_not_read_as_others(model_path, tokens, monkeypatch):
    path, types = model_path("llama-wide"), {"type_k": "q8_0", "type_v": "q8_0"}
    with new(path, **types) as llm:
        llm.eval(tokens[:40])
        state = llm.save_state()
        llm.load_state(state)
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")
    with new(path, **types) as llm:
        with pytest.raises(InvalidInput, match="transformed=True, this object has transformed=False"):
            llm.load_state(state)
        with pytest.raises(InvalidInput, match="another Hadamard transform"):
            llm.session.context.set_state(state.llama_state)


def test_other_ubatches_need_other_near_rows(model_path, tokens):
    method = "selfextend,group_size=4,neighbor_window=16"
    with new(model_path("llama"), method=method) as one, new(model_path("llama"), method=method, n_ubatch=64) as other:
        one.eval(tokens[:40])
        with pytest.raises(InvalidInput, match="n_batch or n_ubatch"):
            other.load_state(one.save_state())
        other.eval(tokens[:40])


def test_damaged_bytes_are_refused(used):
    data = used[1].to_bytes()
    rng = random.Random(0)
    damaged = [data[: rng.randrange(len(data))] for _ in range(50)] + [data + b"x", b"", data[:8]]
    for _ in range(200):
        i = rng.randrange(rng.choice([200, len(data)]))
        damaged.append(data[:i] + bytes([data[i] ^ rng.randrange(1, 256)]) + data[i + 1 :])
    for bad in damaged:
        with pytest.raises(InvalidInput, match="the saved state cannot be used"):
            LlamaState.from_bytes(bad)


def test_another_version_is_refused(used, tmp_path):
    path = tmp_path / "new.state"
    data = used[1].to_bytes()
    path.write_bytes(data[:8] + struct.pack("<I", 99) + data[12:])
    with pytest.raises(InvalidInput, match=r"new\.state.*its version is 99, but this pylongctx reads version 1"):
        LlamaState.load(path)


@pytest.mark.parametrize("method", ["full", "selfextend,group_size=4,neighbor_window=16"])
def test_rows_that_lie_are_refused_or_harmless(model_path, tokens, method):
    rng = np.random.default_rng(0)
    with new(model_path("llama"), method=method) as llm:
        llm.eval(tokens[:100])
        state = llm.save_state()
        for i in range(100):
            rows = state.llama_state.copy()
            rows[rng.integers(0, 160 if i % 2 else len(rows), 4)] = rng.integers(0, 256, 4)
            rows = rows[: rng.integers(1, len(rows))] if i % 3 == 0 else rows
            try:
                llm.load_state(replace(state, llama_state=rows))
            except ValueError:
                assert llm.n_tokens == 0
            llm.eval(tokens[100:102])
        llm.load_state(state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": np.zeros(5, np.float32)}, "holds 5 logits"),
        ({"input_ids": np.arange(39, dtype=np.int32)}, "holds 39 tokens, but the cache of 40"),
        ({"input_ids": np.full(40, 9999, np.int32)}, "token 9999 is outside the vocabulary"),
        ({"llama_state": np.zeros(64, np.uint8)}, "wrong sequence state magic"),
    ],
)
def test_contradictions_are_refused(used, change, message):
    llm, state = used
    with pytest.raises(ValueError, match=message):
        llm.load_state(replace(state, **change))
    assert llm.n_tokens == 0
    llm.load_state(state)
