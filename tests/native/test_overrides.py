"""Values in the place of a file's metadata, and tensors in buffers that a caller chose."""

import shutil

import gguf
import numpy as np
import pytest
from tiny_gguf import make_model, set_number

from pylongctx import Llama
from pylongctx.errors import InvalidInput, ModelRefused

TOKENS = [1, 5, 9, 13, 40]


def new(path, **kwargs):
    return Llama(str(path), **{"n_ctx": 64, "n_threads": 1, "n_threads_batch": 1, "verbose": False} | kwargs)


def logits(path, **kwargs):
    with new(path, **kwargs) as llm:
        llm.eval(TOKENS)
        return llm.scores[-1].copy()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("overrides") / "model.gguf")


# ---- metadata ----


@pytest.mark.parametrize("method", ["auto", None])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.rope.freq_base", 300.0),
        ("llama.attention.layer_norm_rms_epsilon", 0.25),
        ("llama.rope.freq_base", np.float32(300)),
    ],
)
def test_rows_are_those_of_a_file_that_has_the_value(path, tmp_path, key, value, method):
    """The file is the oracle: what an override gives is what editing gives, bit for bit."""
    edited = tmp_path / "edited.gguf"
    shutil.copyfile(path, edited)
    set_number(edited, key, lambda _: value)
    found = logits(path, kv_overrides={key: value}, method=method)
    assert (found == logits(edited, method=method)).all()
    assert (found != logits(path, method=method)).any()


def test_each_type(path):
    overrides = {
        "tokenizer.ggml.add_bos_token": False,
        "llama.context_length": np.int64(77),
        "general.name": "\u2581 two words" + 110 * "x",
        "llama.rope.freq_base": 1e6,
    }
    with new(path) as llm:
        assert llm.tokenize(b"a")[0] == llm.token_bos()
    with new(path, kv_overrides=overrides, n_ctx=0) as llm:
        assert llm.token_bos() not in llm.tokenize(b"a")
        assert llm.n_ctx() == 4 * 77 or llm.n_ctx() == 77
        assert llm.metadata["general.name"] == overrides["general.name"]
        assert llm.metadata["tokenizer.ggml.add_bos_token"] == "false"
        assert llm.metadata["llama.context_length"] == "77"
        assert float(llm.metadata["llama.rope.freq_base"]) == 1e6


def test_a_key_that_the_file_lacks(path):
    assert "tokenizer.ggml.add_space_prefix" not in gguf.GGUFReader(str(path)).fields
    with new(path) as llm, new(path, kv_overrides={"tokenizer.ggml.add_space_prefix": False}) as other:
        assert len(llm.tokenize(b"a", add_bos=False)) == len(other.tokenize(b"a", add_bos=False)) + 1


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"llama.rope.freq_base": 300}, ModelRefused, "is a float in the file, but kv_overrides has an int, 300"),
        ({"llama.block_count": 2.0}, ModelRefused, "is an int in the file, but kv_overrides has a float"),
        ({"general.architecture": True}, ModelRefused, "general.architecture is a text in the file"),
        ({"tokenizer.ggml.add_sep_token": 1}, InvalidInput, "add_sep_token', expected bool but got int"),
        ({"tokenizer.ggml.tokens": "a"}, ModelRefused, "tokenizer.ggml.tokens is a list"),
        ({"llama.nonsense": 1}, ModelRefused, "llama.cpp reads no llama.nonsense of this model"),
        ({"tokenizer.chat_template": "x"}, ModelRefused, "llama.cpp reads no tokenizer.chat_template"),
        ({"llama.block_count": 600}, ModelRefused, "block_count must be from 1 to 512, not 600"),
        ({"llama.rope.freq_base": 0.5}, ModelRefused, "rope.freq_base must be from 1.01"),
        ({"llama.rope.freq_base": float("nan")}, ValueError, "freq_base must be a finite 32-bit number, not nan"),
        ({"llama.rope.freq_base": 1e39}, ValueError, "freq_base must be a finite 32-bit number"),
        ({"llama.block_count": -1}, ValueError, "llama.block_count must be from 0 to 4294967295, not -1"),
        ({"llama.block_count": 2**32}, ValueError, "llama.block_count must be from 0 to 4294967295"),
        ({"general.name": 128 * "x"}, ValueError, "the text of general.name must have at most 127 bytes .* 128"),
        ({"general.name": "a\0b"}, ValueError, "no NUL"),
        ({128 * "k": 1}, ValueError, "a key must have at most 127 bytes"),
        ({"general.name": b"x"}, TypeError, "general.name must be a bool, an int, a float or a str"),
        ({1: "x"}, TypeError, "a key must be a str, not 1"),
        ([("general.name", "x")], TypeError, "kv_overrides must be a dict"),
    ],
    ids=str,
)
@pytest.mark.parametrize("preflight", [True, False])
def test_what_cannot_be_overridden_is_refused_by_name(path, given, error, message, preflight):
    with pytest.raises(error, match=message):
        new(path, kv_overrides=given, preflight=preflight)


# ---- tensors ----


@pytest.mark.parametrize("given", [{"ffn": "CPU"}, {r"blk\.0\.": "CPU", "output": "CPU"}, {"nothing": "CPU"}, {}])
def test_tensors_in_memory_of_the_host(path, given):
    np.testing.assert_allclose(logits(path, override_tensor=given), logits(path), rtol=1e-5)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"ffn": "CUDA7"}, ModelRefused, "there is no buffer type CUDA7; known are CPU"),
        ({"(": "CPU"}, ModelRefused, r"override_tensor: \( is not a regular expression"),
        ({"": "CPU"}, TypeError, "override_tensor must be a dict of patterns"),
        ({"ffn": 1}, TypeError, "override_tensor must be a dict of patterns"),
        ("ffn=CPU", TypeError, "override_tensor must be a dict of patterns"),
    ],
    ids=str,
)
def test_buffers_that_are_not_there_are_refused(path, given, error, message):
    with pytest.raises(error, match=message):
        new(path, override_tensor=given)
