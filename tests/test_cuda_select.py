"""The CUDA kernels of *angles*, *store*, *summarize* and *select*, run by the CPU: against the oracle and its own.

Other CUDA kernels run too where they are there; the tensor cores of *attend* read f16.
"""

from dataclasses import replace

import numpy as np
import pytest
import thinning
from cases import (
    CHUNK_CASES,
    HALF,
    LONGHEADS,
    OP_CASES,
    POSITIONS,
    REPRESENTATIONS,
    ROPES,
    TOLERANCE,
    ChunkCase,
    chunk_case,
)
from cases_evict import EVICT_CASES
from op import LayerRun, assert_same_summaries, make_inputs, run_chunks, run_evict, run_native, stored
from oracle_chunks import LongHeads
from session import Session, assert_same
from thinning import thin

CASES = {case.name: case for case in CHUNK_CASES}
ATTEND = 4e-3


pytestmark = pytest.mark.usefixtures("emulated")


# ---- against the oracle ----


def check(case: ChunkCase) -> LayerRun:
    x = make_inputs(case)
    layer, got = stored(case, x), run_chunks(case, x)
    assert_same_summaries(case, got.summaries, layer.summarize(), case.tolerance)
    np.testing.assert_array_equal(got.chunks, layer.choose(got.summaries))
    assert_same(got.out, layer.attend(got.chunks), max(case.tolerance, ATTEND))
    return got


# where the choice of a warp may go wrong; others of the table in the full suite
CHOICES = [
    "chunk16-rows1", "chunk16-rows65", "chunk48-rows257", "chunk80-rows321",
    "heads8x8", "heads6x2", "heads8x2-group", "heads4x1-group",
    "dim32", "dim40", "dim80", "dim128", "dim512", "hadamard-dim512",
    "k-f16-v-q8_0-grouped", "k-q4_0-v-f16-packed", "rope-yarn-packed",
    "options-neighbor1", "options-neighbor2", "options-neighbor3", "options-recent0-grouped", "options-recent2-exact",
    "short-group", "softcap", "long",
]  # fmt: skip
NAMES = [f"{name}-{representation}" for name in CHOICES for representation in REPRESENTATIONS]
OTHERS = [case.name for case in CHUNK_CASES[::3]] if thinning.run_all else []


@thin(table=CASES)
@pytest.mark.parametrize("name", dict.fromkeys([*NAMES, *OTHERS]))
def test_chunks_equal_the_oracle(name):
    check(CASES[name])


@thin
@pytest.mark.parametrize("n_ubatch", [1, 7, 9, 300])
@pytest.mark.parametrize("representation", REPRESENTATIONS)
@pytest.mark.parametrize("select", ["head", "group"])
def test_chunks_equal_the_oracle_in_ubatches_of_any_size(n_ubatch, representation, select):
    """Queries of a chunk come from the batch, from the ring, or from both."""
    method = LongHeads(80, 400, representation=representation, select=select)
    check(chunk_case("ubatch", n_rows=490, n_head=4, n_head_kv=2, n_ubatch=n_ubatch, method=method))


def test_queries_beyond_shared_memory_are_refused():
    """Where a choice is of many wide heads, the CPU takes its place; a launch would fail."""
    sizes = {"n_rows": 70, "n_head": 48, "n_head_kv": 1, "head_dim_k": 512, "head_dim_v": 512, "n_ubatch": 5}
    check(chunk_case("wide-group", method=LongHeads(16, 64, select="group", representation="outlier"), **sizes))


@pytest.mark.parametrize("n_ubatch", [1, 200])
def test_long_chunks_equal_the_oracle(n_ubatch):
    """Several tiles of queries and keys, and more tokens than a warp looks through at once."""
    sizes = {"n_rows": 650, "n_head": 2, "n_head_kv": 1, "n_ubatch": n_ubatch}
    check(chunk_case("long-chunks", method=LongHeads(320, 960), **sizes))


@thin
@pytest.mark.parametrize("n_ubatch", [8, 512])
@pytest.mark.parametrize("n_neighbor", [0, 34])
def test_many_chunks_equal_the_oracle(n_neighbor, n_ubatch):
    """More chunks to choose, and more of them to choose from, than a warp has lanes."""
    sizes = {"n_rows": 1200, "n_head": 1, "n_head_kv": 1, "head_dim_k": 32, "head_dim_v": 32, "n_ubatch": n_ubatch}
    method = LongHeads(16, 50 * 16 if n_neighbor == 0 else 70 * 16, n_neighbor=n_neighbor)
    check(chunk_case("many-chunks", method=method, **sizes))


