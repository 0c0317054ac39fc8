"""LongHeads in whole models against the whole-model oracle, its ablations, and what its memory can give back.

A choice at a near tie may fall the other way in float32, and then rows differ for a good reason: logits are compared
by the share of rows that are equal and by the median.
"""

from dataclasses import replace

import numpy as np
import oracle_chunks
import pytest
from cases import LONGHEADS, POSITIONS, REPRESENTATIONS
from model_oracle import Model
from oracle_chunks import LongHeads
from session import assert_same
from test_methods import evaluate
from thinning import thin

from pylongctx import Llama
from pylongctx.eval.haystack import load_haystack
from pylongctx.eval.passkey import make_prompt, run_trial

CHUNK, N = 16, 200
TRAINED = 64
METHODS = [
    LongHeads(CHUNK, 64, select=select, representation=representation, position=position, trained=TRAINED)
    for select in ("head", "group") for representation in REPRESENTATIONS for position in POSITIONS
]  # fmt: skip
OTHERS = [
    LongHeads(CHUNK, 64, n_recent=0, n_neighbor=1),
    LongHeads(CHUNK, 64, representation="minmax", position="grouped", n_recent=0, group_size=11),
]


def assert_nearly_all_rows_equal(got: np.ndarray, want: np.ndarray) -> None:
    error = abs(got - want).max(-1) / abs(want).max()
    assert (error < 1e-3).mean() > 0.97, f"rows {np.flatnonzero(error >= 1e-3)} differ"
    assert np.median(error) < 1e-4


# ---- logits ----


@thin(strength=2)
@pytest.mark.parametrize("model", ["llama", "qwen2"])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: f"{m.select}-{m.representation}-{m.position}")
def test_logits_equal_the_oracle(model_path, tokens, model, method):
    want = Model.load(model_path(model)).logits(tokens[:N], method)
    assert_nearly_all_rows_equal(evaluate(model_path(model), method.text(), tokens[:N]), want)


@pytest.mark.parametrize("select", ["head", "group"])
def test_logits_equal_the_oracle_at_eight_times_the_trained_context(model_path, select):
    tokens = np.random.default_rng(1).integers(3, 200, 8 * 64).tolist()
    method = LongHeads(CHUNK, 64, select=select)
    want = Model.load(model_path("llama")).logits(tokens, method)
    assert_nearly_all_rows_equal(evaluate(model_path("llama"), method.text(), tokens, n_ctx=512), want)


@thin
@pytest.mark.parametrize("method", OTHERS, ids=lambda m: m.text().removeprefix("longheads,"))
@pytest.mark.parametrize("model", ["llama-mha", "llama-yarn", "llama-freqs"])
def test_logits_equal_the_oracle_on_other_models(model_path, tokens, model, method):
    """One ubatch, since queries share a choice within theirs only. YaRN has four times the trained context."""
    method = replace(method, trained=256 if model == "llama-yarn" else TRAINED)
    want = Model.load(model_path(model)).logits(tokens, method)
    got = evaluate(model_path(model), method.text(), tokens, n_batch=256, n_ubatch=256)
    assert_nearly_all_rows_equal(got, want)


@pytest.mark.parametrize(("type_name", "tolerance"), [("f16", 1e-2), ("q8_0", 5e-2)])
def test_a_rounded_cache_stays_close(model_path, tokens, type_name, tolerance):
    method = LONGHEADS["longheads-attention"]
    want = Model.load(model_path("llama-wide")).logits(tokens[:N], method)
    got = evaluate(model_path("llama-wide"), method.text(), tokens[:N], type_k=type_name, type_v=type_name)
    assert 0 < np.median(abs(got - want)) < tolerance * abs(want).max()


@pytest.mark.parametrize("representation", REPRESENTATIONS)
def test_the_embedded_model_equals_the_oracle(embedded_f32, representation):
    """A trained model past its 512 positions; a near tie may be decided otherwise."""
    tokens = np.random.default_rng(0).integers(300, 2000, 560).tolist()
    method = LongHeads(32, 256, representation=representation, trained=512)
    want = Model.load(embedded_f32).logits(tokens, method)[-48:]
    got = evaluate(embedded_f32, method.text(), tokens, n_ctx=1024)[-48:]
    assert_nearly_all_rows_equal(got, want)


@pytest.mark.parametrize("representation", REPRESENTATIONS)
def test_a_window_that_holds_everything_equals_full(model_path, tokens, representation):
    path, tokens = model_path("llama"), tokens[:64]
    method = LongHeads(CHUNK, 64, representation=representation)
    assert_same(evaluate(path, method.text(), tokens), evaluate(path, "full", tokens), 1e-5)


def test_settings_matter_beyond_the_window(model_path, tokens):
    """The comparison with the oracle could not fail if every choice gave the same logits."""
    methods = [m for m in METHODS if m.position != "exact"]  # here the last token stands where exact is packed
    results = [evaluate(model_path("llama"), m.text(), tokens[:N])[-1] for m in methods]
    for i, a in enumerate(results):
        for b in results[:i]:
            assert abs(a - b).max() > 0.01


