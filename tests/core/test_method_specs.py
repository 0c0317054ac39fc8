"""Eviction rules and compositions as values: their options, their limits, their spec strings."""

import pickle
from dataclasses import FrozenInstanceError, fields
from itertools import combinations, product

import numpy as np
import pytest

import pylongctx
from pylongctx.methods import (
    H2O,
    METHODS,
    Composition,
    Corm,
    DualChunk,
    Full,
    Kvzip,
    LongHeads,
    Scissorhands,
    SelfExtend,
    ShiftedRotary,
    SnapKV,
    Tova,
    named,
    parse,
)

BASES = [Full, SelfExtend, LongHeads, DualChunk, ShiftedRotary]
RULES = [cls for cls in METHODS.values() if cls.role == "rule"]
SIZES = [(cls, field.name) for cls in RULES for field in fields(cls) if field.name not in cls.words]
LARGEST = 2**30

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
    (Tova(1, heads="adaptive"), "tova,budget=1,heads=adaptive"),
    (Kvzip(), "kvzip"),
    (Kvzip("piece"), "kvzip,replay=piece"),
    (Kvzip("text"), "kvzip,replay=text"),
    (SnapKV(), "snapkv"),
    (SnapKV(32, 7), "snapkv,window=32,pool=7"),
])  # fmt: skip
def test_specs_of_rules(rule, spec):
    assert str(rule) == spec
    assert parse(spec) == rule


@pytest.mark.parametrize("cls", RULES)
def test_any_choice_of_options_round_trips(cls):
    """An option left out of the spec is the default, one that is there is read back as itself."""
    names = [field.name for field in fields(cls)]
    values = dict.fromkeys(names, 7) | {"budget": 400, "window": 3, "evict_every": 5}
    values |= {name: words[-1] for name, words in cls.words.items()}
    for n in range(len(names) + 1):
        for chosen in combinations(names, n):
            options = {name: values[name] for name in chosen}
            rule = cls(**options)
            assert parse(str(rule)) == rule
            assert parse(",".join([cls.name, *(f"{name}={value}" for name, value in options.items())])) == rule
            assert all(getattr(rule, name) == value for name, value in options.items())


def test_options_that_are_left_out():
    expected = {
        Corm: [("window", 256), ("recent", 256), ("evict_every", None)],
        H2O: [("budget", None), ("recent", None), ("evict_every", None), ("heads", None)],
        Scissorhands: [("budget", None), ("window", None), ("recent", None), ("evict_every", None), ("heads", None)],
        Tova: [("budget", None), ("evict_every", None), ("heads", None)],
        Kvzip: [("replay", None)],
        SnapKV: [("window", None), ("pool", None)],
    }
    for cls, defaults in expected.items():
        assert [(field.name, field.default) for field in fields(cls)] == defaults
    assert parse("corm") == Corm()


@pytest.mark.parametrize(("cls", "option"), SIZES)
def test_sizes_of_rules_have_limits(cls, option):
    least = 0 if option == "recent" else 1
    for value in (least, LARGEST - (option == "pool")):  # which is odd
        assert getattr(cls(**{option: value}), option) == value
    for value, message in ((least - 1, f"at least {least}, not {least - 1}"), (LARGEST + 1, f"at most {LARGEST}")):
        with pytest.raises(ValueError, match=f"^{option} must be {message}"):
            cls(**{option: value})
        with pytest.raises(ValueError, match=f"^{option} must be {message}"):
            parse(f"longheads+{cls.name},{option}={value}")


@pytest.mark.parametrize(("cls", "option"), SIZES)
@pytest.mark.parametrize("value", [1.0, "8", True, [8]], ids=repr)
def test_sizes_of_rules_are_integers(cls, option, value):
    with pytest.raises(TypeError, match=f"^{option} must be an integer"):
        cls(**{option: value})


@pytest.mark.parametrize(("cls", "option"), [(Corm, "window"), (Corm, "recent")])
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
    (LongHeads(16, 512) + Corm(window=64), "longheads,chunk_size=16,window=512+corm,window=64,recent=256"),
    (
        LongHeads.paper(256) + Scissorhands(512, 64),
        "longheads,chunk_size=256,n_recent=1,select=head,representation=attention,position=packed"
        "+scissorhands,budget=512,window=64",
    ),
    (LongHeads(n_recent=0) + H2O(), "longheads,n_recent=0+h2o"),
    (SelfExtend(4) + Tova(100), "selfextend,group_size=4+tova,budget=100"),
    (DualChunk(48) + H2O(100), "dca,chunk_size=48+h2o,budget=100"),
    (ShiftedRotary(48) + H2O(100), "string,shift_offset=48+h2o,budget=100"),
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
    names = [field.name for field in fields(rule)]
    options = {name: 8 for name in names if name in ("evict_every", "window")}
    assert parse(",".join([f"full+{rule.name}", *(f"{key}={n}" for key, n in options.items())])) == rule(**options)
    with pytest.raises(ValueError, match=rf"'full\+{rule.name}' is the same as '{rule.name}'"):
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
    ("window,window=64+corm", "window does not compose with other methods"),
    ("tova+window", "window does not compose with other methods"),
    ("corm+longheads", "the base comes first, 'longheads\\+corm'"),
    ("longheads+corm+tova", "it has 3 parts"),
    ("full+corm+tova", "it has 3 parts"),
    ("full+longheads+corm", "it has 3 parts"),
])  # fmt: skip
def test_what_does_not_compose_says_what_does(spec, reason):
    with pytest.raises(ValueError, match=reason) as info:
        parse(spec)
    *rules, last = sorted(rule.name for rule in RULES)
    assert str(info.value).endswith(
        "a composition is one base (dca, full, longheads, selfextend or string) "
        f"+ one rule ({', '.join(rules)} or {last})"
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
    ("longheads+", "unknown method ''; available: full, window, selfextend, dca, string, longheads, corm, h2o"),
    ("+corm", "unknown method ''"),
    ("longheads++corm", "unknown method ''"),
    ("longheads+nonsense", "unknown method 'nonsense'"),
    ("longheads+Corm", "unknown method 'Corm'"),
    ("longheads+corm,chunk_size=16", "'chunk_size=16' of method 'corm'; options: window=N, recent=N, evict_every=N"),
    ("longheads,evict_every=8+corm", "unknown option 'evict_every=8' of method 'longheads'"),
    ("full,window=8+corm", "unknown option 'window=8' of method 'full'; options: spans=N"),
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


def test_none_names_llama_cpp_s_own_cache():
    assert named("none") is None
    assert named("longheads+tova,budget=64") == parse("longheads+tova,budget=64")
