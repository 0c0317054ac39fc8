"""How often a token finds its chunks on the device when K and V lie in memory of the host, and what it moves.

    python bench/offload.py --tokens 8192,32768 --slots 1,1.5,2,4

A text is evaluated, then tokens are decoded, with room on the device for a multiple of what a query
chooses at most. Without a GPU the CPU stands for both sides: what is counted is the same, the time is not.
"""

import argparse
import time
from itertools import islice
from pathlib import Path

from geometries import model_file
from report import machine, table

from pylongctx import Llama
from pylongctx.cli.arguments import int_list
from pylongctx.eval.haystack import SENTENCES
from pylongctx.models import embedded_model

MIB = 2**20


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default=str(embedded_model()), help="a file, a name, or random:GEOMETRY:LAYERS[:WEIGHTS]")
    add("--method", default="longheads")
    add("--text", type=Path, help="a novel, for instance; default: the sentences of the pass-key test")
    add("--tokens", type=int_list, default="8192,32768")
    add("--decode", type=int, default=64)
    add("--slots", default="1,1.5,2,4", help="room, in multiples of what a query chooses at most")
    add("--kv", default="f16")
    add("--threads", type=int)
    add("-ngl", "--gpu-layers", type=int, default=0)
    return parser.parse_args()


def measure(args: argparse.Namespace, n: int, slots: float | None) -> list[str]:
    """Return one row of the table; slots None: no offload."""
    options = {"n_ctx": n + args.decode + 1, "type_k": args.kv, "type_v": args.kv, "n_gpu_layers": args.gpu_layers}
    options |= {"n_threads": args.threads, "n_threads_batch": args.threads, "verbose": False, "seed": 0}
    budget = {} if slots is None else {"kv_offload": "host", "kv_offload_mib": room(args, options, slots)}
    with Llama(model_file(args.model), method=args.method, **options, **budget) as llm:
        text = args.text.read_text() if args.text else SENTENCES
        tokens = llm.tokenize((text * (8 * n // len(text) + 1)).encode())[:n]
        llm.eval(tokens)
        before, start = llm.offload_usage(), time.perf_counter()
        for _ in islice(llm.generate([], reset=False, temp=0.8), args.decode):
            pass
        seconds, usage, held = time.perf_counter() - start, llm.offload_usage(), llm.kv_usage().bytes
    hits, misses, far = (getattr(usage, name) - getattr(before, name) for name in ("hits", "misses", "far"))
    moved = (misses + far) * usage.unit_bytes / args.decode
    rate = f"{100 * hits / (hits + misses + far):.1f} %" if hits + misses + far else ""
    there = usage.device_bytes if usage.staged else held
    sizes = [f"{held / MIB:.1f}", f"{there / MIB:.1f}", f"{100 * there / held:.0f} %"]
    return [
        str(n),
        "all" if slots is None else f"{slots:g}",
        *sizes,
        rate,
        f"{moved / MIB:.2f}",
        f"{args.decode / seconds:.1f}",
    ]


def room(args: argparse.Namespace, options: dict, slots: float) -> int:
    """MiB for a multiple of what a query of every head chooses at most."""
    with Llama(model_file(args.model), method=args.method, **options, kv_offload="host") as llm:
        usage, heads = llm.offload_usage(), llm.kv_usage().rows.size
        return int(slots * usage.chosen * usage.unit_bytes * heads / MIB) + 1


def main() -> None:
    args = arguments()
    head = ["tokens", "room", "K and V, MiB", "on the device, MiB", "share", "hits", "MiB moved per token", "tokens/s"]
    room_of = [None, *(float(s) for s in args.slots.split(","))]
    rows = [measure(args, n, slots) for n in args.tokens for slots in room_of]
    print(f"{machine()}; {Path(args.model).name}; {args.method}; KV {args.kv}\n")
    print(table(head, rows))


if __name__ == "__main__":
    main()
