"""Memory that is not held belongs to the system again: the resident size of a process, with KV of tens of MiB."""

import json
import subprocess
import sys

import pytest
from tiny_gguf import Shape, make_model

PAGE_ROWS = 64
RESIDENT = """
import json, resource, sys
from pathlib import Path
import numpy as np
from pylongctx import Llama

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

path, method, kv, n = sys.argv[1:]
tokens = np.random.default_rng(0).integers(3, 288, int(n)).tolist()
settings = {"n_ctx": len(tokens) + 2, "n_batch": 256, "n_ubatch": 256, "n_threads": 2, "n_threads_batch": 2}
with Llama(path, method=method, type_k=kv, type_v=kv, verbose=False, **settings) as llm:
    for _ in range(2):  # the first time the weights and the buffers of the graph are touched too
        llm.eval(tokens)
        steps = [(resident(), 0, 0)]
        for do in (lambda: llm.eval(tokens[:1]), llm.reset):  # the next token evicts what is due
            do()
            usage = llm.kv_usage()
            steps.append((resident(), usage.bytes, usage.peak_bytes))
print(json.dumps(steps))
"""


BUDGET = "h2o,budget=256,recent=64"


@pytest.mark.parametrize(("kv", "n", "n_layer", "n_head", "head_dim", "method"), [
    ("f16", 1024, 4, 16, 128, "corm,window=1,recent=64"),
    ("q8_0", 1024, 4, 16, 128, BUDGET),
    # lists of rows are a fourth, summaries of chunks a half of what is held in the end
    ("q4_0", 16384, 1, 16, 32, "longheads,chunk_size=256,window=1024+h2o,budget=4096,recent=64"),
    ("q8_0", 1024, 4, 16, 128, f"longheads,chunk_size=16,window=512+{BUDGET}"),
], ids=["corm", "h2o", "lists", "summaries"])  # fmt: skip
def test_memory_belongs_to_the_system_again(tmp_path, kv, n, n_layer, n_head, head_dim, method):
    """As much as ``bytes`` says, except for two pages of every head: the next rows need one, and one is begun."""
    shape = Shape(n_layer=n_layer, n_head=n_head, n_head_kv=n_head, key_length=head_dim, n_ctx_train=n)
    path = make_model(tmp_path / "wide.gguf", shape)
    done = subprocess.run(
        [sys.executable, "-c", RESIDENT, str(path), f"{method},evict_every={n}", kv, str(n)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (full, _, _), (evicted, n_held, peak), (empty, n_left, peak_after) = json.loads(done.stdout)
    kept = n_layer * n_head * PAGE_ROWS * 2 * head_dim * {"f16": 2, "q8_0": 34 / 32, "q4_0": 18 / 32}[kv]
    assert peak >= n * kept / PAGE_ROWS
    assert n_left == 0 < n_held < 0.7 * peak
    assert peak_after == peak
    assert full - evicted == pytest.approx(peak - n_held, rel=0.05, abs=2 * kept)
    assert full - empty == pytest.approx(peak, rel=0.05, abs=2 * kept)
