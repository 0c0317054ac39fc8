"""Models of random weights with the widths of real ones: their files, and which layers a method reads."""

from dataclasses import replace

import geometries
import gguf
import numpy as np
import pytest
from random_blocks import F32
from random_model import LLAMA, Shape, write_model
from test_methods import assert_same_logits

from pylongctx import Llama

# name: KV channels of a full layer, and which layers are full
FULL_LAYERS = {
    "gemma-3-270m:6:q8_0": (256, [5]),
    "gpt-oss-quarter:4": (128, [1, 3]),
    "qwen3-4b:1": (1024, [0]),
    "qwen3-next-quarter:5": (256, [3]),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A folder for the files of this module."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_cache(cache, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


def test_random_models_are_written_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(geometries.GEOMETRIES, "tiny", (LLAMA, Shape(n_embd=256, n_ff=256)))
    path = geometries.cached_model("tiny:3")
    assert path == tmp_path / "pylongctx" / "tiny-3-q4_k_m.gguf"
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    written = path.stat().st_mtime_ns
    assert geometries.cached_model("tiny:3:q4_k_m") == path
    assert path.stat().st_mtime_ns == written
    with Llama(str(path), vocab_only=True, verbose=False) as llm:
        assert llm.metadata["llama.block_count"] == "3"


@pytest.mark.parametrize("name", FULL_LAYERS)
def test_methods_hold_the_full_layers_alone(name):
    n_tokens, (n_channels, full) = 131, FULL_LAYERS[name]
    path = geometries.cached_model(name)
    with Llama(str(path), n_ctx=256, n_threads=1, method="full", verbose=False) as llm:
        llm.eval(np.random.default_rng(0).integers(3, 512, n_tokens).tolist())
        usage = llm.kv_usage()
        assert 0.5 < llm.scores.std() < 2
    assert np.flatnonzero(usage.rows.any(axis=1)).tolist() == full
    assert usage.full_bytes == n_tokens * len(full) * n_channels * 2 * 2  # K and V, f16


def test_wide_models_have_the_layers_of_real_ones():
    path = geometries.cached_model("gemma-3-4b:1")
    reader = gguf.GGUFReader(path)
    assert reader.fields["gemma3.attention.sliding_window"].contents() == 1024
    assert reader.fields["gemma3.rope.scaling.factor"].contents() == 8
    assert next(t for t in reader.tensors if t.name == "blk.0.attn_q.weight").shape.tolist() == [2560, 2048]


@pytest.mark.parametrize("name", FULL_LAYERS)
def test_full_is_llama_cpp_with_heads_of_real_widths(tmp_path, name):
    """In f32, since quantized products round activations to 8 bits, and a router's choice may hang on a last bit."""
    geometry, layers = name.split(":")[:2]
    recipe, shape = geometries.GEOMETRIES[geometry]
    path = tmp_path / "model.gguf"
    write_model(path, recipe, replace(shape, n_embd=96, n_layer=int(layers)), qtype=F32)
    tokens = np.random.default_rng(1).integers(3, 512, 700).tolist()  # longer than the windows
    options = {"n_ctx": 768, "n_threads": 1, "type_k": "f32", "type_v": "f32", "verbose": False}
    logits = {}
    for method in (None, "full"):
        with Llama(str(path), method=method, **options) as llm:
            llm.eval(tokens[:600])
            logits[method] = np.concatenate([rows.copy() for rows in llm.eval_rows(tokens[600:])])
    assert_same_logits(logits["full"], logits[None], 1e-4)


def test_what_llama_cpp_never_quantizes_stays_f32():
    types = {}
    for name in ("gpt-oss-quarter:4", "qwen3-next-quarter:5"):
        types |= {t.name: t.tensor_type.name for t in gguf.GGUFReader(geometries.cached_model(name)).tensors}
    kept = ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "ssm_conv1d.weight")
    assert {types[name] for name in types if name.endswith(kept)} == {"F32"}
    assert {types[f"blk.3.{name}.weight"] for name in ("attn_q", "ffn_up_exps", "ffn_gate_shexp")} == {"Q4_K"}
