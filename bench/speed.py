"""Prefill and decode speed against unpatched llama.cpp, in the same run on the same weights.

    python bench/speed.py --geometry llama-3-8b --layers 2 --depth 4096

The weights are random, of real width; the file is written once. Every engine runs in a process of its own and they
take turns (A B C A B C), so that a slow moment of the machine hits all of them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from report import machine, spread, table

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))
import tiny_gguf  # noqa: E402

ENGINES = {
    "pylongctx full": {"engine": "ours", "method": "full"},
    "pylongctx selfextend": {"engine": "ours", "method": "selfextend,group_size=4,neighbor_window=1024"},
    "pylongctx longheads": {"engine": "ours", "method": "longheads,chunk_size=256,window=2048"},
    "llama.cpp": {"engine": "peer", "flash_attn": False},
    "llama.cpp flash": {"engine": "peer", "flash_attn": True},
}


class Worker:
    """A process of ``worker.py``."""

    def __init__(self, setup: dict):
        environment = {name: value for name, value in os.environ.items() if name != "LCTX_METHOD"}
        command = [sys.executable, str(HERE / "worker.py")]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.error = self.ask(setup).get("error")
        self.results: list[dict] = []

    def ask(self, message: dict) -> dict:
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"error": "the process ended"}

    def run(self, n_prompt: int, n_decode: int) -> None:
        result = self.ask({"n_prompt": n_prompt, "n_decode": n_decode})
        self.error = result.get("error")
        self.results.append(result)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def peer_and_ours(parser: argparse.ArgumentParser) -> None:
    """Add the options of every comparison with llama.cpp."""
    add = parser.add_argument
    add("--geometry", choices=list(tiny_gguf.GEOMETRIES), default="llama-3-8b")
    add("--layers", type=int, default=2, help="how many layers of it; times scale with them")
    add("--weights", choices=["q8_0", "f16"], default="q8_0")
    add("--decode", type=int, default=32, help="tokens decoded at every depth")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)))
    add("--model", type=Path, help="a GGUF file instead of random weights")
    add("--cache", type=Path, default=Path(tempfile.gettempdir()) / "pylongctx-bench", help="folder for the weights")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    peer_and_ours(parser)
    add = parser.add_argument
    add("--depth", type=int, default=4096, help="tokens of the prompt, and so the depth of decoding")
    add("--rounds", type=int, default=3)
    add("--kv", default="f16,q8_0", help="types of K and V")
    add("--engine", action="append", choices=list(ENGINES), help="default: all")
    return parser.parse_args()


def model_file(args: argparse.Namespace) -> Path:
    """Return the file with the weights, written on first use."""
    if args.model:
        return args.model
    path = args.cache / f"{args.geometry}-{args.layers}-{args.weights}.gguf"
    if not path.exists():
        args.cache.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        tiny_gguf.make_geometry(part, args.geometry, args.layers, args.weights)
        part.rename(path)
    return path


def compare(args: argparse.Namespace, model: Path, kv: str) -> dict[str, Worker]:
    """Run all engines with one KV type, taking turns; one round before is not counted."""
    base = {"model": str(model), "kv": kv, "n_ctx": args.depth + args.decode + 64, "n_threads": args.threads}
    workers = {name: Worker(base | ENGINES[name]) for name in args.engine or ENGINES}
    for worker in workers.values():
        if not worker.error:
            worker.ask({"n_prompt": min(512, args.depth), "n_decode": 4})
    for round_ in range(args.rounds):
        for name, worker in workers.items():
            if not worker.error:
                print(f"{kv} round {round_ + 1}/{args.rounds}: {name}", file=sys.stderr)
                worker.run(args.depth, args.decode)
    for worker in workers.values():
        worker.close()
    return workers


def rows(workers: dict[str, Worker], kv: str, depth: int) -> list[list[str]]:
    """Return one table row per engine; ratios are times of the faster llama.cpp over times of this engine."""
    prefill, decode = {}, {}
    for name, worker in workers.items():
        if not worker.error:
            prefill[name] = [depth / r["prefill"] for r in worker.results]
            decode[name] = [1 / median(r["decode"]) for r in worker.results]
    peers = [name for name in prefill if ENGINES[name]["engine"] == "peer"]
    out = []
    for name, worker in workers.items():
        if worker.error:
            out.append([kv, name, f"refused: {worker.error[:60]}", "", "", ""])
            continue
        out.append([kv, name, *(cell for rates in (prefill, decode) for cell in (
            spread(rates[name]), f"{median(rates[name]) / max(median(rates[p]) for p in peers):.2f}" if peers else "-"
        ))])  # fmt: skip
    return out


def main() -> None:
    args = arguments()
    model = model_file(args)
    lines = [row for kv in args.kv.split(",") for row in rows(compare(args, model, kv), kv, args.depth)]
    head = ["KV", "engine", f"prefill of {args.depth}, tokens/s", "ratio", "decode there, tokens/s", "ratio"]
    print(f"{machine()}; {args.threads} threads; {model.name}; {args.rounds} rounds; median (min - max); "
          "ratio: to the faster llama.cpp of the same KV type, above 1 is faster\n")  # fmt: skip
    print(table(head, lines))


if __name__ == "__main__":
    main()
