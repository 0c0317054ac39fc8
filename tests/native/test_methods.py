"""``Llama`` against the whole-model oracle: every method, beyond the trained context; refusals."""

from itertools import combinations

import numpy as np
import oracle
import pytest
from cases import LOGIT_TOLERANCE, MODEL_CASES, N_CTX_TRAIN
from model_oracle import Model
from thinning import thin

from pylongctx._enums import ROPE_SCALINGS
from pylongctx._lib import ffi, lib
from pylongctx.methods import DualChunk, ShiftedRotary


def evaluate(path, method: str, tokens: list[int], **settings) -> np.ndarray:
    """Return the logits of every token from the package, with f32 KV."""
    from pylongctx import Llama

    defaults = {"n_ctx": 256, "n_batch": 128, "n_ubatch": 64, "n_threads": 1, "n_threads_batch": 1}
    options = defaults | {"type_k": "f32", "type_v": "f32", "logits_all": True, "verbose": False} | settings
    with Llama(str(path), method=method, **options) as llm:
        llm.eval(tokens)
        return np.array(llm.scores[: len(tokens)])


def open_llama(path, method, **settings):
    from pylongctx import Llama

    return Llama(str(path), method=method, verbose=False, n_threads=1, **settings)


def assert_same_logits(got: np.ndarray, want: np.ndarray, tolerance: float = LOGIT_TOLERANCE) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * abs(want).max())


# ---- logits ----


@thin
@pytest.mark.parametrize("model", ["llama", "qwen2"])
@pytest.mark.parametrize("case", MODEL_CASES)
def test_logits_equal_the_oracle(model_path, tokens, model, case):
    method, n = MODEL_CASES[case]
    want = Model.load(model_path(model)).logits(tokens[:n], method)
    got = evaluate(model_path(model), method.text(), tokens[:n], n_ctx=n)
    assert_same_logits(got, want)


@thin
@pytest.mark.parametrize("model", ["llama-mha", "llama-wide", "llama-freqs", "llama-linear", "llama-yarn"])
@pytest.mark.parametrize("method", [oracle.SelfExtend(8, 13), oracle.Window(4, 29)], ids=["selfextend", "window"])
def test_logits_equal_the_oracle_on_other_models(model_path, tokens, model, method):
    want = Model.load(model_path(model)).logits(tokens[:160], method)
    assert_same_logits(evaluate(model_path(model), method.text(), tokens[:160]), want)


@pytest.mark.parametrize(("model", "n_ctx_train"), [
    ("llama-mha", 64), ("llama-wide", 64), ("llama-freqs", 64), ("llama-linear", 64), ("llama-yarn", 256),
])  # fmt: skip
def test_dual_chunks_equal_the_oracle_on_other_models(model_path, tokens, model, n_ctx_train):
    """The constant distance is what the model was trained on: four times the original context with its YaRN."""
    method = oracle.DualChunk(29, 11, n_ctx_train)
    want = Model.load(model_path(model)).logits(tokens[:160], method)
    assert_same_logits(evaluate(model_path(model), method.text(), tokens[:160]), want)


@pytest.mark.parametrize(("type_name", "tolerance"), [("f16", 1e-2), ("q8_0", 8e-2)])
def test_a_rounded_cache_stays_close(model_path, tokens, type_name, tolerance):
    """Head dim 64, so that q8_0 has whole blocks; the oracle keeps its cache in float64, and queries as they are."""
    method = oracle.SelfExtend(5, 16)
    want = Model.load(model_path("llama-wide")).logits(tokens[:160], method)
    got = evaluate(model_path("llama-wide"), method.text(), tokens[:160], type_k=type_name, type_v=type_name)
    assert_same_logits(got, want, tolerance)
    assert abs(got - want).max() > 0


