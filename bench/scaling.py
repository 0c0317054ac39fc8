"""How the time of a token and the rate of a prompt change with the length, against unpatched llama.cpp.

    python bench/scaling.py --until "llama.cpp=32768" --until "llama.cpp flash=32768" --json scaling.jsonl

One process per engine goes from depth to depth: it evaluates the prompt up to one, decodes some tokens, and continues.
The rate at a depth is that of the 1024 tokens before it; the mean rate is that of all tokens up to there. Results are
appended to the JSON lines, and the tables and the plot show all that the file holds for the same model, so the engines
may be run one by one.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median

from geometries import model_file
from report import machine, table

from pylongctx.cli.arguments import int_list
from pylongctx.eval.bench.programs import clean_environment
from pylongctx.eval.bench.record import physical_cores

PEERS = {"llama.cpp": {"flash_attn": False}, "llama.cpp flash": {"flash_attn": True}}
ENGINES = [*PEERS, "full", "selfextend", "longheads", "corm", "longheads+corm"]
MEASURES = {
    "token_ms": ("one token, ms", lambda point: median(point["token_ms"])),
    "prefill_last": ("prompt at the depth, tokens/s", lambda point: point["prefill_last"]),
    "prefill_mean": ("prompt up to the depth, tokens/s", lambda point: point["prefill_mean"]),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="random:llama-3-8b:2", help="a file, a name, or random:GEOMETRY:LAYERS[:WEIGHTS]")
    add("--kv", default="f16", help="type of K and V")
    add("--threads", type=int, default=physical_cores())
    add("--engine", action="append", help=f"a method, or one of {', '.join(PEERS)}; default: {', '.join(ENGINES)}")
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


def walk(args: argparse.Namespace, engine: str, about: dict) -> Iterator[dict]:
    """Yield a point for every depth of an engine, or what refused it."""
    last = dict(args.until).get(engine, max(args.depths))
    depths = sorted(depth for depth in args.depths if depth <= last)
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
    for engine in [] if args.no_run else args.engine or ENGINES:
        for point in walk(args, engine, about):
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
    for title, value in MEASURES.values():
        rows = [[name, *(cell(points.get(depth), value) for depth in depths)] for name, points in engines.items()]
        yield table([title, *map(str, depths)], rows)


def cell(point: dict | None, value) -> str:
    if point is None:
        return ""
    return "refused" if "error" in point else f"{value(point):.3g}" if value(point) < 100 else f"{value(point):.0f}"


def plot(engines: dict[str, dict[int, dict]], title: str, path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), ("token_ms", "prefill_last"), strict=True):
        label, value = MEASURES[name]
        for engine, points in engines.items():
            measured = {depth: value(point) for depth, point in sorted(points.items()) if "error" not in point}
            style = "--o" if engine in PEERS else "-o"
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
