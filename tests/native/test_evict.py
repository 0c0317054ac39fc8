"""Heads that drop rows, one layer at a time: ``lctx_layer_run`` against the oracle (see ``test_oracle_evict.py``).

A decision on which float32 and float64 may differ is checked when it is made: the native run of the rows so far says
which rows were kept. They must include those that certainly stay, and only those that may stay; the oracle continues
from there.
"""

from dataclasses import fields, replace

import numpy as np
import pytest
from cases import FLOAT_COLUMNS
from cases_evict import BASES, EVICT_CASES, RULES, EvictCase, compositions, evict_case
from hypothesis import given, settings
from hypothesis import strategies as st
from op import Inputs, LayerRun, assert_near_ties, assert_same_summaries, evict_layer, make_inputs, run_evict, run_layer
from oracle_chunks import LongHeads
from oracle_evict import Run
from oracle_rules import H2O, Corm, Kvzip, Scissorhands, Tova
from session import assert_same
from thinning import few, thin

from pylongctx.methods import METHODS
from pylongctx.methods.base import LIMIT, MINIMUM

BY_NAME = {case.name: case for case in EVICT_CASES}
CHUNKED = [case for case in EVICT_CASES if isinstance(case.method, LongHeads)]
IDLE = {
    "corm-window": Corm(400, 0, 1),
    "corm-recent": Corm(1, 400, 1),
    "corm-never": Corm(1, 0, 400),
    "h2o": H2O(400, 0, 1),
    "scissorhands": Scissorhands(400, 3, 0, 3),
    "tova": Tova(400, 1),
}


# ---- native ----


def prefix(case: EvictCase, x: Inputs, n: int) -> tuple[EvictCase, Inputs]:
    """Return the case of the first ``n`` rows."""
    cut = {name: getattr(x, name)[:n] for name in ("k", "v", "q", "k_pos", "seg_rows", "seg_pos")}
    return replace(case, n_rows=n, n_tokens=n), replace(x, **cut)


def native_decisions(case: EvictCase, x: Inputs):
    """Return a function that takes every decision in doubt as the native code takes it, if that is possible at all."""

    def decide(p: int, certain: np.ndarray, possible: np.ndarray) -> np.ndarray:
        taken = np.zeros_like(certain)
        n = case.n_rows if isinstance(case.rule, Kvzip) else p + 1
        taken[:, :n] = run_evict(*prefix(case, x, n)).held
        assert (certain <= taken).all(), f"rows {np.argwhere(certain & ~taken)} must stay after {p}"
        assert (taken <= possible).all(), f"rows {np.argwhere(taken & ~possible)} must leave after {p}"
        return taken

    return decide


def assert_same_scores(case: EvictCase, got: LayerRun, want: Run) -> None:
    """Hold the scores of rows held between those of scores of attention a bit lower and a bit higher."""
    scores = got.scores.view(case.rule.score_type).astype(np.float64)[want.held]
    low, _, high = want.scores[:, want.held]
    low = case.rule.least(low, np.nonzero(want.held)[1])
    slack = 0.0 if case.rule.score_type is np.int32 else 1e-5 * abs(high).max(initial=0)
    assert (scores >= low - slack).all()
    assert (scores <= high + slack).all()