@thin
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize(
    "rope", ["neox", "norm-partial", "neox-partial", "neox-two-dims", "factors", "yarn-partial-factors"]
)
def test_keys_are_rotated_and_turned_to_their_own_positions(rope, position):
    method = LongHeads(16, 96, position=position, representation="minmax")
    check(chunk_case("rope", n_rows=130, rope=ROPES[rope], method=method))


@pytest.mark.parametrize("type_name", ["f32", "f16"])
def test_halves_that_are_no_whole_vectors_are_turned(type_name):
    method = LongHeads(16, 96, representation="moments")
    sizes = {"n_rows": 130, "head_dim_k": 40, "head_dim_v": 40, "type_k": type_name}
    check(chunk_case("halves", rope=ROPES["neox"], method=method, **sizes))


@thin
@pytest.mark.parametrize("representation", REPRESENTATIONS)
@pytest.mark.parametrize("size", [16, 48])
def test_equal_chunks_are_chosen_by_their_index(representation, size):
    case = chunk_case("ties", n_rows=12 * size, method=LongHeads(size, 6 * size, representation=representation))
    x = make_inputs(case)
    for part in (x.k, x.v, x.q):
        part[:] = part[np.arange(case.n_rows) % size]
    if representation != "attention":  # what stands elsewhere has another score
        x.q[:] = 0
    got = run_chunks(case, x)
    for own in range(6, 12):
        assert (got.chunks[own * size : (own + 1) * size] == [0, 1, 2, 3, own - 1, own]).all()


@thin
@pytest.mark.parametrize("n_ubatch", [7, 130])
@pytest.mark.parametrize("mass", [0.3, 0.6, 1.0])
@pytest.mark.parametrize("select", ["head", "group"])
def test_heads_read_until_they_have_their_mass(select, mass, n_ubatch):
    method = LongHeads(16, 128, select=select, representation="moments", mass=mass)
    case = chunk_case("mass", n_rows=261, n_head=6, n_head_kv=2, n_ubatch=n_ubatch, sharpness=3.0, method=method)
    n_read = (check(case).chunks[160:] >= 0).sum(-1)
    assert (n_read == 8).all() if mass == 1.0 else 2 < n_read.min() < n_read.max()


@pytest.mark.parametrize("n_ubatch", [8, 512])
def test_many_chunks_are_read_until_they_have_their_mass(n_ubatch):
    """More chunks than a warp has lanes. Flat attention takes many of them."""
    sizes = {"n_rows": 1200, "n_head": 2, "n_head_kv": 1, "head_dim_k": 32, "head_dim_v": 32, "n_ubatch": n_ubatch}
    method = LongHeads(16, 60 * 16, select="group", representation="moments", mass=0.6)
    got = check(chunk_case("many-chunks", sharpness=0.5, method=method, **sizes))
    assert 32 < (got.chunks[-1] >= 0).sum(-1).min() < 60


@pytest.mark.parametrize("n_chunk", [4_000, 12_300])
def test_choices_fit_into_shared_memory(n_chunk):
    """Fewer of them at once; and on the CPU what does not fit alone."""
    method = LongHeads(16, 16 * n_chunk, n_neighbor=1, representation="minmax")
    check(chunk_case("shared", n_rows=37, n_head=2, n_head_kv=1, method=method))


# ---- against the CPU's kernels ----


def both(run, back_to_the_cpu) -> list:
    got = run()
    back_to_the_cpu()
    return [got, run()]


@thin
@pytest.mark.parametrize("type_name", TOLERANCE)
@pytest.mark.parametrize("position", POSITIONS)
def test_rows_are_rounded_as_on_the_cpu(emulated, type_name, position):
    """Extremes show what is stored; a rotation that is one bit off flips a level, or a half, now and then."""
    method = LongHeads(16, 96, representation="minmax", position=position)
    case = chunk_case("rounding", type_k=type_name, type_v=type_name, method=method)
    x = make_inputs(case)
    got, want = both(lambda: run_chunks(case, x).summaries, emulated)
    assert_same(got, want, max(case.tolerance, HALF))
    assert np.isclose(got, want, rtol=1e-5, atol=1e-6).mean() > 0.98


@thin
@pytest.mark.parametrize("ablation", ["random", "random_all", "no_first", "last"])
@pytest.mark.parametrize("n_ubatch", [5, 64])
def test_an_ablation_chooses_what_the_cpu_chooses(emulated, monkeypatch, ablation, n_ubatch):
    case = replace(chunk_case("ablation"), n_ubatch=n_ubatch)
    x = make_inputs(case)
    plain = run_chunks(case, x).chunks
    monkeypatch.setenv("LCTX_TEST_ABLATION", ablation)
    got, want = both(lambda: run_chunks(case, x).chunks, emulated)
    np.testing.assert_array_equal(got, want)
    assert (got[96:] != plain[96:]).any(-1).mean() > 0.5


