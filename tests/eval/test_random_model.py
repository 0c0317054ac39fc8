"""Models of random weights: what the benchmarks run when no real model is at hand."""

import importlib
import sys
from dataclasses import replace

import geometries
import gguf
import numpy as np
import pytest
import random_blocks
import random_model

from pylongctx import Llama


@pytest.mark.parametrize("qtype", random_blocks.BLOCKS, ids=lambda qtype: qtype.name)
def test_random_blocks_have_the_deviation_asked_for(qtype):
    blocks = random_blocks.BLOCKS[qtype](np.random.default_rng(0), [64, 2048], 0.02)
    values = gguf.dequantize(blocks, qtype)
    assert values.shape == (64, 2048)
    assert values.std() == pytest.approx(0.02, rel=0.02)
    assert abs(values.mean()) < (0.003 if qtype is random_blocks.Q4_0 else 0.001)  # -8 to 7


@pytest.mark.parametrize("recipe", [random_model.LLAMA, random_model.QWEN2, random_model.PHI2])
@pytest.mark.parametrize("weights", geometries.WEIGHTS)
def test_random_models_compute_logits_of_order_one(tmp_path, recipe, weights):
    shape = random_model.Shape(512, 512, 4, 4, 4 if recipe is random_model.PHI2 else 2, 1024, 1024, n_rot=0)
    if recipe is random_model.PHI2:
        shape = replace(shape, n_rot=32)
    path = random_model.write_model(tmp_path / "a.gguf", recipe, shape, qtype=geometries.WEIGHTS[weights])
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    matrix = {"q4_k_m": "Q4_K", "q5_k_s": "Q5_K", "mxfp4": "Q8_0"}.get(weights, weights.upper())
    assert (types["blk.0.attn_q.weight"], types["blk.0.attn_v.weight"]) == (matrix, matrix)
    assert types["blk.3.ffn_down.weight"] == types["output.weight"] == {"Q4_K": "Q6_K"}.get(matrix, matrix)
    with Llama(str(path), n_ctx=256, n_threads=1, verbose=False) as llm:
        llm.eval(np.random.default_rng(0).integers(3, 512, 64).tolist())
        assert 0.5 < llm.scores.std() < 2


def test_random_models_need_whole_blocks(tmp_path):
    shape = random_model.Shape(n_embd=96)
    with pytest.raises(ValueError, match=r"rows of 96 are not a multiple of a block, 256: use weights f16"):
        random_model.write_model(tmp_path / "a.gguf", random_model.LLAMA, shape, qtype=random_blocks.Q4_K)


@pytest.mark.parametrize("name", ["llama-9:2", "phi-2:0", "phi-2", "phi-2:1:q3_k"])
def test_a_wrong_name_lists_the_parts(name):
    with pytest.raises(ValueError, match=rf"{name} is not geometry:layers\[:weights\]; geometries: gemma-3-270m"):
        geometries.cached_model(name)


def test_random_models_without_gguf_say_how_to_get_it(monkeypatch):
    for module in ("geometries", "random_model", "random_blocks"):
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match="models with random weights need the gguf package: pip install gguf"):
        importlib.import_module("geometries")
