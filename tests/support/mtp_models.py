"""Models with a block that drafts (MTP, NextN), and llama.cpp's drafts of it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
from random_model import write_model
from test_dropin import checked, run
from tiny_gguf import Shape
from tiny_hybrids import HYBRIDS
from tiny_indexed import INDEXED
from tiny_models import RECIPES
from tiny_nextn import with_head

SHAPE = Shape(n_embd=128, n_ctx_train=512)
MODELS = RECIPES | {
    "qwen35moe-nextn": with_head(HYBRIDS["qwen35moe"], "qwen35moe", 4, 1),
    "qwen3next-nextn": with_head(HYBRIDS["qwen3next"], "qwen3next", 4, 1),
    "deepseek32-nextn": with_head(INDEXED["deepseek32"], "deepseek32", 3, 1),
    "glm-dsa-nextn": with_head(INDEXED["glm-dsa"], "glm-dsa", 3, 1),
}
MODELS["step35-two"] = with_head(MODELS["step35-nextn"], "step35", 5, 0, nextn_predict_layers=2, **{
    "attention.head_count": [4, 6, 6, 4, 4, 4], "attention.head_count_kv": [2, 1, 1, 2, 2, 2]})  # fmt: skip
TRUNK = MODELS["hy_v3-nextn"]
TRUNK_LAYERS = tuple(" ".join(word for word in one.split() if not word.startswith("nextn")) for one in TRUNK.layer)
MODELS["hy_v3-trunk"] = replace(TRUNK, layer=TRUNK_LAYERS)  # its metadata says that there is a block
ATTENTION = ["glm4moe-nextn", "hy_v3-nextn", "cohere2moe-nextn", "step35-nextn", "deepseek2-nextn"]
HYBRID = ["qwen35-nextn", "qwen35moe-nextn", "qwen3next-nextn"]
WITH_INDEXER = ["deepseek32-nextn", "glm-dsa-nextn"]  # without a method
WRITES = ("attn_output", "ffn_down", "ffn_down_exps", "ffn_down_shexp", "ssm_out")  # what adds to the residual


def make(folder: Path, name: str) -> Path:
    """Return the file of a model, written on first use."""
    path = folder / f"{name}.gguf"
    recipe = MODELS[name]
    return path if path.is_file() else write_model(path, recipe, replace(SHAPE, **recipe.shape), seed=1)


def make_apt(folder: Path, name: str) -> Path:
    """Return a model whose drafts are often right: both mostly map the last token, and the block ignores the state."""
    path = folder / f"{name}.apt.gguf"
    if not path.is_file():
        shutil.copy(make(folder, name), path)
        for tensor in gguf.GGUFReader(path, "r+").tensors:
            part = tensor.name.removesuffix(".weight").partition("blk.")[2].partition(".")[2]
            if part in WRITES:
                tensor.data[:] *= 0.4
            elif part == "nextn.eh_proj":
                tensor.data[:] = np.eye(*tensor.data.shape)
    return path


# What llama.cpp's program does with the block, on a whole text at once: the state before each token is that of the
# previous one, zeros before the first; a draft token is evaluated with the state that the block made of the one before.
# first: the block does not evaluate the tokens before; unknown: the state before this token is zeros too.
PROGRAM = """
import ctypes, json, sys
import llama_cpp.llama_cpp as C, numpy as np

jobs, n_draft, out = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
library = C._lib
keep = getattr(library, "_Z26llama_set_embeddings_nextnP13llama_contextbb")
keep.argtypes, keep.restype = [ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool], None
state_of = getattr(library, "_Z30llama_get_embeddings_nextn_ithP13llama_contexti")
state_of.argtypes, state_of.restype = [ctypes.c_void_p, ctypes.c_int32], ctypes.POINTER(ctypes.c_float)
C.llama_backend_init()
at = lambda array, kind: array.ctypes.data_as(ctypes.POINTER(kind))

def context(model, kind):
    params = C.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_threads, params.n_threads_batch = 512, 512, 512, 1, 1
    params.ctx_type, params.type_k, params.type_v = kind, kind, kind  # f32, and f16 for the block
    params.flash_attn_type = -1 if kind else 0
    ctx = C.llama_init_from_model(model, params)
    keep(ctx, True, bool(kind))
    return ctx

def decode(ctx, tokens, first, rows, wanted):
    n = len(tokens)
    ids, pos = np.array(tokens, np.int32), np.arange(first, first + n, dtype=np.int32)
    ones, zeros, wants = np.ones(n, np.int32), np.zeros(n, np.int32), np.full(n, wanted, np.int8)
    seqs = (ctypes.POINTER(ctypes.c_int32) * n)(*[at(zeros, ctypes.c_int32)] * n)
    embd = None if rows is None else at(rows, ctypes.c_float)
    assert C.llama_decode(ctx, C.llama_batch(
        n_tokens=n, token=at(ids, ctypes.c_int32), embd=embd, pos=at(pos, ctypes.c_int32),
        n_seq_id=at(ones, ctypes.c_int32), seq_id=seqs, logits=at(wants, ctypes.c_int8))) == 0

found = {}
for name, (path, texts) in jobs.items():
    params = C.llama_model_default_params()
    params.load_mtp = True
    model = C.llama_model_load_from_file(path.encode(), params)
    n_vocab = C.llama_vocab_n_tokens(C.llama_model_get_vocab(model))
    n_embd = C.llama_model_n_embd(model)
    for i, (text, first, unknown) in enumerate(texts):
        main, block = context(model, 0), context(model, 1)
        n = len(text) - 1
        decode(main, text[:n], 0, None, 0)
        states = np.stack([np.ctypeslib.as_array(state_of(main, k), (n_embd,)) for k in range(n)])
        before = np.concatenate([np.zeros((1, n_embd), np.float32), states[:-1]])
        before[unknown] = 0
        decode(block, text[first:n], first, before[first:], 0)
        token, state, rows = text[n], states[-1:].copy(), []
        for k in range(n_draft):
            decode(block, [token], n + k, state, 1)
            rows.append(np.ctypeslib.as_array(C.llama_get_logits_ith(block, 0), (n_vocab,)).copy())
            state = np.ctypeslib.as_array(state_of(block, 0), (1, n_embd)).copy()
            token = int(rows[-1].argmax())
        found[f"{name}/{i}"] = np.stack(rows)
        C.llama_free(block), C.llama_free(main)
    C.llama_model_free(model)
np.savez(out, **found)
"""


def stock_drafts(jobs: dict[str, tuple[str, list[tuple]]], n_draft: int, out: Path) -> dict[str, list[np.ndarray]]:
    """Return the logits of the drafts of unpatched llama.cpp, float32 [n_draft, n_vocab] for each text of a model.

    jobs: by name, a path and texts with two numbers, see ``PROGRAM``.
    """
    checked(run(PROGRAM, json.dumps(jobs), n_draft, out, environment={}))
    found = dict(np.load(out))
    return {name: [found[f"{name}/{i}"] for i in range(len(texts))] for name, (_, texts) in jobs.items()}
