"""``pylongctx.compat``: llama_cpp is pylongctx, in processes of their own, since a process has one library."""

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from needs import lacks

METHOD = "longheads,chunk_size=16,window=128"
BEGIN = "import sys, pylongctx\nfrom pylongctx import compat\npath = sys.argv[1]\n"
OPEN = "llama_cpp.Llama(path, n_ctx=1024, verbose=False"

with_package = pytest.mark.usefixtures("llama_cpp")


def environment(**more):
    """Return the variables of a user who set none of those that choose a library or a method."""
    chosen = ("LLAMA_CPP_LIB_PATH", "LCTX_METHOD")
    return {name: value for name, value in os.environ.items() if name not in chosen} | more


def python(*arguments, **more):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment(**more))


def run(script, path, *arguments, **more):
    """Return what a script prints that starts with ``compat`` and ``path``."""
    done = python("-c", BEGIN + script, path, *arguments, **more)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split("\n")[:-1]


def fails(script, path, **more):
    """Return the last line of the error that ends a script."""
    done = python("-c", BEGIN + script, path, **more)
    assert done.returncode == 1, done.stdout
    return done.stderr.strip().split("\n")[-1]


# ---- the package on our library ----


@with_package
def test_a_vocabulary_alone_has_a_context_of_llama_cpp(embedded_model):
    script = """
compat.enable()
import llama_cpp
with llama_cpp.Llama(path, vocab_only=True, verbose=False) as llm:
    assert llm._ctx.ctx is not None and llm._ctx.n_ctx() > 0
    assert not llm._is_recurrent and not llm._is_hybrid
    held = llm._ctx
assert held.ctx is None  # freed before the model
print("freed")
"""
    assert run(script, embedded_model) == ["freed"]


@with_package
def test_its_names_are_ours_wherever_they_are_bound(embedded_model):
    script = """
with compat.enable():
    import llama_cpp
    from llama_cpp.llama import Llama
    from llama_cpp.llama_chat_format import register_chat_completion_handler
    for name in ("LlamaGrammar", "LlamaRAMCache", "LogitsProcessorList", "StoppingCriteriaList", "LlamaState"):
        assert getattr(llama_cpp, name) is getattr(pylongctx, name), name
    assert register_chat_completion_handler is pylongctx.register_chat_completion_handler
    assert llama_cpp.Llama is Llama and issubclass(Llama, pylongctx.Llama)
    assert llama_cpp.__version__ != pylongctx.__version__
    print(llama_cpp.llama_cpp._lib._name)
assert llama_cpp.Llama.__module__ == llama_cpp.LlamaGrammar.__module__.replace("_grammar", "") == "llama_cpp.llama"
"""
    from pylongctx._lib import library_path

    assert run(script, embedded_model) == [str(library_path())]


@with_package
def test_raw_pointers_are_of_the_same_model(embedded_model):
    script = f"""
compat.enable()
import llama_cpp, pickle
with {OPEN}, n_batch=64) as llm:
    assert isinstance(llm, llama_cpp.Llama)
    assert llama_cpp.llama_n_ctx(llm.ctx) == llm._ctx.n_ctx() == llm.context_params.n_ctx == llm.n_ctx() == 1024
    assert llama_cpp.llama_model_n_embd(llm.model) == llm.n_embd()
    assert llama_cpp.llama_get_model(llm.ctx) == llm.model
    assert llm.context_params.n_batch == llm.n_batch == 64
    with pickle.loads(pickle.dumps(llm)) as copy:
        print(type(copy) is type(llm), copy.ctx != llm.ctx)
"""
    assert run(script, embedded_model) == ["True True"]


@with_package
@pytest.mark.parametrize("method", ["full", METHOD])
def test_logits_through_raw_pointers_are_ours(embedded_model, method):
    """And a program that changes the cache through ``ctx`` does not change what the object says afterwards."""
    script = f"""
import numpy as np
compat.enable(sys.argv[2])
import llama_cpp
with {OPEN}, n_ubatch=64) as llm:
    tokens = llm.tokenize(b"It was the best of times, it was the worst of times. " * 12)
    llm.eval(tokens)
    want = llm.scores[-1].copy()
    batch = llama_cpp.llama_batch_init(64, 0, 1)

    def read(tokens):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llm.ctx), True)
        for start in range(0, len(tokens), 64):
            part = tokens[start : start + 64]
            batch.n_tokens = len(part)
            for i, token in enumerate(part):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, start + i, 1, True
                batch.seq_id[i][0] = 0
            assert llama_cpp.llama_decode(llm.ctx, batch) == 0
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llm.ctx, -1), (llm.n_vocab(),)).copy()

    assert np.abs(read(tokens) - want).max() < 1e-5 * np.abs(want).max()
    assert np.abs(read(tokens[::-1]) - want).max() > 1
    llm.eval(tokens[:1])
    after = llm.scores[-1].copy()
    llm.reset()
    llm.eval(tokens)
    llm.eval(tokens[:1])
    print(len(tokens), np.abs(llm.scores[-1] - after).max() < 1e-5 * np.abs(want).max())
"""
    n, agrees = run(script, embedded_model, method)[0].split()
    assert int(n) > 128
    assert agrees == "True"


# ---- methods ----


