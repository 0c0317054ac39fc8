"""The Vulkan kernels on a device, which may be one in software: ``make vulkan-check``. See docs/gpu.md."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cases import OP_CASES, SPECS, STRETCHED, OpCase
from gpu.checks import fits
from needs import lacks
from op import make_inputs, run_native, run_oracle
from oracle import SelfExtend
from test_methods import evaluate, open_llama
from test_models import make
from test_ops import assert_close
from thinning import thin

from pylongctx._lib import build_info

VULKAN = Path(__file__).resolve().parents[1] / "native" / "vulkan"
SHADERS = sorted(path.name for path in VULKAN.glob("*.comp"))
BARRIERS = re.findall(r'\bbarrier\("(\w+)"\)', (VULKAN / "backend.cpp").read_text())
MODELS = ("llama", "qwen2", "gemma3", "gpt-oss", "deepseek2")
METHODS = ("window", "selfextend", "dca", "string")
N, N_PROMPT = 120, 100
STOCK = 1e-3  # of the largest logit: llama.cpp's own attention on the same device
OTHER_DEVICE = 0.05  # and on the CPU, whose products of weights differ


@pytest.fixture(scope="session")
def device() -> str:
    names = [name for name in build_info()["backends"] if name.startswith("Vulkan")]
    if not names:
        lacks("vulkan", "the library has no Vulkan device")
    return names[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("vulkan")


# ---- sources ----


@pytest.mark.parametrize("name", SHADERS)
def test_shaders_compile_without_warnings_and_need_little_of_a_device(tmp_path, name):
    glslc = shutil.which("glslc")
    if not glslc:
        lacks("vulkan", "glslc is not installed")
    command = [glslc, "--target-env=vulkan1.2", "-O", "-Werror", "-S", str(VULKAN / name), "-o", str(tmp_path / name)]
    subprocess.run(command, check=True)
    found = set(re.findall(r"OpCapability (\w+)", (tmp_path / name).read_text()))
    assert found <= {"Shader", "Int64", "StorageBuffer16BitAccess", "PhysicalStorageBufferAddresses"}


def test_the_kernels_stay_small():
    assert sum(len(path.read_text().splitlines()) for path in VULKAN.iterdir()) <= 1800


# ---- sub-ops ----


@thin
@pytest.mark.parametrize("case", [case for case in OP_CASES if fits(case)], ids=lambda case: case.name)
def test_store_and_attend_equal_the_oracle(device, case):
    x = make_inputs(case)
    out, lse = run_native(case, x, device=device)
    want_out, want_lse = run_oracle(case, x)
    assert_close(out, want_out, case.rounding)
    if lse is not None:
        assert_close(lse, want_lse, case.rounding)


@pytest.mark.parametrize("position", [0, 1, 2**17, 10**6 - 1, 2**24 - 1, 2**24 + 2, -5])
def test_angles_are_exact_far_from_the_beginning(device, position):
    """A key that is turned, and a query turned as far: their product depends on every digit of both angles."""
    case = OpCase("far", n_rows=1, n_tokens=1, n_head=1, n_head_kv=1, head_dim_k=64, head_dim_v=64)
    x = make_inputs(case)
    x.k_pos[:] = position
    x.q[:] = x.k[:]
    x.seg_pos[:] = 0
    got, want = (run_native(case, x, **where)[1] for where in ({"device": device}, {}))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * abs(x.k).sum())


def test_heads_that_no_octet_divides_are_refused(device):
    case = replace(OP_CASES[0], head_dim_k=20)
    with pytest.raises(ValueError, match=r"cannot run LCTX"):
        run_native(case, make_inputs(case), device=device)


def test_dispatches_have_barriers_but_for_what_ggml_sees():
    assert sorted(BARRIERS) == ["attend", "merge", "store"]


@pytest.mark.parametrize("name", BARRIERS)
def test_every_barrier_is_needed(device, monkeypatch, name):
    """A software device gives the right answer without them: what dispatches say they use decides."""
    case = OpCase("near", n_rows=300, n_tokens=1, near_rows=64, method=SelfExtend(4, 32))
    x = make_inputs(case)
    run_native(case, x, device=device)
    monkeypatch.setenv("LCTX_VK_WITHOUT", name)
    with pytest.raises(ValueError, match=rf"no barrier between \w+ and {name}, which use the same memory"):
        run_native(case, x, device=device)


# ---- models ----


def logits(path: Path, method: str | None, tokens: list[int], n_gpu_layers: int = -1, **settings) -> np.ndarray:
    """Return logits of a prompt, then of single tokens."""
    settings = {"type_k": "f32", "type_v": "f32", "op_offload": n_gpu_layers != 0} | settings
    llm = open_llama(path, method, n_ctx=256, n_gpu_layers=n_gpu_layers, logits_all=True, **settings)
    with llm:
        llm.eval(tokens[:N_PROMPT])
        for token in tokens[N_PROMPT:N]:
            llm.eval([token])
        return np.array(llm.scores[:N])


def error_of(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.median(abs(got - want).max(1)) / abs(want).max())


@pytest.mark.parametrize("name", MODELS)
def test_full_equals_the_attention_of_llama_cpp_on_the_same_device(device, folder, tokens, name):
    path = make(folder, name)
    assert error_of(logits(path, "full", tokens), logits(path, None, tokens)) < STOCK


@pytest.mark.parametrize("method", METHODS)
def test_methods_equal_the_cpu(device, folder, tokens, method):
    path, stretched = make(folder, "llama"), STRETCHED.get(SPECS[method], {})
    got, want = (logits(path, SPECS[method], tokens, n, **stretched) for n in (-1, 0))
    full = logits(path, "full", tokens, 0, **stretched)
    assert error_of(got, want) < OTHER_DEVICE
    assert error_of(got, want) < error_of(want, full) / 4, "the method does nothing here"


@pytest.mark.parametrize(("method", "op"), [
    ("longheads,chunk_size=16,window=64", "lctx_index"),
    ("corm,window=8,recent=24,evict_every=16", "lctx_store"),
])  # fmt: skip
def test_methods_that_need_more_are_refused_with_what_works(device, folder, method, op):
    with pytest.raises(ValueError, match=rf"cannot compute {op} for {method.split(',')[0]}.*use n_gpu_layers=0, or"):
        open_llama(make(folder, "llama"), method, n_ctx=256, n_gpu_layers=-1)


def test_those_run_with_attention_on_the_cpu(device, folder, tokens):
    path, method = make(folder, "llama"), "longheads,chunk_size=16,window=64"
    got, want = (logits(path, method, tokens, n, offload_kqv=False) for n in (-1, 0))
    assert error_of(got, want) < OTHER_DEVICE


@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q5_0"])
def test_sequences_are_copied_saved_and_loaded(device, folder, tokens, kv_type):
    options = {"n_ctx": 256, "n_gpu_layers": -1, "type_k": kv_type, "type_v": kv_type}
    with open_llama(make(folder, "llama"), "full", **options) as llm:
        llm.eval(tokens[:N_PROMPT])
        state = llm.save_state()
        llm.eval(tokens[N_PROMPT:N])
        want = np.array(llm.scores[-1])
        llm.reset()
        llm.eval(tokens[:5])
        llm.load_state(state)
        llm.eval(tokens[N_PROMPT:N])
        np.testing.assert_allclose(llm.scores[-1], want, rtol=0, atol=1e-5 * abs(want).max())


def test_a_model_without_a_method_is_llama_cpp(device, folder, tokens):
    assert np.isfinite(evaluate(make(folder, "llama"), None, tokens[:20], n_gpu_layers=-1)).all()
