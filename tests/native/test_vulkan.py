"""The Vulkan kernels on a device, which may be one in software: ``make vulkan-check``. See docs/gpu.md."""

import argparse
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cases import OP_CASES, ROPES, SPECS, STRETCHED, OpCase
from cases_chunks import CHUNK_CASES, ChunkCase, chunk_case, with_method
from gpu.checks import fits
from needs import lacks
from op import RARE, assert_right_choices, make_inputs, run_chunks, run_native, run_oracle, stored
from oracle import SelfExtend
from oracle_chunks import LongHeads
from session import Session, assert_same
from test_methods import evaluate, open_llama
from test_models import make
from test_ops import assert_close
from thinning import thin

from pylongctx._lib import build_info
from pylongctx.cli.arguments import Options
from pylongctx.cli.options import add_tensor_options, override_arguments
from pylongctx.planning import devices

VULKAN = Path(__file__).resolve().parents[2] / "native" / "vulkan"
SHADERS = sorted(path.name for path in VULKAN.glob("*.comp"))
BARRIERS = re.findall(r'\bbarrier\(\s*"(\w+)",\s', (VULKAN / "backend.cpp").read_text())
MODELS = ("llama", "qwen2", "gemma3", "gpt-oss", "deepseek2")
METHODS = {name: SPECS[name] for name in ("window", "selfextend", "dca", "string", "longheads-keys")} | {
    "longheads-selfextend": LongHeads(16, 64, n_recent=0, position="selfextend", n_ctx_train=64, n_ctx=256).text()
}
LONGHEADS = "longheads,chunk_size=16,window=64"
TILED = [case for case in CHUNK_CASES if case.method.tile > 1]
N, N_PROMPT = 120, 100
SMALL_BUFFERS = "GGML_VK_FORCE_MAX_ALLOCATION_SIZE"  # of ggml: a limit on those of the device, in bytes
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


def check_choices(case: ChunkCase, device: str, most: float = RARE) -> None:
    """Compare choices with the scores of the oracle, and as integers with the CPU's: near ties fall either way."""
    x = make_inputs(case)
    layer, got, want = stored(case, x), run_chunks(case, x, device=device), run_chunks(case, x)
    assert_right_choices(layer, got)
    assert_same(got.out, layer.attend(got.chunks), case.tolerance)
    once = [p for p in range(case.n_rows) if layer.tile_of(p) in (None, p)]  # the queries of a tile have one list
    other = (got.chunks != want.chunks)[once].any(-1)
    assert other.sum() <= most * other.size, f"{other.sum()} of {other.size} choices are not the CPU's"


@thin
@pytest.mark.parametrize("case", [case for case in CHUNK_CASES if fits(case) and case.method.key_bits],
                         ids=lambda case: case.name)  # fmt: skip
def test_choices_equal_the_oracle_and_the_cpu(device, case):
    check_choices(case, device)


@thin
@pytest.mark.parametrize("case", TILED, ids=lambda case: case.name)
def test_lists_of_tiles_equal_the_oracle_and_the_cpu(device, case):
    check_choices(case, device)


