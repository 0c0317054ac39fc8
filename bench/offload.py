"""What kv_offload costs and saves: memory, seconds, and how often a token finds its chunks in the buffer.

    python bench/offload.py --model qwen2.5-coder-1.5b --text emma.txt --tokens 32768 --where disk --mib 32,128

A text is read once, but for its end. Then every setting loads that state in a process of its own, as does a Llama
without offload, and both read the end and the next tokens by turns: speeds are ratios of these two. The buffer is given
in MiB, or in multiples of what a query selects at most. RSS is without pages of files, before the second Llama is
opened; with --alone after one token, and after all. Without a GPU the CPU stands for both sides of "host".
"""

import argparse
import gc
import multiprocessing
import os
import pickle
import re
import statistics
import struct
import tempfile
import time
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
TURN = 128  # tokens of the end that one reads before the other does
HEADER = 4096  # bytes of a slice that say which rows it has, and more
HEAD = ["tokens", "buffer", "K and V", "file", "RSS", "at the end", "prompt", "token", "hits", "read per token"]


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
    add("--alone", action="store_true", help="no second Llama, for one that does not fit into memory")
    add("--cold", action="store_true", help="with --alone: drop the page cache before the first token (root)")
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


def text_tokens(args: argparse.Namespace, llm: Llama, n: int) -> list[int]:
    text = args.text.read_text() if args.text else SENTENCES
    return llm.tokenize((text * (8 * n // len(text) + 1)).encode())[:n]


def read_text(args: argparse.Namespace, n: int, path: Path) -> None:
    """Leave the state after n tokens, but for the end, in a file."""
    with opened(args, n, None) as llm:
        llm.eval(text_tokens(args, llm, n)[: n - args.end])
        path.write_bytes(pickle.dumps(llm.save_state()))


def begin(args: argparse.Namespace, llm: Llama, tokens: list[int], path: Path) -> None:
    """Give the tokens their rows."""
    if not args.fill:
        llm.load_state(pickle.loads(path.read_bytes()))
        gc.collect()
        return
    # memory and time are those of a text, answers are not
    llm.eval(tokens[:STEP])
    rows = llm.session.context.slice(0, STEP)
    at = rows[:HEADER].tobytes().index(struct.pack("<2i", 0, STEP))
    for first in range(STEP, len(tokens), STEP):
        rows[at : at + 8] = np.frombuffer(struct.pack("<2i", first, first + STEP), np.uint8)
        llm.session.append(np.asarray(tokens[first : first + STEP], np.int32), rows)


def seconds(llm: Llama, tokens: list[int]) -> float:
    start = time.perf_counter()
    llm.eval(tokens)
    return time.perf_counter() - start


def measure(args: argparse.Namespace, n: int, mib: int, path: Path) -> list[str]:
    """Return one row of the table."""
    with opened(args, n, mib) as llm:
        tokens = text_tokens(args, llm, n + args.decode)
        begin(args, llm, tokens[: n - args.end], path)
        speeds, before, memory = alone(args, llm, tokens, n) if args.alone else by_turns(args, llm, tokens, n, path)
        usage, rows = llm.offload_usage(), llm.kv_usage().bytes
    hits, misses, far = (getattr(usage, name) - getattr(before, name) for name in ("hits", "misses", "far"))
    sizes = [f"{size / MIB:.0f} MiB" for size in (rows, usage.file_bytes, *memory)]
    moved = (misses + far) * usage.unit_bytes / args.decode
    return [str(n), f"{mib} MiB", *sizes, *speeds, f"{hits / (hits + misses + far):.0%}", f"{moved / MIB:.1f} MiB"]


def alone(args: argparse.Namespace, llm: Llama, tokens: list[int], n: int) -> tuple[list, object, list]:
    """Return the speeds in tokens per second, the usage before tokens, and RSS after one of these and after all.

    Prints what the first token takes.
    """
    prompt, before = seconds(llm, tokens[n - args.end : n]), llm.offload_usage()
    if args.cold:
        os.sync()  # pages that are not written yet stay
        Path("/proc/sys/vm/drop_caches").write_text("1")
    token, first = [seconds(llm, tokens[n : n + 1])], llm.offload_usage()
    memory = [rss()]
    token += [seconds(llm, [one]) for one in tokens[n + 1 :]]
    speeds = [f"{args.end / prompt:.1f} tokens/s", f"{1 / statistics.median(token):.2f} tokens/s"]
    read = (first.read_bytes - before.read_bytes) / MIB
    print(f"first token{' without the page cache' * args.cold}: {token[0]:.3f} s, {read:.1f} MiB from the file")
    return speeds, before, [*memory, rss()]


def by_turns(args: argparse.Namespace, llm: Llama, tokens: list[int], n: int, path: Path) -> tuple[list, object, list]:
    """Return the speeds as fractions of those without offload, the usage before tokens, and RSS before all that."""
    memory = [rss()]
    with opened(args, n, None) as plain:
        begin(args, plain, tokens[: n - args.end], path)
        both = (llm, plain)
        prompt = [[seconds(one, tokens[i : i + TURN]) for one in both] for i in range(n - args.end, n, TURN)]
        before = llm.offload_usage()
        token = [[seconds(one, [next_one]) for one in both] for next_one in tokens[n:]]
    ratios = [statistics.median(theirs / ours for ours, theirs in pairs) for pairs in (prompt, token)]
    return [f"{ratio:.2f}" for ratio in ratios], before, memory


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
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, context.Pool(1, maxtasksperchild=1) as pool:
        for n in args.tokens:
            path = Path(folder) / "state"
            if not args.fill:
                pool.apply(read_text, (args, n, path))
            rows += [pool.apply(measure, (args, n, mib, path)) for mib in sizes(args, n)]
    print(f"{machine()}; {Path(args.model).name}; {args.method}; KV {args.kv}; kv_offload={args.where}\n")
    print(table([name for name in HEAD if args.alone or name != "at the end"], rows))


if __name__ == "__main__":
    main()
