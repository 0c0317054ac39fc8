"""Attention sinks: one more key whose value is zero, for the output and for the votes."""

import shutil

import gguf
import numpy as np
import pytest
from test_methods import evaluate, open_llama
from tiny_gguf import Shape, make_model

pytestmark = pytest.mark.check

N, RECENT, EVERY = 96, 8, 16
CORM = f"corm,window=16,recent={RECENT},evict_every={EVERY}"


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    """Return a function from the value of all sinks to a gpt-oss of random weights with it."""
    folder = tmp_path_factory.mktemp("sinks")
    source = make_model(folder / "gpt-oss.gguf", Shape(n_embd=128), arch="gpt-oss", seed=1)

    def make(value: float):
        path = folder / f"{value}.gguf"
        shutil.copy(source, path)
        sinks = [tensor for tensor in gguf.GGUFReader(path, "r+").tensors if "sinks" in tensor.name]
        assert sinks
        for tensor in sinks:
            tensor.data[:] = value
        return path

    return make


def kept(path, tokens) -> np.ndarray:
    """Return the rows that each head of each layer holds after a prompt, int32 [n_layer, n_head_kv]."""
    with open_llama(path, CORM, n_ctx=128, type_k="f32", type_v="f32") as llm:
        llm.eval(tokens)
        return llm.kv_usage().rows


def test_a_sink_that_takes_all_leaves_the_residual_stream_alone(gpt_oss, tokens):
    """Attention adds nothing then, so no token sees another one: the same token has the same logits everywhere."""
    same = [tokens[0], *[7] * 9]
    rows = evaluate(gpt_oss(60.0), "full", same)[1:]
    assert abs(rows - rows[0]).max() < 1e-5 * abs(rows).max()
    rows = evaluate(gpt_oss(-60.0), "full", same)[1:]
    assert abs(rows - rows[0]).max() > 1e-3 * abs(rows).max()


def test_votes_count_what_a_sink_takes(gpt_oss, tokens):
    """A key needs the average weight to stay: with a large sink, none has it."""
    with_sink, without = kept(gpt_oss(30.0), tokens[:N]), kept(gpt_oss(-30.0), tokens[:N])
    served = without.max(axis=1) > 0
    assert served.any() and not served.all()  # the other layers slide, and are llama.cpp's own
    assert (with_sink[served] <= RECENT + EVERY).all()
    assert (without[served] > RECENT + EVERY).any()
