"""Llama against llama_cpp.Llama: the same answers; the same parameters in test_surface.py."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from llamas import TEXT, new
from needs import lacks

import pylongctx


def peer_file() -> Path:
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or not spec.submodule_search_locations:
        lacks("stock", "llama_cpp is not installed")
    return Path(spec.submodule_search_locations[0]) / "llama.py"


PEER = """
import json, sys
from itertools import islice
from llama_cpp import Llama
llm = Llama(sys.argv[1], n_ctx=512, verbose=False)
out = llm(sys.argv[2], max_tokens=24, temperature=0.0, repeat_penalty=1.1)
stream = list(llm(sys.argv[2], max_tokens=4, temperature=0.0, stream=True))
tokens = llm.tokenize(sys.argv[2].encode(), special=True)
every = Llama(sys.argv[1], n_ctx=512, logits_all=True, verbose=False)
scored = every(sys.argv[2], max_tokens=6, temperature=0.0, logprobs=3)["choices"][0]["logprobs"]
print(json.dumps([out, stream, tokens, llm.detokenize(tokens).decode(), llm.metadata, scored], default=float))
"""


@pytest.fixture(scope="module")
def llm(embedded_f32):
    """Weights in f32: where products are rounded, their order decides near ties."""
    with new(embedded_f32) as llm:
        yield llm


@pytest.fixture(scope="module")
def peer(embedded_f32):
    """What llama_cpp makes of TEXT, in a process of its own."""
    peer_file()
    usable = subprocess.run([sys.executable, "-c", "import llama_cpp"], capture_output=True, check=False)
    if usable.returncode != 0:
        lacks("stock", "llama_cpp is installed without its library")
    command = [sys.executable, "-c", PEER, str(embedded_f32), TEXT.decode()]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_completion_equals_llama_cpp(llm, peer):
    theirs, _, tokens, text, metadata, _ = peer
    ours = llm(TEXT.decode(), max_tokens=24, temperature=0.0, repeat_penalty=1.1)
    assert ours["choices"] == theirs["choices"]
    assert ours["usage"] == theirs["usage"]
    assert ours["model"] == theirs["model"]
    assert list(ours) == list(theirs)
    assert llm.tokenize(TEXT, special=True) == tokens
    assert llm.detokenize(tokens).decode() == text
    assert llm.metadata == metadata


def test_stream_chunks_have_the_keys_of_llama_cpp(llm, peer):
    ours = list(llm(TEXT.decode(), max_tokens=4, temperature=0.0, stream=True))
    theirs = peer[1]
    assert [c["choices"] for c in ours] == [c["choices"] for c in theirs]
    assert all(list(chunk) == list(theirs[0]) for chunk in ours[:-1])
    assert ours[-1].pop("usage")["completion_tokens"] == 4
    assert list(ours[-1]) == list(theirs[-1])


def test_logprobs_equal_llama_cpp(llm, peer):
    ours = llm(TEXT.decode(), max_tokens=6, temperature=0.0, logprobs=3)["choices"][0]["logprobs"]
    theirs = peer[-1]
    assert list(ours) == list(theirs)
    assert ours["tokens"] == theirs["tokens"]
    assert ours["token_logprobs"] == pytest.approx(theirs["token_logprobs"], abs=1e-2)
    for own, other in zip(ours["top_logprobs"], theirs["top_logprobs"], strict=True):
        assert own == pytest.approx(other, abs=1e-2)
    assert ours["text_offset"] == theirs["text_offset"]


def test_public_names_exist():
    assert {"Full", "LongHeads", "SelfExtend", "Window"} <= set(pylongctx.__all__)
    assert all(hasattr(pylongctx, name) for name in pylongctx.__all__)
