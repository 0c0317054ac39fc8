"""The library in place of llama.cpp's: the unmodified llama_cpp package and upstream's own tools run on it."""

import ast
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import numpy as np
import pytest
from llamas import F32, new
from needs import lacks, need
from test_abi import exported_symbols
from test_weights import FEATURES, OPENED, VNNI
from tiny_gguf import requantized

httpx = need("server", "httpx")

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "build" / "tools"
N_BOUND = 253  # functions that the pinned llama_cpp binds
PROMPT = "The grass is green. The sky is blue. The sun is yellow. Here we go. " * 4
METHODS = [
    "full",
    "window,n_sink=4,window=100",
    "selfextend,group_size=8,neighbor_window=128",
    "longheads,chunk_size=32,window=256",
]
BAD_METHODS = {
    "no-such-method": "no-such-method",
    "selfextend,group_size=0": "group_size",
    "window,no_such_option=1": "no_such_option",
    "selfextend,group_size=2,neighbor_window=500": "n_ctx",
    "longheads,chunk_size=64,window=100": "multiple of chunk_size",
}

PARAMETERS = """
import ctypes, json, sys
import llama_cpp.llama_cpp as C

def fields(value):
    if isinstance(value, ctypes.Structure):
        return {name: fields(getattr(value, name)) for name, *_ in value._fields_}
    if isinstance(value, ctypes._CFuncPtr | ctypes._Pointer) or value is None:
        return bool(value)  # addresses differ between libraries
    return value.decode() if isinstance(value, bytes) else value

model, quantized = sys.argv[1:]
out = {kind: fields(getattr(C, f"llama_{kind}_default_params")())
       for kind in ("model", "context", "sampler_chain", "model_quantize")}

batch = C.llama_batch_init(7, 0, 2)
for i in range(7):
    batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = i, i, 1, 0
out["batch"] = fields(batch)
C.llama_batch_free(batch)

messages = (C.llama_chat_message * 2)((b"system", b"be brief"), (b"user", b"hello"))
text = ctypes.create_string_buffer(1000)
C.llama_chat_apply_template(b"chatml", messages, 2, True, text, len(text))
out["chat"] = text.value.decode()

tokens = (C.llama_token_data * 3)((0, 1.0, 0.0), (1, 2.0, 0.0), (2, 3.0, 0.0))
array = C.llama_token_data_array(tokens, 3, -1, False)
bias = (C.llama_logit_bias * 1)(C.llama_logit_bias(0, 5.0))
chain = C.llama_sampler_chain_init(C.llama_sampler_chain_default_params())
C.llama_sampler_chain_add(chain, C.llama_sampler_init_logit_bias(3, 1, bias))
C.llama_sampler_chain_add(chain, C.llama_sampler_init_greedy())
C.llama_sampler_apply(chain, ctypes.byref(array))
out["sampler"] = [array.size, array.selected, array.data[array.selected].id, array.data[array.selected].logit]
out["perf"] = C.llama_perf_sampler(chain).n_sample
C.llama_sampler_free(chain)

params = C.llama_model_quantize_default_params()
params.nthread, params.ftype, params.allow_requantize = 2, C.LLAMA_FTYPE_MOSTLY_Q4_0, True
out["quantize"] = C.llama_model_quantize(model.encode(), quantized.encode(), ctypes.byref(params))
print(json.dumps(out))
"""

RUN = """
import sys
import llama_cpp, numpy as np

model, out, text = sys.argv[1:4]
settings = dict(n_ctx=1024, n_batch=256, n_threads=2, n_threads_batch=2, verbose=False)
llm = llama_cpp.Llama(model, logits_all=True, **settings)
tokens = llm.tokenize(text.encode())
result = {"tokens": tokens}

llm.eval(tokens)
result["logits"] = llm.scores[:len(tokens)].copy()
state = llm.save_state()
result["text"] = llm(text, max_tokens=24, temperature=0)["choices"][0]["text"]
llm.reset()
llm.load_state(state)
result["text_after_load"] = llm(text, max_tokens=24, temperature=0)["choices"][0]["text"]

embedder = llama_cpp.Llama(model, embedding=True, **settings)
result["embedding"] = embedder.embed(text)
np.savez(out, **result)
"""