@pytest.mark.parametrize("representation", ["keys1", "keys2"])
@pytest.mark.parametrize("select", ["head", "group"])
def test_choices_are_the_same_integers_where_numbers_are_exact(device, representation, select):
    """Integers in channels that do not rotate, one per query, equal keys in a chunk, equal queries in a group.

    Ties are many, and all are exact.
    """
    method = LongHeads(16, 96, representation=representation, select=select)
    case = chunk_case("exact", n_rows=515, method=method, rope=ROPES["neox-partial"])
    x, n_dims = make_inputs(case), case.make_rope().n_dims
    rotates = np.arange(case.head_dim_k) < n_dims
    x.k[:] = np.where(rotates, 0, np.rint(4 * x.k[np.arange(case.n_rows) // 16 * 16]))
    x.q[:] = np.where(np.where(rotates, -np.inf, x.q) == x.q[..., n_dims:].max(-1, keepdims=True), np.rint(4 * x.q), 0)
    if select == "group":
        x.q[:, 1::2] = x.q[:, ::2]
    got, want = (run_chunks(case, x, **where).chunks for where in ({"device": device}, {}))
    np.testing.assert_array_equal(got, want)
    assert len(np.unique(want[-1], axis=0)) > 1, "all heads choose the same"


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
    assert sorted(BARRIERS) == ["attend", "choose", "index", "merge", "score", "store"]


@pytest.mark.parametrize("name", BARRIERS)
def test_every_barrier_is_needed(device, monkeypatch, name):
    """A software device gives the right answer without them: what dispatches say they use decides."""
    whole = OpCase("near", n_rows=300, n_tokens=1, near_rows=64, method=SelfExtend(4, 32))
    chosen = chunk_case("chosen", n_rows=120, n_ubatch=40, n_head=2, n_head_kv=1, method=LongHeads(16, 96))
    tiled = with_method(replace(chosen, n_rows=200, n_tokens=200, n_ubatch=200), window=64, tile=64, tile_window=64)

    def run() -> None:
        run_native(whole, make_inputs(whole), device=device)
        run_chunks(chosen, make_inputs(chosen), device=device)
        run_chunks(tiled, make_inputs(tiled), device=device)

    run()
    monkeypatch.setenv("LCTX_VK_WITHOUT", name)
    with pytest.raises(ValueError, match=rf"no barrier between \w+ and {name}, which use the same memory"):
        run()


# ---- models ----


def why_of(session: Session) -> str:
    """Return what a context says of its method and where it runs."""
    return session.ffi.string(session.lib.lctx_context_why(session.ctx)).decode()


def logits(
    path: Path, method: str | None, tokens: list[int], n_gpu_layers: int = -1, n_prompt: int = N_PROMPT, **settings
) -> np.ndarray:
    """Return logits of a prompt, then of single tokens."""
    settings = {"type_k": "f32", "type_v": "f32"} | settings
    llm = open_llama(path, method, n_ctx=256, n_gpu_layers=n_gpu_layers, logits_all=True, **settings)
    with llm:
        n = n_prompt + N - N_PROMPT
        llm.eval(tokens[:n_prompt])
        for token in tokens[n_prompt:n]:
            llm.eval([token])
        return np.array(llm.scores[:n])


def error_of(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.median(abs(got - want).max(1)) / abs(want).max())


@pytest.mark.parametrize("name", MODELS)
def test_full_equals_the_attention_of_llama_cpp_on_the_same_device(device, folder, tokens, name):
    path = make(folder, name)
    assert error_of(logits(path, "full", tokens), logits(path, None, tokens)) < STOCK


@pytest.mark.parametrize("method", METHODS)
def test_methods_equal_the_cpu(device, folder, tokens, method):
    path, spec = make(folder, "llama"), METHODS[method]
    stretched = STRETCHED.get(spec, {})
    got, want = (logits(path, spec, tokens, n, **stretched) for n in (-1, 0))
    full = logits(path, "full", tokens, 0, **stretched)
    assert error_of(got, want) < OTHER_DEVICE
    late = slice(N_PROMPT, N)  # some methods begin late
    assert error_of(got[late], want[late]) < error_of(want[late], full[late]) / 4, "the method does nothing here"


@pytest.mark.parametrize("position", ["full", "dca"])
def test_tiles_of_a_prompt_equal_the_cpu(device, folder, tokens, position):
    path, method = make(folder, "llama"), f"{LONGHEADS},position={position},tile_window=64"
    runs = (method, tokens), (method, tokens, 0), ("full", tokens, 0)
    got, want, full = (logits(path, *run, n_prompt=200) for run in runs)
    tile = slice(128, 192)
    assert error_of(got, want) < OTHER_DEVICE
    assert error_of(got[tile], want[tile]) < error_of(want[tile], full[tile]) / 4, "the method does nothing here"


@pytest.mark.parametrize(("method", "op"), [
    (f"{LONGHEADS},representation=minmax", "lctx_summarize"),
    (f"{LONGHEADS},representation=attention", "lctx_summarize"),
    (f"{LONGHEADS}+corm,window=8,recent=24,evict_every=16", "lctx_store"),
    ("corm,window=8,recent=24,evict_every=16", "lctx_store"),
])  # fmt: skip
def test_methods_that_need_more_are_refused_with_what_works(device, folder, method, op):
    with pytest.raises(ValueError, match=rf"cannot compute {op} for {method.split(',')[0]}.*use n_gpu_layers=0, or"):
        open_llama(make(folder, "llama"), method, n_ctx=256, n_gpu_layers=-1)


def test_methods_that_need_more_run_with_attention_on_the_cpu(device, folder, tokens):
    path, method = make(folder, "llama"), f"{LONGHEADS},representation=minmax"
    got, want = (logits(path, method, tokens, n, offload_kqv=False) for n in (-1, 0))
    assert error_of(got, want) < OTHER_DEVICE


@pytest.mark.parametrize("words", ["-cmoe", "-ncmoe 2"])
def test_experts_are_on_the_cpu_and_attention_on_the_device(device, folder, tokens, words):
    parser = argparse.ArgumentParser()
    add_tensor_options(Options(parser, environment=False))
    where = override_arguments(parser.parse_args(words.split()))
    path = make(folder, "qwen3moe")
    got = logits(path, LONGHEADS, tokens, **where)
    assert error_of(got, logits(path, LONGHEADS, tokens, 0)) < OTHER_DEVICE


@pytest.mark.parametrize("method", ["full", LONGHEADS])
def test_the_last_layer_is_on_the_device_and_the_first_on_the_cpu(device, folder, ffi, lib, tokens, method):
    path, n_gpu_layers = make(folder, "llama"), 2  # that of the output counts
    assert error_of(logits(path, method, tokens, n_gpu_layers), logits(path, method, tokens, 0)) < OTHER_DEVICE
    with Session(ffi, lib, path, method, {"n_gpu_layers": n_gpu_layers}) as session:
        assert re.search(r"on CPU \(.*\) and Vulkan0 \(Vulkan\)", why_of(session))


@pytest.mark.parametrize("method", ["full", LONGHEADS])
@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q5_0", "iq4_nl"])
def test_sequences_are_copied_saved_and_loaded(device, folder, tokens, kv_type, method):
    options = {"n_ctx": 256, "n_gpu_layers": -1, "type_k": kv_type, "type_v": kv_type}
    with open_llama(make(folder, "llama"), method, **options) as llm:
        llm.eval(tokens[:N_PROMPT])
        state = llm.save_state()
        llm.eval(tokens[N_PROMPT:N])
        want = np.array(llm.scores[-1])
        llm.reset()
        llm.eval(tokens[:5])
        llm.load_state(state)
        llm.eval(tokens[N_PROMPT:N])
        np.testing.assert_allclose(llm.scores[-1], want, rtol=0, atol=1e-5 * abs(want).max())


@pytest.mark.parametrize("method", ["full", LONGHEADS])
def test_a_copied_sequence_and_its_source_continue_as_on_the_cpu(device, folder, ffi, lib, tokens, method):
    """Both write to what was one page, and complete what was one chunk."""

    def run(n_gpu_layers: int) -> np.ndarray:
        sizes = {"n_ctx": 512, "n_seq_max": 2, "n_batch": 128, "n_ubatch": 64}
        with Session(ffi, lib, make(folder, "llama"), method, {"n_gpu_layers": n_gpu_layers}, **sizes) as session:
            session.decode(tokens[:90])
            assert session.copy(0, 1)
            return session.decode_mixed([(i // 20, token) for i, token in enumerate(tokens[90:130])])

    got, want = run(-1), run(0)
    assert error_of(got[:20], want[:20]) < OTHER_DEVICE
    assert error_of(got[20:], want[20:]) < OTHER_DEVICE


# ---- buffers ----


def test_rows_are_in_as_many_buffers_as_the_device_needs(device, folder, ffi, lib):
    with Session(ffi, lib, make(folder, "llama"), "full", {"n_gpu_layers": -1}) as session:
        assert ("(Vulkan, 2 buffers)" if SMALL_BUFFERS in os.environ else "(Vulkan)") in why_of(session)


def test_small_buffers_change_nothing(device):
    """Every layer has one of its own: ggml reads the limit once in a process, so these tests run again in another."""
    again = "rows_are_in or sequence or methods_equal"
    command = [sys.executable, *["-S"] * sys.flags.no_site, "-m", "pytest", "-q", "-x", __file__, "-k", again]
    env = os.environ | {SMALL_BUFFERS: str(1 << 20)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def test_the_device_says_its_driver_and_limits(device):
    found = next(one for one in devices() if one.name == device)
    assert re.search(r", \S.*, subgroups of \d+, buffers of at most \d+ MiB$", found.description)


def test_a_model_without_a_method_is_llama_cpp(device, folder, tokens):
    assert np.isfinite(evaluate(make(folder, "llama"), None, tokens[:20], n_gpu_layers=-1)).all()
