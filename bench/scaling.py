"""How the time of a token and the rate of a prompt change with the length, against unpatched llama.cpp.

    python bench/scaling.py --until "llama.cpp flash=32768" --json scaling.jsonl \
        --sweep "ik_llama.cpp=build/tools/ik/bin/llama-sweep-bench"

One process per engine goes from depth to depth: it evaluates the prompt up to one, decodes some tokens, and continues.
The rate at a depth is that of the 1024 tokens before it; the mean rate is that of all tokens up to there. A
llama-sweep-bench (``--sweep``) measures the 512 tokens after it, and no mean. Results are appended to the JSON lines,
and the tables and the plot show all that the file holds for the same model, so the engines may be run one by one.
"""

import argparse
import json
import math
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from statistics import median

from geometries import model_file
from report import machine, table

from pylongctx.cli.arguments import int_list
from pylongctx.eval.bench.programs import clean_environment
from pylongctx.eval.bench.record import physical_cores

PEERS = {"llama.cpp": {"flash_attn": False}, "llama.cpp flash": {"flash_attn": True}}
ENGINES = ["llama.cpp flash", "full", "selfextend", "longheads", "corm", "longheads+corm"]
MEASURES = {
    "token_ms": ("one token, ms", median),
    "prefill_last": ("prompt at the depth, tokens/s", float),
    "prefill_mean": ("prompt up to the depth, tokens/s", float),
}
UBATCH = 512


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="random:llama-3-8b:2", help="a file, a name, or random:GEOMETRY:LAYERS[:WEIGHTS]")
    add("--kv", default="f16", help="type of K and V")
    add("--threads", type=int, default=physical_cores())
    add("--engine", action="append", help=f"a method, or one of {', '.join(PEERS)}; default: {', '.join(ENGINES)}")
    add("--sweep", action="append", default=[], metavar="LABEL=COMMAND", help="a llama-sweep-bench, with its arguments")
    add("--depths", type=int_list, default="4096-131072*2")
    add("--until", action="append", type=limit, default=[], metavar="ENGINE=N", help="last depth of an engine")
    add("--decode", type=int, default=16, help="tokens decoded at every depth, after one that is not counted")
    add("--json", type=Path, help="append the points here, and show all points that are here")
    add("--no-run", action="store_true", help="only show what the JSON lines hold")
    add("--plot", type=Path, metavar="FILE", help="draw a plot, for instance docs/assets/scaling.png")
    return parser.parse_args()


def limit(text: str) -> tuple[str, int]:
    name, _, depth = text.rpartition("=")
    return name, int(depth)


def depths_of(args: argparse.Namespace, engine: str) -> list[int]:
    last = dict(args.until).get(engine, max(args.depths))
    return sorted(depth for depth in args.depths if depth <= last)


def sweep(args: argparse.Namespace, label: str, command: str, about: dict) -> Iterator[dict]:
    """Yield a point for every depth of a llama-sweep-bench, which goes through all of them once."""
    depths = depths_of(args, label)
    if not depths:
        return
    given = {"-m": model_file(args.model), "-c": depths[-1] + 2 * UBATCH, "-b": 2048, "-ub": UBATCH, "-n": args.decode}
    given |= {"-t": args.threads, "-ctk": args.kv, "-ctv": args.kv, "--output-format": "jsonl"}
    given["--sweep-stride"] = math.gcd(*depths) // UBATCH
    words = [*shlex.split(command), "-wb", *(str(word) for pair in given.items() for word in pair)]
    print(f"{label}: {shlex.join(words)}", file=sys.stderr)
    done = subprocess.run(words, capture_output=True, text=True, env=clean_environment(), check=False)
    lines = (done.stdout + "\n" + done.stderr).splitlines()
    rows = {row["n_kv"]: row for row in (json.loads(line) for line in lines if line.startswith("{")) if "n_kv" in row}
    for depth in depths:
        row = rows.get(depth)
        found = {"error": next((line for line in reversed(lines) if line), f"exit code {done.returncode}")}
        if row:
            found = {"token_ms": [1e3 * row["t_tg"] / row["tg"]], "prefill_last": row["pp"] / row["t_pp"]}
        yield about | {"engine": label, "depth": depth} | found


