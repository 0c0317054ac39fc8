"""Prompts by products of warpgroups (wgmma), run by the CPU: tiles, swizzles, masks and waits, against the oracle.

The emulator takes factors from shared memory by their descriptors, leaves sums undefined until they are waited for, and
ends the program where a tile changes before that or a fence is missing.
"""

from dataclasses import replace

import pytest
from cases import ROPES, OpCase
from op import make_inputs, run_layer, run_native, run_oracle
from oracle import DualChunk, Full, SelfExtend, Window
from oracle_chunks import LongHeads
from session import assert_same
from thinning import thin

TOLERANCE = 2e-3  # queries, weights and rows are f16
PRODUCT = 16 * 8 * 16  # multiplications
BASE = OpCase("warpgroup", type_k="f16", type_v="f16", lse=True)

pytestmark = pytest.mark.usefixtures("launches")


@pytest.fixture
def grouped(launches, monkeypatch):
    """Return a function that gives the products of warpgroups since it was asked last."""
    monkeypatch.setenv("LCTX_CUDA_WGMMA", "1")
    return lambda: sum(one["grouped"] for one in launches())


def assert_equals_the_oracle(case: OpCase) -> None:
    x = make_inputs(case)
    for got, want in zip(run_native(case, x), run_oracle(case, x), strict=True):
        assert_same(got, want, max(TOLERANCE, case.tolerance))


@thin(strength=2)
@pytest.mark.parametrize("n_rep", [1, 4, 7])
@pytest.mark.parametrize("dim", [40, 64, 112, 128])
@pytest.mark.parametrize("n_rows", [1, 63, 64, 65, 257])
def test_a_prompt_equals_the_oracle(grouped, n_rows, dim, n_rep):
    """Tiles of 64, 63 or 12 columns, the last ones with fewer; channels that no row has are zeros."""
    case = replace(BASE, n_rows=n_rows, n_tokens=min(max(n_rows, 17), 77), n_head=2 * n_rep, n_head_kv=2,
                   head_dim_k=dim, head_dim_v=dim)  # fmt: skip
    assert_equals_the_oracle(case)
    assert grouped() > 0


@pytest.mark.parametrize("case", [
    replace(BASE, n_rows=321, n_tokens=65, method=Window(4, 64)),
    replace(BASE, n_rows=131, n_tokens=20, method=Window(0, 33)),  # blocks that a warp does not read
    replace(BASE, n_rows=321, n_tokens=40, method=DualChunk(48, 16), rope=ROPES["neox"]),  # queries turn twice
    replace(BASE, n_rows=321, n_tokens=40, near_rows=192, method=SelfExtend(4, 32)),  # near keys elsewhere
    replace(BASE, n_rows=700, n_tokens=33, random_segments=4, seed=5),
    replace(BASE, n_rows=300, n_tokens=33, softcap=5.0, sharpness=4.0),
    replace(BASE, n_rows=300, n_tokens=33, sharpness=8.0),  # maxima that grow
    replace(BASE, n_rows=200, n_tokens=33, hadamard_k=64, hadamard_v=64),
    replace(BASE, n_rows=200, n_tokens=33, head_dim_k=128, head_dim_v=64),
    replace(BASE, n_rows=257, n_tokens=65, n_head=8, type_k="q8_0", type_v="q4_0"),  # converted before
], ids=lambda case: f"{case.method}-{case.n_rows}-{case.type_k}-{case.softcap}-{case.hadamard_k}")  # fmt: skip
def test_masks_turns_and_conversions_equal_the_oracle(grouped, case):
    assert_equals_the_oracle(case)
    assert grouped() > 0


@thin
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("method", [
    LongHeads(16, 64, tile=64, tile_window=64), LongHeads(32, 128, tile=64, tile_window=160, select="group"),
], ids=["heads", "groups"])  # fmt: skip
def test_lists_of_chunks_equal_those_of_warps(grouped, monkeypatch, dim, method):
    case = replace(BASE, n_rows=449, n_tokens=449, head_dim_k=dim, head_dim_v=dim, n_head=4, n_head_kv=2)
    x = make_inputs(case)
    outs = [run_layer(case, x, 192, method.text(), 4096).out]
    assert grouped() > 0
    monkeypatch.delenv("LCTX_CUDA_WGMMA")
    outs.append(run_layer(case, x, 192, method.text(), 4096).out)
    assert grouped() == 0
    assert_same(outs[0], outs[1], TOLERANCE)


@pytest.mark.parametrize(("n_rows", "n_tokens"), [(257, 65), (1100, 128)])
def test_work_is_that_of_the_columns(launches, monkeypatch, n_rows, n_tokens):
    """Every row once per tile, 64 x 64 x 128 products of keys and of values per block, and one barrier."""
    monkeypatch.setenv("LCTX_CUDA_WGMMA", "1")
    dim, n_head, n_head_kv, rows, step = 128, 8, 2, 64, 16
    ends = [n_rows - n_tokens + min(first + step, n_tokens) for first in range(0, n_tokens, step)]
    n_block = sum(-(-end // rows) for end in ends) * n_head_kv
    case = replace(BASE, n_rows=n_rows, n_tokens=n_tokens, n_head=n_head, n_head_kv=n_head_kv, head_dim_k=dim,
                   head_dim_v=dim)  # fmt: skip
    run_native(case, make_inputs(case))
    (one,) = (one for one in launches() if one["kernel"] == "attend_runs")
    assert one["products"] == one["grouped"]
    assert one["products"] * PRODUCT == n_block * 64 * rows * dim * 2
    assert one["copied"] == sum(ends) * n_head_kv * 2 * 2 * dim
    n_part = one["blocks"][0] * one["blocks"][1] * one["blocks"][2]
    assert n_block <= one["barriers"] <= n_block + 8 * n_part


@pytest.mark.parametrize("case", [
    replace(BASE, n_rows=100, n_tokens=33, head_dim_k=256, head_dim_v=256),
    replace(BASE, n_rows=100, n_tokens=33, head_dim_k=80, head_dim_v=80),
    replace(BASE, n_rows=100, n_tokens=33, type_k="f32"), replace(BASE, n_rows=100, n_tokens=3),
], ids=["256", "80", "f32", "few"])  # fmt: skip
def test_everything_else_is_up_to_warps(grouped, case):
    assert_equals_the_oracle(case)
    assert grouped() == 0


@pytest.mark.parametrize("text", ["0", ""])
def test_only_who_asks_for_them_gets_them(launches, monkeypatch, text):
    monkeypatch.setenv("LCTX_CUDA_WGMMA", text)
    case = replace(BASE, n_rows=65, n_tokens=33, method=Full())
    assert_equals_the_oracle(case)
    assert sum(one["grouped"] for one in launches()) == 0
