"""What *attend* and *vote* look up on the CPU (``native/cpu/walk.h``), counted: threads may outnumber cores."""

from dataclasses import replace

import numpy as np
import pytest
from cases_chunks import chunk_case
from cases_evict import BASES, RULES, evict_case
from op import make_inputs, run_chunks, run_evict, run_step, stored
from op_harness import call, ffi, lib
from oracle_chunks import LongHeads
from session import assert_same
from thinning import thin

THREADS = (2, 8, 32)
WINDOW, N_HEAD = 256, 3
SPEC = f"longheads,window={WINDOW},position=full,select_from={WINDOW}"
RULE = "+corm,window=256,recent=16,evict_every=256"  # all vote, for all rows


def lookups(n_rows: int, n_tokens: int, n_threads: int, spec: str) -> np.ndarray:
    """Return how many segments and how many items a step looked at."""
    sizes = {"n_head": N_HEAD, "n_head_kv": N_HEAD, "head_dim_k": 32, "head_dim_v": 32, "n_threads": n_threads}
    case = evict_case("step", n_rows=n_rows, sharpness=1.0, **sizes)
    out = ffi.new("lctx_lookups_args *")
    call(lib.lctx_lookups_run, out)
    run_step(case, make_inputs(case), spec, n_tokens, n_ctx_train=n_rows)
    call(lib.lctx_lookups_run, out)
    return np.array([out.segments, out.items])


@pytest.mark.parametrize("n_tokens", [1, 5, 70])
def test_lookups_do_not_grow_with_threads(n_tokens):
    """A list is inverted once, and a split goes through its own items: of a vote, those with a block of its cells."""
    for spec in (SPEC, SPEC + RULE):
        counts = [lookups(1000, n_tokens, n_threads, spec) for n_threads in THREADS]
        assert counts[0].min() > 0
        np.testing.assert_array_equal(counts, [counts[0]] * len(THREADS))


@pytest.mark.parametrize("n_threads", THREADS)
@pytest.mark.parametrize("spec", [SPEC, SPEC + RULE])
def test_lookups_do_not_grow_with_the_context(n_threads, spec):
    near, far = (lookups(n_rows, 1, n_threads, spec) for n_rows in (1000, 8168))
    assert near.min() > 0
    np.testing.assert_array_equal(near, far)


@thin
@pytest.mark.parametrize("n_ubatch", [1, 6, 64])
@pytest.mark.parametrize("base", ["longheads", "longheads-group", "longheads-dca", "full"])
@pytest.mark.parametrize("rule", ["corm-every16", "h2o", "scissorhands"])
def test_the_number_of_threads_changes_no_bit(rule, base, n_ubatch):
    case = evict_case("threads", n_rows=130, method=BASES[base], rule=RULES[rule], n_ubatch=n_ubatch)
    x = make_inputs(case)
    want = run_evict(case, x)
    for n_threads in THREADS:
        got = run_evict(replace(case, n_threads=n_threads), x)
        for name in ("out", "held", "scores"):
            np.testing.assert_array_equal(getattr(got, name), getattr(want, name))


@thin
@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("n_ubatch", [6, 16])
def test_chunks_that_parts_of_a_tile_share(n_ubatch, n_threads):
    """A chunk of several blocks belongs to two parts where their border is in it."""
    method = LongHeads(144, 144 * 6, n_recent=1, position="full")
    case = chunk_case("shared", n_rows=1200, n_head=4, n_head_kv=1, head_dim_k=32, head_dim_v=32, n_ubatch=n_ubatch,
                      n_threads=n_threads, method=method)  # fmt: skip
    x = make_inputs(case)
    got = run_chunks(case, x)
    assert_same(got.out, stored(case, x).attend(got.chunks), case.tolerance)
