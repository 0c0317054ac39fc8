"""Embeddings against unpatched llama.cpp and against their definitions."""

import json
import subprocess
import sys

import numpy as np
import pytest
from hybrid_files import path_of
from needs import lacks
from session import Session

from pylongctx import Llama

TEXTS = ["It was the best of times", "it was the worst of times, it was the age of wisdom", "x"]
NONE, MEAN, CLS, LAST, RANK = range(5)


def open_model(path, **kwargs):
    return Llama(str(path), **{"embedding": True, "n_ctx": 256, "verbose": False} | kwargs)


def check(found, expected, share):
    """Compare; the activations are rounded (Q8_0 weights, f16 rows), in other steps in other ways."""
    assert np.shape(found) == np.shape(expected)
    assert np.abs(np.subtract(found, expected)).max() < share * np.abs(expected).max()


PEER = """
import json, sys
from llama_cpp import Llama
found = []
for pooling in json.loads(sys.argv[3]):
    llm = Llama(sys.argv[1], n_ctx=256, embedding=True, pooling_type=pooling, verbose=False)
    found.append([llm.embed(text) for text in json.loads(sys.argv[2])])
print(json.dumps(found))
"""


def peer(path, poolings):
    """What unpatched llama.cpp says, in a process of its own."""
    if subprocess.run([sys.executable, "-c", "import llama_cpp"], capture_output=True, check=False).returncode != 0:
        lacks("stock", "llama_cpp is not installed, or without its library")
    command = [sys.executable, "-c", PEER, str(path), json.dumps(TEXTS), json.dumps(poolings)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("name", ["embedded", "bert", "qwen2"])
def test_embeddings_equal_llama_cpp(name, embedded_model, model_path):
    path = embedded_model if name == "embedded" else model_path(name)
    poolings = [NONE, MEAN, CLS, LAST]
    for pooling, expected in zip(poolings, peer(path, poolings), strict=True):
        with open_model(path, pooling_type=pooling) as llm:
            assert llm.pooling_type() == pooling
            for ours, theirs in zip(llm.embed(TEXTS), expected, strict=True):
                check(ours, theirs, 5e-2 if name == "embedded" else 5e-3)


def test_several_texts_are_each_alone(embedded_model):
    with open_model(embedded_model, pooling_type=MEAN) as llm:
        together = llm.embed(TEXTS * 30)  # more than one evaluation takes
        for text, found in zip(TEXTS, together, strict=False):
            check(found, llm.embed(text), 5e-2)
        assert len(together) == 90
        check(together[:3], together[87:], 5e-2)


@pytest.mark.parametrize("pooling", [NONE, MEAN, CLS, LAST])
@pytest.mark.parametrize("n_batch", [1, 3, 63, 65, 100, 255])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_any_batch_works_with_any_pooling(model_path, name, n_batch, pooling):
    """Vectors are those of a batch of 256, and a text still has at most ``n_batch`` tokens."""
    texts = ["a"[: n_batch - 1] or [5], [4, 5, 6][:n_batch], [7]]
    path = model_path(name)
    with open_model(path, pooling_type=pooling, n_batch=256) as llm:
        expected = llm.embed(texts)
    with open_model(path, pooling_type=pooling, n_batch=n_batch) as llm:
        assert llm.n_batch == n_batch
        for ours, theirs in zip(llm.embed(texts), expected, strict=True):
            check(ours, theirs, 5e-3)
        cut = min(n_batch, llm.n_ctx())
        assert len(llm.embed([[5] * 300])[0]) == (cut if pooling == NONE else np.shape(expected[0])[-1])
        with pytest.raises(ValueError, match=rf"Requested tokens \(300\) exceed batch size of {cut}"):
            llm.embed([[5] * 300], truncate=False)


@pytest.mark.parametrize("n_batch", [1, 64, 100])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_scores_need_a_classifier(model_path, name, n_batch):
    with pytest.raises(ValueError, match=r"pooling_type 4 \(rank\) needs a classifier"):
        open_model(model_path(name), pooling_type=RANK, n_batch=n_batch)


def test_positions_that_a_model_learned_end(model_path):
    """llama.cpp asserts that a text has no other position."""
    with open_model(model_path("gpt2"), n_ctx=100, embedding=False) as llm:
        assert llm.n_ctx() == 64
        with pytest.raises(ValueError, match="exceed context window of 64"):
            llm.eval([5] * 65)
        assert llm([5, 6], max_tokens=200, temperature=0)["usage"]["total_tokens"] == 64


@pytest.mark.parametrize(("n_seq", "n_ctx", "n_ubatch"), [(3, 256, 512), (7, 0, 100), (255, 256, 256), (63, 512, 63)])
def test_any_number_of_sequences_works_with_any_pooling(ffi, lib, model_path, n_seq, n_ctx, n_ubatch):
    fields = {
        "n_seq_max": n_seq,
        "n_ctx": n_ctx,
        "n_batch": 300,
        "n_ubatch": n_ubatch,
        "pooling_type": MEAN,
        "embeddings": 1,
    }
    with Session(ffi, lib, model_path("llama"), "", **fields) as session:
        lengths, out = [2] * min(n_seq, 30), np.empty(30 * 4096, np.float32)
        tokens = np.arange(3, 3 + sum(lengths), dtype=np.int32)
        done = lib.lctx_embed(
            session.ctx, len(lengths), lengths, ffi.from_buffer("int32_t[]", tokens), ffi.from_buffer("float[]", out)
        )
        assert done == lib.LCTX_OK and np.isfinite(out[: lib.lctx_embedding_size(session.ctx)]).all()


def test_normalize(embedded_model):
    with open_model(embedded_model, pooling_type=MEAN) as llm:
        plain, unit = np.array(llm.embed(TEXTS)), np.array(llm.embed(TEXTS, normalize=True))
    np.testing.assert_allclose(unit, plain / np.linalg.norm(plain, axis=1, keepdims=True), rtol=1e-5)


def test_pooling_of_the_last_is_the_last(embedded_model):
    with open_model(embedded_model, pooling_type=NONE) as every, open_model(embedded_model, pooling_type=LAST) as last:
        np.testing.assert_allclose(every.embed(TEXTS[1])[-1], last.embed(TEXTS[1]), atol=1e-5)


def test_the_response(embedded_model):
    with open_model(embedded_model, pooling_type=MEAN) as llm:
        done = llm.create_embedding(TEXTS, model="mine")
        n_tokens = sum(len(llm.tokenize(text.encode())) for text in TEXTS)
        single = llm.create_embedding(TEXTS[0])
        assert llm.embed(TEXTS, return_count=True)[1] == n_tokens
        assert len(single["data"][0]["embedding"]) == llm.n_embd()
    assert (done["object"], done["model"]) == ("list", "mine")
    assert done["usage"] == {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    assert [(one["index"], one["object"]) for one in done["data"]] == [(i, "embedding") for i in range(3)]
    assert json.loads(json.dumps(done)) == done


def test_tokens_instead_of_texts(embedded_model):
    with open_model(embedded_model, pooling_type=MEAN) as llm:
        tokens = [llm.tokenize(text.encode()) for text in TEXTS]
        assert llm.embed(tokens) == llm.embed(TEXTS)
        assert llm.embed(tokens[1]) == llm.embed(TEXTS[1])
        with pytest.raises(ValueError, match="outside the vocabulary"):
            llm.embed([10**6])


def test_long_texts_are_cut_or_refused(embedded_model):
    with open_model(embedded_model, pooling_type=MEAN, n_batch=16) as llm:
        text = TEXTS[1] * 5
        cut = llm.detokenize(llm.tokenize(text.encode())[:16])
        assert llm.tokenize(cut) == llm.tokenize(text.encode())[:16]
        check(llm.embed(text), llm.embed(cut.decode()), 5e-2)
        with pytest.raises(ValueError, match=r"Requested tokens \(\d+\) exceed batch size of 16"):
            llm.embed(text, truncate=False)


def test_no_more_of_a_long_text_is_tokenized_than_is_kept(embedded_model, monkeypatch):
    with open_model(embedded_model, pooling_type=MEAN, n_batch=16) as llm:
        tokenize, sizes = llm.session.model.tokenize, []
        monkeypatch.setattr(
            llm.session.model, "tokenize", lambda data, *more: sizes.append(len(data)) or tokenize(data, *more)
        )
        for text in ("\u00e9t\u00e9 et hiver, " * 20000, "x" * 300000, " " * 300000):
            assert llm.embed(text) == llm.embed(tokenize(text.encode())[:16])
        assert len(sizes) == 3
        assert max(sizes) <= 2 * 16 * max(32, llm.session.model.longest_piece) < 5000


def test_the_object_still_generates(embedded_model):
    with open_model(embedded_model, pooling_type=MEAN) as llm, Llama(str(embedded_model), verbose=False) as other:
        llm.embed(TEXTS)
        said = [one("It was", max_tokens=8, temperature=0.0)["choices"][0]["text"] for one in (llm, other)]
        first = llm.embed(TEXTS)
        assert llm.n_tokens == 0
        assert llm.embed(TEXTS) == first
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"method": "selfextend"}, "leave out method=selfextend"),
        ({"pooling_type": 9}, "pooling_type must be"),
        ({"attention_type": 5}, "attention_type must be"),
    ],
)
def test_bad_options_of_embeddings_are_refused(embedded_model, kwargs, message):
    with pytest.raises(ValueError, match=message):
        open_model(embedded_model, **kwargs)


@pytest.mark.parametrize("arch", ["deepseek4", "qwen4exp"])
def test_vectors_that_llama_cpp_would_read_beyond_their_end(tmp_path, arch):
    with Llama(str(path_of(tmp_path, arch)), embedding=True, n_ctx=256, verbose=False) as model:
        for _ in range(2):
            with pytest.raises(ValueError, match=f"does not embed texts with {arch}"):
                model.embed([[3, 4, 5]])


def test_without_embedding(llm, embedded_model):
    with pytest.raises(RuntimeError, match="must be created with embedding=True"):
        llm.embed("x")
    with open_model(embedded_model) as other:
        assert other.embed([]) == []
        with pytest.raises(TypeError, match="text"):
            other.embed([7.5])
