"""The CUDA kernel of *attend*, run by the CPU thread by thread: against the oracle; whole models against the CPU's."""

from dataclasses import replace

import numpy as np
import pytest
from cases import OP_CASES, SPECS
from cases import TOLERANCE as TOLERANCES
from op import POISON, _pointer, make_inputs, run_native, run_oracle
from oracle import Full, Window
from oracle_chunks import LongHeads
from session import assert_same
from thinning import thin

TOLERANCE = 2e-3  # queries, weights and rows are f16 on the tensor cores
N = 100


pytestmark = pytest.mark.usefixtures("emulated")


@thin
@pytest.mark.parametrize("case", OP_CASES, ids=lambda case: case.name)
def test_attend_equals_the_oracle(case):
    x = make_inputs(case)
    parts = zip(run_native(case, x), run_oracle(case, x), strict=True)
    for got, want in ((got, want) for got, want in parts if got is not None):
        assert not (got == POISON).any(), "an element was not written"
        finite = np.isfinite(want)
        np.testing.assert_array_equal(got[~finite], want[~finite])
        scale = max(1, abs(want[finite]).max(initial=0))
        np.testing.assert_allclose(got[finite], want[finite], rtol=0, atol=max(TOLERANCE, case.tolerance) * scale)


@thin
@pytest.mark.parametrize("n_tokens", [1, 9, 130])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512, 576])
def test_any_tile_of_any_width(n_tokens, head_dim):
    """Few and many columns, parts of the rows that are merged, and heads in tiles of their own."""
    for n_head, n_head_kv in ((8, 8), (8, 1), (71, 1)) if head_dim <= 256 else ((2, 2), (17, 1)):
        case = replace(OP_CASES[0], n_rows=193, n_tokens=n_tokens, n_head=n_head, n_head_kv=n_head_kv, lse=True,
                       head_dim_k=head_dim, head_dim_v=head_dim, type_k="f16", type_v="f16")  # fmt: skip
        x = make_inputs(case)
        for got, want in zip(run_native(case, x), run_oracle(case, x), strict=True):
            assert_same(got, want, TOLERANCE)


@thin
@pytest.mark.parametrize("n_tokens", [1, 20])
@pytest.mark.parametrize("kib", [64, 99, 227])
@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "f32"])
def test_gpus_with_less_or_more_shared_memory(monkeypatch, kib, kv_type, n_tokens):
    """Of GPUs from sm_75 on to sm_90: fewer or more blocks of rows are on their way."""
    monkeypatch.setenv("LCTX_EMULATED_SHARED", str(kib))
    for head_dim in (64, 256):
        case = replace(OP_CASES[0], n_rows=150, n_tokens=n_tokens, head_dim_k=head_dim, head_dim_v=head_dim,
                       type_k=kv_type, type_v=kv_type)  # fmt: skip
        x = make_inputs(case)
        assert_same(run_native(case, x)[0], run_oracle(case, x)[0], max(TOLERANCE, case.tolerance))


@thin
@pytest.mark.parametrize("n_tokens", [1, 40])
@pytest.mark.parametrize("kib", [64, 99, 227])
@pytest.mark.parametrize(("method", "types"), [
    (Full(), ("f16", "f16")), (Window(100, 1500), ("f16", "f16")), (Full(), ("q8_0", "q8_0")),
    (Full(), ("f16", "q4_0")), (Full(), ("bf16", "q5_1")), (Full(), ("q8_0", "f32")),
    (Full(), ("iq4_nl", "iq4_nl")),
])  # fmt: skip
def test_most_blocks_of_a_long_text_are_read_whole(monkeypatch, kib, method, types, n_tokens):
    """By every column, without a mask: a loop of its own, for one or two blocks that are on their way."""
    monkeypatch.setenv("LCTX_EMULATED_SHARED", str(kib))
    case = replace(OP_CASES[0], n_rows=2011, n_tokens=n_tokens, n_head=2, n_head_kv=1, type_k=types[0],
                   type_v=types[1], lse=True, method=method)  # fmt: skip
    x = make_inputs(case)
    for got, want in zip(run_native(case, x), run_oracle(case, x), strict=True):
        assert_same(got, want, max(TOLERANCE, case.tolerance))


@pytest.mark.parametrize("kv_type", [name for name in TOLERANCES if "q" in name])
def test_rows_of_few_bits_become_the_nearest_halves(emulated, kv_type):
    """A query that reads one row gives it back; every second row of three blocks begins between two words."""
    few = {"n_rows": 4, "n_tokens": 4, "n_head": OP_CASES[0].n_head_kv}  # columns whose factors the CPU does not round
    case = replace(OP_CASES[0], head_dim_k=96, head_dim_v=96, type_k=kv_type, type_v=kv_type, **few)
    x = make_inputs(case)
    x.seg_rows[:, 0] = [(row, row + 1) for row in range(4)]
    cuda, _ = run_native(case, x)
    emulated()
    cpu, _ = run_native(case, x)
    np.testing.assert_array_equal(cuda, cpu.astype(np.float16))


