"""The CUDA kernels of *angles*, *store*, *index*, *summarize* and *select*, run by the CPU.

Against the oracle, and against the CPU's own. Other CUDA kernels run too where they are there; the tensor cores of
*attend* read f16.
"""

from dataclasses import replace

import numpy as np
import pytest
import thinning
from cases import LONGHEADS, OP_CASES, ROPES, TOLERANCE
from cases_chunks import CHUNK_CASES, HALF, POSITIONS, ChunkCase, chunk_case
from cases_evict import EVICT_CASES, RULES, evict_case
from op import (
    ROUNDED_OTHERWISE,
    LayerRun,
    assert_right_choices,
    assert_same_summaries,
    make_inputs,
    run_chunks,
    run_evict,
    run_native,
    stored,
)
from oracle import hadamard
from oracle_chunks import LongHeads, Stored, missed
from oracle_index import in_bytes, index_block, key_levels, row_scores
from session import Session, assert_same
from thinning import thin

CASES = {case.name: case for case in CHUNK_CASES}
COMPARED = ("keys1", "keys2", "minmax", "outlier")  # the paper's representation is computed on the CPU
ATTEND = 4e-3
TILE = LongHeads(16, 64, tile=64, tile_window=96)
OTHERS = 0.01  # share of queries that may choose another chunk than on the CPU: a level or byte is rounded otherwise


pytestmark = pytest.mark.usefixtures("emulated")


# ---- against the oracle ----


def check(case: ChunkCase) -> LayerRun:
    layer, got = check_read(case)
    assert_same_summaries(case, got.summaries, layer.summarize(), case.tolerance)
    assert_right_choices(layer, got)
    return got


def check_read(case: ChunkCase) -> tuple[Stored, LayerRun]:
    """Whatever chunks were chosen, they are read."""
    x = make_inputs(case)
    layer, got = stored(case, x), run_chunks(case, x)
    assert_same(got.out, layer.attend(got.chunks), max(case.tolerance, ATTEND))
    return layer, got


# where a warp may go wrong; others of the table in the full suite
CHOICES = [
    "chunk16-rows1", "chunk16-rows65", "chunk48-rows257", "chunk80-rows321", "heads8x8", "heads6x2", "heads8x2-group",
    "heads4x1-group", "dim8", "dim24", "dim32", "dim40", "dim80", "dim128", "dim512", "hadamard-dim512",
    "options-ubatch7-group", "short-group", "softcap", "long",
]  # fmt: skip
NAMES = [f"{name}-{representation}" for name in CHOICES for representation in COMPARED]
PLACED = [name for name in CASES if name.startswith(("rope-", "k-", "base-")) and not name.endswith("attention")]
TILED = [name for name in CASES if name.startswith("tile")]
MORE = [case.name for case in CHUNK_CASES[::3]] if thinning.run_all else []


@thin(table=CASES)
@pytest.mark.parametrize(
    "name", dict.fromkeys([*(name for name in NAMES if name in CASES), *PLACED[::7], *TILED, *MORE])
)
def test_chunks_equal_the_oracle(name):
    check(CASES[name])


def test_the_table_has_the_cases_of_kernels():
    missing = [name for name in NAMES if name not in CASES]
    assert missing == []


@thin
@pytest.mark.parametrize("n_ubatch", [1, 7, 9, 300])
@pytest.mark.parametrize("representation", COMPARED)
@pytest.mark.parametrize("select", ["head", "group"])
def test_chunks_equal_the_oracle_in_ubatches_of_any_size(n_ubatch, representation, select):
    method = LongHeads(80, 400, representation=representation, select=select)
    check(chunk_case("ubatch", n_rows=490, n_head=4, n_head_kv=2, n_ubatch=n_ubatch, method=method))


def test_what_the_paper_represents_is_left_to_the_cpu():
    """*select* and *summarize* of it are refused; so is an index of heads that are too wide to transform."""
    check(CASES["heads6x2-attention"])
    sizes = {"head_dim_k": 1024, "head_dim_v": 32, "n_rows": 130, "n_ubatch": 9}
    check(chunk_case("wide", method=LongHeads(16, 64), **sizes))


@pytest.mark.parametrize("n_ubatch", [5, 200])
@pytest.mark.parametrize("representation", ["keys2", "outlier"])
def test_long_chunks_equal_the_oracle(n_ubatch, representation):
    """More rows than a warp takes at once, and more tokens than it looks through."""
    sizes = {"n_rows": 650, "n_head": 2, "n_head_kv": 1, "head_dim_k": 32, "head_dim_v": 32, "n_ubatch": n_ubatch}
    check(chunk_case("long-chunks", method=LongHeads(144, 432, n_recent=0, representation=representation), **sizes))


