"""Writers of a KV store that are killed in mid-write: every block that is there is whole, and no rest stays.

A few kills by default; LCTX_KILLS=200 asks for more.
"""

import json
import os
import signal
import subprocess
import sys
from itertools import pairwise

import numpy as np
from stored import files

from pylongctx.cli import main
from pylongctx.engine.saved_state import LlamaState
from pylongctx.store.folder import UNFINISHED, Folder

N_KILLS = int(os.environ.get("LCTX_KILLS", "8"))
# A process that forks writers one by one: the thread of each writer kills its process at a byte of a block.
PARENT = """
import json, os, random, signal, sys
import numpy as np
from pylongctx.engine.saved_state import LlamaState
from pylongctx.store import KVStore

folder, n_kills = sys.argv[1], int(sys.argv[2])
N_BYTES = 200_000

class Deadly(LlamaState):
    at = 0

    def parts(self):
        n_left = self.at
        for part in super().parts():
            part = memoryview(part).cast("B")
            if n_left < len(part):
                yield part[:n_left]
                os.kill(os.getpid(), signal.SIGKILL)
            yield part
            n_left -= len(part)

def block(kind, i, rng):
    rows = np.frombuffer(rng.randbytes(N_BYTES), np.uint8)
    return kind(np.arange(i, i + 512, dtype=np.int32), np.empty(0, np.float32), rows, {"first": 0, "end": 512})

def write(i):
    rng = random.Random(i)
    store = KVStore(folder, 1 << 40, dict, lambda: "weights")
    for k in range(rng.randrange(4)):
        store.write([f"{i:036x}{k:04x}"], "rows", block(LlamaState, k, rng))
    deadly = block(Deadly, 9, rng)
    Deadly.at = rng.choice([0, 1, rng.randrange(100), rng.randrange(N_BYTES), N_BYTES])
    store.write([f"{i:036x}{9:04x}"], "rows", deadly)
    store.flush()
    os._exit(0)  # it was not killed

for i in range(n_kills):
    child = os.fork()
    if not child:
        write(i)
    status = os.waitpid(child, 0)[1]
    n_unfinished = sum(name.startswith(".writing.") for _, _, names in os.walk(folder) for name in names)
    print(json.dumps([os.WTERMSIG(status), n_unfinished]), flush=True)
"""


def test_writers_that_are_killed_in_mid_write(tmp_path, capsys):
    folder = tmp_path / "kv"
    command = [sys.executable, "-c", PARENT, str(folder), str(N_KILLS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60 + N_KILLS)
    assert done.returncode == 0, done.stderr
    signals, n_unfinished = zip(*map(json.loads, done.stdout.splitlines()), strict=True)
    assert signals == (signal.SIGKILL,) * N_KILLS
    for before, after in pairwise((0, *n_unfinished)):
        assert after in (1, before + 1), "each leaves a file, and removes those of earlier ones with its first block"

    whole = files(folder, "rows")
    assert not [path for path in whole if path.stem.endswith("0009")] and (whole or N_KILLS < 8)
    for path in whole:
        state = LlamaState.load(path)  # its checksum is right
        first = int(path.stem[-4:], 16)
        np.testing.assert_array_equal(state.input_ids, np.arange(first, first + 512))
    assert main(["kv", "verify", str(folder)]) == 0
    assert f"{len(whole)} files, 0 damaged" in capsys.readouterr().out
    Folder(folder, 1 << 40).trim()
    assert files(folder, "rows") == whole
    assert not list(folder.rglob(f"{UNFINISHED}*"))