def test_methods_differ_beyond_the_trained_context(model_path, tokens):
    """The comparison with the oracle could not fail if every method gave the same logits."""
    methods = ["full", "window,n_sink=4,window=32", "selfextend,group_size=8,neighbor_window=16", "dca"]
    results = [evaluate(model_path("llama"), method, tokens[:160])[-1] for method in methods]
    for one, other in combinations(results, 2):
        assert abs(one - other).max() > 0.1


@pytest.mark.parametrize("method", [
    "selfextend,group_size=1,neighbor_window=16",
    "selfextend,group_size=4,neighbor_window=60",
    "window,n_sink=4,window=60",
    "window,n_sink=0,window=60",
    "selfextend",
    "dca",
    "dca,chunk_size=32",
    "dca,chunk_size=51,local_window=9",
    "string,shift_offset=60,local_window=9",
    "string,shift_offset=17,local_window=17",
    "longheads,chunk_size=16,window=64",
    "longheads,chunk_size=16,window=64,representation=minmax",
    "longheads,chunk_size=16,window=64,representation=attention",
    "longheads,chunk_size=16,window=64,position=selfextend",
    "longheads,chunk_size=16,window=64,position=dca",
])  # fmt: skip
def test_methods_that_do_nothing_equal_full(model_path, tokens, method):
    path, tokens = model_path("llama"), tokens[:60]
    full = evaluate(path, "full", tokens, n_ctx=60)
    assert_same_logits(evaluate(path, method, tokens, n_ctx=60), full, 1e-5)


@pytest.mark.parametrize(("spec", "n_same"), [
    ("dca", N_CTX_TRAIN),
    ("dca,chunk_size=40", N_CTX_TRAIN),
    ("dca,chunk_size=21,local_window=10", 31),
    ("dca,chunk_size=17", 34),
])  # fmt: skip
def test_dual_chunks_equal_full_until_the_local_window_ends(model_path, tokens, spec, n_same):
    """In any n_ctx: to the token, whatever follows."""
    full = evaluate(model_path("llama"), "full", tokens[:90])
    got = evaluate(model_path("llama"), spec, tokens[:90])
    assert_same_logits(got[:n_same], full[:n_same], 1e-5)
    assert abs(got - full)[n_same].max() > 1e-3 * abs(full).max()


