"""Heads that drop rows, one layer at a time: the oracle against itself, ``lctx_layer_run`` against the oracle.

A decision that float32 may take otherwise than float64 is checked where it falls: the native run of the rows so far
says what was kept, which must lie between what stays for certain and what possibly stays, and the oracle goes on from
there.
"""

from dataclasses import replace

import numpy as np
import oracle
import pytest
from cases import BASES, EVICT_CASES, EVICT_CROSS, RULES, EvictCase, evict_case
from hypothesis import given, settings
from hypothesis import strategies as st
from op import Inputs, LayerRun, evict_layer, make_inputs, run_evict, run_layer
from oracle_chunks import LongHeads, Stored, choose, share_queries, softmax
from oracle_evict import (
    H2O,
    Corm,
    Evicting,
    Layer,
    Run,
    Scissorhands,
    Tova,
    border,
    choose_held,
    corm_listing,
    moved,
    share_in_ubatch,
)
from session import assert_same

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


def run_oracle(case: EvictCase, **options) -> Run:
    return evict_layer(case, make_inputs(case)).run(**options)


# ---- the oracle itself: algorithm 1 ----


@pytest.mark.parametrize(("window", "recent", "every"), [
    (8, 16, 1), (20, 5, 1), (3, 1, 1),
    (1, 40, 1), (1, 0, 1), (9, 0, 1),  # a single query decides, nothing is protected
    (300, 4, 1), (4, 300, 1), (140, 0, 1),  # beyond the end: nothing leaves, or only late
    (3, 2, 7), (12, 30, 5), (9, 3, 4), (6, 0, 64), (2, 2, 300),
])  # fmt: skip
@pytest.mark.parametrize("n", [1, 63, 150])
def test_oracle_of_one_head_equals_the_listing(window, recent, every, n):
    case = evict_case("listing", n_rows=n, n_head=1, n_head_kv=1, rule=Corm(window, recent, every))
    x = make_inputs(case)
    q, k, v = (part[:, 0].astype(np.float64) for part in (x.q, x.k, x.v))
    out, held = corm_listing(q, k, v, window, recent, case.make_rope(), case.scale, every)
    got = evict_layer(case, x).run()
    assert_same(got.out[:, 0], out, 1e-5)  # f32 rows
    assert np.flatnonzero(got.held[0]).tolist() == held[-1].tolist()
    before = [*held[-2], n - 1] if n > 1 else [0]
    assert np.flatnonzero(got.before[0]).tolist() == before


def test_oracle_keeps_what_any_query_head_wants():
    """With a single border the heads of a group cannot influence each other before it."""
    case = evict_case("group", n_rows=90, n_head=3, n_head_kv=1, rule=Corm(4, 7, 90))
    x = make_inputs(case)
    alone = [replace(evict_layer(case, x), q=x.q[:, h : h + 1]).run() for h in range(3)]
    together = evict_layer(case, x).run()
    want = np.logical_or.reduce([run.held for run in alone])
    np.testing.assert_array_equal(together.held, want)
    assert all(run.held.sum() < want.sum() < 90 for run in alone)


def test_oracle_counts_evicted_rows_in_the_threshold():
    """Row 12 has less than a 31st of the weight of the 31 rows that query 39 reads, but more than a 40th."""
    n = 40
    q, k = np.zeros((n, 1, 8)), np.ones((n, 1, 8))
    q[19], q[39], k[3], k[12] = -9.0, 0.01, -1.0, 0.0  # query 19 wants row 3 only
    no_rope = oracle.Rope(8, freq_scale=1e-9)
    run = Layer(q, k, k, Evicting(oracle.Full(), Corm(1, 10, 20)), no_rope, 1.0).run()
    assert np.flatnonzero(run.before[0]).tolist() == [3, *range(10, 40)]
    np.testing.assert_array_equal(run.held, run.before)


# ---- the oracle itself: budgets ----


@given(st.data())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_oracle_bounds_hold_for_all_scores_between_them(data):
    n = data.draw(st.integers(1, 30))
    numbers = st.lists(st.integers(0, 12), min_size=n, max_size=n)
    a, b, mix = (np.array(data.draw(numbers), dtype=float) for _ in range(3))
    low, high = np.minimum(a, b), np.maximum(a, b)
    score = low + np.round((high - low) * mix / 12)
    rows, p = np.cumsum(1 + np.array(data.draw(numbers))), data.draw(st.integers(0, 40))
    p += rows[-1]
    open_row = data.draw(st.integers(0, p + 1))
    recent = data.draw(st.integers(0, 9))
    budget = recent + data.draw(st.integers(1, 20))
    window = data.draw(st.integers(1, 400))
    for rule in (H2O(budget, recent, 1), Scissorhands(budget, 8, recent, 1), Tova(budget, 1), Corm(window, recent, 1)):
        certain, possible = rule.kept(low, high, rows, p, open_row)
        exact, same = rule.kept(score, score, rows, p, open_row)
        np.testing.assert_array_equal(exact, same)
        assert (certain <= exact).all()
        assert (exact <= possible).all()
        assert exact[rows >= open_row].all()
        if not isinstance(rule, Corm):
            np.testing.assert_array_equal(exact, keep_sorted(rule, score, rows, open_row))