def test_positions_far_out_have_the_angles_of_the_cpu(emulated):
    case = next(c for c in OP_CASES if c.name == "rope-yarn")
    x = make_inputs(case)
    far = replace(x, k_pos=x.k_pos + 100_000, seg_pos=x.seg_pos + 100_000)
    got, want = both(lambda: run_native(case, far)[0], emulated)
    assert_same(got, want, ATTEND)


@pytest.mark.parametrize("name", ["empty-chunks", "long-chunks", "longheads-grouped-corm"])
def test_heads_that_drop_rows_choose_what_the_cpu_chooses(emulated, name):
    """A chunk that has lost its rows is not chosen; a vote at a near tie may fall the other way."""
    case = next(c for c in EVICT_CASES if c.name == name)
    x = make_inputs(case)
    got, want = both(lambda: run_evict(case, x), emulated)
    assert np.isnan(want.summaries).all(-1).any() or name != "empty-chunks"
    assert (got.held == want.held).mean() > 0.99
    assert (got.chunks == want.chunks).all(-1).mean() > 0.97


def test_heads_that_drop_rows_share_what_is_left(emulated):
    method = LongHeads(16, 96, representation="moments", mass=0.9)
    case = replace(next(c for c in EVICT_CASES if c.name == "empty-chunks"), method=method)
    x = make_inputs(case)
    got, want = both(lambda: run_evict(case, x), emulated)
    assert np.isnan(want.summaries).all(-1).any()
    assert (got.held == want.held).mean() > 0.99
    assert (got.chunks == want.chunks).all(-1).mean() > 0.97


# ---- whole models ----


def assert_nearly_all_rows_equal(got: np.ndarray, want: np.ndarray) -> None:
    error = abs(got - want).max(-1) / abs(want).max()
    assert (error < 10 * ATTEND).mean() > 0.97, f"rows {np.flatnonzero(error >= 10 * ATTEND)} differ"


SIZES = {"n_ctx": 96, "n_seq_max": 3, "n_batch": 60, "n_ubatch": 60}


@thin
@pytest.mark.parametrize("step", [6, 60])
@pytest.mark.parametrize("method", LONGHEADS.values(), ids=lambda m: m.text())
def test_sequences_that_complete_their_chunks_together(open_session, tokens, emulated, method: LongHeads, step):
    """Neighbouring tokens are of different sequences; every sequence meets its own summaries."""
    parts = [tokens[i : i + 90] for i in (0, 50, 100)]
    pairs = [(seq, part[i]) for i in range(90) for seq, part in enumerate(parts)]

    def run() -> np.ndarray:
        session: Session = open_session("llama", method.text(), **SIZES)
        return np.concatenate([session.decode_mixed(pairs[i : i + step]) for i in range(0, len(pairs), step)])

    assert_nearly_all_rows_equal(*both(run, emulated))


def test_scores_of_a_long_context_are_computed_in_parts(open_session, tokens, emulated):
    """With room for so many chunks 64 queries are scored at a time."""
    sizes = {"n_ctx": 16 * 1024, "n_batch": 200, "n_ubatch": 200}
    run = lambda: open_session("llama-mha", LongHeads(16, 64).text(), **sizes).decode(tokens[:200])  # noqa: E731
    assert_nearly_all_rows_equal(*both(run, emulated))


@pytest.mark.parametrize("select", ["head", "group"])
def test_what_is_left_unread_is_summed(open_session, tokens, emulated, select):
    method = LongHeads(16, 64, select=select, representation="moments", mass=0.5).text()

    def run() -> np.ndarray:
        session: Session = open_session("llama", method, **SIZES | {"n_ctx": 260})
        info = session.ffi.new("lctx_model_info *")
        session.lib.lctx_model_get_info(session.model, info)
        shares = np.empty((info.n_layer, info.n_head), np.float32)
        out = session.ffi.from_buffer("float[]", shares)
        session.decode(tokens[:60])
        assert session.lib.lctx_unread_shares(session.ctx, out) == session.lib.LCTX_OK
        first = shares.copy()
        session.decode(tokens[60:256], step=49)
        assert session.lib.lctx_unread_shares(session.ctx, out) == session.lib.LCTX_OK
        return np.stack([first, shares])

    got, want = both(run, emulated)
    np.testing.assert_allclose(got, want, atol=0.01)
    assert (want[0] < want[1]).all()
    assert (want[1] < 0.5).all()
