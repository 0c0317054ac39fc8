"""Fixtures: the native library, tiny models written once per session."""

import json
import os

# Several processes run tests: numpy gets one thread, and threads of ggml that wait leave the processor to others.
# Libraries read this when they are loaded.
os.environ |= {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
# A device multiplies only the weights that it holds: its products are less exact than what tests of the CPU allow.
os.environ["GGML_OP_OFFLOAD_MIN_BATCH"] = str(2**31 - 1)

from importlib.util import find_spec
from pathlib import Path

import pylongctx.models

# Commands without a model would choose one that answers well, and download it.
os.environ.setdefault("LLAMA_ARG_MODEL", str(pylongctx.models.embedded_model()))

import numpy as np
import pytest
from cases import N_CTX_TRAIN, SPECS, STRETCHED
from needs import lacks
from session import Session
from tiny_gguf import Shape, make_model, unquantized

pytest_plugins = ["thinning"]  # --all

BASE = Shape(n_ctx_train=N_CTX_TRAIN)
MODELS = {
    "llama": {},
    "llama-mha": {"shape": Shape(n_head_kv=4, n_ctx_train=N_CTX_TRAIN), "seed": 1},
    "llama-wide": {"shape": Shape(n_embd=128, n_head=2, n_head_kv=1, n_layer=3), "seed": 2},
    "llama-freqs": {"rope_freqs": True, "seed": 3},
    "llama-linear": {"rope_scaling": ("linear", 4.0, 64), "seed": 4},
    "llama-yarn": {"rope_scaling": ("yarn", 4.0, 64), "seed": 5},
    "qwen2": {"arch": "qwen2", "seed": 6},
    "qwen2vl": {"arch": "qwen2vl"},
    "gemma2": {"arch": "gemma2", "shape": Shape()},
    "gpt2": {"arch": "gpt2", "shape": Shape(n_head_kv=4)},
    "mamba": {"arch": "mamba", "shape": Shape()},
    "bert": {"arch": "bert", "shape": Shape(n_head_kv=4)},
}


@pytest.fixture(scope="session")
def llama_cpp() -> None:
    """Skip where the package llama_cpp is not installed."""
    if find_spec("llama_cpp") is None:
        lacks("stock", "llama_cpp is not installed")


@pytest.fixture(scope="session")
def ffi():
    from pylongctx._lib import ffi

    return ffi


@pytest.fixture(scope="session")
def lib():
    from pylongctx._lib import lib

    return lib


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    """Return a function from a name in ``MODELS`` to its file, written on first use."""
    folder, made = tmp_path_factory.mktemp("models"), {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = make_model(folder / f"{name}.gguf", **{"shape": BASE} | MODELS[name])
        return made[name]

    return get


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    from pylongctx.models import embedded_model

    return Path(embedded_model())


@pytest.fixture(scope="session")
def embedded_f32(embedded_model, tmp_path_factory) -> Path:
    """Return the embedded model in f32, to be compared with an oracle that rounds nothing."""
    return unquantized(tmp_path_factory.mktemp("f32") / "f32.gguf", embedded_model)


@pytest.fixture(scope="session")
def tokens() -> list[int]:
    """Return 256 random ordinary tokens of the tiny vocabulary."""
    return np.random.default_rng(0).integers(3, BASE.n_vocab, 256).tolist()


# ---- a Llama on the embedded model ----


@pytest.fixture(scope="module")
def shared(embedded_model):
    from llamas import new

    with new(embedded_model) as llm:
        yield llm


@pytest.fixture
def llm(shared):
    """Return an empty, unseeded Llama."""
    shared.reset()
    shared.set_seed(-1)
    return shared


@pytest.fixture
def prompt(llm) -> list[int]:
    from llamas import TEXT

    return llm.tokenize(TEXT)


# ---- the web page of a module's server ----


@pytest.fixture(scope="module")
def driver():
    from page import browsing

    with browsing() as driver:
        yield driver


@pytest.fixture(scope="module")
def haystack(tmp_path_factory):
    """Return a text file with a pass key."""
    from page import write_haystack

    return write_haystack(tmp_path_factory.mktemp("files"))


@pytest.fixture
def page(driver, server, request):
    """Open the page, empty; a module may have SETTINGS of its own."""
    from page import opened

    with opened(driver, server, **getattr(request.module, "SETTINGS", {})) as page:
        yield page


# ---- contexts of the C API ----


@pytest.fixture(params=SPECS)
def method(request) -> str:
    return SPECS[request.param]


@pytest.fixture
def open_file(ffi, lib):
    """Return a function from a model's file, method and context parameters to an open session."""
    sessions = []

    def open_file(path: Path, method: str, **params) -> Session:
        params = STRETCHED.get(method.partition("+")[0], {}) | params
        sessions.append(Session(ffi, lib, path, method, **params))
        return sessions[-1]

    yield open_file
    for session in sessions:
        session.close()


@pytest.fixture
def open_session(open_file, model_path):
    """Return a function from model name, method and context parameters to an open session."""

    def open_session(model: str, method: str, **params) -> Session:
        return open_file(model_path(model), method, **params)

    return open_session


@pytest.fixture
def open_llama():
    """Return a function from a file and its arguments to an open Llama, which is closed after the test."""
    from llamas import new

    opened = []

    def open_llama(path, **options):
        opened.append(new(path, **options))
        return opened[-1]

    yield open_llama
    for llm in opened:
        llm.close()


@pytest.fixture
def strict_arena(monkeypatch):
    """Let the system stop who reads or writes memory that was not committed, or was given back."""
    monkeypatch.setenv("LCTX_STRICT_ARENA", "1")


# ---- CUDA kernels on the CPU ----


@pytest.fixture
def emulated(monkeypatch):
    """Run the CUDA kernels on the CPU; the function that is returned goes back to the CPU's own."""
    from pylongctx._lib import build_info

    if not build_info()["emulates_cuda"]:
        lacks("harness")
    monkeypatch.setenv("LCTX_EMULATE_CUDA", "1")
    return lambda: monkeypatch.delenv("LCTX_EMULATE_CUDA")


@pytest.fixture
def launches(emulated, monkeypatch, tmp_path):
    """Return a function that gives, and forgets, what was launched."""
    log = tmp_path / "launches.jsonl"
    monkeypatch.setenv("LCTX_EMULATED_LOG", str(log))

    def take() -> list[dict]:
        done = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        log.unlink()
        return done

    return take


@pytest.fixture
def drafted(monkeypatch):
    """Return the drafts of all jobs."""
    from pylongctx.engine.drafting import Drafting

    found = []
    first = Drafting.__init__

    def record(self, model):
        first(self, model)
        found.append(self)

    monkeypatch.setattr(Drafting, "__init__", record)
    return found


@pytest.fixture
def drafts(drafted, monkeypatch, request):
    """Let each step draft, at most N_DRAFT tokens of the module, and return the drafts of all jobs."""
    from pylongctx.engine.drafting import DraftLength

    n_draft = request.module.N_DRAFT
    monkeypatch.setattr(DraftLength, "choose", lambda self, times, n_others, most: min(n_draft, most))
    return drafted
