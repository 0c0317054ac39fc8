"""A single token whose row the CUDA kernels write in a launch with what follows: *attend*, or *select* with the index.

Run by the CPU thread by thread. Blocks run in any order, so a block that reads the row of another shows here.
"""

from dataclasses import replace

import numpy as np
import pytest
from cases import OP_CASES, SPECS
from cases_chunks import chunk_case
from op import make_inputs, run_chunks, run_layer, run_oracle, stored
from oracle_chunks import LongHeads
from session import assert_same
from thinning import thin

TOLERANCE = 2e-3  # queries and weights may be halves
OTHERS = 0.03  # share of rows of which a step of one element falls the other way

pytestmark = pytest.mark.usefixtures("emulated")


@thin
@pytest.mark.parametrize("kv_type", ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"])
@pytest.mark.parametrize("heads", [(1, 1), (8, 2), (14, 2), (8, 1), (9, 1)])
@pytest.mark.parametrize("dims", [(32, 64), (128, 128), (192, 128), (256, 512), (576, 512)])
def test_a_text_that_is_read_token_by_token_equals_the_oracle(dims, heads, kv_type):
    """One tile of a KV head, two that write the same row, and heads that tensor cores read."""
    case = replace(OP_CASES[0], n_rows=67, n_tokens=67, n_head=heads[0], n_head_kv=heads[1], head_dim_k=dims[0],
                   head_dim_v=dims[1], type_k=kv_type, type_v=kv_type)  # fmt: skip
    x = make_inputs(case)
    got = run_layer(case, x, 1, "full", 4096).out
    assert_same(got, run_oracle(case, x)[0], max(case.tolerance, TOLERANCE))


@pytest.mark.parametrize("settings", [
    {"type_k": "q8_0", "type_v": "q4_0", "hadamard_k": 32, "hadamard_v": 64}, {"softcap": 5.0},
    {"type_k": "q8_0", "type_v": "q8_0", "head_dim_k": 256, "head_dim_v": 64, "hadamard_k": 256, "hadamard_v": 32},
])  # fmt: skip
def test_rows_are_transformed_when_they_are_written(settings):
    case = replace(OP_CASES[0], n_rows=70, n_tokens=70, **settings)
    x = make_inputs(case)
    got = run_layer(case, x, 1, "full", 4096).out
    assert_same(got, run_oracle(case, x)[0], max(case.tolerance, TOLERANCE))


@thin
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize("name", ["window", "selfextend", "dca", "string"])
def test_every_method_reads_the_row_that_it_writes(emulated, name, kv_type):
    """*attend* writes what it reads: a row that no segment has would be lost."""
    case = replace(OP_CASES[0], n_rows=90, n_tokens=90, n_head=8, type_k=kv_type, type_v=kv_type)
    x = make_inputs(case)
    run = lambda: run_layer(case, x, 1, SPECS[name], 64, shows_chunks=False).out  # noqa: E731
    got = run()
    emulated()
    error = abs(got - run()).max(-1) / abs(got).max()
    assert (error < max(case.tolerance, TOLERANCE)).mean() > 1 - OTHERS


@thin
@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q4_1", "iq4_nl"])
@pytest.mark.parametrize("dims", [(32, 64), (96, 40), (128, 128), (256, 256)])
@pytest.mark.parametrize("heads", [(2, 2), (8, 2), (19, 1)])
@pytest.mark.parametrize("method", [
    LongHeads(16, 64), LongHeads(16, 48, n_recent=0, representation="keys1"), LongHeads(16, 96, position="dca"),
    LongHeads(16, 64, select="group"),
])  # fmt: skip
def test_a_row_and_its_index_are_written_while_chunks_are_scored(method, heads, dims, kv_type):
    """With few columns of a list, and with many. Where tokens come in fives, *store* writes before."""
    dims = [-(-dim // 32) * 32 if "q" in kv_type else dim for dim in dims]
    case = chunk_case("rows", n_rows=131, n_head=heads[0], n_head_kv=heads[1], head_dim_k=dims[0], head_dim_v=dims[1],
                      type_k=kv_type, type_v=kv_type, n_ubatch=1, method=method)  # fmt: skip
    x = make_inputs(case)
    got, fives = run_chunks(case, x), run_chunks(replace(case, n_ubatch=5), x)
    assert_same(got.out, stored(case, x).attend(got.chunks), max(case.tolerance, TOLERANCE))
    assert (got.chunks == fives.chunks).all(-1).mean() > 1 - OTHERS


def test_heads_that_drop_rows_find_those_that_are_written_with_scores(emulated):
    case = chunk_case("held", n_rows=140, n_head=4, n_head_kv=2, type_k="f16", type_v="f16")
    x = make_inputs(case)
    spec = "longheads,window=64,chunk_size=16,select_from=64+h2o,budget=96"
    run = lambda: run_layer(case, x, 1, spec, 4096, shows_chunks=False)  # noqa: E731
    got = run()
    emulated()
    want = run()
    assert (got.held == want.held).mean() > 1 - OTHERS
    error = abs(got.out - want.out).max(-1) / abs(want.out).max()
    assert (error < TOLERANCE).mean() > 1 - 2 * OTHERS, np.argwhere(error >= TOLERANCE)