def check_summaries(case: EvictCase, x: Inputs, got: LayerRun, want: Run) -> None:
    """A chunk without rows has lost its summary; the others have kept theirs."""
    if got.summaries is None:
        return
    n = getattr(case.rule, "n_text", case.n_rows)
    starts = np.arange(0, n, case.method.chunk_size)[: n // case.method.chunk_size]
    ends = starts + case.method.chunk_size
    gone = np.array([[not head[a:b].any() for a, b in zip(starts, ends, strict=True)] for head in want.held])
    if len(starts):
        gone = gone.repeat(len(got.summaries) // case.n_head_kv, axis=0)
        summaries, wanted = (all_rows[:, : len(starts)] for all_rows in (got.summaries, base_summaries(case, x)))
        np.testing.assert_array_equal(np.isnan(summaries).all(-1), gone)
        np.testing.assert_array_equal(summaries[~gone], wanted[~gone])


def base_summaries(case: EvictCase, x: Inputs) -> np.ndarray | None:
    """Return what the base method alone makes of the same rows; its ubatches are cut where evictions cut them."""
    n_ubatch = min(case.n_ubatch, case.rule.evict_every)
    return run_layer(case, x, n_ubatch, case.method.text(), case.method.n_ctx_train).summaries


def check(case: EvictCase) -> None:
    x = make_inputs(case)
    got, layer, summaries = run_evict(case, x), evict_layer(case, x), None
    if isinstance(case.method, LongHeads):
        summaries = base_summaries(case, x)
        assert_same_summaries(case, summaries, layer.chunked.summarize(), case.rounding)
    want = layer.run(summaries, case.margin, native_decisions(case, x), got.chunks)
    if layer.chunked:
        assert_near_ties(want.missed, layer.chunked.all_scores(summaries))
        check_summaries(case, x, got, want)
    np.testing.assert_array_equal(got.held, want.held)
    assert_same(got.out, want.out, case.tolerance)
    assert_same_scores(case, got, want)


@thin(table=BY_NAME)
@pytest.mark.parametrize("name", BY_NAME)
def test_native_layers_evict_and_attend_as_defined(name):
    check(BY_NAME[name])


@st.composite
def random_cases(draw) -> EvictCase:
    every, recent, n_head_kv = draw(st.integers(1, 40)), draw(st.integers(0, 40)), draw(st.integers(1, 2))
    budget, window = recent + draw(st.integers(1, 90)), draw(st.integers(1, 60))
    n_rows, heads = draw(st.integers(2, 330)), draw(st.sampled_from(["uniform", "adaptive"]))
    rules = [Corm(window, recent, every), H2O(budget, recent, every, heads), Tova(budget, every, heads),
             Scissorhands(budget, min(window, every), recent, every, heads),
             Kvzip(draw(st.integers(1, n_rows - 1)), draw(st.floats(0.01, 1.0)))]  # fmt: skip
    return evict_case(
        "random",
        n_rows=n_rows,
        head_dim_k=8 * draw(st.integers(1, 16)),
        head_dim_v=64,
        n_head=n_head_kv * draw(st.integers(1, 3)),
        n_head_kv=n_head_kv,
        n_threads=draw(st.integers(1, 3)),
        n_ubatch=draw(st.integers(1, 130)),
        method=draw(st.sampled_from([base for name, base in BASES.items() if name != "longheads-paper"])),
        rule=draw(st.sampled_from(rules)),
        sharpness=draw(st.sampled_from([2.0, 4.0, 6.0])),
        seed=draw(st.integers(0, 99)),
    )


@given(random_cases())
@settings(max_examples=few(100), deadline=None, derandomize=True)
def test_native_layers_evict_and_attend_as_defined_on_random_settings(case):
    check(case)


# ---- native: what must not matter ----


NAMES = ("corm-every16", "corm-unprotected", "h2o", "scissorhands", "tova")
composed = pytest.mark.parametrize(("base", "rule"), compositions({name: RULES[name] for name in NAMES}), indirect=True)


@pytest.fixture
def rule(request):
    return RULES[request.param]


@pytest.fixture
def base(request):
    return BASES[request.param]


def assert_same_run(got: LayerRun, want: LayerRun) -> None:
    np.testing.assert_array_equal(got.held, want.held)
    assert_same(got.out, want.out, 1e-5)
    if want.chunks is not None:
        np.testing.assert_array_equal(got.chunks, want.chunks)


@thin(strength=2)
@composed
@pytest.mark.parametrize("n_ubatch", [1, 7, 64, 1000])
def test_the_size_of_a_ubatch_does_not_matter(base, rule, n_ubatch):
    case = evict_case("ubatch", method=base, rule=rule, n_ubatch=13)
    x = make_inputs(case)
    assert_same_run(run_evict(replace(case, n_ubatch=n_ubatch), x), run_evict(case, x))


@thin
@composed
@pytest.mark.parametrize("n_threads", [2, 3])
def test_the_number_of_threads_does_not_matter(base, rule, n_threads):
    case = evict_case("threads", method=base, rule=rule)
    x = make_inputs(case)
    assert_same_run(run_evict(replace(case, n_threads=n_threads), x), run_evict(case, x))


@thin
@composed
def test_the_order_of_the_pages_does_not_matter(base, rule):
    case = evict_case("pages", method=base, rule=rule)
    x = make_inputs(case)
    a, b = (run_evict(case, x, page_seed=seed) for seed in (1, 2))
    for name in ("held", "scores", "out"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


@thin(strength=2)
@composed
@pytest.mark.parametrize("n", [1, 16, 100, 256])
def test_what_follows_does_not_matter(base, rule, n):
    case = evict_case("causal", method=base, rule=rule)
    x = make_inputs(case)
    part = run_evict(*prefix(case, x, n))
    assert_same(part.out, run_evict(case, x).out[:n], 1e-5)


# ---- native: special settings ----


@thin(strength=2)
@pytest.mark.parametrize(("base", "idle"), compositions(IDLE), indirect=["base"])
def test_a_rule_that_evicts_nothing_equals_its_base(base, idle):
    case = evict_case("idle", method=base, rule=IDLE[idle])
    x = make_inputs(case)
    got = run_evict(case, x)
    plain = run_evict(case, x, spec=base.text())
    assert got.held.all()
    assert plain.held.all()
    assert_same(got.out, plain.out, 1e-5)


def test_of_equal_scores_the_newer_rows_stay():
    case = evict_case("ties", n_rows=130, sharpness=0.0, rule=Tova(40, 10))
    held = run_evict(case, make_inputs(case)).held
    assert held[:, 90:].all()
    assert not held[:, :90].any()


@pytest.mark.parametrize("type_name", ["f32", "f16", "q8_0", "q4_0"])
def test_rows_move_as_they_are_stored(type_name):
    """Rows are moved at every step, hundreds of times; a rounding on the way would show."""
    case = evict_case("move", n_rows=400, n_head=2, type_k=type_name, type_v=type_name, rule=Tova(70, 1))
    x = make_inputs(case)
    got, layer = run_evict(case, x), evict_layer(case, x)
    want = layer.run(margin=case.margin, decide=native_decisions(case, x))
    assert_same(got.out, want.out, case.tolerance)
    rounds = type_name in ("q8_0", "q4_0") and FLOAT_COLUMNS == 0  # ARM multiplies a token's keys as integers
    assert np.median(abs(got.out - want.out)) < (2e-3 if rounds else 1e-5) * abs(want.out).max()


def test_a_spec_names_full_or_leaves_it_out():
    case = BY_NAME["full-corm-every16"]
    x = make_inputs(case)
    got = run_evict(case, x, spec=f"full+{case.rule.text()}")
    np.testing.assert_array_equal(got.out, run_evict(case, x).out)


# ---- native: refusals ----


@pytest.mark.parametrize(("spec", "reason"), [
    ("corm,window=0", "window"),
    ("corm,recent=-1", "recent"),
    ("corm,evict_every=0", "evict_every"),
    ("corm,budget=9", "budget"),
    ("corm,window=many", "window"),
    ("h2o,budget=0", "budget"),
    ("h2o,budget=8,recent=9", "recent"),
    ("h2o,budget=8,recent=-1", "recent"),
    ("h2o,budget=8,window=4", "window"),
    ("scissorhands,budget=8,recent=4,window=0", "window"),
    ("scissorhands,budget=8,recent=8", "recent"),
    ("scissorhands,budget=8,recent=4,window=5,evict_every=4", "window"),
    ("tova,budget=0", "budget"),
    ("tova,budget=8,recent=4", "recent"),
    ("tova,budget=8,evict_every=-1", "evict_every"),
    ("tova,budget=8,heads=shared", "heads"),
    ("corm,heads=adaptive", "heads"),
    ("kvzip,budget=8", "budget"),
    ("window,n_sink=4,window=32+corm", "window"),
    ("corm+selfextend,group_size=4,neighbor_window=16", r"corm\+selfextend|selfextend"),
    ("corm+h2o,budget=8", "h2o"),
    ("full+selfextend,group_size=4,neighbor_window=16", "selfextend"),
    ("full+corm+h2o,budget=8", "h2o"),
    ("full+nonsense", "nonsense"),
    ("full+", r"\+|method"),
])  # fmt: skip
def test_bad_settings_are_refused_with_the_reason(spec, reason):
    case = evict_case("refused", n_rows=20)
    with pytest.raises(ValueError, match=reason):
        run_evict(case, make_inputs(case), spec=spec)


def refusal(spec: str) -> str:
    case = evict_case("refused", n_rows=20)
    with pytest.raises(ValueError) as info:
        run_evict(case, make_inputs(case), spec=spec)
    return str(info.value)


@pytest.mark.parametrize("cls", METHODS.values())
def test_options_and_their_words_are_those_in_python(cls):
    options = ["=".join([f.name, *(["|".join(cls.words[f.name])] if f.name in cls.words else [])]) for f in fields(cls)]
    assert refusal(f"{cls.name},missing=1").endswith(f"options: {', '.join(options)}")


@pytest.mark.parametrize(("rule", "option"), [
    (cls, field.name)
    for cls in METHODS.values() if cls.role == "rule"
    for field in fields(cls) if field.name not in cls.words
])  # fmt: skip
def test_sizes_have_the_limits_that_they_have_in_python(rule, option):
    least = MINIMUM.get(option, 1)
    for value in (least - 1, LIMIT + 1):
        assert option in refusal(f"{rule.name},{option}={value}")
    if not rule.waits:  # this run has no text to compress
        case = evict_case("least", n_rows=20)
        run_evict(case, make_inputs(case), spec=f"{rule.name},{option}={least}")


def test_chunks_of_a_method_without_chunks_are_refused():
    case = CHUNKED[0]
    with pytest.raises(ValueError, match=r"chunks|summaries"):
        run_evict(case, make_inputs(case), spec=case.rule.text())
