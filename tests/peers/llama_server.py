#!/usr/bin/env python3
"""llama-server's command line for ``pylongctx serve``: what llama.cpp's tests of its server start.

``LLAMA_SERVER_BIN_PATH`` names this file. Models are files of the folder ``LCTX_PEER_MODELS``, by the last part of the
Hugging Face name that a test gives. Without the model, or with an option that is not offered, the process ends with a
status that ``suites.py`` knows.
"""

import os
import sys
from pathlib import Path

NO_MODEL, NO_OPTION = 77, 78  # exit statuses

SAME = {  # taken as they are: the option, and how many values follow
    "--host": 1, "--port": 1, "--temp": 1, "--seed": 1, "--batch-size": 1, "--ubatch-size": 1, "--threads": 1,
    "--n-gpu-layers": 1, "--pooling": 1, "--alias": 1, "--n-predict": 1, "--api-key": 1, "--chat-template": 1,
    "--chat-template-file": 1, "--reasoning": 1, "--jinja": 0, "--swa-full": 0, "--lora": 1, "-ctk": 1, "-ctv": 1,
    "-fa": 1, "--embedding": 0, "--metrics": 0, "--cont-batching": 0, "--grp-attn-n": 1, "--grp-attn-w": 1,
    "--verbose": 0, "--slots": 0, "--no-slots": 0, "--slot-save-path": 1, "--no-ui": 0,
    "--reasoning-format": 1, "--context-shift": 0, "--tags": 1,
}  # fmt: skip
WITHOUT_MEANING = {"--offline", "--no-jinja", "--kv-unified"}  # nothing is fetched; named formats are read as Jinja too


def model(name: str) -> str:
    """Return the local file of a model of the Hugging Face hub."""
    folder = Path(os.environ["LCTX_PEER_MODELS"])
    path = folder / (Path(name.partition(":")[0]).name.removesuffix(".gguf") + ".gguf")
    if not path.exists():
        print(f"no local copy of {name}: put it at {path}", file=sys.stderr)
        sys.exit(NO_MODEL)
    return str(path)


def translate(given: list[str]) -> list[str]:
    """Return the arguments of ``pylongctx serve``."""
    said, wanted = iter(given), list[str]()
    found = dict[str, str]()
    for option in said:
        if option in SAME:
            wanted += [option, *(next(said) for _ in range(SAME[option]))]
        elif option in ("--hf-repo", "--hf-file", "--model", "--ctx-size", "--parallel"):
            found[option] = next(said)
        elif option not in WITHOUT_MEANING:
            print(f"pylongctx serve does not offer {option}", file=sys.stderr)
            sys.exit(NO_OPTION)
    remote = found.get("--hf-file") or found.get("--hf-repo")
    wanted += ["--model", found["--model"] if "--model" in found else model(str(remote))]
    n_seq = int(found.get("--parallel", 4))
    n_sharing = 1 if "--kv-unified" in given else n_seq  # llama-server divides its context among the sequences
    wanted += ["--parallel", str(n_seq), "--ctx-size", str(int(found.get("--ctx-size", 0)) // n_sharing)]
    return wanted


if __name__ == "__main__":
    python = os.environ.get("LCTX_PEER_PYTHON", sys.executable)
    os.execv(python, [python, "-m", "pylongctx", "serve", *translate(sys.argv[1:])])