@with_package
def test_where_the_method_comes_from(embedded_model):
    script = f"""
compat.enable(sys.argv[2] or None)
import llama_cpp
for given in ({{}}, {{"method": "window"}}, {{"method": None}}, {{"embedding": True}}):
    with {OPEN}, **given) as llm:
        print(str(llm.method).partition(",")[0])
"""
    explicit = ["window", "None", "None"]
    assert run(script, embedded_model, "") == ["full", *explicit]
    assert run(script, embedded_model, METHOD) == ["longheads", *explicit]
    assert run(script, embedded_model, "", LCTX_METHOD="selfextend") == ["selfextend", *explicit]
    assert run(script, embedded_model, METHOD, LCTX_METHOD="selfextend") == ["longheads", *explicit]


def test_an_unknown_method_is_refused_at_once(embedded_model):
    assert "no-such-method" in fails("compat.enable('no-such-method')", embedded_model)


@with_package
def test_enabling_again_changes_the_method(embedded_model):
    script = f"""
compat.enable("window")
compat.enable("selfextend")
import llama_cpp
with {OPEN}) as llm:
    print(str(llm.method).partition(",")[0])
compat.disable()
compat.disable()
print(llama_cpp.Llama.__module__)
"""
    assert run(script, embedded_model) == ["selfextend", "llama_cpp.llama"]


# ---- the other library, the other version, no package ----


@with_package
def test_an_import_with_another_library_is_refused(embedded_model):
    script = """
import types
other = types.ModuleType("llama_cpp.llama_cpp")
other._lib = types.SimpleNamespace(_name=path)  # a file that is not our library
sys.modules["llama_cpp"] = types.ModuleType("llama_cpp")
sys.modules["llama_cpp"].llama_cpp = sys.modules["llama_cpp.llama_cpp"] = other
compat.enable()
"""
    reason = fails(script, embedded_model)
    assert f"with the library {embedded_model}" in reason
    assert "python -m pylongctx.compat" in reason


@with_package
def test_an_earlier_import_of_our_library_is_welcome(embedded_model):
    from pylongctx._lib import library_path

    script = "import llama_cpp\ncompat.enable()\nprint(llama_cpp.Llama.__module__)"
    folder = str(library_path().parent)
    assert run(script, embedded_model, LLAMA_CPP_LIB_PATH=folder) == ["pylongctx.compat.llama"]


@with_package
def test_another_version_is_refused_with_the_command_that_helps(embedded_model):
    reason = fails("compat.version = lambda name: '0.2.90'\ncompat.enable()", embedded_model)
    assert "llama-cpp-python 0.2.90 is installed" in reason
    assert 'CMAKE_ARGS="-DLLAMA_BUILD=OFF" pip install' in reason
    assert (Path(__file__).parents[2] / "patches/upstream.txt").read_text().split()[0] in reason


def test_the_version_is_that_of_the_tests():
    from pylongctx.compat import how_to_install

    try:
        assert how_to_install().endswith(f"=={version('llama-cpp-python')}")
    except PackageNotFoundError:
        lacks("stock", "llama-cpp-python is not installed")


def test_without_the_package_its_classes_are_there(embedded_model):
    script = f"""
compat.find_spec = lambda name: None
with compat.enable("window"):
    from llama_cpp import Llama, LlamaGrammar, LogitsProcessorList
    import importlib.util, llama_cpp
    assert importlib.util.find_spec("llama_cpp") is not None
    with {OPEN}) as llm:
        said = llm("Was it? ", grammar=LlamaGrammar.from_string('root ::= "yes" | "no"'), max_tokens=5)
        print(isinstance(llm, Llama), str(llm.method).partition(",")[0], said["choices"][0]["text"] in ("yes", "no"))
    try:
        llama_cpp.llama_n_ctx
    except AttributeError as reason:
        print(reason)
assert "llama_cpp" not in sys.modules
"""
    facts, reason = run(script, embedded_model)
    assert facts == "True window True"
    assert "llama_cpp.llama_n_ctx needs the package llama-cpp-python" in reason
    assert "LLAMA_BUILD=OFF" in reason


# ---- python -m pylongctx.compat ----

PROGRAM = """
import sys
import llama_cpp
import beside
with llama_cpp.Llama(sys.argv[1], verbose=False) as llm:
    print(__name__, beside.FACT, str(llm.method).partition(",")[0], *sys.argv[2:])
"""


@with_package
@pytest.mark.parametrize("as_module", [False, True])
def test_a_program_runs_unchanged(embedded_model, tmp_path, as_module):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "beside.py").write_text("FACT = 7")
    program = ["-m", "program"] if as_module else [tmp_path / "program.py"]
    path = os.pathsep.join([str(tmp_path)] * as_module + sys.path)
    options = ["-m", "pylongctx.compat", "--method", "window"]
    done = python(*options, *program, embedded_model, "--method", "theirs", PYTHONPATH=path)
    assert done.stdout == "__main__ 7 window --method theirs\n", done.stderr[-2000:]


@with_package
def test_the_log_is_ours_after_the_import(embedded_model):
    """llama_cpp's own callback prints what its logger lets through, which is all of a raw call's lines."""
    script = """
compat.enable()
import llama_cpp
params = llama_cpp.llama_model_default_params()
model = llama_cpp.llama_model_load_from_file(path.encode(), params)
assert model
llama_cpp.llama_model_free(model)
"""
    done = python("-c", BEGIN + script, embedded_model)
    assert done.returncode == 0
    assert done.stderr == ""
