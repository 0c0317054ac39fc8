"""The real LangChain, guidance and LlamaIndex on the embedded model, with a method that they do not know."""

from importlib.util import find_spec

import pytest
from needs import lacks
from test_compat import METHOD, python

pytestmark = pytest.mark.peers

TEXT = "The grass is green. The sky is blue. The sun is yellow. Here we go. " * 40  # several times the trained context


def run(package, script, path):
    """Return what an unchanged program prints."""
    for name in (package, "llama_cpp"):
        if find_spec(name) is None:
            lacks("peers", f"{name} is not installed")
    code = f"import sys\npath, text = sys.argv[1:]\n{script}"
    program = "import sys; exec(sys.argv.pop(1))"
    launch = f"from pylongctx import compat; compat.enable({METHOD!r}); {program}"
    done = python("-W", "ignore", "-c", launch, code, path, TEXT)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_langchain_completes_and_streams(embedded_model):
    script = """
from langchain_community.llms import LlamaCpp
llm = LlamaCpp(model_path=path, n_ctx=4096, n_batch=64, temperature=0, max_tokens=9, verbose=False)
whole = llm.invoke(text)
assert whole == "".join(llm.stream(text))
assert whole == llm.client(text, max_tokens=9, temperature=0, repeat_penalty=1.1)["choices"][0]["text"]
assert llm.get_num_tokens(text) > 512
ruled = LlamaCpp(model_path=path, n_ctx=512, grammar='root ::= "yes" | "no"', max_tokens=5, verbose=False)
assert ruled.invoke("Was it? ") in ("yes", "no")
print(type(llm.client.method).__name__, bool(whole))
"""
    assert run("langchain_community", script, embedded_model) == "LongHeads True\n"


def test_langchain_chats(embedded_model):
    script = """
from langchain_community.chat_models import ChatLlamaCpp
chat = ChatLlamaCpp(model_path=path, n_ctx=4096, n_batch=64, temperature=0, max_tokens=9, verbose=False)
messages = [("system", "Be brief."), ("human", text)]
answer = chat.invoke(messages)
assert answer.response_metadata["finish_reason"] in ("length", "stop")
assert "".join(chunk.content for chunk in chat.stream(messages)) == answer.content
roles = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
same = chat.client.create_chat_completion(roles, max_tokens=9, temperature=0, repeat_penalty=1.1)
assert same["choices"][0]["message"]["content"] == answer.content
print(type(chat.client.method).__name__)
"""
    assert run("langchain_community", script, embedded_model) == "LongHeads\n"


def test_langchain_embeds(embedded_model):
    """The model has no pooling, so LangChain gets a row for every token; the default method is left aside."""
    script = """
import numpy as np
from langchain_community.embeddings import LlamaCppEmbeddings
from pylongctx import Llama
found = LlamaCppEmbeddings(model_path=path, n_ctx=512, verbose=False).embed_documents(["the sky", "the grass"])
with Llama(path, embedding=True, n_ctx=512, verbose=False) as llm:
    want = np.concatenate(llm.embed(["the sky", "the grass"]))
np.testing.assert_allclose(found, want, rtol=0, atol=1e-4 * np.abs(want).max())
print(len(found) > 2)
"""
    assert run("langchain_community", script, embedded_model) == "True\n"


def test_guidance_generates_through_raw_pointers(embedded_model):
    script = """
import re
from guidance import gen, models, select
lm = models.LlamaCpp(path, n_ctx=4096, n_batch=64, echo=False)
lm += text + "The number is " + gen("n", regex=r"[0-9]{3}", temperature=0)
lm += " and it is " + select(["blue", "green", "yellow"], name="colour")
assert re.fullmatch("[0-9]{3}", lm["n"]) and lm["colour"] in ("blue", "green", "yellow")
import llama_cpp
given = llama_cpp.Llama(path, n_ctx=4096, n_batch=64, logits_all=True, verbose=False)
again = models.LlamaCpp(given, echo=False) + text + "The number is " + gen("n", regex=r"[0-9]{3}", temperature=0)
print(type(given.method).__name__, again["n"] == lm["n"])
"""
    assert run("guidance", script, embedded_model) == "LongHeads True\n"


def test_llama_index_completes_and_streams(embedded_model):
    script = """
from llama_index.llms.llama_cpp import LlamaCPP
llm = LlamaCPP(
    model_path=path, context_window=4096, max_new_tokens=9, temperature=0, verbose=False,
    completion_to_prompt=lambda prompt: prompt,
)
whole = llm.complete(text).text
assert [part.text for part in llm.stream_complete(text)][-1] == whole
print(llm.metadata.context_window, type(llm.session.model.method).__name__, bool(whole))
"""
    assert run("llama_index", script, embedded_model) == "4096 LongHeads True\n"
