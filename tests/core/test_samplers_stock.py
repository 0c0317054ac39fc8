"""llama.cpp's samplers together: they choose as unpatched llama.cpp does."""

import importlib.util
import json
import subprocess
import sys

import numpy as np
from needs import lacks

from pylongctx.engine.model import Model
from pylongctx.engine.sampling.params import SamplingParams
from pylongctx.engine.sampling.sampler import Sampler

N_STEPS = 200


PEER = """
import ctypes, json, sys
import llama_cpp, numpy as np
from llama_cpp._internals import LlamaModel, LlamaSampler
path, file, before, n_steps = json.load(sys.stdin)
params = llama_cpp.llama_model_default_params()
params.vocab_only = True
model = LlamaModel(path_model=path, params=params, verbose=False)
chain, rows = LlamaSampler(), np.load(file)
chain.add_penalties(model.n_vocab(), 64, 1.1, 0.2, 0.1)
chain.add_dry(model, 0.6, 1.4, 2, 50, ["\\n", ":"])
for token in before:
    llama_cpp.llama_sampler_accept(llama_cpp.llama_sampler_chain_get(chain.sampler, 1), token)
chain.add_top_n_sigma(2.5)
chain.add_top_k(60)
chain.add_typical(0.95, 2)
chain.add_top_p(0.97, 2)
chain.add_min_p(0.01, 2)
chain.add_xtc(0.4, 0.05, 2, 11)
chain.add_temp_ext(1.1, 0.5, 1.3)
chain.add_dist(11)
found = []
for step in range(n_steps):
    row = rows[step % len(rows)]
    data = (llama_cpp.llama_token_data * len(row))(*((i, float(x), 0.0) for i, x in enumerate(row)))
    array = llama_cpp.llama_token_data_array(data, len(row), -1, False)
    llama_cpp.llama_sampler_apply(chain.sampler, ctypes.byref(array))
    found.append(array.data[array.selected].id)
    chain.accept(found[-1])
print(json.dumps(found))
"""


def test_all_of_them_choose_as_unpatched_llama_cpp(embedded_model, tmp_path):
    if importlib.util.find_spec("llama_cpp") is None:
        lacks("stock", "llama_cpp is not installed")
    model = Model(str(embedded_model), {"vocab_only": True})
    rows = np.random.default_rng(8).normal(size=(5, model.info.n_vocab)).astype(np.float32) * 4
    rows[:, 2] = -np.inf
    np.save(tmp_path / "rows.npy", rows)
    before = np.random.default_rng(9).integers(20, 24, 60).tolist()
    job = json.dumps([str(embedded_model), str(tmp_path / "rows.npy"), before, N_STEPS])
    peer = subprocess.run([sys.executable, "-c", PEER], input=job, text=True, capture_output=True, timeout=120)
    assert peer.returncode == 0, peer.stderr
    params = SamplingParams(
        seed=11,
        repeat_penalty=1.1,
        frequency_penalty=0.2,
        presence_penalty=0.1,
        dry_multiplier=0.6,
        dry_base=1.4,
        dry_penalty_last_n=50,
        dry_sequence_breakers=["\n", ":"],
        top_n_sigma=2.5,
        top_k=60,
        typical_p=0.95,
        top_p=0.97,
        min_p=0.01,
        min_keep=2,
        xtc_probability=0.4,
        xtc_threshold=0.05,
        temp=1.1,
        dynatemp_range=0.5,
        dynatemp_exponent=1.3,
    )
    sampler = Sampler(model, params, before=before)
    found = [sampler.sample(rows[step % len(rows)]) for step in range(N_STEPS)]
    model.close()
    assert len(set(found)) > 20
    assert found == json.loads(peer.stdout)
