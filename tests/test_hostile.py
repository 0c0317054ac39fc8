"""Damaged files, exhausted memory, broken weights: an exception each, never a signal."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny_gguf

from pylongctx import Llama
from pylongctx.errors import InvalidInput, LctxError

DRIVER = Path(__file__).with_name("hostile_driver.py")
NOISE = np.random.default_rng(0).bytes(4096)


def run(*command: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"GGML_NO_BACKTRACE": "1"}
    done = [sys.executable, *command]
    return subprocess.run(done, capture_output=True, text=True, env=env, timeout=timeout, check=False)


def new(path, **kwargs):
    return Llama(str(path), **{"n_ctx": 64, "n_ubatch": 16, "verbose": False} | kwargs)


# ---- files ----


def test_no_mutation_of_a_file_ends_the_process(model_path, tmp_path):
    done = run(str(DRIVER), str(model_path("llama")), str(tmp_path / "mutated.gguf"), "0", "200")
    assert done.returncode == 0, done.stderr
    codes = dict(json.loads(line) for line in done.stdout.splitlines())
    assert len(codes) == 200
    assert set(codes.values()) <= {0, 3}, {seed: code for seed, code in codes.items() if code not in (0, 3)}
    assert Counter(codes.values())[3] > 100


def edited(path: Path, folder: Path, field: str, value: bytes) -> Path:
    """Return a copy of a file with another value of a scalar metadata field."""
    data = bytearray(path.read_bytes())
    at = data.index(field.encode()) + len(field) + 4
    data[at : at + len(value)] = value
    copy = folder / "edited.gguf"
    copy.write_bytes(data)
    return copy


@pytest.mark.parametrize("n_layer", [0, 513, 2**31])
def test_absurd_layer_counts_are_refused(model_path, tmp_path, n_layer):
    path = edited(model_path("llama"), tmp_path, "llama.block_count", np.uint32(n_layer).tobytes())
    with pytest.raises(InvalidInput, match=f"block_count must be from 1 to 512, not {n_layer}"):
        new(path)


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_heads_that_are_rotated_in_part_are_refused(model_path, tmp_path, arch):
    path = edited(model_path(arch), tmp_path, f"{arch}.rope.dimension_count", np.uint32(8).tobytes())
    with pytest.raises(InvalidInput, match=r"rope\.dimension_count must be that of a head, 16, not 8"):
        new(path)


@pytest.mark.parametrize("epsilon", [-1.0, np.nan, -np.inf, np.inf])
def test_a_bad_epsilon_is_refused(model_path, tmp_path, epsilon):
    field = "llama.attention.layer_norm_rms_epsilon"
    path = edited(model_path("llama"), tmp_path, field, np.float32(epsilon).tobytes())
    with pytest.raises(InvalidInput, match=r"layer_norm_rms_epsilon must be a number from 0"):
        new(path)


def test_a_repeated_token_is_refused(model_path, tmp_path):
    path = tmp_path / "twice.gguf"
    path.write_bytes(model_path("llama").read_bytes().replace(b"<0x51>", b"<0x52>"))
    with pytest.raises(InvalidInput, match="token b'<0x52>' is twice in the vocabulary"):
        new(path)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("output.weight", "I32", "tensor output.weight has type i32, which no computation reads"),
        ("blk.0.attn_q.weight", "I32", "tensor blk.0.attn_q.weight has type i32"),
        ("output.weight", "I8", "type i8"),
        ("output.weight", "Q8_1", "type q8_1"),
        ("output_norm.weight", "Q8_0", "tensor output_norm.weight is a vector of another type than f32"),
    ],
)
def test_weights_of_types_that_cannot_be_computed_are_refused(model_path, tmp_path, name, kind, message):
    data = bytearray(model_path("llama").read_bytes())
    reader = gguf.GGUFReader(model_path("llama"))
    info = next(tensor.field for tensor in reader.tensors if tensor.name == name)
    type_at = info.offset + sum(part.nbytes for part in info.parts[:-2])
    assert data[type_at : type_at + 4] == bytes(4)  # f32
    data[type_at] = gguf.GGMLQuantizationType[kind]
    path = tmp_path / "types.gguf"
    path.write_bytes(data)
    with pytest.raises(InvalidInput, match=message):
        new(path)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + bytes(20), NOISE], ids=len)
def test_files_that_are_no_models(tmp_path, content):
    path = tmp_path / "none.gguf"
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match=r"\w"):
        new(path)
    with pytest.raises(ValueError, match=r"\w"):
        new(tmp_path)


# ---- weights ----


@pytest.mark.parametrize("method", ["full", "window", None])
@pytest.mark.parametrize("name", ["token_embd.weight", "blk.0.attn_k.weight", "output.weight"])
def test_nan_weights_raise(tmp_path, name, method):
    path = tiny_gguf.make_model(tmp_path / "nan.gguf")
    tensor = next(t for t in gguf.GGUFReader(path, "r+").tensors if t.name == name)
    tensor.data[:] = np.nan
    tensor.data.flush()
    with new(path, method=method) as llm:
        for temperature in (0.0, 0.8):
            with pytest.raises(LctxError, match="no token can be sampled"):
                llm("ab", max_tokens=3, temperature=temperature)
        llm.eval([1, 2, 3])
        assert np.isnan(llm.scores).all()


def test_some_nan_logits_are_never_chosen(model_path):
    def spoil(input_ids, logits):
        logits[::2] = np.nan
        return logits

    with new(model_path("llama")) as llm:
        for temperature in (0.0, 0.8):
            for seed in range(5):
                stream = llm.generate([1, 5, 9], temp=temperature, logits_processor=spoil)
                llm.set_seed(seed)
                assert next(stream) % 2 == 1


# ---- memory ----


@pytest.mark.parametrize("method", ["full", "selfextend"])
def test_an_absurd_context_is_refused_before_it_is_allocated(embedded_model, method):
    code = (
        "import re, sys; from pylongctx import Llama\n"
        "try: Llama(sys.argv[1], n_ctx=2**30, method=sys.argv[2], verbose=False)\n"
        "except MemoryError as reason: print(str(reason).splitlines()[2:4])\n"
        # not getrusage: its peak is inherited from the process that started this one
        "print(int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) // 1024)"
    )
    done = run("-c", code, str(embedded_model), method)
    assert done.returncode == 0, done.stderr
    reason, peak_mib = done.stdout.splitlines()
    assert "K" in reason and reason.count("2.00 TiB") == 1
    assert int(peak_mib) < 600


LIMITED = """
import resource, sys
from pylongctx import Llama
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (int(sys.argv[2]) << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    with Llama(sys.argv[1], n_ctx=4096, method="selfextend", n_threads=1, n_threads_batch=1, verbose=False) as llm:
        llm.eval(llm.tokenize(b"It was the best of times. " * 20))
        llm.save_state()
    print("fine")
except (MemoryError, RuntimeError) as reason:
    print("refused", reason)
"""

# ggml asserts that malloc gave it memory for the nodes of a graph (ggml_init in ggml.c, ggml_gallocr in ggml-alloc.c):
# that ends the process, and no caller can prevent it.
KNOWN_ABORT = re.compile(r"ggml/src/ggml(-alloc)?\.c:\d+: GGML_ASSERT\(.* != NULL\) failed")


def test_exhausted_memory_is_an_exception_where_llama_cpp_allows_it(embedded_model):
    outcomes = []
    for mib in (1, 4, 10, 16, 22, 28, 36, 44, 400):
        done = run("-c", LIMITED, str(embedded_model), str(mib))
        if done.returncode != 0:
            assert KNOWN_ABORT.search(done.stderr), (mib, done.returncode, done.stderr[-500:])
            outcomes.append("aborted")
        else:
            outcomes.append(done.stdout.split()[0])
    assert outcomes[0] == "refused"
    assert outcomes[-1] == "fine"
    assert outcomes.count("refused") >= 2
