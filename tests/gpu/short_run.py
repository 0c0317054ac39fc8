"""Ten minutes on a GPU: results, layers, a whole model, counters of a profiler, each step with a limit of its own.

    python tests/gpu/short_run.py run OUT                  # all steps that fit into --seconds
    python tests/gpu/short_run.py run OUT --dry            # tiny steps on the CPU: does the script itself work
    python tests/gpu/short_run.py merge OUT                # its tables into docs/gpu.md
    python tests/gpu/short_run.py pack FOLDER              # what a machine with nothing but CUDA needs

OUT/lines.jsonl gets a line of JSON after every step, so that what was measured is kept when time ends. Nothing is
compiled here: build before with GGML_CUDA=ON and LCTX_HARNESS=ON. docs/gpu.md describes the way from a machine without
a GPU. Exit status 0: all steps that ran have a result; 1: one has none, or found something wrong.
"""

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

# this folder is a package of the first
sys.path.extend(str(Path(__file__).resolve().parents[2] / folder) for folder in ("tests", "tests/support", "bench"))

from gpu import counters, pack, pages

ACCEPTANCE = Path(__file__).with_name("acceptance.py")
LONGHEADS = "longheads,window=4096"
SECONDS = 540
LEAST = 15  # seconds that must be left for a step to begin


@dataclass(frozen=True)
class Step:
    """A command with a limit in seconds.

    Attributes
    ----------
    words : tuple of str
        Options of ``acceptance.py``; of a step with ``profiled`` method, type, rows and tokens.
    after : str
        A step that must have found everything right; empty: none.
    wgmma : bool
        Whether prompts are multiplied by warpgroups, which a card of compute capability 9.0 has.
    """

    name: str
    limit: int
    words: tuple[str, ...]
    profiled: bool = False
    after: str = ""
    wgmma: bool = False


def layers(kv: str, depth: int, limit: int) -> Step:
    words = f"--section layers --kv {kv} --depth {depth} --method full --method longheads"
    return Step(f"layers {kv} {depth}", limit, tuple(words.split()))


def whole(kv: str, depth: int, limit: int) -> Step:
    words = f"--section end-to-end --kv {kv} --depth {depth} --method full --method longheads"
    return Step(f"model {kv} {depth}", limit, tuple(words.split()))


def profile(method: str, kv: str, depth: int, tokens: int) -> Step:
    name = f"counters {method.partition(',')[0]} {kv} {depth} {tokens}"
    return Step(name, 30, (method, kv, str(depth), str(tokens)), profiled=True)


# what is wanted most comes first: time may end
STEPS = (
    Step("results", 90, ("--section", "ops", "--every", "10", "--workers", "8")),
    layers("f16", 8192, 30),
    layers("f16", 32768, 45),
    Step("results wgmma", 60, ("--section", "ops", "--named", "f16", "--workers", "8"), wgmma=True),
    replace(layers("f16", 32768, 45), name="layers wgmma", after="results wgmma", wgmma=True),
    layers("q8_0", 32768, 45),
    layers("f16", 131072, 60),
    whole("f16", 32768, 90),
    profile("full", "f16", 32768, 512),
    profile(LONGHEADS, "f16", 32768, 512),
    profile("full", "f16", 32768, 1),
    profile(LONGHEADS, "f16", 32768, 1),
    profile("full", "q8_0", 32768, 512),
    whole("f16", 131072, 120),
    layers("q4_0", 32768, 45),
    layers("f16", 2048, 20),
    whole("q8_0", 131072, 120),
)
DRY = (
    Step("results", 60, ("--section", "ops", "--every", "200", "--device", "CPU", "--seed", "1")),
    Step(
        "layers f16 1024",
        60,
        tuple("--section layers --kv f16 --depth 1024 --device CPU --layers 1 --repeats 1".split()),
    ),
    Step("counters full f16 1024 1", 20, ("full", "f16", "1024", "1"), profiled=True),
)


RANDOM = ("layers f16 32768", DRY[1].name)  # steps that come again with the rows of a text


def recorded(rows: Path, step: Step) -> Step:
    """Return a step with the rows that a model had for a text."""
    depth = step.words.index("--depth")  # is that of the rows
    words = (*step.words[:depth], *step.words[depth + 2 :], "--rows", str(rows))
    return Step("layers recorded", step.limit, words)


# ---- a step ----


def command(step: Step, to: Path) -> list[str]:
    """Return the words of a step, whose result is a file ``to``."""
    if step.profiled:
        return counters.command(to, [sys.executable, __file__, "profile", *step.words])
    return [sys.executable, str(ACCEPTANCE), *step.words, "--json", str(to)]


def run_limited(words: Sequence[str], log: Path, limit: float, wgmma: bool = False) -> int | None:
    """Run a command and what it starts; None when they were ended after ``limit`` seconds."""
    env = os.environ | {"LCTX_CUDA_WGMMA": str(int(wgmma))}
    with log.open("w") as text:
        process = subprocess.Popen(words, stdout=text, stderr=subprocess.STDOUT, start_new_session=True, env=env)
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None


