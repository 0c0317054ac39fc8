"""``method="full"`` against unpatched llama.cpp, through the installed llama_cpp package in a process of its own."""

import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from cases import LOGIT_TOLERANCE
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

STOCK = """
import json, sys
import llama_cpp, numpy as np
jobs, tokens, out = json.load(sys.stdin)
logits = {}
for name, (path, settings) in jobs.items():
    llm = llama_cpp.Llama(path, n_ctx=256, n_batch=256, n_ubatch=256, n_threads=2, n_threads_batch=2, logits_all=True,
                          type_k=0, type_v=0, flash_attn=False, verbose=False, **settings)
    llm.eval(tokens)
    logits[name] = llm.scores[:len(tokens)].copy()
    llm.close()
np.savez(out, **logits)
"""


@pytest.fixture(scope="module")
def stock_logits(model_path, tokens, tmp_path_factory) -> dict[str, np.ndarray]:
    """Logits of every case from unpatched llama.cpp: one process for all."""
    if importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("llama_cpp (unpatched llama.cpp to compare with) is not installed")
    out = tmp_path_factory.mktemp("stock") / "logits.npz"
    jobs = {name: (str(model_path(model)), settings) for name, (model, settings) in CASES.items()}
    # LCTX_METHOD would turn a method on, if llama_cpp were pointed at our library.
    environment = {name: value for name, value in os.environ.items() if name != "LCTX_METHOD"}
    subprocess.run(
        [sys.executable, "-c", STOCK],
        input=json.dumps([jobs, tokens[:N], str(out)]),
        text=True,
        check=True,
        env=environment,
        timeout=120,
    )
    return dict(np.load(out))


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