@thin
@pytest.mark.parametrize("n_ubatch", [8, 512])
@pytest.mark.parametrize("window", [4, 50])
def test_many_chunks_equal_the_oracle(n_ubatch, window):
    """More chunks to choose, and more of them to choose from, than a warp has lanes."""
    sizes = {"n_rows": 1200, "n_head": 1, "n_head_kv": 1, "head_dim_k": 32, "head_dim_v": 32, "n_ubatch": n_ubatch}
    check(chunk_case("many-chunks", method=LongHeads(16, window * 16), **sizes))


@thin
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize(
    "rope", ["neox", "norm-partial", "neox-partial", "neox-two-dims", "factors", "yarn-partial-factors"]
)
def test_queries_see_chunks_from_the_angles_of_the_base(rope, position):
    method = LongHeads(16, 96, position=position, representation="minmax")
    check(chunk_case("rope", n_rows=130, rope=ROPES[rope], method=method))


@pytest.mark.parametrize("select", ["head", "group"])
@pytest.mark.parametrize("representation", COMPARED)
def test_more_query_heads_than_meet_a_row_at_once(select, representation):
    method = LongHeads(16, 64, select=select, representation=representation)
    check(
        chunk_case("heads", n_rows=137, n_head=13, n_head_kv=1, head_dim_k=40, head_dim_v=40, n_ubatch=9, method=method)
    )


# rows, ubatch, heads, head_dim and method: 16 columns, multiples and others, one tile or more, heads of no whole words
ODD = [
    (257, 65, (1, 1), 24, TILE),
    (330, 330, (3, 1), 40, replace(TILE, n_recent=0)),
    (300, 290, (13, 1), 72, replace(TILE, representation="keys1")),
    (420, 397, (5, 5), 8, replace(TILE, chunk_size=48, window=192, tile_window=336)),
    (401, 130, (6, 2), 104, replace(TILE, select="group", tile_window=64)),
    (260, 260, (16, 1), 32, replace(TILE, representation="keys1")),
    (260, 260, (10, 1), 256, TILE),  # columns in two passes
]


@pytest.mark.parametrize(("n_rows", "n_ubatch", "heads", "dim", "method"), ODD)
def test_tiles_of_odd_sizes_equal_the_oracle(n_rows, n_ubatch, heads, dim, method):
    sizes = {"n_head": heads[0], "n_head_kv": heads[1], "head_dim_k": dim, "head_dim_v": dim}
    check(chunk_case("odd-tile", n_rows=n_rows, n_ubatch=n_ubatch, method=method, **sizes))


# heads, head_dim of K and V, types and base: every width of the loop over a list, columns that turn for each angle, and
# keys of a ring
LISTS = [
    ((2, 1), (128, 128), ("f16", "f16"), "dca"),
    ((4, 1), (128, 128), ("q8_0", "q8_0"), "full"),
    ((6, 2), (104, 40), ("f16", "f16"), "selfextend"),
    ((13, 1), (32, 64), ("q5_0", "q4_1"), "full"),
    ((2, 2), (72, 80), ("f16", "f32"), "string"),
    ((1, 1), (96, 96), ("q5_1", "q8_0"), "dca"),
    ((2, 1), (256, 256), ("f16", "f16"), "selfextend"),
    ((1, 1), (256, 192), ("q4_0", "f16"), "dca"),
    ((1, 1), (512, 512), ("f16", "f16"), "full"),
    ((1, 1), (576, 512), ("q8_0", "q8_0"), "dca"),
]


@thin
@pytest.mark.parametrize(("heads", "dims", "types", "position"), LISTS)
def test_lists_of_any_shape_equal_the_oracle(heads, dims, types, position):
    """Tokens outside of tiles come before and after them; what is chosen of quantized keys has a test of its own."""
    sizes = {"n_head": heads[0], "n_head_kv": heads[1], "head_dim_k": dims[0], "head_dim_v": dims[1]}
    method = replace(TILE, position=position)
    check_read(chunk_case("list", n_rows=330, n_ubatch=170, type_k=types[0], type_v=types[1], method=method, **sizes))


