"""The oracle of heads that drop rows, against itself and the listings of the papers."""

from dataclasses import replace

import numpy as np
import oracle
import pytest
from cases_evict import BASES, EVICT_CROSS, RULES, EvictCase, evict_case
from hypothesis import given, settings
from hypothesis import strategies as st
from op import evict_layer, make_inputs
from oracle_chunks import LongHeads, Stored, softmax
from oracle_evict import Evicting, Layer, Run, corm_listing, moved
from oracle_rules import H2O, Corm, Scissorhands, Tova, border
from session import assert_same
from test_evict import BY_NAME, IDLE
from thinning import thin


def run_oracle(case: EvictCase, **options) -> Run:
    return evict_layer(case, make_inputs(case)).run(**options)


# ---- algorithm 1 ----


@thin
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


# ---- budgets ----


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


@pytest.mark.parametrize("base", ["full", "selfextend", "longheads"])
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


# ---- bases ----


@thin
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
        want = stored.attend(stored.choose(stored.summarize()))
    else:
        settings = (case.method, layer.rope, case.scale)
        want = np.array([oracle.attend_method(x.q[p], x.k, x.v, p, *settings) for p in range(case.n_rows)])
    assert_same(run.out, want, 1e-5)


@thin
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "kvzip"])
@pytest.mark.parametrize("name", ["longheads", "longheads-dca"])
def test_oracle_keeps_the_open_chunk(rule, name):
    for n in (160, 165, 175):
        held = run_oracle(evict_case("open", n_rows=n, sharpness=8.0, method=BASES[name], rule=RULES[rule])).held
        assert held[:, n // 16 * 16 :].all()


@given(st.integers(20, 30), st.integers(0, 3), st.sampled_from(["keys2", "outlier"]), st.integers(0, 99))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_oracle_chooses_empty_chunks_last(own, n_recent, representation, seed):
    n, method = 16 * own + 1, LongHeads(16, 16 * (n_recent + 2 + 3), n_recent=n_recent, representation=representation)
    rng = np.random.default_rng(seed)
    held = np.repeat(rng.random((2, own + 1)) < rng.random(), 16, axis=1)[:, :n]
    case = evict_case("empty", n_rows=n, n_head=2, n_head_kv=2, head_dim_k=8, head_dim_v=8, method=method, seed=seed)
    layer = evict_layer(case, make_inputs(case))
    wants = layer.chunked.wants(layer.chunked.summarize())
    chunks, free = layer.choose(n - 1, layer.chunked.scores(wants[n - 1], held)), method.free(n - 1)
    assert (chunks.sum(-1) == method.window // 16).all()
    for head in range(2):
        empty, taken = ~held[head, ::16] & free, chunks[head] & free
        if (empty & taken).any():
            assert empty[free & ~taken].all()


@pytest.mark.parametrize("name", ["empty-chunks", "empty-summaries"])
def test_oracle_meets_empty_chunks(name):
    """Or the choice among them would not be tested."""
    case = BY_NAME[name]
    run, layer = run_oracle(case), evict_layer(case, make_inputs(case)).chunked
    starts = np.arange(0, case.n_rows, case.method.chunk_size)
    gone = ~np.logical_or.reduceat(run.held, starts, axis=1)
    assert gone[:, 1:-2].mean() > 0.5
    assert (run.chunks[200:] != layer.choose(layer.summarize())[200:]).any()


# ---- doubts ----


def test_oracle_moves_one_score():
    scores = np.random.default_rng(0).standard_normal(9)
    np.testing.assert_allclose(moved(softmax(scores), 0.3), np.exp(scores + 0.3) / np.exp(scores).sum())


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


@thin
@pytest.mark.parametrize("case", EVICT_CROSS, ids=lambda case: case.name)
def test_oracle_finds_something_to_evict_and_little_to_doubt(case):
    """The comparison with the native code could not fail otherwise."""
    run = run_oracle(case, margin=case.margin)
    assert 0.05 * case.n_rows < run.held.sum(1).min() <= run.held.sum(1).max() < 0.75 * case.n_rows
    assert len(run.doubts) <= 3
