"""The CUDA kernels of *vote*, *center* and *evict*, run on the CPU (``native/cuda/emulate.h``).

Queries and keys meet as f16 on the tensor cores, so a score of attention is off by up to ``SCORE_MARGIN``, and a
decision within that may fall otherwise than the oracle's.
"""

from dataclasses import dataclass, fields, replace
from itertools import cycle

import numpy as np
import pytest
from cases_evict import BASES, EVICT_CASES, RULES, EvictCase, evict_case
from op import make_inputs, run_evict, run_step
from test_corm import METHODS, random_tokens
from test_evict import check
from thinning import thin

SCORE_MARGIN = 8e-3
TOLERANCE = 4e-3  # of an output

pytestmark = pytest.mark.usefixtures("emulated")


@dataclass(frozen=True)
class HalfCase(EvictCase):
    """A case with scores from f16 operands."""

    @property
    def tolerance(self) -> float:
        return max(super().tolerance, TOLERANCE)

    @property
    def margin(self) -> float:
        return max(super().margin, SCORE_MARGIN)


def half(case: EvictCase) -> HalfCase:
    return HalfCase(**{f.name: getattr(case, f.name) for f in fields(case)})


# ---- one layer, against the oracle ----

CROSS = [f"{base}-{rule}" for base in BASES for rule in ("corm-every16", "corm-unprotected", "h2o", "scissorhands")][
    ::2
]
SHAPES = [f"heads{heads}-{what}" for heads in ("4x1", "6x2") for what in ("scissorhands", "longheads")]
OTHERS = [
    *("full-tova", "rows1-h2o", "rows65-corm-every16", "rows130-h2o", "rows321-corm-every16"),
    *("dim40x40", "dim80x80", "dim128x128", "dim40-longheads", "dim128-longheads"),
    *("k-f16-v-f16-full-h2o", "k-q8_0-v-q8_0-selfextend-corm-unprotected"),
    *("k-f16-v-q4_0-longheads-dca-scissorhands", "k-q4_0-v-q4_0-longheads-corm-every16"),
    *("ubatch1-selfextend", "ubatch1000-full", "ubatch7-longheads-dca"),
    *("rope-neox-full", "rope-yarn-partial-factors-selfextend", "softcap-full", "softcap-longheads-group"),
    *("empty-chunks", "empty-summaries", "long-chunks", "open-chunk-exceeds-the-budget"),
    *("every-wider-than-window", "budget-is-nearly-recent", "scissorhands-window-one"),
    *("tile-corm", "tile-h2o"),
    *("full-kvzip", "longheads-kvzip", "selfextend-h2o-adaptive", "adaptive-scissorhands", "kvzip-nothing"),
]
BY_NAME = {case.name: case for case in EVICT_CASES}


@thin(table=BY_NAME)
@pytest.mark.parametrize("name", [*CROSS, *SHAPES, *OTHERS])
def test_layers_evict_and_attend_as_defined(name):
    check(half(BY_NAME[name]))


def test_evictions_after_every_row():
    """An emulated graph for every row: fewer rows than the other cases have."""
    check(half(replace(BY_NAME["scissorhands-every-one"], n_rows=83, n_tokens=83)))


@pytest.mark.parametrize("dim", [96, 192, 256, 512, 576])
def test_heads_of_every_width(dim):
    check(half(evict_case("wide", n_rows=140, head_dim_k=dim, head_dim_v=dim, type_k="f16", type_v="f16")))


# ---- one layer, against itself ----


@pytest.mark.parametrize("rule", ["h2o", "tova", "corm-every16"])
def test_a_nan_score_is_the_worst_on_every_backend(emulated, rule):
    """A query that is NaN spoils the scores of all rows before it; sums of weights are NaN then."""
    case = evict_case("nan", n_rows=150, rule=RULES[rule])
    x = make_inputs(case)
    x.q[40] = np.nan
    cuda = run_evict(case, x)
    emulated()
    cpu = run_evict(case, x)
    np.testing.assert_array_equal(cuda.held, cpu.held)
    for run in (cuda, cpu):
        assert np.isnan(run.out[40]).all()
        if case.rule.score_type is np.float32:
            n_new = run.held[:, 41:].sum(1)
            assert (run.held[:, :41].sum(1) <= np.maximum(0, case.rule.budget - n_new)).all()
            assert n_new.min() > 0