def run_step(step: Step, folder: Path, left: float) -> dict[str, Any]:
    """Return the line of a step; ``error`` says why it has no result."""
    to = folder / f"{step.name.replace(' ', '-')}.{'csv' if step.profiled else 'json'}"
    limit, start = min(step.limit, left), monotonic()
    line = {"step": step.name, "limit": step.limit}
    if step.profiled and not counters.profiler():
        return line | {"seconds": 0.0, "error": "ncu is not there"}
    status = run_limited(command(step, to), to.with_suffix(".txt"), limit, step.wgmma)
    line |= {"seconds": round(monotonic() - start, 1), "status": status}
    if status is None:
        return line | {"error": f"no result after {limit:.0f} s"}
    if not to.exists():
        return line | {"error": f"no result, see {to.with_suffix('.txt').name}"}
    return line | {"result": counters.read(to) if step.profiled else json.loads(to.read_text())}


def steps_of(args: argparse.Namespace) -> Iterator[Step]:
    """Yield the steps to run, in their order."""
    for step in DRY if args.dry else STEPS:
        if step.wgmma and not has_wgmma():
            continue
        yield step
        if args.rows and step.name in RANDOM:
            yield recorded(args.rows, step)


def has_wgmma() -> bool:
    """Whether the card has products of warpgroups, and the build code for them."""
    from gpu.speed import ask_gpus
    from pylongctx._lib import build_info

    codes = [code.removesuffix("-real") for code in build_info()["cuda"] or []]
    (capability,), *_ = ask_gpus("compute_cap") or [("",)]
    return capability == "9.0" and "90a" in codes and "90" not in codes


def card() -> dict[str, str]:
    """Return what the numbers are of: the card, its driver, the build and the date."""
    from gpu.speed import ask_gpus
    from pylongctx._lib import build_info

    info = build_info()
    found = {"date": datetime.date.today().isoformat(), "cuda": str(info["cuda"]), "version": str(info["version"])}
    (name, driver, memory), *_ = ask_gpus("name", "driver_version", "memory.total") or [("CPU", "", "")]
    return found | {"card": name, "driver": driver, "memory_mib": memory}


# ---- commands ----


def run(args: argparse.Namespace) -> int:
    """Run the steps, one line each."""
    args.out.mkdir(parents=True, exist_ok=True)
    lines, end, good = args.out / "lines.jsonl", monotonic() + args.seconds, True
    right = {""}  # steps
    with lines.open("w") as file:
        print(json.dumps({"step": "card"} | card()), file=file, flush=True)
        for step in steps_of(args):
            if (left := end - monotonic()) < LEAST:
                print(f"{step.name}: no time is left", file=sys.stderr)
                continue
            if step.after in right:
                line = run_step(step, args.out, left)
            else:
                error = f"{step.after} did not find everything right"
                line = {"step": step.name, "limit": step.limit, "seconds": 0.0, "error": error}
            right |= {step.name} if line.get("status") == 0 else set()
            print(json.dumps(line), file=file, flush=True)
            good = good and ("result" in line or step.profiled) and not line.get("status")
            print(f"{step.name}: {line.get('error', 'done')}, {line['seconds']} s of {step.limit}", file=sys.stderr)
    return 0 if good else 1


def merge(args: argparse.Namespace) -> int:
    """Write the tables of a run into a page, in place of those of the same card."""
    lines = [json.loads(line) for line in (args.out / "lines.jsonl").read_text().splitlines()]
    args.page.write_text(pages.merged(args.page.read_text(), lines))
    return 0


def profile_one(args: argparse.Namespace) -> int:
    """Run one step of a method once, for a profiler."""
    from native_ops import SHAPES, Rows, Run, step

    from gpu.acceptance import first_gpu

    rows = Rows.random(SHAPES["llama-3-8b"], args.depth, args.tokens)
    times = step(rows, Run(args.kv, args.depth, args.tokens, 1, 1, first_gpu() or "CPU"), args.method, 8192).times
    print(json.dumps(times))
    return 0


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    add = commands.add_parser("run", help="measure")
    add.add_argument("out", type=Path)
    add.add_argument("--seconds", type=float, default=SECONDS, help=f"for all steps (default: {SECONDS})")
    add.add_argument("--rows", type=Path, help="a file of bench/record_rows.py, for one step more")
    add.add_argument("--dry", action="store_true", help="tiny steps on the CPU")
    add.set_defaults(run=run)
    add = commands.add_parser("merge", help="write tables into a page")
    add.add_argument("out", type=Path, help="the folder of a run")
    add.add_argument("--page", type=Path, default=pages.PAGE)
    add.set_defaults(run=merge)
    add = commands.add_parser("pack", help="copy a build and what it needs")
    add.add_argument("folder", type=Path)
    add.set_defaults(run=pack.run)
    add = commands.add_parser("profile", help="one step of a method, once")
    for name, kind in (("method", str), ("kv", str), ("depth", int), ("tokens", int)):
        add.add_argument(name, type=kind)
    add.set_defaults(run=profile_one)
    args = parser.parse_args(words)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