def wants_between(layer: Stored) -> tuple[np.ndarray, np.ndarray]:
    """Return the least and the most that queries may want rows.

    Of a block of quantized numbers a transformed channel is a whole multiple of one step, and exactly 0 for one of 60.
    The index has no level 0, so what floats leave of such a sum decides between -3 and 3.
    """
    keys = hadamard(layer.keys, index_block(layer.keys.shape[-1]))
    level, scale = key_levels(keys, layer.method.key_bits)
    kept, is_zero = scale.astype(np.float16).astype(np.float64), abs(keys) < 1e-5 * scale
    known, either = np.where(is_zero, 0, level) * kept, np.where(is_zero, abs(level), 0) * kept

    def wants(sign: int) -> np.ndarray:
        products = lambda q: row_scores(q, known, layer.scale) + sign * row_scores(abs(q), either, layer.scale)  # noqa: E731
        return layer.seen(1, lambda q: products(in_bytes(q)))

    return wants(-1), wants(1)


def missed_for_sure(layer: Stored, got: LayerRun, first: int, least: np.ndarray, most: np.ndarray) -> float:
    """Return by how much a chunk that a tile's list has left is better than one that it has, of the largest value."""
    free, end = layer.method.tile_free(first), first + layer.method.tile
    is_far = np.pad(free.repeat(layer.method.chunk_size), (0, len(layer.k)))[: len(layer.k)]
    # a value grows with the keys of the chunk, and falls with those that are read anyway
    held = np.ones((layer.n_head_kv, len(layer.k)), dtype=bool)
    low, high = (
        layer.tile_values(np.where(is_far, far, near), first, held) for far, near in ((least, most), (most, least))
    )
    by = 0.0
    for group, read in enumerate(got.chunks[end - 1, :: layer.ratio, : len(free)]):
        between = np.where(read, high[group], low[group])
        by = max(by, missed(between, read, free, layer.method.n_shared) / abs(high[high > -np.inf]).max())
    return by


# the first seeds of each with which a list misses a chunk that is better by a tenth of the largest value, if sums of 0
# are taken as positive: on CUDA, on the CPU, or on both
ZEROS = [("q4_0", 0), ("q5_1", 1), ("q5_1", 2)]


@pytest.mark.parametrize(("type_k", "seed"), ZEROS)
def test_lists_of_quantized_keys_are_right_but_for_sums_that_are_0(emulated, type_k, seed):
    """Heads of 32 channels, which are one block of 32 numbers."""
    sizes = {"n_head": 2, "n_head_kv": 1, "head_dim_k": 32, "head_dim_v": 32}
    case = chunk_case("zeros", n_rows=330, n_ubatch=330, type_k=type_k, type_v="f16", seed=seed, method=TILE, **sizes)
    x = make_inputs(case)
    layer = stored(case, x)
    between = wants_between(layer)
    for got in both(lambda: run_chunks(case, x), emulated):
        for first in (128, 192, 256):
            assert missed_for_sure(layer, got, first, *between) < ROUNDED_OTHERWISE


@pytest.mark.parametrize("types", [("f16", "f16"), ("q8_0", "q4_0")])
def test_lists_of_rows_that_are_transformed_equal_the_oracle(types):
    sizes = {"n_head": 2, "n_head_kv": 1, "hadamard_k": 64, "hadamard_v": 32}
    check(chunk_case("list", n_rows=330, n_ubatch=330, type_k=types[0], type_v=types[1], method=TILE, **sizes))


@thin
@pytest.mark.parametrize("n_rows", [512, 540])
@pytest.mark.parametrize("types", [("f16", "f16"), ("q8_0", "f32")])
def test_parts_of_a_long_list_are_merged(n_rows, types):
    """With and without tokens that choose for themselves, whose parts are others."""
    method = replace(TILE, tile_window=352)
    sizes = {"n_head": 2, "n_head_kv": 1, "type_k": types[0], "type_v": types[1], "hadamard_v": 64}
    check(chunk_case("parts", n_rows=n_rows, n_ubatch=n_rows - 384, method=method, **sizes))


def test_lists_without_room_are_written_out(monkeypatch):
    """Rows of f32 wait as they are stored; the kernel of other tokens needs less."""
    monkeypatch.setenv("LCTX_EMULATED_SHARED", "64")
    sizes = {"n_head": 2, "n_head_kv": 1, "head_dim_k": 128, "head_dim_v": 128}
    check(chunk_case("no-room", n_rows=330, n_ubatch=330, method=TILE, **sizes))