LOGITS = """
import sys
import llama_cpp, numpy as np

model, out, n = sys.argv[1:4]
llm = llama_cpp.Llama(model, n_ctx=1024, n_batch=256, n_threads=2, n_threads_batch=2, logits_all=True, verbose=True)
llm.eval([3 + (i * i) % 1000 for i in range(int(n))])
np.save(out, llm.scores[:int(n)])
"""


def llama_cpp_source() -> Path:
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None:
        lacks("stock", "llama_cpp is not installed, whose place the library takes")
    return Path(spec.origin).parent / "llama_cpp.py"


def library() -> Path:
    from pylongctx._lib import library_path

    return library_path()


def on_ours(**more: str) -> dict[str, str]:
    return {"LLAMA_CPP_LIB_PATH": str(library().parent), **more}


def run(script: str, *arguments: object, environment: dict[str, str]) -> subprocess.CompletedProcess:
    """Run a script on the unmodified llama_cpp package, in a process of its own: one library per process."""
    llama_cpp_source()
    outer = {name: value for name, value in os.environ.items() if name != "LCTX_METHOD"}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=outer | environment)


def checked(done: subprocess.CompletedProcess) -> str:
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def bound_functions() -> set[str]:
    """Return the C names that llama_cpp binds: the first argument of its decorator ctypes_function."""
    names = set()
    for node in ast.walk(ast.parse(llama_cpp_source().read_text())):
        for call in getattr(node, "decorator_list", []):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "ctypes_function":
                names.add(ast.literal_eval(call.args[0]))
    return names


def test_every_function_that_llama_cpp_binds_is_exported():
    bound = bound_functions()
    assert len(bound) == N_BOUND
    assert bound <= exported_symbols(library())


@pytest.fixture(scope="module")
def parameters(embedded_model, tmp_path_factory) -> dict[str, dict]:
    """What passes through the by-value structs, on the unpatched library and on ours."""
    folder = tmp_path_factory.mktemp("structs")
    found = {}
    for name, environment in (("stock", {}), ("ours", on_ours())):
        quantized = folder / f"{name}.gguf"
        out = checked(run(PARAMETERS, embedded_model, quantized, environment=environment))
        found[name] = json.loads(out) | {"quantized": quantized.read_bytes()}
    return found


@pytest.mark.parametrize("kind", ["model", "context", "sampler_chain", "model_quantize", "batch"])
def test_structs_by_value_have_the_layout_of_llama_cpp(parameters, kind):
    """A field that moved, or a struct that grew, would shift what the caller's definition reads."""
    assert parameters["ours"][kind] == parameters["stock"][kind]


@pytest.mark.parametrize("kind", ["chat", "sampler", "perf", "quantize", "quantized"])
def test_structs_by_reference_have_the_layout_of_llama_cpp(parameters, kind):
    assert parameters["ours"][kind] == parameters["stock"][kind]


def test_the_structs_were_used(parameters):
    ours = parameters["ours"]
    assert ours["context"]["n_batch"] > 0
    assert "<|im_start|>user\nhello" in ours["chat"]
    assert ours["sampler"] == [3, 0, 0, 6.0]  # the bias lifts token 0 to the top
    assert ours["quantize"] == 0


@pytest.fixture(scope="module")
def results(embedded_f32, tmp_path_factory) -> dict[str, dict]:
    """Return what a program of llama_cpp gets, on the unpatched library and on ours, without a method."""
    folder, found = tmp_path_factory.mktemp("results"), {}
    for name, environment in (("stock", {}), ("ours", on_ours())):
        checked(run(RUN, embedded_f32, folder / f"{name}.npz", PROMPT, environment=environment))
        found[name] = dict(np.load(folder / f"{name}.npz"))
    return found


@pytest.mark.parametrize("what", ["tokens", "text"])
def test_text_without_a_method_is_that_of_llama_cpp(results, what):
    np.testing.assert_array_equal(results["ours"][what], results["stock"][what])


@pytest.mark.parametrize("what", ["logits", "embedding"])
def test_numbers_without_a_method_are_those_of_llama_cpp(results, what):
    ours, stock = results["ours"][what], results["stock"][what]
    assert np.abs(stock).max() > 0
    np.testing.assert_allclose(ours, stock, rtol=0, atol=1e-5 * np.abs(stock).max())


def test_saved_states_work_without_a_method(results):
    assert results["ours"]["text"]
    assert results["ours"]["text_after_load"] == results["ours"]["text"]


