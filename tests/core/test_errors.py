"""Bad input: a clear exception each, and the object stays usable."""

from types import SimpleNamespace

import numpy as np
import pytest

from pylongctx import Llama, SelfExtend, _lib
from pylongctx.errors import Aborted, ContextFull, InvalidInput, LctxError
from pylongctx.eval.perplexity import mean_nll, perplexity


@pytest.fixture(scope="module")
def llm(embedded_model):
    with Llama(str(embedded_model), n_ctx=256, verbose=False) as llm:
        yield llm
        assert len(llm("It was", max_tokens=2, temperature=0.0)["choices"]) == 1  # still usable


def make(embedded_model, **kwargs):
    Llama(str(embedded_model), **{"n_ctx": 256, "verbose": False} | kwargs).close()


# ---- constructor ----


def test_missing_model():
    with pytest.raises(ValueError, match=r"Model path does not exist: /no/such\.gguf"):
        Llama("/no/such.gguf")


def test_a_file_that_is_not_a_model(tmp_path):
    path = tmp_path / "text.gguf"
    path.write_text("not a model")
    with pytest.raises(ValueError, match=r"\w") as caught:
        Llama(str(path), verbose=False)
    assert isinstance(caught.value, InvalidInput)
    assert caught.value.status == _lib.lib.LCTX_INVALID


@pytest.mark.parametrize("name", ["n_batch", "n_ubatch", "n_threads", "n_threads_batch"])
@pytest.mark.parametrize("value", [0, -1, 2**31])
def test_counts_are_positive(embedded_model, name, value):
    with pytest.raises(ValueError, match=f"{name} must be from 1"):
        make(embedded_model, **{name: value})


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"n_ctx": -1}, ValueError, "n_ctx must be from 0"),
        ({"n_ctx": 2**40}, ValueError, "n_ctx must be from 0"),
        ({"n_ctx": 2**31 - 1}, RuntimeError, None),
        ({"n_ctx": "512"}, TypeError, "n_ctx must be an integer"),
        ({"n_batch": 1.5}, TypeError, "n_batch must be an integer"),
        ({"n_threads": True}, TypeError, "n_threads must be an integer"),
        ({"last_n_tokens_size": -1}, ValueError, "last_n_tokens_size must be from 0"),
        ({"type_k": "q9_9"}, ValueError, "unknown type_k 'q9_9'"),
        ({"type_v": 9999}, ValueError, "unknown type_v 9999"),
        ({"type_v": "q2_K"}, ValueError, None),
        ({"method": "nonsense"}, ValueError, "unknown method 'nonsense'; available: full, window, selfextend"),
        ({"method": 7}, TypeError, "a method must be a string or a method object"),
        ({"method": SelfExtend(2, 500), "n_ctx": 4096}, ValueError, "n_ctx"),
    ],
)
def test_constructor_refuses(embedded_model, kwargs, error, message):
    with pytest.raises(error, match=message):
        make(embedded_model, **kwargs)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"lora_base": "x"},
        {"numa": True},
        {"tokenizer": print},
        {"spm_infill": True},
    ],
)
def test_what_is_not_supported_says_so(embedded_model, kwargs):
    (name,) = kwargs
    with pytest.raises(NotImplementedError, match=f"{name}=.*: \\w+"):
        make(embedded_model, **kwargs)


def test_unknown_arguments_warn_with_the_closest_name(embedded_model):
    with pytest.warns(RuntimeWarning, match="'n_thread'; did you mean 'n_threads'"):
        make(embedded_model, n_thread=1)


def test_legacy_arguments_are_silent(embedded_model, recwarn):
    make(embedded_model, n_parts=-1, f16_kv=True, mul_mat_q=True, flash_attn=True)
    assert not recwarn.list