PAIRS = list(zip(BASES, cycle(("corm-every16", "h2o", "scissorhands", "tova")), strict=False))


@pytest.mark.parametrize(("base", "rule"), PAIRS)
def test_the_size_of_a_ubatch_does_not_matter(base, rule):
    case = evict_case("ubatch", n_rows=150, method=BASES[base], rule=RULES[rule])
    x = make_inputs(case)
    held = [run_evict(replace(case, n_ubatch=n), x).held for n in (1, 13, 64)]
    np.testing.assert_array_equal(held[0], held[1])
    np.testing.assert_array_equal(held[0], held[2])


# ---- which rows stay, and their bytes, against the CPU ----

# rows of 2, 4 and 16 bytes at a time
TYPES = [("f32", "f16", 128), ("q8_0", "q4_0", 96), ("q8_0", "q5_1", 64), ("bf16", "q8_0", 256)]


@thin
@pytest.mark.parametrize("spec", ["corm,window=8", "h2o,budget=300", "scissorhands,budget=300", "tova,budget=1300"])
@pytest.mark.parametrize(("type_k", "type_v", "dim"), TYPES)
def test_the_same_rows_stay_as_on_the_cpu(monkeypatch, spec, type_k, type_v, dim):
    """Scores are random, and equal ones frequent; the output shows which rows stayed and that they are whole."""
    shape = {"head_dim_k": dim, "head_dim_v": dim, "type_k": type_k, "type_v": type_v}
    case = evict_case("step", n_rows=1500, n_head=4, n_head_kv=2, sharpness=1.0, **shape)
    x = make_inputs(case)
    got = run_step(case, x, spec, n_tokens=1, held=0.4)
    monkeypatch.delenv("LCTX_EMULATE_CUDA")
    want = run_step(case, x, spec, n_tokens=1, held=0.4)
    assert got.n_held == want.n_held < 1499
    np.testing.assert_allclose(got.out, want.out, rtol=0, atol=TOLERANCE * abs(want.out).max())


# ---- whole models ----

MODEL_METHODS = ["corm-every16", "h2o", "scissorhands"]


def shown(ffi, lib, session, seq: int) -> list[tuple[list[int], list[int]]]:
    """Return the rows that the heads of the first layer hold, and their scores."""
    rows, scores = np.zeros((2, 256), dtype=np.int32)
    buffers = [ffi.from_buffer("int32_t[]", array, require_writable=True) for array in (rows, scores)]
    out = []
    for head in range(2):
        n = lib.lctx_seq_held(session.ctx, seq, 0, head, *buffers, 256)
        out.append((rows[:n].tolist(), scores[:n].tolist()))
    return out


@pytest.fixture
def start(open_session):
    """Return a function that opens a session on the tiny model."""
    sizes = {"n_ctx": 200, "n_seq_max": 3, "n_batch": 100, "n_ubatch": 100, "n_threads": 2, "n_threads_batch": 2}
    return lambda name: open_session("llama", METHODS[name].text(), **sizes)


@pytest.mark.parametrize("name", MODEL_METHODS)
def test_votes_that_were_taken_back_leave_no_trace(ffi, lib, start, name):
    session, other, tokens = start(name), start(name), random_tokens(0)[:100]
    every = METHODS[name].rule.evict_every
    first = 80 // every * every
    for one in (session, other):
        one.decode(tokens[:first])
    session.decode(random_tokens(1)[: every - 1])
    assert session.remove_tail(first)
    np.testing.assert_array_equal(session.decode(tokens[first:]), other.decode(tokens[first:]))
    assert shown(ffi, lib, session, 0) == shown(ffi, lib, other, 0)


@pytest.mark.parametrize("name", MODEL_METHODS)
def test_sequences_of_a_batch_vote_for_themselves(ffi, lib, start, name):
    parts = {seq: random_tokens(seq)[:n] for seq, n in enumerate((100, 75, 7))}
    mixed = [(seq, part[i]) for i in range(100) for seq, part in parts.items() if i < len(part)]
    session = start(name)
    session.decode_mixed(mixed[:90])
    session.decode_mixed(mixed[90:])
    for seq, part in parts.items():
        alone = start(name)
        alone.decode_mixed([(0, token) for token in part])
        got, want = shown(ffi, lib, session, seq), shown(ffi, lib, alone, 0)
        assert [rows for rows, _ in got] == [rows for rows, _ in want]