@thin
@pytest.mark.parametrize("n_tokens", [1, 20])
@pytest.mark.parametrize("largest", [7e4, 1e5, 1e8, 1e12])
@pytest.mark.parametrize("kv_type", ["f32", "bf16"])
def test_values_beyond_a_half_are_read_as_they_are(emulated, kv_type, largest, n_tokens):
    """Up to 1e9; small ones next to them keep their precision, and NaN stays in its channel."""
    case = replace(OP_CASES[0], n_rows=200, n_tokens=n_tokens, type_k="q8_0", type_v=kv_type)
    x = make_inputs(case)
    x.v[20, :, :32], x.v[150, :, 3], x.v[30, 0, 40] = largest, -largest, np.nan
    cuda, _ = run_native(case, x)
    emulated()
    cpu, _ = run_native(case, x)
    x.v[:] = np.clip(x.v, -1e9, 1e9)
    want, _ = run_oracle(case, x)
    for got in (cuda, cpu):
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
        for channels in (slice(0, 32), slice(32, 40), slice(41, 64)):
            assert_same(got[..., channels], want[..., channels], 1e-2)


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_sums_of_large_values_are_finite(kv_type):
    """64 rows of them are more than a half, and what a GPU with f16 sums adds first."""
    case = replace(OP_CASES[0], n_rows=200, n_tokens=40, type_k="f16", type_v=kv_type)
    x = make_inputs(case)
    x.v[:] = np.where(np.arange(case.head_dim_v) % 3, 6e4, -5e4)
    got, want = run_native(case, x)[0], run_oracle(case, x)[0]
    assert abs(want).max() > 5.9e4
    assert_same(got, want, TOLERANCE)


@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q5_1", "iq4_nl"])
def test_values_beyond_a_half_are_stored_as_the_largest(emulated, kv_type):
    case = replace(OP_CASES[0], n_rows=100, n_tokens=3, type_k="f32", type_v=kv_type)
    x = make_inputs(case)
    x.v[20, :, :32], x.v[30, :, :32] = 1e9, -3e5
    cuda, _ = run_native(case, x)
    emulated()
    cpu, _ = run_native(case, x)
    x.v[:] = np.clip(x.v, -65504, 65504)
    want, _ = run_oracle(case, x)
    for got in (cuda, cpu):
        assert np.isfinite(got).all()
        assert_same(got, want, 1e-2)


@pytest.mark.parametrize("kv_type", ["f32", "q8_0", "q4_0"])
def test_keys_are_stored_without_their_center(emulated, kv_type):
    case = replace(OP_CASES[0], n_rows=100, n_tokens=3, type_k=kv_type, type_v=kv_type)
    x = make_inputs(case)
    center = np.linspace(-2, 5, case.n_head_kv * case.head_dim_k, dtype=np.float32)
    cuda, cuda_lse = run_native(case, x, center=_pointer(center))
    emulated()
    cpu, cpu_lse = run_native(case, x, center=_pointer(center))
    assert_same(cuda, cpu, max(TOLERANCE, case.tolerance))
    assert_same(cuda_lse, cpu_lse, max(TOLERANCE, case.tolerance))


@pytest.mark.parametrize("kv_type", ["f32", "iq4_nl"])
@pytest.mark.parametrize("n_tokens", [1, 20])
def test_a_key_that_is_nan_is_not_hidden(emulated, n_tokens, kv_type):
    """Each query that reads it gives NaN, also where parts of the rows are merged; the other KV head is unaffected."""
    case = replace(OP_CASES[0], n_rows=700, n_tokens=n_tokens, n_head=2, n_head_kv=2, lse=True, type_k=kv_type)
    x = make_inputs(case)
    x.k[300, 0] = np.nan
    cuda, cuda_lse = run_native(case, x)
    emulated()
    cpu, cpu_lse = run_native(case, x)
    for out, lse in ((cuda, cuda_lse), (cpu, cpu_lse)):
        assert np.isnan(out[:, 0]).all()
        assert np.isnan(lse[:, 0]).all()
        assert np.isfinite(out[:, 1]).all()