@pytest.mark.parametrize("method", METHODS)
def test_the_environment_gives_what_pylongctx_gives(embedded_model, tmp_path, method):
    """Beyond the 512 trained positions, where methods differ."""
    from pylongctx import Llama

    n, out = 700, tmp_path / "logits.npy"
    checked(run(LOGITS, embedded_model, out, n, environment=on_ours(LCTX_METHOD=method)))
    llm = Llama(
        str(embedded_model), method=method, n_ctx=1024, n_batch=256, n_threads=2, n_threads_batch=2,
        logits_all=True, verbose=False)  # fmt: skip
    llm.eval([3 + (i * i) % 1000 for i in range(n)])
    want = llm.scores[:n]
    np.testing.assert_allclose(np.load(out), want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("method", BAD_METHODS)
def test_a_bad_method_in_the_environment_fails_with_the_reason(embedded_model, tmp_path, method):
    done = run(LOGITS, embedded_model, tmp_path / "never.npy", 8, environment=on_ours(LCTX_METHOD=method))
    assert done.returncode == 1  # a Python exception, not a signal
    assert "Failed to create llama_context" in done.stderr
    assert BAD_METHODS[method] in done.stderr
    assert not (tmp_path / "never.npy").exists()


# ---- upstream's tools ----


def command(kind: str, name: str, *arguments: object) -> list[str]:
    """Return the command of ``build/tools/KIND/NAME``."""
    path = TOOLS / kind / name
    if not path.is_file():
        lacks("tools", f"{path.relative_to(ROOT)} is not built")
    # one thread: upstream's threads wait by spinning, which is slow where other programs run
    return [str(path), "-t", "1", *map(str, arguments)]


def environment(method: str | None = None, **more: str) -> dict[str, str]:
    outer = {key: value for key, value in os.environ.items() if not key.startswith(("LCTX_", "LLAMA_"))}
    return outer | ({"LCTX_METHOD": method} if method else {}) | more


def tool(kind: str, name: str, *arguments: object, method: str | None = None, **variables: str) -> str:
    """Return what ``build/tools/KIND/NAME`` prints."""
    words = command(kind, name, *arguments)
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=120, env=environment(method, **variables), input=""
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def perplexity(embedded_model):
    """Return a function: the perplexity that a tool prints for a novel."""
    text = ROOT / "bench" / "emma.txt"

    @functools.cache
    def run_tool(kind: str, n_ctx: int, method: str | None = None) -> float:
        # one sequence per batch: methods serve one sequence per context
        size = ("-c", n_ctx, "-b", n_ctx, "--chunks", 4)
        for _ in range(5):  # the tool logs from a thread that it does not always wait for
            out = tool(kind, "llama-perplexity", "-m", embedded_model, "-f", text, *size, method=method)
            if found := re.search(r"Final estimate: PPL = ([\d.]+)", out):
                return float(found.group(1))
        raise AssertionError(f"no final estimate:\n{out[-2000:]}")

    return run_tool


@pytest.mark.parametrize("n_ctx", [256, 1024])
@pytest.mark.parametrize("method", [None, "full"])
def test_perplexity_of_full_is_that_of_the_unpatched_tool(perplexity, method, n_ctx):
    assert perplexity("patched", n_ctx, method) == pytest.approx(perplexity("stock", n_ctx), rel=1e-3)


def test_a_method_changes_the_perplexity_beyond_the_trained_context(perplexity):
    full, extended = (perplexity("patched", 1024, method) for method in METHODS[::2])
    assert extended < 0.9 * full


@pytest.mark.parametrize("method", METHODS)
def test_llama_bench_runs_with_a_method(embedded_model, method):
    out = tool("patched", "llama-bench", "-m", embedded_model, "-p", 64, "-n", 4, "-r", 1, "-o", "json", method=method)
    assert [row["n_prompt"] for row in json.loads(out[out.index("[") : out.rindex("]") + 1])] == [64, 0]


@contextmanager
def tool_server(
    model: Path, folder: Path, *arguments: object, method: str | None = None, **variables: str
) -> Iterator["httpx.Client"]:
    """Run the patched llama-server on a socket of a folder, and return a client of it."""
    address = folder / "server.sock"
    words = command("patched", "llama-server", "-m", model, "--host", address, "-np", 1, *arguments)
    log = folder / "server.log"
    env = environment(method, **variables)
    with log.open("w") as output, subprocess.Popen(words, stdout=output, stderr=output, env=env) as one:
        transport = httpx.HTTPTransport(uds=str(address))
        try:
            with httpx.Client(transport=transport, base_url="http://localhost", timeout=60) as client:
                end = time.monotonic() + 60
                while not answers(client):
                    assert one.poll() is None and time.monotonic() < end, log.read_text()[-2000:]
                    time.sleep(0.1)
                yield client
        finally:
            one.kill()


def answers(client: "httpx.Client") -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("method", METHODS)
def test_llama_server_answers_with_a_method_as_the_package_does(embedded_f32, tmp_path, method):
    """To a text longer than the 512 trained positions, of which methods read different parts."""
    prompt = [3 + (i * i) % 1000 for i in range(700)]
    length = {"llama.context_length": 1024}  # the server gives a text no more than the model says
    with new(embedded_f32, method=method, n_ctx=1024, kv_overrides=length, **F32) as llm:
        expected = llm(prompt, max_tokens=12, temperature=0)["choices"][0]["text"]
    given = {"prompt": prompt, "n_predict": 12, "temperature": 0}
    words = ("-c", 1024, "-ctk", "f32", "-ctv", "f32", "--override-kv", "llama.context_length=int:1024")
    with tool_server(embedded_f32, tmp_path, *words, method=method) as client:
        assert client.post("/completion", json=given).json()["content"] == expected


def test_llama_server_names_a_bad_method(embedded_model, tmp_path):
    words = command("patched", "llama-server", "-m", embedded_model, "--host", tmp_path / "server.sock", "-np", 1)
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment("no-such-method"))
    assert done.returncode > 0  # not a signal
    assert "no-such-method" in done.stdout + done.stderr


