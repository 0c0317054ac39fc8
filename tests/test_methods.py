"""``Llama`` against the whole-model oracle: every method, beyond the trained context; refusals; spec strings."""

import pickle
from dataclasses import FrozenInstanceError, fields
from itertools import combinations, product

import numpy as np
import oracle
import pytest
from cases import LOGIT_TOLERANCE, MODEL_CASES, N_CTX_TRAIN
from model_oracle import Model

import pylongctx
from pylongctx.methods import (
    H2O,
    METHODS,
    Composition,
    Corm,
    DualChunk,
    Full,
    LongHeads,
    Scissorhands,
    SelfExtend,
    Tova,
    parse,
)

BASES = [Full, SelfExtend, LongHeads, DualChunk]
RULES = [Corm, H2O, Scissorhands, Tova]
LARGEST = 2**30


def evaluate(path, method: str, tokens: list[int], **settings) -> np.ndarray:
    """Return the logits of every token from the package, with f32 KV."""
    from pylongctx import Llama

    defaults = {"n_ctx": 256, "n_batch": 128, "n_ubatch": 64, "n_threads": 2, "n_threads_batch": 2}
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


@pytest.mark.parametrize("model", ["llama", "qwen2"])
@pytest.mark.parametrize("case", MODEL_CASES)
def test_logits_equal_the_oracle(model_path, tokens, model, case):
    method, n = MODEL_CASES[case]
    want = Model.load(model_path(model)).logits(tokens[:n], method)
    got = evaluate(model_path(model), method.text(), tokens[:n], n_ctx=n)
    assert_same_logits(got, want)


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


@pytest.mark.parametrize(("type_name", "tolerance"), [("f16", 1e-2), ("q8_0", 5e-2)])
def test_a_rounded_cache_stays_close(model_path, tokens, type_name, tolerance):
    """Head dim 64, so that q8_0 has whole blocks; the oracle keeps its cache in float64."""
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
    "longheads,chunk_size=16,window=64",
    "longheads,chunk_size=16,window=64,select_block=8,representation=minmax",
    "longheads,chunk_size=16,window=64,position=grouped,group_size=1",
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


@pytest.mark.parametrize(
    "method", [oracle.SelfExtend(8, 128), oracle.DualChunk(192, 64, 512)], ids=["selfextend", "dca"]
)
def test_the_embedded_model_equals_the_oracle(embedded_f32, method):
    """A trained model past its 512 positions."""
    tokens = np.random.default_rng(0).integers(300, 2000, 560).tolist()
    got = evaluate(embedded_f32, method.text(), tokens, n_ctx=1024)[-48:]
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


def test_default_context_is_the_trained_one_or_four_times_that(model_path):
    for method, n_ctx in (("full", N_CTX_TRAIN), ("selfextend", 4 * N_CTX_TRAIN), ("dca", 4 * N_CTX_TRAIN)):
        with open_llama(model_path("llama"), method) as llm:
            assert llm.n_ctx() == n_ctx


def test_settings_that_do_not_reach_n_ctx_name_the_largest(model_path):
    method = oracle.SelfExtend(4, 16)
    largest = method.max_ctx(N_CTX_TRAIN)
    with open_llama(model_path("llama"), method.text(), n_ctx=largest) as llm:
        assert llm.n_ctx() == largest
    with pytest.raises(ValueError, match=str(largest)):
        open_llama(model_path("llama"), method.text(), n_ctx=largest + 1)


# ---- refusals ----


