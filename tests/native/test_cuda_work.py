"""What the CUDA kernels do, counted where the CPU runs them: bytes copied, barriers, products and launches."""

import math
from collections import Counter
from dataclasses import replace

import pytest
from cases import OP_CASES
from conftest import BASE
from op import make_inputs, run_layer, run_native
from oracle_chunks import LongHeads

DIM, COLUMNS, ROWS, WARPS = 128, 64, 64, 4
ROW_BYTES = {"f16": 2 * DIM, "q8_0": DIM // 32 * 34, "q4_0": DIM // 32 * 18}
PRODUCT = 16 * 8 * 16  # multiplications


@pytest.mark.parametrize(("n_rows", "n_tokens"), [(257, 65), (1100, 128), (1500, 33)])
@pytest.mark.parametrize(("kv_type", "kib", "n_barrier"), [
    ("f16", 99, 2), ("f16", 163, 1), ("q8_0", 163, 1), ("q4_0", 99, 2),
])  # fmt: skip
def test_a_prompt_copies_each_row_once_per_tile(launches, monkeypatch, kv_type, kib, n_barrier, n_rows, n_tokens):
    """Barriers and 64 x 64 x 128 products of keys and of values for a block of rows; four barriers for bytes.

    Of halves, a GPU with much shared memory has the next block on its way.
    """
    monkeypatch.setenv("LCTX_EMULATED_SHARED", str(kib))
    n_head, n_head_kv = 8, 2
    step = COLUMNS // (n_head // n_head_kv)  # tokens of a tile
    ends = [n_rows - n_tokens + min(first + step, n_tokens) for first in range(0, n_tokens, step)]
    blocks = [-(-end // ROWS) for end in ends]
    case = replace(OP_CASES[0], n_rows=n_rows, n_tokens=n_tokens, n_head=n_head, n_head_kv=n_head_kv,
                   head_dim_k=DIM, head_dim_v=DIM, type_k=kv_type, type_v=kv_type)  # fmt: skip
    run_native(case, make_inputs(case))
    done = launches()
    work = Counter()
    for one in (one for one in done if one["kernel"] == "attend_runs"):
        work.update({name: one[name] for name in ("products", "copied", "barriers")})
        work["blocks" if one["products"] else "idle"] += math.prod(one["blocks"])
    converts = kv_type != "f16" and len(ends) >= 4
    assert sum(one["kernel"] == "convert_text" for one in done) == (n_head_kv if n_rows > 1000 else 1) * converts
    last = -(-((n_tokens - 1) % step + 1) * (n_head // n_head_kv) // 16)  # warps with columns in the last tile
    n_warp = (sum(blocks[:-1]) * WARPS + blocks[-1] * last) * n_head_kv
    assert work["products"] * PRODUCT == n_warp * 16 * ROWS * DIM * 2
    in_bytes = kv_type != "f16" and not converts
    read = [-(-end // 16) * 16 for end in ends] if in_bytes else ends  # bytes come by groups of rows
    assert work["copied"] == sum(read) * n_head_kv * 2 * ROW_BYTES[kv_type if in_bytes else "f16"]
    of_block = 4 if in_bytes else n_barrier
    assert work["barriers"] == of_block * sum(blocks) * n_head_kv + 6 * work["blocks"] + work["idle"]


TILES = LongHeads(16, 64, tile=64, tile_window=64).text()
ALONE = "longheads,window=64,chunk_size=16"


@pytest.mark.parametrize(("spec", "n_ubatch", "launched"), [
    ("full", 1, "decode merge"), ("full", 64, "store attend_runs merge"),
    ("selfextend", 1, "decode merge"), ("selfextend", 64, "store attend_runs merge"),
    (TILES, 64, "store prepare_tiles score_tiles choose_lists attend_lists"),
    (f"{ALONE},select=head", 1, "score_keys choose decode merge"),
    (f"{ALONE},select=group", 1, "score_keys weigh choose decode merge"),
])  # fmt: skip
def test_launches_do_not_grow_with_the_text(launches, spec, n_ubatch, launched):
    """Angles, which all layers share, come first. A token alone is stored by what reads its query first."""
    counts = []
    step = 2 * max(n_ubatch, 16)
    for n_rows in (3 * step, 4 * step, 5 * step):
        case = replace(OP_CASES[0], n_rows=n_rows, n_tokens=n_rows, type_k="f16", type_v="f16")
        run_layer(case, make_inputs(case), n_ubatch, spec, 4096, shows_chunks=False)
        counts.append(Counter(one["kernel"] for one in launches()))
    assert counts[2] - counts[1] == counts[1] - counts[0]
    assert counts[2] - counts[1] == Counter(dict.fromkeys(["angles", *launched.split()], step // n_ubatch))


def test_a_token_of_each_sequence_copies_its_rows_once(launches, open_session, tokens):
    """Of a tile with the tokens of all, one warp has the columns of a sequence, and multiplies 16 rows at a time."""
    dim, padded, group, n_layer, n_head_kv = 16, 64, 16, BASE.n_layer, BASE.n_head_kv
    lengths = [9 + 7 * seq % 50 for seq in range(16)]
    session = open_session("llama", "full", n_ctx=16 * 128, n_batch=64, n_ubatch=64, n_seq_max=16, n_threads=1,
                           n_threads_batch=1, type_k=1, type_v=1)  # fmt: skip
    for seq, n in enumerate(lengths):
        session.decode_mixed([(seq, token) for token in tokens[:n]])
    launches()
    session.decode_mixed([(seq, tokens[100]) for seq in range(16)])
    done = launches()
    of_layer = dict.fromkeys(("store", "attend", "merge"), n_layer)
    assert Counter(one["kernel"] for one in done) == {"angles": 1, **of_layer}
    rows, groups = (sum(-(-(n + 1) // step) for n in lengths) for step in (1, group))
    for one in (one for one in done if one["kernel"] == "attend"):
        assert one["copied"] == rows * n_head_kv * 2 * 2 * dim
        assert one["products"] * PRODUCT == groups * n_head_kv * 2 * 16 * group * padded
