"""Training a tiny model: llama.cpp computes and tokenizes what torch does, and the command trains and exports."""

import importlib
import sys
from dataclasses import replace

import gguf
import numpy as np
import pytest
from needs import need

torch = need("train", "sentencepiece", "google.protobuf", "torch")

import train_tiny  # noqa: E402
from random_model import Shape  # noqa: E402
from tiny.data import load_corpus  # noqa: E402
from tiny.export import export  # noqa: E402
from tiny.model import Model  # noqa: E402

from pylongctx import Llama  # noqa: E402
from pylongctx.eval.haystack import synthetic_text  # noqa: E402

SHAPE = Shape(n_vocab=448, n_embd=48, n_layer=2, n_head=4, n_head_kv=2, n_ff=64, n_ctx_train=256, key_length=16)
SQUARE = replace(SHAPE, n_embd=64)
VARIANTS = {
    "llama": ("llama", SHAPE),
    "llama-mha": ("llama", replace(SHAPE, n_head_kv=4)),
    "qwen2": ("qwen2", SQUARE),
    "qwen2-mha": ("qwen2", replace(SQUARE, n_head_kv=4)),
}
TEXT = "It was \u00e9t\u00e9, and  two spaces;\nanother line: 1234 567.\n\n\tThe pass key is 98765."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts")
    (path / "below").mkdir()
    for i, name in enumerate(["one.txt", "below/two.txt"]):
        (path / name).write_text(synthetic_text(90_000, i) + " Zo\u00eb.\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def corpus(folder, tmp_path_factory):
    return load_corpus(folder, None, tmp_path_factory.mktemp("run") / "tokenizer.model", SHAPE.n_vocab)


@pytest.mark.parametrize("variant", VARIANTS)
def test_llama_cpp_computes_the_logits_of_torch(corpus, tmp_path, variant):
    torch.manual_seed(1)
    model = Model(*VARIANTS[variant])
    for values in model.parameters():  # zeros would hide what they multiply
        torch.nn.init.normal_(values, 1.0 if values.ndim == 1 else 0.0, 0.3)
    tokens = np.random.default_rng(0).integers(3, SHAPE.n_vocab, 201)
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens)[None])[0].numpy()
    path = export(tmp_path / "a.gguf", model, corpus.tokenizer, "f32")
    names = [tensor.name for tensor in gguf.GGUFReader(path).tensors]
    assert ("blk.1.attn_k.bias" in names) == variant.startswith("qwen2")
    with Llama(str(path), n_ctx=256, n_threads=1, logits_all=True, type_k="f32", type_v="f32", verbose=False) as llm:
        llm.eval(tokens.tolist())
        scores = np.array(llm.scores)
    assert scores.shape == expected.shape
    assert np.abs(scores - expected).max() < 1e-3 * np.abs(expected).max()


def test_llama_cpp_tokenizes_as_sentencepiece_does(corpus, tmp_path):
    path = export(tmp_path / "a.gguf", Model("llama", SQUARE), corpus.tokenizer, "q8_0")
    with Llama(str(path), vocab_only=True, verbose=False) as llm:
        for text in (TEXT, corpus.held_out[:3000], "x", ""):
            assert llm.tokenize(text.encode()) == corpus.encode(text)
        assert llm.detokenize(llm.tokenize(TEXT.encode(), add_bos=False)).decode().removeprefix(" ") == TEXT
        assert llm.metadata["general.name"] == "pylongctx-tiny"
        assert llm.metadata["llama.context_length"] == "256"
        assert "tokenizer.chat_template" not in llm.metadata


def test_the_command_trains_and_exports(folder, tmp_path, capsys):
    sizes = "--vocabulary 448 --width 128 --layers 1 --feed-forward 64 --context 256 --steps 4 --batch-tokens 256"
    command = [str(folder), str(tmp_path / "run"), *sizes.split(), "--threads", "1", "--arch", "qwen2", "--mha"]
    with pytest.raises(ValueError, match=r"no model to measure: .*holds no checkpoint\.pt, and --init names"):
        train_tiny.main([*command, "--examine", "8"])
    train_tiny.main([*command, "--until", "2"])
    train_tiny.main(command)
    out = capsys.readouterr().out
    assert "step 2, loss" in out
    assert "step 4, loss" in out
    assert "named" in out
    train_tiny.main([*command, "--examine", "8"])  # as many as while it trains: the same numbers
    measured = capsys.readouterr().out.splitlines()[1]
    assert measured.startswith("perplexity ")
    assert measured in out
    with pytest.raises(ValueError, match="0 texts: an evaluation needs at least one"):
        train_tiny.main([*command, "--examine", "0"])
    train_tiny.main(
        [*command[:1], str(tmp_path / "more"), *command[2:], "--init", str(tmp_path / "run" / "model-q8_0.gguf")]
    )
    assert "step 4, loss" in capsys.readouterr().out
    with Llama(str(tmp_path / "run" / "model-q8_0.gguf"), n_ctx=256, verbose=False) as llm:
        assert llm.metadata["general.architecture"] == "qwen2"
        assert llm.metadata["qwen2.attention.head_count_kv"] == "2"
        assert llm.create_completion("The pass key is", max_tokens=4)["usage"]["completion_tokens"] > 0


def test_training_without_torch_says_how_to_get_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "train_tiny")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"training needs torch: pip install pylongctx\[train\]"):
        importlib.import_module("train_tiny")