@pytest.mark.parametrize(("model", "reason"), [
    ("gemma2", "sliding"),
    ("gpt2", "rotary"),
    ("mamba", "recurrent"),
    ("bert", "encoder"),
    ("qwen2vl", "multi-section"),
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
    ("window,window=0", "window"),
    ("window,n_sink=-1", "n_sink"),
    ("full,window=4", "window"),
    ("longheads,chunk_size=24,window=48", "chunk_size"),
    ("longheads,chunk_size=16,window=40", "window"),
    ("longheads,chunk_size=16,window=32", "window"),
    ("longheads,chunk_size=16,window=128", "window"),
    ("longheads,chunk_size=16,window=64,select_block=5", "select_block"),
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


# ---- rules ----


@pytest.mark.parametrize(("rule", "spec"), [
    (Corm(), "corm,window=256,recent=256"),
    (Corm(64, 0, 1), "corm,window=64,recent=0,evict_every=1"),
    (H2O(), "h2o"),
    (H2O(512, 0, 16), "h2o,budget=512,recent=0,evict_every=16"),
    (Scissorhands(), "scissorhands"),
    (Scissorhands(512, 16, 128, 32), "scissorhands,budget=512,window=16,recent=128,evict_every=32"),
    (Tova(), "tova"),
    (Tova(1, 1), "tova,budget=1,evict_every=1"),
])  # fmt: skip
def test_specs_of_rules(rule, spec):
    assert str(rule) == spec
    assert parse(spec) == rule


@pytest.mark.parametrize("cls", RULES)
def test_any_choice_of_options_round_trips(cls):
    """An option left out of the spec is the default, one that is there is read back as itself."""
    names = [field.name for field in fields(cls)]
    values = {"budget": 400, "window": 3, "recent": 7, "evict_every": 5}
    for n in range(len(names) + 1):
        for chosen in combinations(names, n):
            options = {name: values[name] for name in chosen}
            rule = cls(**options)
            assert parse(str(rule)) == rule
            assert parse(",".join([cls.name, *(f"{name}={value}" for name, value in options.items())])) == rule
            assert all(getattr(rule, name) == value for name, value in options.items())


def test_options_that_are_left_out():
    defaults = {cls: [(field.name, field.default) for field in fields(cls)] for cls in RULES}
    assert defaults == {
        Corm: [("window", 256), ("recent", 256), ("evict_every", None)],
        H2O: [("budget", None), ("recent", None), ("evict_every", None)],
        Scissorhands: [("budget", None), ("window", None), ("recent", None), ("evict_every", None)],
        Tova: [("budget", None), ("evict_every", None)],
    }
    assert parse("corm") == Corm()


@pytest.mark.parametrize(("cls", "option"), [(cls, field.name) for cls in RULES for field in fields(cls)])
def test_sizes_of_rules_have_limits(cls, option):
    least = 0 if option == "recent" else 1
    for value in (least, LARGEST):
        assert getattr(cls(**{option: value}), option) == value
    for value, message in ((least - 1, f"at least {least}, not {least - 1}"), (LARGEST + 1, f"at most {LARGEST}")):
        with pytest.raises(ValueError, match=f"^{option} must be {message}"):
            cls(**{option: value})
        with pytest.raises(ValueError, match=f"^{option} must be {message}"):
            parse(f"longheads+{cls.name},{option}={value}")


@pytest.mark.parametrize(("cls", "option"), [(cls, field.name) for cls in RULES for field in fields(cls)])
@pytest.mark.parametrize("value", [1.0, "8", True, [8]], ids=repr)
def test_sizes_of_rules_are_integers(cls, option, value):
    with pytest.raises(TypeError, match=f"^{option} must be an integer"):
        cls(**{option: value})


@pytest.mark.parametrize(("cls", "option"), [(Corm, "window"), (Corm, "recent"), (LongHeads, "n_recent")])
def test_sizes_with_a_default_are_given(cls, option):
    with pytest.raises(TypeError, match=f"^{option} must be an integer, not None"):
        cls(**{option: None})


@pytest.mark.parametrize("cls", [H2O, Scissorhands])
def test_recent_is_below_the_budget(cls):
    for recent in (64, 65):
        with pytest.raises(ValueError, match=rf"^recent must be below budget \(64\), not {recent}$"):
            cls(budget=64, recent=recent)
    assert cls(budget=64, recent=63).recent == 63
    assert cls(recent=64).budget is None
    assert cls(budget=1, recent=0).budget == 1


def test_scissorhands_counts_from_one_eviction_to_the_next():
    with pytest.raises(ValueError, match=r"^window must be at most evict_every \(8\), not 9$"):
        Scissorhands(window=9, evict_every=8)
    assert Scissorhands(window=8, evict_every=8).window == Scissorhands(window=8).window == 8


def test_numpy_integers_are_integers():
    assert Corm(np.int64(64)) == Corm(64)
    assert str(H2O(np.int32(64), np.uint8(3))) == "h2o,budget=64,recent=3"


# ---- compositions ----


@pytest.mark.parametrize(("method", "spec"), [
    (SelfExtend() + Corm(), "selfextend+corm,window=256,recent=256"),
    (SelfExtend(8) + Corm(64, 0, 1), "selfextend,group_size=8+corm,window=64,recent=0,evict_every=1"),
    (LongHeads(16, 512) + Corm(window=64), "longheads,chunk_size=16,window=512,n_recent=1+corm,window=64,recent=256"),
    (
        LongHeads.paper(256) + Scissorhands(512, 64),
        "longheads,chunk_size=256,n_recent=1,select=head,select_block=1,representation=attention,position=packed,"
        "n_neighbor=0+scissorhands,budget=512,window=64",
    ),
    (LongHeads(n_recent=0) + H2O(), "longheads,n_recent=0+h2o"),
    (SelfExtend(4) + Tova(100), "selfextend,group_size=4+tova,budget=100"),
    (DualChunk(48) + H2O(100), "dca,chunk_size=48+h2o,budget=100"),
])  # fmt: skip
def test_specs_of_compositions(method, spec):
    assert str(method) == spec
    assert parse(spec) == method
    assert parse(spec.replace("+", " + ").replace(",", " , ").replace("=", " = ")) == method


def test_options_bind_to_the_part_that_they_follow():
    method = parse("longheads,window=512,chunk_size=16+corm,window=64")
    assert isinstance(method, Composition)
    assert (method.base, method.rule) == (LongHeads(16, 512), Corm(64))
    assert parse("longheads+corm,window=64").base == LongHeads()
    assert parse("longheads,window=512+corm").rule == Corm()


def test_a_composition_is_a_value():
    method = LongHeads(16) + Corm(64)
    assert method == Composition(LongHeads(16), Corm(64))
    assert hash(method) == hash(LongHeads(16) + Corm(64))
    assert method not in (LongHeads(16) + Corm(65), LongHeads(32) + Corm(64), LongHeads(16), Corm(64))
    assert pickle.loads(pickle.dumps(method)) == method
    assert (method.name, method.parts) == ("longheads+corm", (LongHeads(16), Corm(64)))
    with pytest.raises(FrozenInstanceError):
        method.rule = Tova()


@pytest.mark.parametrize("rule", RULES)
def test_full_attention_is_what_a_rule_alone_reads(rule):
    assert Full() + rule() == rule()
    assert parse(f"full+{rule.name},evict_every=8") == rule(evict_every=8)
    with pytest.raises(ValueError, match=rf"'full\+{rule.name}' is '{rule.name}' alone"):
        Composition(Full(), rule())


@pytest.mark.parametrize(("first", "second"), [*product(METHODS.values(), repeat=2)])
def test_a_base_composes_with_a_rule_and_nothing_else_does(first, second):
    spec = f"{first.name}+{second.name}"
    if first in BASES and second in RULES:
        assert (first() + second()).parts[-1] == parse(spec).parts[-1] == second()
        return
    for compose in (lambda: first() + second(), lambda: Composition(first(), second()), lambda: parse(spec)):
        with pytest.raises(ValueError, match=rf"^'{first.name}\+{second.name}' does not compose: "):
            compose()


@pytest.mark.parametrize(("spec", "reason"), [
    ("longheads+selfextend", "both are bases"),
    ("full+full", "both are bases"),
    ("corm+h2o", "both are rules"),
    ("window,window=64+corm", "window composes with nothing"),
    ("tova+window", "window composes with nothing"),
    ("corm+longheads", "the base comes first, 'longheads\\+corm'"),
    ("longheads+corm+tova", "it has 3 parts"),
    ("full+corm+tova", "it has 3 parts"),
    ("full+longheads+corm", "it has 3 parts"),
])  # fmt: skip
def test_what_does_not_compose_says_what_does(spec, reason):
    with pytest.raises(ValueError, match=reason) as info:
        parse(spec)
    assert str(info.value).endswith(
        "a composition is one base (full, selfextend, longheads or dca) + one rule (corm, h2o, scissorhands or tova)"
    )


@pytest.mark.parametrize("compose", [
    lambda: LongHeads() + Corm() + Tova(),
    lambda: LongHeads() + (SelfExtend() + Corm()),
    lambda: Composition(LongHeads() + Corm(), Tova()),
    lambda: Composition(LongHeads(), SelfExtend() + Corm()),
])  # fmt: skip
def test_a_composition_has_two_parts(compose):
    with pytest.raises(ValueError, match="does not compose: it has 3 parts"):
        compose()


@pytest.mark.parametrize("compose", [
    lambda: LongHeads() + "corm",
    lambda: "longheads" + Corm(),
    lambda: Corm() + None,
    lambda: LongHeads() + Corm,
    lambda: Composition("longheads", Corm()),
    lambda: Composition(LongHeads(), "corm"),
    lambda: Composition(LongHeads(), None),
])  # fmt: skip
def test_parts_are_method_objects(compose):
    with pytest.raises(TypeError, match=r"unsupported operand|can only concatenate|must be a method object"):
        compose()


@pytest.mark.parametrize(("spec", "message"), [
    ("longheads+", "unknown method ''; available: full, window, selfextend, longheads, dca, corm, h2o"),
    ("+corm", "unknown method ''"),
    ("longheads++corm", "unknown method ''"),
    ("longheads+nonsense", "unknown method 'nonsense'"),
    ("longheads+Corm", "unknown method 'Corm'"),
    ("longheads+corm,chunk_size=16", "'chunk_size=16' of method 'corm'; options: window=N, recent=N, evict_every=N"),
    ("longheads,evict_every=8+corm", "unknown option 'evict_every=8' of method 'longheads'"),
    ("full,window=8+corm", "unknown option 'window=8' of method 'full'; options: none"),
    ("selfextend+corm,window=3,window=4", "option 'window' of method 'corm' is given twice"),
    ("h2o,window=4", "unknown option 'window=4' of method 'h2o'; options: budget=N, recent=N, evict_every=N"),
    ("tova,recent=4", "unknown option 'recent=4' of method 'tova'"),
    ("corm,budget=4", "unknown option 'budget=4' of method 'corm'"),
    ("corm,window=2.5", "option 'window' of method 'corm' must be an integer, not '2.5'"),
    ("corm,evict_every=", "option 'evict_every' of method 'corm' must be an integer, not ''"),
    ("corm,evict_every=None", "option 'evict_every' of method 'corm' must be an integer, not 'None'"),
    ("longheads,chunk_size=40+corm", "chunk_size must be a multiple of 16"),
    ("selfextend+h2o,budget=8,recent=8", "recent must be below budget"),
])  # fmt: skip
def test_bad_specs_of_rules_and_compositions(spec, message):
    with pytest.raises(ValueError, match=message):
        parse(spec)


@pytest.mark.parametrize("cls", METHODS.values())
def test_methods_are_exported(cls):
    assert getattr(pylongctx, cls.__name__) is cls
    assert cls.__name__ in pylongctx.__all__
    assert METHODS[cls.name] is cls
    assert cls().parts == (cls(),)
    assert cls.role == ("base" if cls in BASES else "rule" if cls in RULES else None)