def keep_sorted(rule, score, rows, open_row) -> np.ndarray:
    """Return what a budget keeps: those that must stay, then the best, later before earlier."""
    n = len(rows)
    if n <= rule.budget:
        return np.ones(n, dtype=bool)
    order = sorted(range(n), key=lambda i: (i < n - rule.recent and rows[i] < open_row, -score[i], -i))
    n_safe = max(min(n, rule.recent), int((rows >= open_row).sum()))
    kept = np.zeros(n, dtype=bool)
    kept[order[: max(n_safe, rule.budget)]] = True
    return kept


@pytest.mark.parametrize("base", ["full", "selfextend", "longheads-head"])
def test_oracle_scores_are_sums_over_queries_and_heads(base):
    case = evict_case("sums", n_rows=100, n_head=6, n_head_kv=2, method=BASES[base])
    totals = {H2O(200, 0, 25): 3 * 100, Tova(200, 33): 0.0, Tova(200, 200): 0.0}
    for rule, total in totals.items():
        np.testing.assert_allclose(run_oracle(replace(case, rule=rule)).scores.sum(-1), total, rtol=1e-9)
    counted = run_oracle(replace(case, rule=Scissorhands(200, 5, 0, 101))).scores
    assert (counted <= 3 * 5).all()
    assert counted.max() > 1


def test_oracle_of_tova_keeps_the_best_of_the_last_query():
    case = evict_case("tova", n_rows=60, n_head=4, n_head_kv=2, rule=Tova(20, 60))
    x = make_inputs(case)
    layer = evict_layer(case, x)
    for g in range(2):
        q = oracle.rotate(x.q[59, 2 * g : 2 * g + 2], 59, layer.rope)
        weights = softmax(q @ layer.far[:, g].T * case.scale).sum(0)
        assert set(np.flatnonzero(layer.run().held[g])) == set(np.argsort(weights)[-20:])


def test_oracle_rules_name_their_options():
    assert Corm(5, 6, 7).text() == "corm,window=5,recent=6,evict_every=7"
    assert H2O(5, 6, 7).text() == "h2o,budget=5,recent=6,evict_every=7"
    assert Scissorhands(5, 6, 7, 8).text() == "scissorhands,budget=5,window=6,recent=7,evict_every=8"
    assert Tova(5, 7).text() == "tova,budget=5,evict_every=7"
    assert Evicting(oracle.Full(), Tova(5)).text() == "tova,budget=5,evict_every=1"
    both = Evicting(oracle.SelfExtend(3, 9), Corm(5, 6, 7)).text()
    assert both == "selfextend,group_size=3,neighbor_window=9+corm,window=5,recent=6,evict_every=7"


def test_oracle_borders():
    assert [border(p, 4) for p in range(9)] == [3, 3, 3, 3, 7, 7, 7, 7, 11]
    assert [p for p in range(9) if Corm(2, 0, 4).votes(p)] == [2, 3, 6, 7]
    assert [p for p in range(9) if Tova(9, 4).votes(p)] == [3, 7]
    assert all(H2O(9, 0, 4).votes(p) and Corm(8, 0, 4).votes(p) for p in range(9))


# ---- the oracle itself: bases ----


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("idle", IDLE)
def test_oracle_that_evicts_nothing_equals_the_base(base, idle):
    case = evict_case("idle", method=BASES[base], rule=IDLE[idle])
    x = make_inputs(case)
    layer = evict_layer(case, x)
    run = layer.run()
    assert run.held.all()
    if isinstance(case.method, LongHeads):
        stored = Stored(x.q, x.k, x.v, case.method, layer.rope, case.scale)
        want = stored.attend(stored.choose(stored.represent(), case.n_rows))
    else:
        settings = (case.method, layer.rope, case.scale)
        want = np.array([oracle.attend_method(x.q[p], x.k, x.v, p, *settings) for p in range(case.n_rows)])
    assert_same(run.out, want, 1e-5)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["longheads-head", "longheads-grouped"])
