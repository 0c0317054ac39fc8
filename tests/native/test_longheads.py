"""LongHeads in whole models against the whole-model oracle, and what its memory can give back.

A choice at a near tie may fall the other way in float32, and then rows differ for a good reason: logits are compared
by the share of rows that are equal and by the median.
"""

from dataclasses import replace

import model_oracle
import numpy as np
import oracle_chunks
import pytest
from cases import LONGHEADS, N_CTX_TRAIN, PAPER
from cases_chunks import POSITIONS, REPRESENTATIONS
from model_oracle import Model
from oracle_chunks import LongHeads
from session import assert_same
from test_methods import evaluate
from thinning import thin

from pylongctx import Llama

CHUNK, N = 16, 200
PAPERS = LongHeads(CHUNK, 64, **PAPER)
METHODS = [PAPERS] + [
    LongHeads(CHUNK, 64, select=select, representation=representation, position=position,
              n_ctx_train=256 if position == "string" else N_CTX_TRAIN, n_ctx=256)
    for select in ("head", "group") for representation in REPRESENTATIONS[1:] for position in POSITIONS
]  # fmt: skip
OTHERS = [
    LongHeads(CHUNK, 64, n_recent=0),
    LongHeads(CHUNK, 64, representation="minmax", position="dca", n_recent=0, n_ctx_train=64),
]


def assert_nearly_all_rows_equal(got: np.ndarray, want: np.ndarray) -> None:
    error = abs(got - want).max(-1) / abs(want).max()
    assert (error < 1e-3).mean() > 0.93, f"rows {np.flatnonzero(error >= 1e-3)} differ"
    assert np.median(error) < 1e-4


def both(path, method: LongHeads, tokens: list[int], **settings) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits of every token and those of the oracle; STRING needs a context that was trained: stretched."""
    stretched = method.position == "string"
    rope = {"rope_scaling_type": 1, "rope_freq_scale": N_CTX_TRAIN / method.n_ctx_train} if stretched else {}
    scale = {"freq_scale": rope["rope_freq_scale"]} if stretched else {}
    want = Model.load(path, **scale).logits(tokens, method)
    return evaluate(path, method.text(), tokens, **{"n_ctx": method.n_ctx} | rope | settings), want


# ---- logits ----


@thin(strength=2)
@pytest.mark.parametrize("model", ["llama", "qwen2"])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: f"{m.select}-{m.representation}-{m.position}")
def test_logits_equal_the_oracle(model_path, tokens, model, method):
    assert_nearly_all_rows_equal(*both(model_path(model), method, tokens[:N]))


@pytest.mark.parametrize("method", [PAPERS, LongHeads(CHUNK, 64, position="dca", n_ctx_train=N_CTX_TRAIN, n_ctx=512)],
                         ids=["paper", "dca"])  # fmt: skip
def test_logits_equal_the_oracle_at_eight_times_the_trained_context(model_path, method):
    tokens = np.random.default_rng(1).integers(3, 200, 8 * 64).tolist()
    assert_nearly_all_rows_equal(*both(model_path("llama"), replace(method, n_ctx=512), tokens))


@thin
@pytest.mark.parametrize("method", OTHERS, ids=lambda m: m.text().removeprefix("longheads,"))
@pytest.mark.parametrize("model", ["llama-mha", "llama-wide", "llama-yarn", "llama-freqs"])
def test_logits_equal_the_oracle_on_other_models(model_path, tokens, model, method):
    """YaRN has four times the trained context."""
    method = replace(method, n_ctx_train=256 if model == "llama-yarn" else N_CTX_TRAIN)
    assert_nearly_all_rows_equal(*both(model_path(model), method, tokens))


@pytest.mark.parametrize(("type_name", "tolerance"), [("f16", 1e-2), ("q8_0", 5e-2)])
def test_a_rounded_cache_stays_close(model_path, tokens, type_name, tolerance):
    method = LONGHEADS["longheads-attention"]
    got, want = both(model_path("llama-wide"), method, tokens[:N], type_k=type_name, type_v=type_name)
    assert 0 < np.median(abs(got - want)) < tolerance * abs(want).max()


@pytest.mark.parametrize("representation", ["attention", "keys2"])
def test_the_embedded_model_equals_the_oracle(embedded_f32, representation):
    """A trained model past its 512 positions; a near tie may be decided otherwise."""
    tokens = np.random.default_rng(0).integers(300, 2000, 560).tolist()
    packed = representation == "attention"
    where = PAPER if packed else {"representation": representation, "position": "dca"}
    got, want = both(embedded_f32, LongHeads(32, 256, **where, n_ctx_train=512, n_ctx=1024), tokens)
    assert_nearly_all_rows_equal(got[-48:], want[-48:])


# ---- what queries read that do not choose ----


@thin(strength=2)
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("representation", REPRESENTATIONS[1:])
@pytest.mark.parametrize("type_name", ["f32", "f16"])
def test_what_reads_every_chunk_equals_the_base_bit_for_bit(model_path, tokens, position, representation, type_name):
    """One token beyond the last chunk that fits, heads have made a choice."""
    n_ctx = {"full": 256, "string": N_CTX_TRAIN}.get(position, 100)
    options = {"n_ctx": n_ctx, "type_k": type_name, "type_v": type_name, "n_threads": 2, "n_threads_batch": 2}
    method = LongHeads(CHUNK, 48, 0, representation=representation, position=position, n_ctx_train=64, n_ctx=n_ctx)
    n_same = next(p for p in range(200) if method.free(p).any())
    assert 48 <= n_same < 100
    got, want = (
        evaluate(model_path("llama"), spec, tokens[: min(n_ctx, n_same + 1)], n_ubatch=CHUNK, **options)
        for spec in (method.text(), position)
    )
    np.testing.assert_array_equal(got[:n_same], want[:n_same])
    if n_same < n_ctx:
        assert (got[n_same] != want[n_same]).any()


def test_a_packed_window_that_holds_everything_equals_full(model_path, tokens):
    path, tokens = model_path("llama"), tokens[:64]
    assert_same(evaluate(path, PAPERS.text(), tokens), evaluate(path, "full", tokens), 1e-5)


def test_settings_matter_beyond_the_window(model_path, tokens):
    """The comparison with the oracle could not fail if every choice gave the same logits."""
    methods = [m for m in METHODS if m.position != "string"]  # it is not for this context
    results = [evaluate(model_path("llama"), m.text(), tokens[:N])[-1] for m in methods]
    for i, a in enumerate(results):
        for b in results[:i]:
            assert abs(a - b).max() > 0.01


def choices(path, method: str, tokens: list[int], **settings) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits of every token, and the chunks that were read."""
    options = {"n_ctx": 256, "n_batch": 128, "type_k": "f32", "type_v": "f32", "logits_all": True, "verbose": False}
    with Llama(str(path), method=method, **options | settings) as llm, llm.trace() as trace:
        llm.eval(tokens)
        return np.array(llm.scores[: len(tokens)]), trace.chunks


