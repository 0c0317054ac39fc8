"""Processes with K and V in a file that are killed at any moment: what they leave in the folder, and the answers after.

    python bench/kills.py --kills 200

Each process reads a text of its own, generates and starts again, with kv_offload="disk" and a store in the same folder.
After a kill the folder may hold files of the store only. After every tenth, another process has to answer about that
text as one without a folder does, from what the killed one had stored of it.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import machine

from pylongctx import Llama
from pylongctx.eval.haystack import SENTENCES
from pylongctx.models import embedded_model

SETTINGS = {"n_ctx": 8192, "method": "longheads,window=512", "n_threads": 1, "verbose": False}
SETTINGS |= {"deterministic": True}  # a text that was read in other pieces is answered alike, to the bit
CHECK_EVERY = 10  # kills
LONGEST = 2.5  # seconds that a process lives after it has opened the model
WORDS = SENTENCES.split()


def text_of(seed: int) -> str:
    """Return the text of a process."""
    return " ".join(random.Random(seed).choices(WORDS, k=2000))


def opened(folder: str | None) -> Llama:
    """Open the model with its rows and its store in a folder, or without either."""
    tiers = {} if folder is None else {"kv_offload": "disk", "kv_offload_mib": 4, "kv_offload_path": folder}
    store = {} if folder is None else {"kv_store": f"{folder}/kv"}
    return Llama(str(embedded_model()), **SETTINGS, **tiers, **store)


def work(folder: str, seed: int) -> None:
    """Read and generate until the end."""
    chance = random.Random(seed)
    with opened(folder) as llm:
        tokens = llm.tokenize(text_of(seed).encode())
        print("open", flush=True)
        while True:
            llm.reset()
            for _ in zip(range(32), llm.generate(tokens[: chance.randint(600, len(tokens))], temp=0.0), strict=False):
                pass


def answer(folder: str | None, seed: int) -> tuple[str, int]:
    """Return an answer about a text, and how many tokens came from the store."""
    with opened(folder) as llm:
        found = llm(text_of(seed), max_tokens=24, temperature=0.0)["choices"][0]["text"]
        return found, llm.kv_store_usage().tokens if folder else 0


def kill(folder: str, seed: int, seconds: float) -> list[str]:
    """Kill a process after some seconds of work; returns the files outside of the store that it leaves."""
    words = [sys.executable, __file__, "--work", folder, "--seed", str(seed)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "open\n"
        time.sleep(seconds)
        process.kill()
        process.wait()
    return [path.name for path in Path(folder).iterdir() if path.name != "kv"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work, args.seed)
    chance = random.Random(args.seed)
    left, wrong, stored = 0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(args.seed + 1, args.seed + 1 + args.kills):
            left += bool(kill(folder, seed, LONGEST * chance.random()))
            if (seed - args.seed) % CHECK_EVERY == 0:
                found, n = answer(folder, seed)
                wrong, stored = wrong + (found != answer(None, seed)[0]), stored + (n > 0)
    checks = args.kills // CHECK_EVERY
    print(f"{machine()}: {args.kills} kills; {left} left a file outside of the store; of {checks} answers after them")
    print(f"{wrong} were wrong, and {stored} used what the killed process had stored")
    sys.exit(1 if left or wrong or (checks and not stored) else 0)


if __name__ == "__main__":
    main()