def test_oracle_keeps_the_open_chunk(rule, name):
    for n in (160, 165, 175):
        held = run_oracle(evict_case("open", n_rows=n, sharpness=8.0, method=BASES[name], rule=RULES[rule])).held
        assert held[:, n // 16 * 16 :].all()


@given(st.integers(1, 30), st.integers(0, 3), st.integers(0, 2), st.integers(0, 99))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_oracle_chooses_empty_chunks_last(own, n_recent, n_neighbor, seed):
    method = LongHeads(16, 16 * (n_recent + 2 + 3), n_recent=n_recent, n_neighbor=n_neighbor)
    rng = np.random.default_rng(seed)
    scores, empty = rng.standard_normal(own), rng.random(own + 1) < rng.random()
    assert choose_held(scores, own, method, np.zeros(own + 1, bool)) == choose(scores, own, method)
    chunks = choose_held(scores, own, method, empty)
    assert chunks == sorted(set(chunks))
    assert len(chunks) == min(own + 1, method.n_chunk)
    if own >= method.n_chunk:
        free = set(range(1, own - method.n_recent))
        if empty[list(free & set(chunks))].any():
            assert empty[list(free - set(chunks))].all()


def test_oracle_meets_empty_chunks():
    """Or the choice among them would not be tested."""
    case = BY_NAME["empty-chunks"]
    run = run_oracle(case)
    starts = np.arange(0, case.n_rows, case.method.chunk_size)
    gone = ~np.logical_or.reduceat(run.held, starts, axis=1)
    assert gone[:, 1:-2].mean() > 0.5
    unaware = evict_layer(case, make_inputs(case))
    plain = np.stack([unaware.choose(p, unaware.score_chunks(unaware.represent())[p], np.ones_like(run.held))
                      for p in range(200, 257)])  # fmt: skip
    assert (run.chunks[200:] != plain).any()


def test_oracle_blocks_end_at_ubatches_and_borders():
    q = np.random.default_rng(0).standard_normal((50, 2, 3))
    for n in (1, 7, 64):
        np.testing.assert_allclose(share_in_ubatch(q, 4, n, 100), share_queries(q, 4, n))
    shared = share_in_ubatch(np.arange(12.0)[:, None, None], 8, 4, 6).ravel()
    assert shared.tolist() == [1.5] * 4 + [4.5] * 2 + [6.5] * 2 + [8.5] * 2 + [10.5] * 2


# ---- the oracle itself: doubts ----


def test_oracle_moves_one_score():
    scores = np.random.default_rng(0).standard_normal(9)
    weights = softmax(scores)
    for i in range(9):
        other = scores.copy()
        other[i] += 0.3
        assert moved(weights, 0.3)[i] == pytest.approx(softmax(other)[i])
    assert moved(np.array([0.0, 1.0]), -0.5).tolist() == [0, 1]


def test_oracle_doubts_near_ties_only():
    case = evict_case("flat", n_rows=100, sharpness=0.0, rule=Corm(4, 8, 10))
    assert run_oracle(case, margin=1e-6).doubts == list(range(9, 100, 10))
    assert not run_oracle(case).doubts
    assert not run_oracle(replace(case, sharpness=4.0), margin=1e-6).doubts
    asked = []

    def keep_possible(p, certain, possible):
        asked.append(p)
        assert (certain <= possible).all()
        return possible

    run = run_oracle(case, margin=1e-6, decide=keep_possible)
    assert asked == run.doubts
    assert run.held.all()


@pytest.mark.parametrize("case", EVICT_CROSS, ids=lambda case: case.name)
def test_oracle_finds_something_to_evict_and_little_to_doubt(case):
    """The comparison with the native code could not fail otherwise."""
    run = run_oracle(case, margin=case.margin)
    assert 0.05 * case.n_rows < run.held.sum(1).min() <= run.held.sum(1).max() < 0.75 * case.n_rows
    assert len(run.doubts) <= 3


# ---- native ----


def prefix(case: EvictCase, x: Inputs, n: int) -> tuple[EvictCase, Inputs]:
    """Return the case of the first ``n`` rows."""
    cut = {name: getattr(x, name)[:n] for name in ("k", "v", "q", "k_pos", "seg_rows", "seg_pos")}
    return replace(case, n_rows=n, n_tokens=n), replace(x, **cut)


def native_decisions(ffi, lib, case: EvictCase, x: Inputs):
    """Return a function that takes every decision in doubt as the native code takes it, if that is possible at all."""

    def decide(p: int, certain: np.ndarray, possible: np.ndarray) -> np.ndarray:
        taken = np.zeros_like(certain)
        taken[:, : p + 1] = run_evict(ffi, lib, *prefix(case, x, p + 1)).held
        assert (certain <= taken).all(), f"rows {np.argwhere(certain & ~taken)} must stay after {p}"
        assert (taken <= possible).all(), f"rows {np.argwhere(taken & ~possible)} must leave after {p}"
        return taken

    return decide


def assert_same_scores(case: EvictCase, got: LayerRun, want: Run) -> None:
    """Hold the scores of rows held between those of scores of attention a bit lower and a bit higher."""
    scores = got.scores.view(case.rule.score_type).astype(np.float64)[want.held]
    low, _, high = want.scores[:, want.held]
    slack = 0.0 if case.rule.score_type is np.int32 else 1e-5 * abs(high).max(initial=0)
    assert (scores >= low - slack).all()
    assert (scores <= high + slack).all()


def check_representations(ffi, lib, case: EvictCase, x: Inputs, got: LayerRun, want: Run) -> None:
    """A chunk without rows has lost its representation; the others have kept theirs."""
    starts = np.arange(0, case.n_rows, case.method.chunk_size)[: case.n_rows // case.method.chunk_size]
    ends = starts + case.method.chunk_size
    gone = np.array([[not head[a:b].any() for a, b in zip(starts, ends, strict=True)] for head in want.held])
    if len(starts):
        gone = gone.repeat(len(got.reps) // case.n_head_kv, axis=0)
        np.testing.assert_array_equal(np.isnan(got.reps).all(-1), gone)
        np.testing.assert_array_equal(got.reps[~gone], base_representations(ffi, lib, case, x)[~gone])


def base_representations(ffi, lib, case: EvictCase, x: Inputs) -> np.ndarray:
    """Return what the base method alone makes of the same rows; its ubatches are cut where evictions cut them."""
    n_ubatch = min(case.n_ubatch, case.rule.evict_every)
    return run_layer(ffi, lib, case, x, n_ubatch, case.method.text(), 4096).reps


def check(ffi, lib, case: EvictCase) -> None:
    x = make_inputs(case)
    got, layer, reps = run_evict(ffi, lib, case, x), evict_layer(case, x), None
    if isinstance(case.method, LongHeads):
        reps = base_representations(ffi, lib, case, x)
        rounded_twice = case.method.position == "grouped" and case.type_k != "f32"
        assert_same(reps, layer.represent(), (10 if rounded_twice else 1) * case.tolerance)
    want = layer.run(reps, case.margin, native_decisions(ffi, lib, case, x))
    if reps is not None:
        np.testing.assert_array_equal(got.chunks, want.chunks)
        check_representations(ffi, lib, case, x, got, want)
    np.testing.assert_array_equal(got.held, want.held)
    assert_same(got.out, want.out, case.tolerance)
    assert_same_scores(case, got, want)


@pytest.mark.parametrize("name", BY_NAME)
def test_native_layers_evict_and_attend_as_defined(ffi, lib, name):
    check(ffi, lib, BY_NAME[name])


@st.composite
def random_cases(draw) -> EvictCase:
    every, recent, n_head_kv = draw(st.integers(1, 40)), draw(st.integers(0, 40)), draw(st.integers(1, 2))
    budget, window = recent + draw(st.integers(1, 90)), draw(st.integers(1, 60))
    rules = [Corm(window, recent, every), H2O(budget, recent, every), Tova(budget, every),
             Scissorhands(budget, min(window, every), recent, every)]  # fmt: skip
    return evict_case(
        "random",
        n_rows=draw(st.integers(1, 330)),
        head_dim_k=8 * draw(st.integers(1, 16)),
        head_dim_v=64,
        n_head=n_head_kv * draw(st.integers(1, 3)),
        n_head_kv=n_head_kv,
        n_threads=draw(st.integers(1, 3)),
        n_ubatch=draw(st.integers(1, 130)),
        method=draw(st.sampled_from([base for name, base in BASES.items() if name != "longheads-head"])),
        rule=draw(st.sampled_from(rules)),
        sharpness=draw(st.sampled_from([2.0, 4.0, 6.0])),
        seed=draw(st.integers(0, 99)),
    )


@given(random_cases())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_native_layers_evict_and_attend_as_defined_on_random_settings(ffi, lib, case):
    check(ffi, lib, case)


# ---- native: what must not matter ----


@pytest.fixture(params=["corm-every16", "corm-unprotected", "h2o", "scissorhands", "tova"])
def rule(request):
    return RULES[request.param]


@pytest.fixture(params=BASES)
def base(request):
    return BASES[request.param]


def assert_same_run(got: LayerRun, want: LayerRun) -> None:
    np.testing.assert_array_equal(got.held, want.held)
    assert_same(got.out, want.out, 1e-5)
    if want.chunks is not None:
        np.testing.assert_array_equal(got.chunks, want.chunks)


@pytest.mark.parametrize("n_ubatch", [1, 7, 64, 1000])
def test_the_size_of_a_ubatch_does_not_matter(ffi, lib, base, rule, n_ubatch):
    case = evict_case("ubatch", method=base, rule=rule, n_ubatch=13)
    x = make_inputs(case)
    assert_same_run(run_evict(ffi, lib, replace(case, n_ubatch=n_ubatch), x), run_evict(ffi, lib, case, x))


@pytest.mark.parametrize("n_threads", [2, 3])
def test_the_number_of_threads_does_not_matter(ffi, lib, base, rule, n_threads):
    case = evict_case("threads", method=base, rule=rule)
    x = make_inputs(case)
    assert_same_run(run_evict(ffi, lib, replace(case, n_threads=n_threads), x), run_evict(ffi, lib, case, x))


def test_the_order_of_the_pages_does_not_matter(ffi, lib, base, rule):
    case = evict_case("pages", method=base, rule=rule)
    x = make_inputs(case)
    a, b = (run_evict(ffi, lib, case, x, page_seed=seed) for seed in (1, 2))
    for name in ("held", "scores", "out"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


@pytest.mark.parametrize("n", [1, 16, 100, 256])
def test_what_follows_does_not_matter(ffi, lib, base, rule, n):
    case = evict_case("causal", method=base, rule=rule)
    x = make_inputs(case)
    part = run_evict(ffi, lib, *prefix(case, x, n))
    assert_same(part.out, run_evict(ffi, lib, case, x).out[:n], 1e-5)


# ---- native: special settings ----


@pytest.mark.parametrize("idle", IDLE)
def test_a_rule_that_evicts_nothing_equals_its_base(ffi, lib, base, idle):
    case = evict_case("idle", method=base, rule=IDLE[idle])
    x = make_inputs(case)
    got = run_evict(ffi, lib, case, x)
    plain = run_layer(ffi, lib, case, x, case.n_ubatch, base.text(), 4096)
    assert got.held.all()
    assert plain.held.all()
    assert_same(got.out, plain.out, 1e-5)


def test_of_equal_scores_the_newer_rows_stay(ffi, lib):
    case = evict_case("ties", n_rows=130, sharpness=0.0, rule=Tova(40, 10))
    held = run_evict(ffi, lib, case, make_inputs(case)).held
    assert held[:, 90:].all()
    assert not held[:, :90].any()


@pytest.mark.parametrize("type_name", ["f32", "f16", "q8_0", "q4_0"])
def test_rows_move_as_they_are_stored(ffi, lib, type_name):
    """Rows are moved at every step, hundreds of times; a rounding on the way would show."""
    case = evict_case("move", n_rows=400, n_head=2, type_k=type_name, type_v=type_name, rule=Tova(70, 1))
    x = make_inputs(case)
    got, layer = run_evict(ffi, lib, case, x), evict_layer(case, x)
    want = layer.run(margin=case.margin, decide=native_decisions(ffi, lib, case, x))
    assert_same(got.out, want.out, case.tolerance)
    assert np.median(abs(got.out - want.out)) < 1e-5 * abs(want.out).max()


def test_a_spec_names_full_or_leaves_it_out(ffi, lib):
    case = BY_NAME["full-corm-every16"]
    x = make_inputs(case)
    got = run_evict(ffi, lib, case, x, spec=f"full+{case.rule.text()}")
    np.testing.assert_array_equal(got.out, run_evict(ffi, lib, case, x).out)


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
    ("window,n_sink=4,window=32+corm", "window"),
    ("corm+selfextend,group_size=4,neighbor_window=16", r"corm\+selfextend|selfextend"),
    ("corm+h2o,budget=8", "h2o"),
    ("full+selfextend,group_size=4,neighbor_window=16", "selfextend"),
    ("full+corm+h2o,budget=8", "h2o"),
    ("full+nonsense", "nonsense"),
    ("full+", r"\+|method"),
])  # fmt: skip
def test_bad_settings_are_refused_with_the_reason(ffi, lib, spec, reason):
    case = evict_case("refused", n_rows=20)
    with pytest.raises(ValueError, match=reason):
        run_evict(ffi, lib, case, make_inputs(case), spec=spec)


def test_chunks_of_a_method_without_chunks_are_refused(ffi, lib):
    case = CHUNKED[0]
    with pytest.raises(ValueError, match=r"chunks|representations"):
        run_evict(ffi, lib, case, make_inputs(case), spec=case.rule.text())
