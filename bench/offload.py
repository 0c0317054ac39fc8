"""What kv_offload costs and saves: seconds, memory, and how often a token finds its chunks in the buffer.

    python bench/offload.py --model qwen2.5-coder-1.5b --text emma.txt --tokens 32768 --where disk --mib 32,128

A text is read once, without offload, but for its end. Then every setting loads that state in a process of its own,
reads the end and generates tokens. The buffer is given in MiB, or in multiples of what a query selects at most. RSS is
without pages of files, after the first generated token and after the last. Without a GPU the CPU stands for both sides
of "host": what is counted is the same, the time is not.
"""

import argparse
import multiprocessing
import pickle
import re
import struct
import tempfile
import time
from itertools import islice
from pathlib import Path

import numpy as np
from geometries import model_file
from report import machine, table

from pylongctx import Llama
from pylongctx.cli.arguments import int_list
from pylongctx.eval.haystack import SENTENCES
from pylongctx.models import embedded_model

MIB = 2**20
STEP = 512  # tokens
HEADER = 4096  # bytes of a slice that say which rows it has, and more
HEAD = [
    "tokens",
    "buffer",
    "K and V",
    "file",
    "RSS",
    "at the end",
    "prompt, tokens/s",
    "tokens/s",
    "hits",
    "read",
]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default=str(embedded_model()), help="a file, a name, or random:GEOMETRY:LAYERS[:WEIGHTS]")
    add("--method", default="longheads")
    add("--where", default="disk", choices=("host", "disk"))
    add("--path", help="folder of the file")
    add("--text", type=Path, help="a novel, for instance; default: the sentences of the pass-key test")
    add("--tokens", type=int_list, default="8192,32768")
    add("--end", type=int, default=1024, help="tokens at the end of the text that every setting reads")
    add("--decode", type=int, default=64)
    add("--mib", type=int_list, help="sizes of the buffer")
    add("--slots", default="1,2,4", help="else sizes, in multiples of what a query selects at most")
    add("--kv", default="f16")
    add("--fill", action="store_true", help="repeat the rows of the first 512 tokens instead of reading a text")
    add("--threads", type=int)
    add("-ngl", "--gpu-layers", type=int, default=0)
    return parser.parse_args()


def opened(args: argparse.Namespace, n: int, mib: int | None) -> Llama:
    """Open the model for n tokens of a text; without a size without offload."""
    offload = {} if mib is None else {"kv_offload": args.where, "kv_offload_mib": mib, "kv_offload_path": args.path}
    types = {"type_k": args.kv, "type_v": args.kv}
    threads = {"n_threads": args.threads, "n_threads_batch": args.threads}
    settings = {"n_ctx": n + args.decode + 1, "n_gpu_layers": args.gpu_layers, "verbose": False, "seed": 0}
    return Llama(model_file(args.model), method=args.method, **settings, **types, **threads, **offload)


def rss() -> int:
    """Return the bytes of memory of this process that no file has."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+)", status).group(1)) << 10


def read_text(args: argparse.Namespace, n: int, path: Path) -> None:
    """Read n tokens but for the end; leave them and the state in a file."""
    text = args.text.read_text() if args.text else SENTENCES
    with opened(args, n, None) as llm:
        tokens = llm.tokenize((text * (8 * n // len(text) + 1)).encode())[:n]
        llm.eval(tokens[: n - args.end])
        path.write_bytes(pickle.dumps((tokens, llm.save_state())))


def fill(llm: Llama, tokens: list[int]) -> None:
    """Give the tokens the rows of the first ones: memory and time are those of a text, answers are not."""
    session = llm.session
    llm.eval(tokens[:STEP])
    rows = session.context.slice(0, STEP)
    at = rows[:HEADER].tobytes().index(struct.pack("<2i", 0, STEP))
    for first in range(STEP, len(tokens), STEP):
        rows[at : at + 8] = np.frombuffer(struct.pack("<2i", first, first + STEP), np.uint8)
        session.append(np.asarray(tokens[first : first + STEP], np.int32), rows)


def measure(args: argparse.Namespace, n: int, mib: int | None, path: Path) -> list[str]:
    """Return one row of the table."""
    with opened(args, n, mib) as llm:
        if args.fill:
            tokens = llm.tokenize((SENTENCES * (8 * n // len(SENTENCES) + 1)).encode())[:n]
            fill(llm, tokens[: n - args.end])
        else:
            tokens, state = pickle.loads(path.read_bytes())
            llm.load_state(state)
            del state
        start = time.perf_counter()
        llm.eval(tokens[n - args.end :])
        middle, before = time.perf_counter(), llm.offload_usage()
        held = [rss() for _ in islice(llm.generate([], reset=False, temp=0.8), args.decode)]
        end, usage, rows = time.perf_counter(), llm.offload_usage(), llm.kv_usage().bytes
    hits, misses, far = (getattr(usage, name) - getattr(before, name) for name in ("hits", "misses", "far"))
    moved = (misses + far) * usage.unit_bytes / args.decode
    rate = f"{100 * hits / (hits + misses + far):.0f} %" if mib is not None else ""
    return [
        str(n),
        "" if mib is None else f"{mib} MiB",
        *(f"{size / MIB:.0f} MiB" for size in (rows, usage.file_bytes, held[0], held[-1])),
        f"{args.end / (middle - start):.1f}",
        f"{args.decode / (end - middle):.2f}",
        rate,
        f"{moved / MIB:.1f} MiB" if mib is not None else "",
    ]


def sizes(args: argparse.Namespace, n: int) -> list[int]:
    """Return the sizes of the buffer in MiB."""
    if args.mib:
        return args.mib
    with opened(args, n, 1 << 14) as llm:
        usage, heads = llm.offload_usage(), llm.kv_usage().rows.size
    return [int(float(slots) * usage.chosen * usage.unit_bytes * heads / MIB) + 1 for slots in args.slots.split(",")]


def main() -> None:
    args = arguments()
    rows = []
    with (
        tempfile.TemporaryDirectory() as folder,
        multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool,
    ):
        for n in args.tokens:
            path = Path(folder) / "state"
            if not args.fill:
                pool.apply(read_text, (args, n, path))
            rows += [pool.apply(measure, (args, n, mib, path)) for mib in (None, *sizes(args, n))]
    print(f"{machine()}; {Path(args.model).name}; {args.method}; KV {args.kv}; kv_offload={args.where}\n")
    print(table(HEAD, rows))


if __name__ == "__main__":
    main()