@pytest.mark.parametrize(("spec", "n_same"), [
    ("string", N_CTX_TRAIN // 3),
    ("string,shift_offset=40", 40),
    ("string,local_window=13", 39),
    ("string,shift_offset=27,local_window=1", 27),
])  # fmt: skip
def test_shifted_positions_equal_full_below_the_shift_offset(model_path, tokens, spec, n_same):
    """The automatic offset grows with n_ctx beyond the trained context, and is the paper's third within it."""
    n_ctx = 90 if "local_window=13" in spec else N_CTX_TRAIN
    full = evaluate(model_path("llama"), "full", tokens[:n_ctx], n_ctx=n_ctx)
    got = evaluate(model_path("llama"), spec, tokens[:n_ctx], n_ctx=n_ctx)
    assert_same_logits(got[:n_same], full[:n_same], 1e-5)
    assert abs(got - full)[n_same].max() > 1e-3 * abs(full).max()


@pytest.mark.parametrize(
    "method",
    [oracle.SelfExtend(8, 128), oracle.DualChunk(192, 64, 512), oracle.ShiftedRotary(171, 32)],
    ids=["selfextend", "dca", "string"],
)
def test_the_embedded_model_equals_the_oracle(embedded_f32, method):
    """A trained model past its 512 positions."""
    tokens = np.random.default_rng(0).integers(300, 2000, 560).tolist()
    got = evaluate(embedded_f32, method.text(), tokens, n_ctx=640)[-48:]
    want = Model.load(embedded_f32).logits(tokens, method)[-48:]
    assert_same_logits(got, want)


# ---- automatic choices ----


@pytest.mark.parametrize("n_ctx", [32, 64, 65, 100, 128, 256])
def test_automatic_selfextend_follows_the_paper(model_path, n_ctx):
    want = oracle.self_extend_auto(N_CTX_TRAIN, n_ctx)
    with open_llama(model_path("llama"), "selfextend", n_ctx=n_ctx) as llm:
        assert llm.method.group_size == want.group_size
        if want.group_size > 1:
            assert llm.method.neighbor_window == want.neighbor_window


def test_automatic_selfextend_equals_the_oracle(model_path, tokens):
    method = oracle.self_extend_auto(N_CTX_TRAIN, 200)
    want = Model.load(model_path("llama")).logits(tokens[:200], method)
    assert_same_logits(evaluate(model_path("llama"), "selfextend", tokens[:200], n_ctx=200), want)


@pytest.mark.parametrize("n_ctx", [32, 64, 200])
def test_automatic_dual_chunks_depend_on_the_trained_context(model_path, tokens, n_ctx):
    want = oracle.dual_chunk_auto(N_CTX_TRAIN)
    with open_llama(model_path("llama"), "dca", n_ctx=n_ctx) as llm:
        assert llm.method == DualChunk(want.chunk_size, want.local_window)


@pytest.mark.parametrize(("options", "chosen"), [
    ("chunk_size=48", (48, 16)),
    ("chunk_size=20", (20, 20)),
    ("local_window=9", (48, 9)),
    ("local_window=20", (44, 20)),
    ("local_window=32", (32, 32)),
])  # fmt: skip
def test_one_option_of_dual_chunks_gives_the_other(model_path, options, chosen):
    with open_llama(model_path("llama"), f"dca,{options}", n_ctx=200) as llm:
        assert llm.method == DualChunk(*chosen)


@pytest.mark.parametrize("n_ctx", [32, 64, 65, 81, 82, 100, 124])
def test_automatic_shifted_positions_follow_the_paper_and_reach_n_ctx(model_path, n_ctx):
    want = oracle.shifted_auto(N_CTX_TRAIN, n_ctx)
    with open_llama(model_path("llama"), "string", n_ctx=n_ctx) as llm:
        assert llm.method == ShiftedRotary(want.shift_offset, want.local_window)


@pytest.mark.parametrize(("options", "chosen"), [
    ("shift_offset=48", (48, 4)),
    ("shift_offset=3", (3, 3)),
    ("local_window=9", (21, 9)),
    ("local_window=30", (30, 30)),
])  # fmt: skip
def test_one_option_of_shifted_positions_gives_the_other(model_path, options, chosen):
    with open_llama(model_path("llama"), f"string,{options}", n_ctx=60) as llm:
        assert llm.method == ShiftedRotary(*chosen)


def test_default_context_is_the_trained_one_or_four_times_that(model_path):
    for method, n_ctx in (
        ("full", N_CTX_TRAIN),
        ("selfextend", 4 * N_CTX_TRAIN),
        ("dca", 4 * N_CTX_TRAIN),
        ("string", N_CTX_TRAIN),
    ):
        with open_llama(model_path("llama"), method) as llm:
            assert llm.n_ctx() == n_ctx


@pytest.mark.parametrize(
    "method", [oracle.SelfExtend(4, 16), oracle.ShiftedRotary(23, 9)], ids=["selfextend", "string"]
)
def test_settings_that_do_not_reach_n_ctx_name_the_largest(model_path, method):
    largest = method.max_ctx(N_CTX_TRAIN)
    with open_llama(model_path("llama"), method.text(), n_ctx=largest) as llm:
        assert llm.n_ctx() == largest
    with pytest.raises(ValueError, match=str(largest)):
        open_llama(model_path("llama"), method.text(), n_ctx=largest + 1)


def test_a_context_with_yarn_leaves_the_trained_length_to_the_next_one(model_path):
    settings = {"rope_scaling_type": ROPE_SCALINGS["yarn"], "rope_freq_scale": 0.25, "yarn_orig_ctx": N_CTX_TRAIN}
    with open_llama(model_path("llama"), "full", n_ctx=64, **settings) as llm:
        handle, info = llm.session.model.handle, ffi.new("lctx_model_info *")
        lib.lctx_model_get_info(handle, info)
        assert info.n_ctx_train == N_CTX_TRAIN


# ---- refusals ----


@thin
@pytest.mark.parametrize(("model", "reason"), [
    ("gpt2", "rotary"),
    ("mamba", "recurrent"),
    ("bert", "encoder"),
])  # fmt: skip
@pytest.mark.parametrize("method", ["full", "selfextend"])
def test_unsupported_models_are_refused_with_the_reason(model_path, model, reason, method):
    with pytest.raises(ValueError, match=f"(?i){reason}"):
        open_llama(model_path(model), method, n_ctx=64)


@pytest.mark.parametrize(("method", "reason"), [
    ("nonsense", "nonsense"),
    ("selfextend,groupsize=4", "groupsize"),
    ("selfextend,group_size=0", "group_size"),
    ("selfextend,group_size=-1", "group_size"),
    ("selfextend,group_size=four", "group_size"),
    ("selfextend,neighbor_window=0", "neighbor_window"),
    ("selfextend,group_size=2,neighbor_window=65", "neighbor_window"),
    ("dca,chunk_size=0", "chunk_size must be 1 .. 63"),
    ("dca,chunk_size=64", "chunk_size must be 1 .. 63"),
    ("dca,chunk_size=48,local_window=17", "local_window must be 1 .. 16"),
    ("dca,chunk_size=20,local_window=21", "local_window must be 1 .. 20"),
    ("dca,local_window=33", "local_window must be 1 .. 31"),
    ("dca,local_window=0", "local_window must be 1 .. 16"),
    ("dca,window=8", "window"),
    ("string", "allow n_ctx up to 124 with the trained context 64, not 128$"),
    ("string,shift_offset=20,local_window=5", "allow n_ctx up to 79 .*; raise shift_offset or leave it out"),
    ("string,shift_offset=0", "shift_offset must be 1 .. 64"),
    ("string,shift_offset=65", "shift_offset must be 1 .. 64"),
    ("string,local_window=0", "local_window must be 1 .. 64"),
    ("string,local_window=65", "local_window must be 1 .. 64"),
    ("string,shift_offset=20,local_window=21", "local_window must be 1 .. 20"),
    ("window,window=0", "window"),
    ("window,n_sink=-1", "n_sink"),
    ("full,window=4", "window"),
    ("longheads,chunk_size=24,window=48", "chunk_size"),
    ("longheads,chunk_size=16,window=40", "window"),
    ("longheads,chunk_size=16,window=32", "window"),
    ("longheads,chunk_size=16,window=128", "window"),
    ("longheads,chunk_size=16,window=64,position=string", "contexts up to the trained 64, not 128"),
    ("longheads,chunk_size=16,window=64,position=packed,representation=keys2", "are the paper's and go together"),
    ("longheads,chunk_size=16,window=64,select=most", "most"),
])  # fmt: skip
def test_bad_settings_are_refused_with_the_reason(ffi, lib, model_path, method, reason):
    """The C API must refuse them by itself: LCTX_METHOD and other programs do not pass through Python."""
    from session import Session

    with pytest.raises(ValueError, match=reason):
        Session(ffi, lib, model_path("llama"), method, n_ctx=128)


@pytest.mark.parametrize("type_name", ["q8_0"])
def test_types_that_do_not_divide_the_head_are_refused(model_path, type_name):
    with pytest.raises(ValueError, match=type_name):
        open_llama(model_path("llama"), "full", n_ctx=64, type_k=type_name, type_v=type_name)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"absent\.gguf"):
        open_llama(tmp_path / "absent.gguf", "full")