def walk(args: argparse.Namespace, engine: str, about: dict) -> Iterator[dict]:
    """Yield a point for every depth of an engine, or what refused it."""
    depths = depths_of(args, engine)
    if not depths:
        return
    n_ctx = depths[-1] + (args.decode + 1) * len(depths)
    setup = {"model": model_file(args.model), "kv": args.kv, "n_ctx": n_ctx, "n_threads": args.threads}
    asked = [setup | PEERS.get(engine, {"method": engine})]
    asked += [{"depth": depth, "decode": args.decode} for depth in depths]
    command = [sys.executable, str(Path(__file__).with_name("worker.py"))]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=clean_environment()
    ) as worker:
        for message in asked:
            print(f"{engine}: {message.get('depth', 'start')}", file=sys.stderr)
            with suppress(BrokenPipeError):  # it has ended: so has its output
                print(json.dumps(message), file=worker.stdin, flush=True)
            line = worker.stdout.readline()
            answer = json.loads(line) if line else {"error": "the process ended"}
            if "depth" in message or "error" in answer:
                yield about | {"engine": engine, "depth": message.get("depth", depths[0])} | answer
            if "error" in answer:
                break
        with suppress(BrokenPipeError):
            worker.stdin.close()


def measure(args: argparse.Namespace, about: dict) -> list[dict]:
    points = []
    engines = [walk(args, engine, about) for engine in args.engine or ENGINES]
    sweeps = [sweep(args, label, command, about) for label, _, command in (text.partition("=") for text in args.sweep)]
    for point in [] if args.no_run else chain(*engines, *sweeps):
        points.append(point)
        if args.json:
            with args.json.open("a") as file:
                print(json.dumps(point), file=file)
    return points


def by_engine(points: list[dict]) -> dict[str, dict[int, dict]]:
    """Return engine: depth: point; a later point replaces an earlier one."""
    found: dict[str, dict[int, dict]] = {}
    for point in points:
        found.setdefault(point["engine"], {})[point["depth"]] = point
    return found


def tables(engines: dict[str, dict[int, dict]]) -> Iterator[str]:
    depths = sorted({depth for points in engines.values() for depth in points})
    for measure, (title, _) in MEASURES.items():
        rows = [[name, *(cell(points.get(depth, {}), measure) for depth in depths)] for name, points in engines.items()]
        yield table([title, *map(str, depths)], rows)


def value(point: dict, measure: str) -> float | None:
    return MEASURES[measure][1](point[measure]) if measure in point else None


def cell(point: dict, measure: str) -> str:
    if "error" in point:
        return "refused"
    found = value(point, measure)
    return "" if found is None else f"{found:.3g}" if found < 100 else f"{found:.0f}"


def plot(engines: dict[str, dict[int, dict]], title: str, path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), ("token_ms", "prefill_last"), strict=True):
        label, _ = MEASURES[name]
        for engine, points in engines.items():
            measured = {depth: value(point, name) for depth, point in sorted(points.items()) if "error" not in point}
            style = "--o" if "llama.cpp" in engine else "-o"
            if measured:
                axes.plot(measured.keys(), measured.values(), style, label=engine, markersize=4)
        axes.set(xscale="log", yscale="log", xlabel="tokens in the context", ylabel=label)
        axes.xaxis.set_major_locator(LogLocator(2))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    axes.legend()
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=90, pil_kwargs={"optimize": True})


def main() -> None:
    args = arguments()
    about = {"machine": machine(), "threads": args.threads, "model": args.model, "kv": args.kv}
    points = measure(args, about)
    if args.json and args.json.exists():
        every = [json.loads(line) for line in args.json.read_text().splitlines()]
        points = [point for point in every if about.items() <= point.items()]
    engines = by_engine(points)
    title = f"{about['machine']}; {args.threads} threads; {args.model}; KV {args.kv}"
    print("\n\n".join([title, *tables(engines)]))
    for point in points:
        if "error" in point:
            print(f"\n{point['engine']} at {point['depth']}: {point['error']}")
    if args.plot:
        plot(engines, title, args.plot)
        print(f"\n{args.plot}")


if __name__ == "__main__":
    main()