def test_llama_cli_answers_with_a_method_as_the_package_does(embedded_f32):
    question, method = "It was the best of times, it was the " * 30, METHODS[1]
    with new(embedded_f32, method=method, n_ctx=1024, **F32) as llm:
        asked = [{"role": "user", "content": question}]
        answer = llm.create_chat_completion(asked, max_tokens=12, temperature=0)
    words = ("-c", 1024, "-ctk", "f32", "-ctv", "f32", "-n", 12, "--temp", 0, "-st", "--simple-io", "-p", question)
    out = tool("patched", "llama-cli", "-m", embedded_f32, *words, method=method)
    assert answer["choices"][0]["message"]["content"].strip() in out


SHORT = {  # what each program does with a model until it ends
    "llama-cli": ("-c", 64, "-n", 1, "-st", "--simple-io", "-p", "a", "-v"),
    "llama-bench": ("-p", 4, "-n", 0, "-r", 1, "-v"),
    "llama-perplexity": ("-f", ROOT / "bench" / "emma.txt", "-c", 64, "-b", 64, "--chunks", 1, "-v"),
}


def log_of(name: str, model: Path, folder: Path, **variables: str) -> str:
    """Return what a patched program logs about the model that it opens."""
    if name in SHORT:
        return tool("patched", name, "-m", model, *SHORT[name], **variables)
    with tool_server(model, folder, "-c", 64, "-v", **variables):
        return (folder / "server.log").read_text()


@pytest.fixture(scope="module")
def quantized(embedded_f32, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "q4_0.gguf"
    return requantized(path, embedded_f32, gguf.GGMLQuantizationType.Q4_0)


@pytest.mark.parametrize("name", ["llama-server", *SHORT])
@pytest.mark.parametrize("switch", ["1", "0"])
def test_products_of_weights_are_linked_into_each_tool(quantized, tmp_path, name, switch):
    """As in the package with the same switch: ours leave weights as they are, which ggml repacks."""
    log = log_of(name, quantized, tmp_path, LCTX_WEIGHTS=switch)
    opened = subprocess.run(
        [sys.executable, "-c", OPENED, str(quantized)],
        env=environment(LCTX_WEIGHTS=switch), capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert "model buffer size" in log
    assert "model buffer size" in opened.stderr
    found = ["CPU_REPACK model buffer size" in text for text in (log, opened.stderr)]
    assert found[0] == found[1]
    if VNNI and "REPACK = 1" in FEATURES:  # where ours are the faster ones for Q4_0
        assert found[0] == (switch == "0")