@pytest.mark.parametrize("largest", [7e4, 1e8])
@pytest.mark.parametrize("kv_type", ["f32", "bf16"])
def test_values_beyond_a_half_are_read_from_lists_as_they_are(emulated, kv_type, largest):
    case = chunk_case("large-tile", n_rows=330, n_ubatch=330, type_k="f32", type_v=kv_type, method=TILE)
    x = make_inputs(case)
    x.v[20, :, :32], x.v[150, :, 3] = largest, -largest
    got, want = both(lambda: run_chunks(case, x), emulated)
    read = (got.chunks == want.chunks).all(-1)
    for channels in (slice(0, 32), slice(32, 64)):
        assert_same(got.out[read][:, channels], want.out[read][:, channels], 1e-2)


def test_tiles_equal_the_oracle_where_blocks_have_little_memory(monkeypatch):
    """16 queries at a time."""
    monkeypatch.setenv("LCTX_EMULATED_SHARED", "64")
    check(chunk_case("narrow-tile", n_rows=330, n_ubatch=330, head_dim_k=512, head_dim_v=64, method=TILE))


def test_of_equal_chunks_a_tile_reads_the_first():
    case = chunk_case("equal-tile", n_rows=320, n_head=2, n_head_kv=1, n_ubatch=320, method=TILE)
    x = make_inputs(case)
    x.q[:] = 0
    got = run_chunks(case, x)
    for first in (192, 256):
        read = np.flatnonzero(got.chunks[first + 63, 0])
        assert read[: 1 + TILE.n_shared].tolist() == list(range(1 + TILE.n_shared))
        assert (got.chunks[first + 63] == got.chunks[first + 63, 0]).all()


@pytest.mark.parametrize("representation", COMPARED)
def test_of_equal_chunks_the_first_are_chosen(representation):
    size = 16
    method = LongHeads(size, 6 * size, representation=representation)
    case = chunk_case("equal", n_rows=12 * size, n_head=2, n_head_kv=1, method=method)
    x = make_inputs(case)
    x.q[:] = 0
    got = run_chunks(case, x)
    for own in range(7, 12):
        assert (np.argwhere(got.chunks[own * size])[:, 1].reshape(2, -1) == [0, 1, 2, 3, own - 1, own]).all()


# ---- against the CPU's kernels ----


def both(run, back_to_the_cpu) -> list:
    got = run()
    back_to_the_cpu()
    return [got, run()]


@thin
@pytest.mark.parametrize("type_name", TOLERANCE)
@pytest.mark.parametrize("position", ["full", "dca"])
def test_rows_are_rounded_as_on_the_cpu(emulated, type_name, position):
    """Extremes show what is stored; a rotation that is one bit off flips a level, or a half, now and then."""
    method = LongHeads(16, 96, representation="minmax", position=position)
    case = chunk_case("rounding", type_k=type_name, type_v=type_name, method=method)
    x = make_inputs(case)
    got, want = both(lambda: run_chunks(case, x).summaries, emulated)
    assert_same(got, want, max(case.tolerance, HALF))
    assert np.isclose(got, want, rtol=1e-5, atol=1e-6).mean() > 0.98


# type of K, head_dim_k, and channels that are stored transformed together
KEYS = [*(("f32", dim, 0) for dim in (8, 24, 40, 72, 96, 256)), ("q8_0", 96, 0), ("q4_0", 96, 32), ("f16", 256, 64),
        ("q8_0", 128, 128)]  # fmt: skip


@thin
@pytest.mark.parametrize(("type_k", "dim", "block"), KEYS)
@pytest.mark.parametrize("bits", [1, 2])
def test_keys_are_indexed_as_on_the_cpu(emulated, type_k, dim, block, bits):
    """Keys that were stored transformed or not; one channel far larger than the others, and rows of zeros."""
    method = LongHeads(16, 96, representation=f"keys{bits}")
    case = chunk_case("index", head_dim_k=dim, type_k=type_k, hadamard_k=block, method=method)
    x = make_inputs(case)
    x.k[..., 3] *= 20
    x.k[100:120] = 0
    got, want = both(lambda: run_chunks(case, x).chunks, emulated)
    # when they are transformed here, quantized values add up to exactly 0 now and then, which is rounded to either sign
    others = 3 * OTHERS if (type_k, block) == ("q8_0", 0) else OTHERS
    assert (got == want).all(-1).mean() > 1 - others


