"""Damaged files, exhausted memory, broken weights: an exception each, never a signal."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import hostile_driver
import numpy as np
import pytest
import tiny_gguf
from gguf_mutator import Gguf

from pylongctx import Llama, loading
from pylongctx.errors import InvalidInput, LctxError

FUZZ = Path(__file__).resolve().parents[1] / "fuzz.py"
NOISE = np.random.default_rng(0).bytes(4096)


def run(*command: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"GGML_NO_BACKTRACE": "1"}
    done = [sys.executable, *command]
    return subprocess.run(done, capture_output=True, text=True, env=env, timeout=timeout, check=False)


def new(path, **kwargs):
    return Llama(str(path), **{"n_ctx": 64, "n_ubatch": 16, "verbose": False} | kwargs)


# ---- files ----


def test_no_mutation_of_a_file_ends_the_process(tmp_path):
    done = run(str(FUZZ), "files", str(tmp_path), "--count", "300")
    assert done.returncode == 0, done.stdout + done.stderr
    codes = Counter(json.loads(line)[2] for line in (tmp_path / "files.jsonl").read_text().splitlines())
    assert set(codes) == {0, 3}
    assert codes[0] > 30 and codes[3] > 100 and codes.total() == 300
    assert done.stdout.startswith(f"files: 300 mutations, {codes[0]} ran, {codes[3]} refused, 0 signals, 0 hangs")


def test_the_fuzzer_sees_a_process_that_dies(tmp_path, monkeypatch):
    """A seed whose child is killed or hangs has a line of its own, and the seeds after it run."""

    def use(path, seed):
        if seed == 1:
            os.abort()
        while seed == 3:
            pass
        return 0

    monkeypatch.setattr(hostile_driver, "LIMIT", 1)
    monkeypatch.setattr(hostile_driver, "use", use)
    bases = [tiny_gguf.make_model(tmp_path / "llama.gguf")]
    lines = list(hostile_driver.run(range(5), bases, tmp_path / "mutated.gguf"))
    assert [line[:3] for line in lines] == [[i, "llama", code] for i, code in enumerate([0, -6, 0, "hang", 0])]


def changed(path: Path, folder: Path, key: str, kind: int, value: Any) -> Path:
    """Return a copy of a file with another value of a key, which may be new."""
    file = Gguf.read(path)
    file.meta = [one for one in file.meta if one[0] != key.encode()] + [(key.encode("latin-1"), kind, value)]
    copy = folder / "changed.gguf"
    copy.write_bytes(file.write())
    return copy


U32, F32, TEXT, LIST = 4, 6, 8, 9
REFUSED = [
    ("llama", "x.epsilon", TEXT, b"x", "x.epsilon must be at least 0"),
    ("llama", "llama.expert_count", U32, 2000, "expert_count must be at most 1024, not 2000"),
    ("llama", "llama.expert_used_count", U32, 2, "expert_used_count must be from 1 to expert_count, 0, not 2"),
    ("mixtral", "llama.expert_used_count", U32, 0, "expert_used_count must be from 1 to expert_count, 4, not 0"),
    ("mixtral", "llama.expert_group_count", U32, 4, "expert_group_count must be less than expert_count, 4, not 4"),
    ("mixtral", "llama.expert_group_count", U32, 3, "does not divide 4 experts"),
    ("llama", "llama.rope.scaling.type", TEXT, b"nonsense", "rope.scaling.type 'nonsense' is unknown"),
    ("llama", "general.alignment", U32, 1, "general.alignment must be a multiple of 32, not 1"),
    ("llama", "llama.block_count", U32, 0, "block_count must be from 1 to 512, not 0"),
    ("llama", "llama.nextn_predict_layers", U32, 3, "nextn_predict_layers must be at most 1 of block_count, 2, not 3"),
    ("qwen3next", "qwen3next.rope.dimension_count", U32, 65535, "must be even and at most the head size, 64"),
    ("lfm2", "lfm2.rope.dimension_count", U32, 3, "must be even and at most the head size, 32, not 3"),
    ("llama", "llama.vocab_size", U32, 2**31, "vocab_size must be at most 4194304"),
    ("llama", "tokenizer.ggml.tokens", LIST, (TEXT, [b"a" * 5000]), "a token is longer than 4096 bytes"),
    ("llama", "llama.attention.head_count_kv", LIST, (U32, [3, 3]), "must be a multiple of attention.head_count_kv, 3"),
    ("llama", "tokenizer.ggml.model", TEXT, b"none", "it has no vocabulary (tokenizer.ggml.model is none)"),
    ("llama", "tokenizer.ggml.model", TEXT, b"no_vocab", "it has no vocabulary (tokenizer.ggml.model is no_vocab)"),
    ("llama", "tokenizer.ggml.model", TEXT, b"rwkv", "tokens begin with the byte b'<', which is not a token"),
    ("llama", "llama.rope.freq_base", F32, float("nan"), "rope.freq_base must be from 1.01 to 1e+18, not nan"),
    ("llama", "llama.rope.freq_base", F32, -1.0, "rope.freq_base must be from 1.01 to 1e+18, not -1"),
    ("llama", "prism.hadamard.block_size", U32, 1024, "its keys prism.hadamard.* say that its weights"),
    ("llama", "some.QuaRot.version", U32, 1, "its keys some.QuaRot.* say"),
    ("llama", "llama.attention.rotation", U32, 1, "its keys llama.attention.* say"),
    ("llama", "llama.rope.scaling.factor", F32, float("inf"), "rope.scaling.factor must be from 0 to 1e+09, not inf"),
]


@pytest.mark.parametrize(
    ("arch", "key", "kind", "value", "reason"), REFUSED, ids=[f"{r[1]}={r[3]}"[:50] for r in REFUSED]
)
def test_what_llama_cpp_asserts_is_refused(tmp_path, arch, key, kind, value, reason):
    path = changed(tiny_gguf.make_model(tmp_path / "base.gguf", arch=arch), tmp_path, key, kind, value)
    with pytest.raises(InvalidInput, match=re.escape(reason)):
        new(path)


@pytest.mark.parametrize("key", ["general.rotation.note", "quantize.imatrix.file", "mycompany.build", "llama.own"])
def test_facts_of_converters_are_harmless(tmp_path, key):
    new(changed(tiny_gguf.make_model(tmp_path / "base.gguf"), tmp_path, key, TEXT, b"x")).close()


@pytest.mark.parametrize("method", ["auto", None, "window"])
@pytest.mark.parametrize(
    ("arch", "key", "kind", "value"),
    [
        ("jamba", "jamba.ssm.inner_size", U32, 2**24),
        ("llama", "llama.attention.head_count_kv", LIST, (U32, [4, 0])),
        ("llama", "tokenizer.ggml.model", TEXT, b"bert"),
        ("deepseek2", "deepseek2.attention.head_count_kv", U32, 2),
    ],
)
def test_what_ends_another_process_is_refused(tmp_path, arch, key, kind, value, method):
    """Nothing here knows why: the file is opened where that does no harm."""
    path = changed(tiny_gguf.make_model(tmp_path / "base.gguf", arch=arch), tmp_path, key, kind, value)
    with pytest.raises(ValueError, match=r"\w"):
        new(path, method=method)


def test_a_vocabulary_that_ends_the_process_is_refused(tmp_path):
    """A text that begins with a token that the vocabulary does not have: asked where that does no harm."""
    file = Gguf.read(
        changed(tiny_gguf.make_model(tmp_path / "base.gguf"), tmp_path, "tokenizer.ggml.model", TEXT, b"t5")
    )
    file.meta = [one for one in file.meta if one[0] != b"tokenizer.ggml.bos_token_id"]
    (tmp_path / "no_bos.gguf").write_bytes(file.write())
    with pytest.raises(InvalidInput, match=r"it crashes llama.cpp: GGML_ASSERT\(special_bos_id"):
        new(tmp_path / "no_bos.gguf")


WORLD = [b"<s>", *(b"\\x%02x" % i for i in range(256))]  # how RWKV's vocabulary spells bytes


@pytest.mark.parametrize("n", [257, 256])
def test_a_vocabulary_of_rwkv_has_all_bytes_that_tokens_begin_with(tmp_path, n):
    words = [*WORLD[:n], b"\xff" * 3, *(b"word%d" % i for i in range(300))]
    base = tiny_gguf.make_model(tmp_path / "base.gguf")
    path = changed(base, tmp_path, "tokenizer.ggml.model", TEXT, b"rwkv")
    path = changed(path, tmp_path, "tokenizer.ggml.tokens", LIST, (TEXT, words[: n_vocab(base)]))
    if n == 257:
        with new(path) as llm:
            assert len(llm.tokenize(b"a\x00b <s", add_bos=False)) == 6
    else:
        with pytest.raises(InvalidInput, match=r"tokens begin with the byte b'\\xff', which is not a token"):
            new(path)


def n_vocab(path: Path) -> int:
    return len(next(value[1] for key, _, value in Gguf.read(path).meta if key == b"tokenizer.ggml.tokens"))


def test_factors_of_recurrent_layers_have_one_type(tmp_path):
    file = Gguf.read(tiny_gguf.make_model(tmp_path / "base.gguf", arch="granitehybrid"))
    at = max(i for i, tensor in enumerate(file.tensors) if tensor[0].endswith(b".ssm_a"))
    name, dims, _, offset = file.tensors[at]
    file.tensors[at] = (name, dims, gguf.GGMLQuantizationType.BF16.value, offset)
    (tmp_path / "types.gguf").write_bytes(file.write())
    with pytest.raises(InvalidInput, match="ssm_a is a vector whose type is not f32"):
        new(tmp_path / "types.gguf")


def test_a_file_cannot_switch_its_check_off(tmp_path):
    base = tiny_gguf.make_model(tmp_path / "base.gguf")
    path = changed(changed(base, tmp_path, "\xff\xfe", U32, 1), tmp_path, "llama.block_count", U32, 0)
    with pytest.raises(InvalidInput, match="block_count must be from 1 to 512, not 0"):
        new(path)


def test_a_trial_that_took_long_is_remembered(tmp_path, monkeypatch):
    path = tiny_gguf.make_model(tmp_path / "base.gguf")
    tried: list[str] = []
    monkeypatch.setenv("LCTX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(loading, "SLOW_TRIAL", 0.0)
    monkeypatch.setattr(loading, "guarded", lambda what, *parts, seconds: tried.append(parts[1]) or "")
    for method in ("full", "full", "window", "full"):
        loading._tried.clear()
        loading.try_model(str(path), {}, {"n_ctx": 64}, method)
    assert tried == [str(path), str(path)]
    path.write_bytes(path.read_bytes() + b"\0")  # another file
    loading.try_model(str(path), {}, {"n_ctx": 64}, "full")
    assert len(tried) == 3


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
    with pytest.raises(InvalidInput, match=r"rope\.dimension_count must equal the head size, 16, not 8"):
        new(path)


@pytest.mark.parametrize("epsilon", [-1.0, np.nan, -np.inf, np.inf])
def test_a_bad_epsilon_is_refused(model_path, tmp_path, epsilon):
    field = "llama.attention.layer_norm_rms_epsilon"
    path = edited(model_path("llama"), tmp_path, field, np.float32(epsilon).tobytes())
    with pytest.raises(InvalidInput, match=r"layer_norm_rms_epsilon must be at least 0"):
        new(path)


def test_a_repeated_token_is_refused(model_path, tmp_path):
    path = tmp_path / "twice.gguf"
    path.write_bytes(model_path("llama").read_bytes().replace(b"<0x51>", b"<0x52>"))
    with pytest.raises(InvalidInput, match="token b'<0x52>' occurs twice in the vocabulary"):
        new(path)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("output.weight", "I32", "tensor output.weight has type i32, which no computation supports"),
        ("blk.0.attn_q.weight", "I32", "tensor blk.0.attn_q.weight has type i32"),
        ("output.weight", "I8", "type i8"),
        ("output.weight", "Q8_1", "type q8_1"),
        ("output_norm.weight", "Q8_0", "tensor output_norm.weight is a vector whose type is not f32"),
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
def test_files_that_are_not_models(tmp_path, content):
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


def test_a_damaged_row_of_the_output_names_its_token(tmp_path):
    path = tiny_gguf.make_model(tmp_path / "row.gguf")
    tensor = next(t for t in gguf.GGUFReader(path, "r+").tensors if t.name == "output.weight")
    tensor.data[17] = np.nan
    tensor.data.flush()
    with new(path, logits_all=True) as llm:
        llm.eval([1, 2, 3])
        for choose in (
            lambda: llm.sample(temp=0.0),
            lambda: llm.sample(temp=0.8),
            lambda: next(llm.generate([1, 2], temp=0.0)),
            lambda: llm("ab", max_tokens=2),
            lambda: llm("ab", max_tokens=2, logprobs=3, temperature=0.0),
            lambda: llm("ab", max_tokens=1, logprobs=3, echo=True),
        ):
            with pytest.raises(LctxError, match=r"the logit of token 17 is nan; the model is damaged"):
                choose()
        llm.eval([4])  # the context can still be used
        assert np.isnan(llm.scores[-1]).nonzero()[0].tolist() == [17]


@pytest.mark.parametrize(("value", "named"), [(np.nan, "token 6 is NaN"), (np.inf, "token 6 is infinite")])
def test_a_processor_that_spoils_logits_is_named(model_path, value, named):
    def spoil(input_ids, logits):
        logits[6:20] = value
        return logits

    def forbid(input_ids, logits):
        logits[::2] = -np.inf
        return logits

    with new(model_path("llama")) as llm:
        for temperature in (0.0, 0.8):
            with pytest.raises(LctxError, match=named):
                next(llm.generate([1, 5, 9], temp=temperature, logits_processor=spoil))
            assert next(llm.generate([1, 5, 9], temp=temperature, logits_processor=forbid)) % 2 == 1


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