@thin
@pytest.mark.parametrize("name", LONGHEADS)
@pytest.mark.parametrize("n_ubatch", [1, 5, 128])
@pytest.mark.parametrize("n_threads", [2, 3])
def test_the_number_of_threads_does_not_matter(model_path, tokens, name, n_ubatch, n_threads):
    """Of a token alone all threads score a head together."""
    threads = {"n_threads": n_threads, "n_threads_batch": n_threads}
    got, want = (
        choices(model_path("llama"), LONGHEADS[name].text(), tokens[:140], n_ubatch=n_ubatch, **settings)
        for settings in (threads, {"n_threads": 1, "n_threads_batch": 1})
    )
    np.testing.assert_array_equal(got[1], want[1])
    assert_same(got[0], want[0], 1e-5)


@pytest.mark.parametrize("name", LONGHEADS)
def test_a_trace_shows_what_the_oracle_chose(model_path, tokens, monkeypatch, name):
    method, wanted, attend = LONGHEADS[name], [], oracle_chunks.attend_longheads
    monkeypatch.setattr(model_oracle, "attend_longheads", lambda *args: wanted.append(attend(*args)) or wanted[-1])
    Model.load(model_path("llama")).logits(tokens[:N], method)
    chunks = choices(model_path("llama"), method.text(), tokens[:N], n_threads=2)[1]
    read = oracle_chunks.as_mask(chunks, -(-N // CHUNK))
    assert (read == np.stack([mask for _, mask in wanted], axis=1)).all(-1).mean() > 0.99


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
    where = PAPER if representation == "attention" else {"representation": representation}
    method = LongHeads(CHUNK, 64, **where).text()
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
