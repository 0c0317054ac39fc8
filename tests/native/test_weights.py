"""Which weights ggml repacks when a model is opened (``native/weights/weights.cpp``), and what comes out of them."""

import os
import subprocess
import sys
from pathlib import Path

import geometries
import gguf
import numpy as np
import pytest
import random_blocks
import random_model
from llamas import new
from tiny_gguf import requantized

from pylongctx._lib import lib, text
from pylongctx.engine.model import Model

FEATURES = text(lib.lctx_system_info())
VNNI = "AVX512_VNNI = 1" in FEATURES
EXPERTS = random_model.Shape(512, 256, 2, 4, 2, 1024, 1024, key_length=64)
SHAPE = random_model.Shape(512, 256, 2, 4, 2, 512, 1024, n_rot=0)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    """Return models with weights in Q4_K and in Q4_0, and one with experts in MXFP4."""
    folder = tmp_path_factory.mktemp("weights")
    k = random_model.write_model(folder / "q4_k.gguf", random_model.LLAMA, SHAPE, qtype=random_blocks.Q4_K)
    legacy = requantized(folder / "q4_0.gguf", k, gguf.GGMLQuantizationType.Q4_0)
    mixture = random_model.write_model(folder / "mxfp4.gguf", geometries.GPT_OSS, EXPERTS, qtype=random_blocks.MXFP4)
    return {"Q4_K": str(k), "Q4_0": str(legacy), "MXFP4": str(mixture)}


@pytest.mark.skipif("REPACK = 1" not in FEATURES or "AVX2 = 1" not in FEATURES, reason="ggml repacks these for AVX2")
@pytest.mark.parametrize(("kind", "repacked"), [("Q4_0", not VNNI), ("Q4_K", False), ("MXFP4", not VNNI)])
def test_weights_stay_plain_where_ggml_has_the_faster_kernel_for_those(models, capfd, kind, repacked):
    lib.lctx_log_set_level(3)
    Model(models[kind], {"n_gpu_layers": 0}).close()
    lib.lctx_log_set_level(1)
    printed = capfd.readouterr().err
    assert "model buffer size" in printed
    assert ("CPU_REPACK model buffer size" in printed) == repacked


def run_with(switch: str, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own: the switch is read when the library is loaded."""
    command, env = [sys.executable, "-c", program, *arguments], {**os.environ, "LCTX_WEIGHTS": switch}
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True)


OPENED = """
import sys
from pylongctx._lib import lib
from pylongctx.engine.model import Model

lib.lctx_log_set_level(3)
Model(sys.argv[1], {"n_gpu_layers": 0}).close()
"""


@pytest.mark.skipif("REPACK = 1" not in FEATURES or "AVX2 = 1" not in FEATURES, reason="ggml repacks these for AVX2")
@pytest.mark.parametrize(("switch", "repacked"), [("1", False), ("0", True)])
def test_weights_may_be_left_to_ggml(models, switch, repacked):
    printed = run_with(switch, OPENED, models["Q4_K"]).stderr
    assert "model buffer size" in printed
    assert ("CPU_REPACK model buffer size" in printed) == repacked


DETERMINISTIC = """
import sys
import numpy as np
from pylongctx import Llama

def logits(n_batch):
    options = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "logits_all": True, "verbose": False}
    with Llama(sys.argv[1], deterministic=True, **options) as llm:
        for first in range(0, len(TOKENS), n_batch):
            llm.eval(TOKENS[first : first + n_batch])
        return llm.scores[: len(TOKENS)].copy()

TOKENS = np.random.default_rng(0).integers(3, 512, 37).tolist()
np.testing.assert_array_equal(logits(37), logits(1))
"""


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K"])
def test_products_whose_order_is_promised_are_not_left_to_ggml(models, kind):
    run_with("0", DETERMINISTIC, models[kind])


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K"])
def test_a_prompt_gives_the_logits_of_its_tokens_one_by_one(models, kind):
    tokens = np.random.default_rng(0).integers(3, 512, 37).tolist()
    with new(models[kind], type_k="f32", type_v="f32", logits_all=True) as llm:
        llm.eval(tokens)
        at_once = np.array(llm.scores[: len(tokens)])
        llm.reset()
        for token in tokens:
            llm.eval([token])
        one_by_one = np.array(llm.scores[: len(tokens)])
    apart = np.abs(at_once - one_by_one) / one_by_one.std()
    # activations are rounded to 8 bits: one that falls on the other side moves all logits after it
    assert np.median(apart) < 0.01
    assert apart.max() < 0.1
    np.testing.assert_allclose(at_once[0], one_by_one[0], atol=1e-5 * one_by_one.std())


# in a process of its own: memory that was freed before may be advised already
ADVISED = """
import re, sys
from pathlib import Path
from pylongctx._enums import LOAD_MODES
from pylongctx.engine.model import Model

def advised():
    mappings = re.split(r"\\n(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text())
    return sum(int(re.search(r"Size: +(\\d+)", one)[1]) for one in mappings if " hg" in one.splitlines()[-1])

before = advised()
model = Model(sys.argv[1], {"n_gpu_layers": 0, **LOAD_MODES[sys.argv[2]]})
print(advised() - before)
"""


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="this system has no huge pages")
@pytest.mark.parametrize(("load", "huge"), [("none", True), ("mmap", False)])
def test_weights_that_are_not_mapped_may_lie_on_huge_pages(tmp_path, load, huge):
    shape = random_model.Shape(512, 512, 2, 8, 2, 4096, 1024, n_rot=0)
    path = random_model.write_model(tmp_path / "q8_0.gguf", random_model.LLAMA, shape, qtype=random_blocks.Q8_0)
    command = [sys.executable, "-c", ADVISED, str(path), load]
    kib = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert (kib > path.stat().st_size >> 11) == huge


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K", "Q4_0", "MXFP4"])
def test_experts(tmp_path, name):
    """Against the same weights in f32. Activations have 8 bits, so a router may choose otherwise now and then."""
    kind = gguf.GGMLQuantizationType[name]
    path = random_model.write_model(tmp_path / "k.gguf", geometries.GPT_OSS, EXPERTS, qtype=kind)
    dense = requantized(tmp_path / "f32.gguf", path, gguf.GGMLQuantizationType.F32)
    tokens = np.random.default_rng(0).integers(3, 512, 48).tolist()
    logits = {}
    for file, n_batch in ((dense, 1), (path, 1), (path, 3), (path, 16)):
        with new(str(file), type_k="f32", type_v="f32", logits_all=True) as llm:
            for first in range(0, len(tokens), n_batch):
                llm.eval(tokens[first : first + n_batch])
            logits[file, n_batch] = np.array(llm.scores[: len(tokens)])
    want = logits.pop((dense, 1))
    for got in logits.values():
        assert np.median(np.abs(got - want), axis=1).mean() < 0.05 * want.std()
