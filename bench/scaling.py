"""How the time of a prompt and of a token grows with the length, against unpatched llama.cpp in the same run.

    python bench/scaling.py --depths 8192,16384,32768,65536 --peer-depths 8192,16384

One prompt per engine and depth is evaluated, then tokens are decoded at its end; engines take turns at every depth.
"""

import argparse
import sys
from statistics import median

from report import machine, table
from speed import Worker, model_file, peer_and_ours

HEAD = ["engine", "tokens", "prompt, s", "of the one before", "one token, ms", "of the first"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    peer_and_ours(parser)
    add = parser.add_argument
    add("--method", action="append", help="may be repeated (default: longheads)")
    add("--kv", default="f16", help="type of K and V")
    add("--depths", default="8192,16384,32768,65536", help="lengths for our methods")
    add("--peer-depths", default="8192,16384", help="lengths for llama.cpp, whose time grows with the square")
    return parser.parse_args()


def engines(args: argparse.Namespace) -> dict[str, tuple[dict, list[int]]]:
    """Return the setup and the depths of every engine."""
    depths, peer_depths = ([int(n) for n in part.split(",")] for part in (args.depths, args.peer_depths))
    ours = {f"pylongctx {m}": ({"engine": "ours", "method": m}, depths) for m in args.method or ["longheads"]}
    return ours | {"llama.cpp flash": ({"engine": "peer", "flash_attn": True}, peer_depths)}


def run(args: argparse.Namespace) -> dict[str, list[tuple[int, float, float]]]:
    """Return (depth, seconds of the prompt, seconds of a token) per engine."""
    chosen, model = engines(args), str(model_file(args))
    results: dict[str, list[tuple[int, float, float]]] = {name: [] for name in chosen}
    for depth in sorted({depth for _, depths in chosen.values() for depth in depths}):
        for name, (setup, depths) in chosen.items():
            if depth not in depths:
                continue
            print(f"{depth}: {name}", file=sys.stderr)
            n_ctx = max(depths) + args.decode + 64
            worker = Worker(setup | {"model": model, "kv": args.kv, "n_ctx": n_ctx, "n_threads": args.threads})
            worker.run(depth, args.decode)
            worker.close()
            if worker.error:
                raise SystemExit(f"{name}: {worker.error}")
            result = worker.results[0]
            results[name].append((depth, result["prefill"], median(result["decode"])))
    return results


def main() -> None:
    args = arguments()
    rows = []
    for name, points in run(args).items():
        for i, (depth, prompt, token) in enumerate(points):
            growth = f"{prompt / points[i - 1][1]:.2f} x" if i else ""
            rows.append(
                [name, str(depth), f"{prompt:.1f}", growth, f"{token * 1e3:.1f}", f"{token / points[0][2]:.2f} x"]
            )
    print(f"{machine()}; {args.threads} threads; {model_file(args).name}; KV {args.kv}\n")
    print(table(HEAD, rows))


if __name__ == "__main__":
    main()
