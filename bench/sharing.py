"""How much processes on the same cores slow each other down, and how much busy processes slow down one that decodes.

    python bench/sharing.py --processes 2,3 --busy 2

Every process decodes with as many threads as there are cores. The fair time of a token is the time alone, times the
number of processes. With ``--busy N``, N other processes compute without end, and the fair time is the time alone,
times 1 + N / cores. The table has the measured time as a multiple of the fair one: 1 is fair.
"""

import argparse
import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean

from geometries import model_file
from report import machine, table

from pylongctx._free import available_cpus
from pylongctx.cli.arguments import int_list
from pylongctx.eval.bench.runner import clean_environment

PEERS = {"llama.cpp": {"flash_attn": True}}
BUSY = "while True: pass"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="random:llama-3-8b:2", help="a file, a name, or random:GEOMETRY:LAYERS[:WEIGHTS]")
    add("--engine", action="append", help=f"a method, or {', '.join(PEERS)}; default: full and llama.cpp")
    add("--processes", type=int_list, default=[2, 4], help="that decode at once")
    add("--busy", type=int_list, default=[2], help="others that compute without end")
    add("--threads", type=int, default=available_cpus(), help="of every process")
    add("--depth", type=int, default=512, help="tokens before the first one that is measured")
    add("--decode", type=int, default=64, help="tokens that are measured")
    return parser.parse_args()


class Worker:
    """An engine in a process of its own."""

    def __init__(self, setup: dict):
        command = [sys.executable, str(Path(__file__).with_name("worker.py"))]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=clean_environment()
        )
        self.send(setup)
        self.answer()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def send(self, message: dict) -> None:
        print(json.dumps(message), file=self.process.stdin, flush=True)

    def answer(self) -> dict:
        found = json.loads(self.process.stdout.readline())
        if "error" in found:
            raise SystemExit(found["error"])
        return found


def token_ms(setup: dict, args: argparse.Namespace, processes: int, busy: int) -> float:
    """Return the mean time of a token, over all tokens of all processes."""
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(setup)) for _ in range(processes)]
        for worker in workers:  # one after the other: only tokens are to meet
            worker.send({"depth": args.depth, "decode": 1})
            worker.answer()
        for _ in range(busy):
            stack.callback(subprocess.Popen([sys.executable, "-c", BUSY]).kill)
        for worker in workers:
            worker.send({"depth": args.depth + 16, "decode": args.decode})
        return fmean([ms for worker in workers for ms in worker.answer()["token_ms"]])


def main() -> None:
    args = arguments()
    rows = []
    for engine in args.engine or ["full", *PEERS]:
        setup = {"model": model_file(args.model), "kv": "f16", "n_threads": args.threads}
        setup |= {"n_ctx": args.depth + args.decode + 64} | PEERS.get(engine, {"method": engine})
        alone = token_ms(setup, args, 1, 0)
        row = [engine, f"{alone:.1f} ms"]
        row += [f"{token_ms(setup, args, n, 0) / (n * alone):.2f}" for n in args.processes]
        row += [f"{token_ms(setup, args, 1, n) / (alone * (1 + n / available_cpus())):.2f}" for n in args.busy]
        rows.append(row)
    columns = [f"{n} processes" for n in args.processes] + [f"with {n} busy ones" for n in args.busy]
    print(machine() + "\n")
    print(table(["engine", "token alone", *columns], rows))


if __name__ == "__main__":
    main()