def test_gpu_layers_without_a_gpu_warn(embedded_model):
    if any(name.upper() != "CPU" for name in _lib.build_info()["backends"]):
        pytest.skip("this build has a GPU backend")
    with pytest.warns(UserWarning, match=r"no GPU backend.*pip install \. -C cmake\.define\.GGML_CUDA=ON"):
        make(embedded_model, n_gpu_layers=-1, verbose=True)


def test_gpu_layers_are_silent_without_verbose(embedded_model, recwarn):
    make(embedded_model, n_gpu_layers=-1, verbose=False)
    assert not recwarn.list


# ---- calls ----


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "a prompt must be a str or a list of tokens, not NoneType"),
        (b"It was", "a prompt must be a str or a list of tokens, not bytes"),
        (["It was", 1], "each prompt of a list must be a str or a list of tokens, not int"),
    ],
)
def test_what_is_not_a_prompt(llm, prompt, message):
    with pytest.raises(TypeError, match=message):
        llm(prompt, max_tokens=2)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "tokens is empty"),
        ([1, 2048], "token 2048 is outside the vocabulary"),
        ([-1], "token -1 is outside the vocabulary"),
        ([2**40], "outside the vocabulary"),
        ([1.5], "flat sequence of integers"),
        (["a"], "flat sequence of integers"),
        ([[1, 2]], "flat sequence of integers"),
        ([True], "flat sequence of integers"),
        ([1] * 257, r"Requested tokens \(257\) exceed context window of 256"),
    ],
)
@pytest.mark.parametrize("call", ["eval", "generate", "eval_rows"])
def test_bad_tokens(llm, call, tokens, message):
    llm.reset()
    with pytest.raises(ValueError, match=message):
        list(getattr(llm, call)(tokens) or [])
    assert llm.n_tokens == 0


def test_a_full_context_keeps_its_tokens(llm):
    llm.reset()
    llm.eval([1] * 256)
    with pytest.raises(ContextFull, match=r"Requested tokens \(257\)"):
        llm.eval([2])
    assert list(llm.eval_tokens) == [1] * 256
    llm.n_tokens = 100
    llm.eval([2])
    assert llm.n_tokens == 101


@pytest.mark.parametrize("n", [-1, 3])
def test_n_tokens_only_goes_back(llm, n):
    llm.reset()
    llm.eval([1, 2])
    with pytest.raises(ValueError, match="n_tokens can only be reduced"):
        llm.n_tokens = n


def test_sampling_needs_logits(llm):
    llm.reset()
    with pytest.raises(RuntimeError, match="no logits"):
        llm.sample()
    llm.eval([1, 2, 3])
    with pytest.raises(ValueError, match="logits_all=True"):
        llm.sample(idx=0)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"temperature": float("nan")}, ValueError, "temp must be a finite number"),
        ({"top_p": float("inf")}, ValueError, "top_p must be a finite number"),
        ({"repeat_penalty": 0.0}, ValueError, "repeat_penalty must be above 0"),
        ({"mirostat_mode": 3}, ValueError, "mirostat_mode must be 0, 1 or 2"),
        ({"logit_bias": {99999: 1.0}}, ValueError, "token 99999 is outside the vocabulary"),
        ({"logits_processor": lambda ids, logits: logits[:5]}, ValueError, "logits_processor must return shape"),
        ({"logits_processor": lambda ids, logits: logits * np.nan}, LctxError, "no token can be sampled"),
        ({"stop": [b"x"]}, TypeError, "stop must be a string"),
        ({"suffix": "x"}, NotImplementedError, "suffix"),
    ],
)
def test_completion_refuses(llm, kwargs, error, message):
    with pytest.raises(error, match=message):
        llm("It was", **kwargs)


def test_removed_samplers_warn(llm):
    with pytest.warns(RuntimeWarning, match="tfs_z"):
        llm("It was", tfs_z=0.5, max_tokens=1)


def test_a_second_bos_warns(llm):
    with pytest.warns(RuntimeWarning, match="BOS"):
        llm("<s>It was", max_tokens=1)


