"""The runs that bench/ops.py times: ggml_flash_attn_ext, one step of a method, and the roofline."""

from dataclasses import replace

import numpy as np
import pytest
from cases import PAGE_ROWS, PAPER, ROPES, OpCase
from cases_chunks import ChunkCase, chunk_case
from op import flash_run, make_inputs, roofline_run, run_layer, run_native, run_step
from oracle import Full
from oracle_chunks import LongHeads

# Of the largest output. ggml_flash_attn_ext sums f16 values in f16, and quantizes the query for q8_0 keys.
FLASH_TOLERANCE = {"f32": 1e-5, "f16": 1e-2, "q8_0": 2e-2}
SIZES = [(1, 1), (63, 7), (257, 1), (600, 1), (300, 65)]  # the last but one is split over the rows by ggml


def flash_cases() -> list[OpCase]:
    base = OpCase("flash", head_dim_k=96, head_dim_v=96, lse=False)
    sizes = [replace(base, n_rows=r, n_tokens=t, type_k=kv, type_v=kv, n_threads=1 + r % 2)
             for r, t in SIZES for kv in FLASH_TOLERANCE]  # fmt: skip
    ropes = [replace(base, n_rows=130, head_dim_k=64, head_dim_v=64, rope=ROPES[name])
             for name in ("neox-partial", "yarn", "factors")]  # fmt: skip
    return [*sizes, *ropes, replace(base, softcap=2.0), replace(base, n_head=6, n_head_kv=2)]


@pytest.mark.parametrize("case", flash_cases(), ids=lambda c: f"{c.type_k}-{c.n_rows}-{c.n_tokens}-{c.n_head}")
def test_flash_attention_equals_attend(case):
    x = make_inputs(case)
    want, _ = run_native(case, x)
    got, times = flash_run(case, x, n_repeat=2)
    assert abs(got - want).max() <= FLASH_TOLERANCE[case.type_k] * abs(want).max()
    assert (times > 0).all()


@pytest.mark.parametrize("field", [{"n_head": 0}, {"n_head_kv": 3}, {"type_k": 9999}, {"n_rows": -1}, {"near_rows": 64},
                                   {"n_threads": 0}, {"n_seg": 2}])  # fmt: skip
def test_flash_attention_refuses_bad_shapes_with_a_reason(field):
    case = OpCase("bad", lse=False)
    with pytest.raises(ValueError, match=r"\w"):
        flash_run(case, make_inputs(case), **field)


def test_flash_attention_refuses_an_empty_segment():
    case = OpCase("empty", lse=False)
    x = make_inputs(case)
    x.seg_rows[0, 0] = (3, 3)
    with pytest.raises(ValueError, match="empty"):
        flash_run(case, x)


# ---- one step of a method ----

N_PAST = 200
CHUNKED = LongHeads(16, 64)
OPS_OF = {
    "full": {"store", "attend"},
    "window,n_sink=3,window=40": {"store", "attend"},
    "selfextend,group_size=7,neighbor_window=21": {"store", "attend"},
    CHUNKED.text(): {"store", "summarize", "select", "attend"},  # keys are written to the index
    LongHeads(16, 64, **PAPER).text(): {"store", "summarize", "select", "attend"},
    "longheads,chunk_size=16,window=64,representation=outlier": {"store", "summarize", "select", "attend"},
    "corm,window=16,recent=16,evict_every=16": {"store", "attend", "vote"},
    "longheads,chunk_size=16,window=64+corm,window=16,recent=16,evict_every=16":
        {"store", "summarize", "select", "attend", "vote"},
}  # fmt: skip


def step_case(n_rows: int, **settings) -> ChunkCase:
    return chunk_case("step", n_rows=n_rows, n_head=4, n_head_kv=2, **settings)


@pytest.mark.parametrize("spec", OPS_OF)
def test_a_step_times_what_its_method_does(spec):
    case = step_case(N_PAST + 3)
    step = run_step(case, make_inputs(case), spec, n_tokens=3, n_repeat=2)
    assert {op for op, times in step.times.items() if (times > 0).all()} == OPS_OF[spec]
    assert {op for op, times in step.times.items() if (times == 0).all()} == set(step.times) - OPS_OF[spec]
    assert step.attend_bytes > 0
    assert step.attend_flops > 0


@pytest.mark.parametrize("spec", [s for s in OPS_OF if "corm" not in s])
@pytest.mark.parametrize("n_tokens", [1, 40])
@pytest.mark.parametrize("n_repeat", [1, 3])
def test_a_step_gives_what_the_whole_layer_gives(spec, n_tokens, n_repeat):
    case = step_case(240)
    if "longheads" not in spec:
        case = replace(case, method=Full())
    x = make_inputs(step_case(240))
    want = run_layer(case, x, 64, spec, 64).out[-n_tokens:]
    got = run_step(case, x, spec, n_tokens, n_repeat=n_repeat).out
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_a_step_evicts_at_a_border_only():
    spec = "corm,window=16,recent=16,evict_every=16"
    case = step_case(208)
    step = run_step(case, make_inputs(case), spec, n_tokens=1, n_repeat=3, held=0.5)
    assert (step.times["evict"] > 0).all()
    assert 16 < step.n_held < 207
    assert run_step(case, make_inputs(case), spec, n_tokens=1, held=1.0).n_held == 207


def test_the_bytes_and_operations_of_attend_are_those_of_the_rows_read():
    case = step_case(256, type_k="f16", type_v="f16")
    full = run_step(case, make_inputs(case), "full", n_tokens=1)
    assert full.attend_bytes == 256 * 2 * (64 + 64) * 2
    assert full.attend_flops == 256 * 4 * 2 * (64 + 64)
    by_group = "longheads,chunk_size=16,window=64,select=group"
    chosen = run_step(case, make_inputs(case), by_group, n_tokens=1)
    assert chosen.attend_bytes == 64 * 2 * (64 + 64) * 2
    assert chosen.attend_flops == 64 * 4 * 2 * (64 + 64)
    prefill = run_step(case, make_inputs(case), "full", n_tokens=2)
    assert prefill.attend_bytes == full.attend_bytes
    assert prefill.attend_flops == (256 + 255) * 4 * 2 * (64 + 64)


BAD_STEPS = {
    "more tokens than rows": ("full", {"n_tokens": 1000}),
    "no tokens": ("full", {"n_tokens": 0}),
    "no repeat": ("full", {"n_repeat": 0}),
    "share": ("corm", {"held": 1.5}),
    "negative share": ("corm", {"unvoted": -0.1}),
    "unknown method": ("fulll", {}),
    "across a border": ("corm,window=16,recent=16,evict_every=16", {"n_tokens": 40}),
    "no queries to summarize with": (LongHeads(16, 64, **PAPER).text(), {"fill_q": False}),
}


@pytest.mark.parametrize("name", BAD_STEPS)
def test_bad_steps_are_refused_with_a_reason(name):
    spec, settings = BAD_STEPS[name]
    case = step_case(N_PAST)
    with pytest.raises(ValueError, match=r"\w"):
        run_step(case, make_inputs(case), spec, **{"n_tokens": 1} | settings)


# ---- the roofline ----


def test_the_roofline_is_measured():
    limits = roofline_run(1)
    assert limits.cache_bytes > PAGE_ROWS
    assert limits.read_bandwidth > 0
    assert limits.gemm_f32 > 0
    assert limits.gemm_bf16 >= 0


def test_a_roofline_of_no_threads_is_refused():
    with pytest.raises(ValueError, match="n_threads"):
        roofline_run(0)