@pytest.mark.parametrize("name", LONGHEADS)
def test_a_trace_shows_what_the_oracle_chose(model_path, tokens, monkeypatch, name):
    wanted, choices = [], oracle_chunks.choices
    monkeypatch.setattr(oracle_chunks, "choices", lambda *args: wanted.append(choices(*args)) or wanted[-1])
    Model.load(model_path("llama")).logits(tokens[:N], LONGHEADS[name])
    options = {"n_ctx": N, "type_k": "f32", "type_v": "f32", "n_threads": 2, "verbose": False}
    with Llama(str(model_path("llama")), method=LONGHEADS[name].text(), **options) as llm, llm.trace() as trace:
        llm.eval(tokens[:N])
    same = trace.chunks == np.stack(wanted, axis=1)
    assert same.all(-1).mean() > 0.99


# ---- ablations ----


@pytest.mark.parametrize("ablation", ["no_first", "last"])
def test_an_ablation_equals_the_oracle(model_path, tokens, monkeypatch, ablation):
    want = Model.load(model_path("llama")).logits(tokens[:N], LongHeads(CHUNK, 64, ablation=ablation))
    monkeypatch.setenv("LCTX_TEST_ABLATION", ablation)
    assert_nearly_all_rows_equal(evaluate(model_path("llama"), LongHeads(CHUNK, 64).text(), tokens[:N]), want)


@pytest.mark.parametrize("ablation", ["random", "random_all", "no_first", "last"])
def test_an_ablation_changes_logits_the_same_way_every_time(model_path, tokens, monkeypatch, ablation):
    run = lambda: evaluate(model_path("llama"), LongHeads(CHUNK, 64).text(), tokens[:N])  # noqa: E731
    plain = run()
    monkeypatch.setenv("LCTX_TEST_ABLATION", ablation)
    first, second = run(), run()
    np.testing.assert_array_equal(first, second)
    assert_same(first[:64], plain[:64])  # nothing to choose
    assert abs(first - plain)[80:].max() > 0.01


@pytest.mark.parametrize(("ablation", "found"), [(None, 4), ("random", 0), ("last", 0)])
def test_retrieval_falls_with_an_ablation(embedded_model, monkeypatch, ablation, found):
    """Table 4 of the paper: random choice and the worst chunks; what the machinery finds is not luck."""
    if ablation:
        monkeypatch.setenv("LCTX_TEST_ABLATION", ablation)
    haystack = load_haystack("sentences")
    with Llama(str(embedded_model), method="longheads", n_ctx=1536, n_threads=2, verbose=False) as llm:
        prompts = [make_prompt(llm.tokenize, haystack, 1536, i, 0, "space") for i in range(4)]
        assert sum(run_trial(llm, prompt).strict for prompt in prompts) == found


# ---- rollback ----


@pytest.mark.parametrize(("n", "prefix"), [
    (200, 200), (199, 199), (193, 193), (192, 192),  # in the open chunk
    (191, 176), (177, 176), (176, 176),  # to a border
    (17, 16), (16, 16), (15, 0), (0, 0),
    (300, 200),  # not longer than it is
])  # fmt: skip
def test_the_longest_restorable_prefix(open_session, tokens, n, prefix):
    session = open_session("llama", LONGHEADS["longheads-attention"].text(), n_ctx=256, n_batch=N, n_ubatch=64)
    session.decode(tokens[:N])
    assert session.restorable(n) == prefix


@pytest.mark.parametrize("representation", REPRESENTATIONS)
def test_summaries_follow_what_replaces_a_chunk(open_session, tokens, representation):
    """Other tokens complete the chunk that was cut: what is chosen later must know the new ones only."""
    method = LongHeads(CHUNK, 64, representation=representation).text()
    settings = {"n_ctx": 256, "n_batch": 256, "n_ubatch": 64}
    session, fresh = (open_session("llama", method, **settings) for _ in range(2))
    kept, replaced = tokens[:100], tokens[40:136]
    session.decode(tokens[:105])
    assert session.remove_tail(100)
    assert_same(session.decode(replaced, 30), fresh.decode(kept + replaced)[100:])
    assert session.remove_tail(6 * CHUNK)
    fresh.clear()
    assert_same(session.decode(tokens[:100], 30), fresh.decode(kept[: 6 * CHUNK] + tokens[:100])[6 * CHUNK :])


@pytest.mark.parametrize("n", [5, CHUNK, 3 * CHUNK + 7, N])
def test_a_copy_of_a_prefix_is_cut_like_a_rollback(open_session, tokens, n):
    method = LONGHEADS["longheads-minmax"].text()
    session = open_session("llama", method, n_seq_max=2, n_ctx=256, n_batch=N, n_ubatch=64)
    session.decode(tokens[:N])
    if session.restorable(n) < n:
        assert not session.copy(0, 1, n)
        assert session.length(1) == 0
    else:
        assert session.copy(0, 1, n)
        assert session.length(1) == n