@pytest.mark.parametrize("call", [lambda llm: llm.tokenize("text"), lambda llm: llm.detokenize([99999])])
def test_vocabulary_refuses(llm, call):
    with pytest.raises((TypeError, ValueError), match=r"must be bytes|outside the vocabulary"):
        call(llm)


@pytest.mark.parametrize("last", [0, 10, -1])
def test_perplexity_refuses(llm, last):
    with pytest.raises(ValueError, match="last must be from 1 to 9"):
        mean_nll(llm, list(range(1, 11)), last)


def test_perplexity_equals_the_definition(embedded_model, llm):
    tokens = llm.tokenize(b"It was the best of times, it was the worst of times.")
    with Llama(str(embedded_model), n_ctx=256, logits_all=True, verbose=False) as every:
        every.eval(tokens[:-1])  # the same batch, so the same bits
        rows = Llama.logits_to_logprobs(every.scores)
    expected = -np.mean([rows[i - 1][tokens[i]] for i in range(len(tokens) - 7, len(tokens))])
    assert mean_nll(llm, tokens, 7) == pytest.approx(expected, rel=1e-3)
    assert perplexity(llm, tokens, 7) == pytest.approx(np.exp(expected), rel=1e-2)


# ---- the binding ----


@pytest.mark.parametrize(
    ("array", "message"),
    [
        ([1, 2], "scores must be a numpy array of float32, not list"),
        (np.zeros(4), "scores must be a numpy array of float32, not float64"),
        (np.zeros((4, 4), np.float32)[:, 1], "scores must be C-contiguous"),
        (np.frombuffer(bytes(16), np.float32), "scores must be writable"),
    ],
)
def test_buffers_are_checked(array, message):
    with pytest.raises(ValueError, match=message):
        _lib.out_buffer("scores", array, np.float32)


def test_status_codes_become_exceptions():
    lib = _lib.lib
    for status, cls in (
        (lib.LCTX_NO_SLOT, ContextFull),
        (lib.LCTX_ABORTED, Aborted),
        (lib.LCTX_INVALID, InvalidInput),
        (lib.LCTX_FAILED, LctxError),
    ):
        with pytest.raises(LctxError, match="why") as caught:
            _lib.check(status, _lib.ffi.new("char[]", b"why"))
        assert type(caught.value) is cls
        assert caught.value.status == status
    _lib.check(lib.LCTX_OK, _lib.ffi.NULL)


def test_a_missing_library_says_how_to_build(monkeypatch, tmp_path):
    monkeypatch.setattr(_lib, "library_path", lambda: tmp_path / "libllama.so")
    with pytest.raises(ImportError, match=r"libllama\.so is missing: build it with"):
        _lib._load()
    (tmp_path / "libllama.so").write_text("no library")
    with pytest.raises(ImportError, match=r"cannot be loaded .*: build it with"):
        _lib._load()


def test_a_library_for_gpus_says_what_it_needs(monkeypatch, tmp_path):
    library = tmp_path / "libllama.so"
    library.touch()
    monkeypatch.setattr(_lib, "library_path", lambda: library)

    def dlopen(path):
        raise OSError("libcublas.so.13: cannot open shared object file: No such file or directory")

    monkeypatch.setattr("pylongctx._ffi_generated.ffi", SimpleNamespace(dlopen=dlopen))
    with pytest.raises(ImportError, match=r"cannot be loaded .*pip install nvidia-cublas nvidia-cuda-runtime"):
        _lib._load()


def test_another_abi_version_is_refused(monkeypatch):
    fake = SimpleNamespace(lctx_abi_version=lambda: 99, LCTX_ABI_VERSION=1)
    monkeypatch.setattr("pylongctx._ffi_generated.ffi", SimpleNamespace(dlopen=lambda path: fake))
    with pytest.raises(ImportError, match="has ABI version 99, this package needs 1"):
        _lib._load()