@thin
@pytest.mark.parametrize("step", [1, 7, 64])
@pytest.mark.parametrize("name", SPECS)
def test_models_equal_the_cpu(emulated, open_session, tokens, name, step):
    sizes = {
        "n_ctx": 128,
        "n_batch": 64,
        "n_ubatch": 32,
        "n_threads": 1,
        "n_threads_batch": 1,
        "type_k": 1,
        "type_v": 1,
    }
    got = open_session("llama", SPECS[name], **sizes).decode(tokens[:N], step)
    emulated()
    want = open_session("llama", SPECS[name], **sizes).decode(tokens[:N], step)
    # a near tie may choose another chunk
    assert np.median(abs(got - want)) < TOLERANCE * abs(want).max()
    assert (abs(got - want).max(axis=1) > 5 * TOLERANCE * abs(want).max()).mean() < 0.1


@pytest.mark.parametrize(("model", "kv_type"), [("llama", 1), ("llama-wide", 8)])
def test_sequences_in_one_tile(emulated, open_session, tokens, model, kv_type):
    """Three that take turns, then a text between tokens of the others: only its own tiles read converted rows."""
    sizes = {"n_ctx": 512, "n_batch": 256, "n_ubatch": 256, "n_seq_max": 3, "n_threads": 1, "n_threads_batch": 1,
             "type_k": kv_type, "type_v": kv_type}  # fmt: skip
    answers = []
    for _ in range(2):
        session = open_session(model, "full", **sizes)
        turns = [(i % 3, t) for i, t in enumerate(tokens[:30])]
        text = [(1, tokens[30]), *((2, t) for t in tokens[31:251]), (0, tokens[251])]
        batches = [turns, text, [(i, t) for i, t in enumerate(tokens[252:255])]]
        answers.append(np.concatenate([session.decode_mixed(batch) for batch in batches]))
        if len(answers) == 1:
            emulated()
    # some CPUs round queries for quantized rows to 8 bits, in every layer
    assert_same(answers[0], answers[1], TOLERANCE if kv_type == 1 else 0.1)


TILES = "longheads-tiles"
FETCHED = {
    **{name: SPECS[name] for name in ("longheads-minmax", "longheads-keys", "longheads-selfextend")},
    TILES: LongHeads(16, 64, tile=64, tile_window=64).text(),
}


@pytest.mark.parametrize("name", FETCHED)
def test_rows_in_memory_of_the_host(open_session, tokens, name):
    """The kernels of *fetch* and of rows that are left out: the same answers without, and with much or little room."""
    n_ubatch = 64 if name == TILES else 32
    sizes = {"n_ctx": 320, "n_batch": 64, "n_ubatch": n_ubatch, "n_threads": 1, "n_threads_batch": 1, "n_seq_max": 2}
    n_units, n_heads, least = 16, 2 * 2, 3 * 4  # that are read, of the model, that are asked for
    answers, room = [], 2**64 - 1
    for offload in (0, room, None):
        offload = room if offload is None else offload
        session = open_session("llama", FETCHED[name], kv_offload=offload, **sizes)
        answers.append(np.concatenate([session.decode(tokens[:192], n_ubatch), session.decode(tokens[192:250], 1)]))
        info = session.ffi.new("lctx_offload_info *")
        assert session.lib.lctx_offload_usage(session.ctx, info) == session.lib.LCTX_OK
        if offload == 2**64 - 1:
            counts = info.n_hit + info.n_miss
            assert (info.n_miss, info.n_far) == (n_heads * n_units, 0)
            room = least * n_heads * info.unit_bytes
    assert info.n_staged == least
    assert info.n_hit + info.n_miss + info.n_far == counts
    assert min(info.n_hit, info.n_miss - n_heads * n_units, info.n_far) > 0
    np.testing.assert_array_equal(answers[1], answers[0])
    np.testing.assert_array_equal(answers[2], answers[0])


def test_the_same_units_stay(open_session, tokens, emulated):
    """What a buffer keeps is decided as on the CPU."""
    sizes = {"n_ctx": 320, "n_batch": 64, "n_ubatch": 32, "n_threads": 1, "n_threads_batch": 1}
    room, counts = 2 * 2 * 12 * 16 * 2 * 16 * 4, []  # bytes: layers, heads, units, rows, K and V, channels, f32
    for go_back in (emulated, list):
        session = open_session("llama", FETCHED["longheads-keys"], kv_offload=room, **sizes)
        session.decode(tokens[:192], 32)
        session.decode(tokens[192:236], 1)
        info = session.ffi.new("lctx_offload_info *")
        assert session.lib.lctx_offload_usage(session.ctx, info) == session.lib.LCTX_OK
        counts.append((info.n_staged, info.n_hit, info.n_miss, info.n_far))
        go_back()
    np.testing.assert_allclose(counts[0], counts[1], rtol=0.02)  # a sum that is rounded otherwise may choose otherwise
    n_staged, n_hit, n_miss, _ = counts[0]
    assert n_hit > n_miss > 4 * n_staged  # heads of all layers: units have made room for others
