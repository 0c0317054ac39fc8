"""Against unpatched llama.cpp, through the installed llama_cpp package in a process of its own."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import oracle
import pytest
from cases import LOGIT_TOLERANCE
from model_oracle import Model
from needs import lacks
from test_methods import assert_same_logits, evaluate

N = 200
LINEAR, YARN = 1, 2  # enum llama_rope_scaling_type
CASES = {
    "llama": ("llama", {}),
    "llama-mha": ("llama-mha", {}),
    "llama-wide": ("llama-wide", {}),
    "llama-freqs": ("llama-freqs", {}),
    "llama-linear": ("llama-linear", {}),
    "llama-yarn": ("llama-yarn", {}),
    "qwen2": ("qwen2", {}),
    "linear-parameters": ("llama", {"rope_scaling_type": LINEAR, "rope_freq_scale": 0.25}),
    "base-parameter": ("qwen2", {"rope_freq_base": 40000.0}),
    "yarn-parameters": ("llama", {"rope_scaling_type": YARN, "rope_freq_scale": 0.25, "yarn_orig_ctx": 64}),
    "yarn-all-parameters": ("qwen2", {
        "rope_scaling_type": YARN, "rope_freq_scale": 0.5, "yarn_orig_ctx": 128, "yarn_ext_factor": 0.5,
        "yarn_attn_factor": 1.25, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0}),
    "yarn-freqs": ("llama-freqs", {"rope_scaling_type": YARN, "rope_freq_scale": 0.25, "yarn_orig_ctx": 64}),
}  # fmt: skip

LLAMA_CPP = """
import json, sys
import llama_cpp, numpy as np
jobs, tokens, out = json.load(sys.stdin)
logits = {}
for name, (path, settings) in jobs.items():
    llm = llama_cpp.Llama(path, n_ctx=256, n_batch=256, n_ubatch=256, n_threads=1, n_threads_batch=1, logits_all=True,
                          type_k=0, type_v=0, flash_attn=False, verbose=False, **settings)
    llm.eval(tokens)
    logits[name] = llm.scores[:len(tokens)].copy()
    llm.close()
np.savez(out, **logits)
"""


def run_llama_cpp(jobs: dict, tokens: list[int], out: Path, **environment: str) -> dict[str, np.ndarray]:
    """Return the logits of ``{name: (path, settings)}`` from the llama_cpp package in one process."""
    if importlib.util.find_spec("llama_cpp") is None:
        lacks("stock", "llama_cpp is not installed")
    # a method from outside would be turned on wherever llama_cpp runs on our library
    outer = {name: value for name, value in os.environ.items() if name != "LCTX_METHOD"}
    subprocess.run(
        [sys.executable, "-c", LLAMA_CPP],
        input=json.dumps([jobs, tokens, str(out)]),
        text=True,
        check=True,
        env=outer | environment,
        timeout=120,
    )
    return dict(np.load(out))


@pytest.fixture(scope="module")
def stock_logits(model_path, tokens, tmp_path_factory) -> dict[str, np.ndarray]:
    """Logits of every case from unpatched llama.cpp: one process for all."""
    jobs = {name: (str(model_path(model)), settings) for name, (model, settings) in CASES.items()}
    return run_llama_cpp(jobs, tokens[:N], tmp_path_factory.mktemp("stock") / "logits.npz")


@pytest.fixture
def drop_in(model_path, tokens, tmp_path):
    """Return a function: logits of the unmodified llama_cpp package on our library, with LCTX_METHOD or without."""
    from pylongctx._lib import library_path

    def run(**environment: str) -> np.ndarray:
        jobs = {"llama": (str(model_path("llama")), {})}
        folder = str(library_path().parent)
        return run_llama_cpp(jobs, tokens[:N], tmp_path / "out.npz", LLAMA_CPP_LIB_PATH=folder, **environment)["llama"]

    return run


@pytest.mark.parametrize("case", CASES)
def test_full_equals_unpatched_llama_cpp(stock_logits, model_path, tokens, case):
    model, settings = CASES[case]
    got = evaluate(model_path(model), "full", tokens[:N], n_batch=256, n_ubatch=256, **settings)
    assert_same_logits(got, stock_logits[case], LOGIT_TOLERANCE)


def test_rope_settings_change_the_logits(stock_logits):
    """The comparison could not fail if the settings were ignored on both sides."""
    for case, base in (("linear-parameters", "llama"), ("yarn-parameters", "llama"), ("base-parameter", "qwen2"),
                       ("yarn-all-parameters", "qwen2"), ("yarn-freqs", "llama-freqs")):  # fmt: skip
        assert abs(stock_logits[case] - stock_logits[base]).max() > 0.1


def test_without_a_method_our_library_is_llama_cpp(stock_logits, drop_in):
    assert_same_logits(drop_in(), stock_logits["llama"], 1e-5)


def test_the_environment_turns_a_method_on_in_other_programs(model_path, tokens, stock_logits, drop_in):
    assert_same_logits(drop_in(LCTX_METHOD="full"), stock_logits["llama"])
    method = oracle.SelfExtend(7, 21)
    want = Model.load(model_path("llama")).logits(tokens[:N], method)
    assert_same_logits(drop_in(LCTX_METHOD=method.text()), want)
