"""What CUDA kernels do as a function of the rows they read, counted where they run thread by thread on the CPU."""

import json
from dataclasses import replace

import pytest
from cases import OP_CASES
from cases_chunks import CHUNK_CASES
from op import make_inputs, run_chunks, run_native

pytestmark = pytest.mark.usefixtures("emulated")

DIM, ROWS_OF_A_BLOCK, HALF = 64, 64, 2
SPLITS = 8  # of few columns, with as many multiprocessors as the CPU stands for


@pytest.fixture
def launches(monkeypatch, tmp_path):
    """Return what gives the launches of a call."""

    def of(run, *args) -> list[dict]:
        log = tmp_path / "launches"
        log.unlink(missing_ok=True)
        monkeypatch.setenv("LCTX_EMULATED_LOG", str(log))
        run(*args)
        return [json.loads(line) for line in log.read_text().splitlines()]

    return of


def attended(n_rows: int, n_tokens: int):
    case = replace(OP_CASES[0], n_rows=n_rows, n_tokens=n_tokens, n_head=4, n_head_kv=1, head_dim_k=DIM,
                   head_dim_v=DIM, type_k="f16", type_v="f16", lse=False)  # fmt: skip
    return case, make_inputs(case)


def test_the_log_names_kernels_and_counts_their_work(launches):
    found = launches(run_native, *attended(512, 1))
    assert {"store", "attend"} <= {launch["kernel"] for launch in found}
    attend = next(launch for launch in found if launch["kernel"] == "attend")
    assert attend["threads"] % 32 == 0
    assert attend["shared"] > 0


@pytest.mark.parametrize("n_tokens", [1, 16])
def test_rows_are_read_once_by_a_tile(launches, n_tokens):
    """16 tokens of 4 heads are the columns of one tile; launches do not depend on the rows."""
    names = set()
    for n in (512, 1024):
        found = launches(run_native, *attended(n, n_tokens))
        names.add(tuple(launch["kernel"] for launch in found))
        assert 0 < sum(launch["copied"] for launch in found) <= 2 * n * DIM * HALF
    assert len(names) == 1


def test_barriers_and_products_grow_with_the_blocks_of_rows(launches):
    work = {n: launches(run_native, *attended(n, 1)) for n in (512, 1024, 1536)}
    barriers, products = (
        [sum(one[what] for one in found) for found in work.values()] for what in ("barriers", "products")
    )
    assert barriers[2] - barriers[1] <= barriers[1] - barriers[0] + SPLITS
    assert barriers[1] - barriers[0] <= 2 * 512 // ROWS_OF_A_BLOCK
    assert products == [n * DIM // 64 for n in work]  # 16 columns, 16 x 8 x 16 at a time, of keys and values


def test_a_choice_of_chunks_has_as_many_launches_for_a_longer_text(launches):
    names = []
    for n in (256, 512):
        case = replace(CHUNK_CASES[0], n_rows=n)
        found = launches(run_chunks, case, make_inputs(case))
        names.append({launch["kernel"] for launch in found})
    assert names[0] == names[1]