@pytest.mark.parametrize("select", ["head", "group"])
@pytest.mark.parametrize("representation", ["keys2", "minmax"])
def test_a_query_that_is_not_a_number_chooses_what_it_chooses_on_the_cpu(emulated, representation, select):
    method = LongHeads(16, 96, representation=representation, select=select)
    case = chunk_case("nan", n_rows=200, n_ubatch=7, method=method)
    x = make_inputs(case)
    x.q[150, 1], x.q[160, 2, 3] = np.nan, np.inf
    got, want = both(lambda: run_chunks(case, x), emulated)
    np.testing.assert_array_equal(got.chunks[[150, 160]], want.chunks[[150, 160]])


@pytest.mark.parametrize("rows", [[132, 164], range(128, 192)])
def test_a_tile_leaves_out_queries_that_are_not_numbers(emulated, rows):
    """Two that are compared, or all of them."""
    case = chunk_case("nan-tile", n_rows=256, n_ubatch=256, method=TILE)
    x = make_inputs(case)
    x.q[list(rows)] = np.nan
    got, want = both(lambda: run_chunks(case, x), emulated)
    np.testing.assert_array_equal(got.chunks[128:], want.chunks[128:])


def test_positions_far_out_have_the_angles_of_the_cpu(emulated):
    case = next(c for c in OP_CASES if c.name == "rope-yarn")
    x = make_inputs(case)
    far = replace(x, k_pos=x.k_pos + 100_000, seg_pos=x.seg_pos + 100_000)
    got, want = both(lambda: run_native(case, far)[0], emulated)
    assert_same(got, want, ATTEND)


HELD = [case for case in EVICT_CASES if case.name in ("empty-chunks", "long-chunks", "longheads-dca-corm-every16")
        or case.name.startswith("tile")]  # fmt: skip
WITH_SUMMARIES = [
    evict_case(f"{name}-{select}-corm", sharpness=8.0, method=LongHeads(16, 96, representation=name, select=select),
               rule=RULES["corm-every16"])
    for name, select in (("minmax", "head"), ("outlier", "head"), ("keys1", "head"), ("keys2", "group"))
]  # fmt: skip


@pytest.mark.parametrize("case", [*HELD, *WITH_SUMMARIES], ids=lambda case: case.name)
def test_heads_that_drop_rows_choose_what_the_cpu_chooses(emulated, case):
    """A chunk that has lost its rows is not chosen; a vote at a near tie may fall the other way."""
    x = make_inputs(case)
    got, want = both(lambda: run_evict(case, x), emulated)
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
    """Neighbouring tokens are of different sequences; every sequence meets its own chunks."""
    parts = [tokens[i : i + 90] for i in (0, 50, 100)]
    pairs = [(seq, part[i]) for i in range(90) for seq, part in enumerate(parts)]

    def run() -> np.ndarray:
        session: Session = open_session("llama", method.text(), **SIZES)
        return np.concatenate([session.decode_mixed(pairs[i : i + step]) for i in range(0, len(pairs), step)])

    assert_nearly_all_rows_equal(*both(run, emulated))


@pytest.mark.parametrize("select", ["head", "group"])
def test_tiles_of_several_sequences_in_a_ubatch(open_session, tokens, select):
    """Tokens outside of tiles stand before them, between them and after them; every sequence has its own answers."""
    parts = [tokens[:192], tokens[50:242]]
    pieces = [slice(0, 131), slice(131, 192)]
    sizes = {"n_ctx": 256, "n_seq_max": 2, "n_batch": 262, "n_ubatch": 262}

    def run(*seqs: int) -> np.ndarray:
        session: Session = open_session("llama", replace(TILE, tile_window=64, select=select).text(), **sizes)
        batches = [[(seq, t) for seq in seqs for t in parts[seq][piece]] for piece in pieces]
        answers = [session.decode_mixed(batch).reshape(len(seqs), -1, session.n_vocab) for batch in batches]
        return np.concatenate(answers, axis=1)

    assert_nearly_all_rows_equal(run(0, 1).reshape(2 * 192, -1), np.concatenate([run(0), run(1)]).reshape(2 * 192, -1))


@pytest.mark.parametrize("method", [LongHeads(16, 64), replace(TILE, tile_window=64)], ids=["alone", "tiles"])
def test_scores_of_a_long_context_are_computed_in_parts(open_session, tokens, emulated, method):
    """With room for this many chunks a few queries are scored at a time."""
    sizes = {"n_ctx": 16 * 1024, "n_batch": 200, "n_ubatch": 200}
    run = lambda: open_session("llama-mha", method.text(), **sizes).decode(tokens[:200])  # noqa: E731
    assert_nearly_all_rows_equal(*both(run, emulated))
