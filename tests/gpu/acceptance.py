"""A GPU against the CPU, then against stock llama.cpp: is everything right, and how fast is it.

    python tests/gpu/acceptance.py                 # all: sub-ops, models, layers at 4096 ... 131072 tokens, end to end
    python tests/gpu/acceptance.py --section ops   # every sub-op over the table of cases, fresh random inputs
    python tests/gpu/acceptance.py --quick         # a few cases and a small model, also for a device in software
    python tests/gpu/acceptance.py --sanitize      # a few of these under compute-sanitizer

The last lines are for an issue: device, driver, how much is right, tokens per second against stock. Exit code 0: all
is right; 1: something is not, it is listed; 2: no GPU here, or no build for one. Speed decides nothing; aims that are
missed are listed.
"""

import argparse
import json
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

# this folder is a package of the first
sys.path.extend(str(Path(__file__).resolve().parents[2] / folder) for folder in ("tests", "tests/support", "bench"))

from geometries import cached_model
from native_ops import Rows, roofline
from report import table

from gpu import checks, features, speed
from gpu.checks import Check, Text
from gpu.speed import EndToEnd, Speed
from gpu.summary import summary
from gpu.workers import each_in
from pylongctx._arguments import why_no_gpu
from pylongctx._lib import build_info
from pylongctx.models import embedded_model

SECTIONS = ("ops", "models", "features", "layers", "end-to-end")
DEPTHS = (4096, 8192, 16384, 32768, 65536, 131072)
KV = ("f16", "q8_0")
METHODS = tuple(speed.METHODS)
RANDOM_MODEL = "llama-3-8b:2"
TIMED_MODEL = "llama-3-8b:8"
EVERY_LAYER = 99
TOOLS = ("memcheck", "racecheck", "initcheck")
QUICK_SECTIONS, QUICK_EVERY, QUICK_DEPTH, QUICK_TOKENS = ("ops", "models", "end-to-end"), 20, 1024, 16
QUICK_METHODS = speed.METHODS | {"longheads": "longheads,window=256"}  # half of what the embedded model is trained for
SANITIZED_EVERY = 40  # only one case in this many: each run is a hundred times slower
TEXT = (
    "The old lighthouse keeper wrote down the weather every evening, the ships that passed, and what the gulls did. "
    "On the third of March he wrote nothing but a number, and nobody in the village ever learned what it had meant. "
)

DECODE, PREFILL = "decode", "prefill"


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", help="a ggml device (default: the first GPU)")
    add("--section", action="append", choices=SECTIONS, help="may be repeated (default: all)")
    add("--depth", type=int, action="append", help=f"may be repeated (default: {', '.join(map(str, DEPTHS))})")
    add("--kv", action="append", choices=KV, help="may be repeated (default: both)")
    add("--method", action="append", choices=METHODS, help="layers, end to end: may be repeated (default: all)")
    add("--rows", type=Path, help="layers: a file of bench/record_rows.py, whose rows take the place of random ones")
    add("--layers", type=int, default=speed.N_LAYER, help="layers: as many at most are timed together")
    add("--repeats", type=int, default=10, help="layers: runs whose median is taken")
    add("--every", type=int, default=1, help="ops: every Nth case only")
    add("--named", default="", help="ops: cases with this in their names only, such as f16")
    add(
        "--workers",
        type=int,
        default=0,
        help="ops, models: processes, so that one that aborts fails alone (default: none)",
    )
    add("--seed", type=int, default=secrets.randbelow(2**20), help="ops: of the inputs (default: random)")
    add("--quick", action="store_true", help="few cases, the embedded model, 1024 tokens, K and V in f16")
    add("--sanitize", action="store_true", help="ops, a few, under compute-sanitizer")
    add("--json", type=Path, help="write all numbers to this file")
    args = parser.parse_args(words)
    if args.quick:
        args.every = max(args.every, QUICK_EVERY)
        args.section, args.depth = args.section or QUICK_SECTIONS, args.depth or [QUICK_DEPTH]
        args.kv = args.kv or ["f16"]
    if any(depth < 2 * speed.PERIOD or depth % speed.PERIOD for depth in args.depth or []):
        parser.error(f"--depth must be a multiple of {speed.PERIOD}, {2 * speed.PERIOD} at least")
    return args


def first_gpu() -> str | None:
    """Return the name of the first device that is neither the CPU nor a library for it."""
    names = [name for name in build_info()["backends"] if name.upper() not in ("CPU", "BLAS")]
    return names[0] if names else None


def why_not(device: str | None) -> str:
    """Return why nothing can be measured on a device; empty when it can."""
    if not device:
        return why_no_gpu()
    if device not in build_info()["backends"]:
        return f"there is no device {device!r}, but {', '.join(build_info()['backends'])}"
    return ""


# ---- sections ----


def run_ops(args: argparse.Namespace) -> Iterator[Check]:
    print(f"ops: seed {args.seed}", file=sys.stderr)
    yield from checks.check_ops(args.device, args.seed, args.every, each=each_in(args.workers), named=args.named)


def run_models(args: argparse.Namespace, n_gpu_layers: int = EVERY_LAYER) -> Iterator[Check]:
    each = each_in(args.workers)
    tiny = str(embedded_model())
    prompt = tokens_of(tiny, 400)
    served = [method for method in checks.METHODS if checks.serves(args.device, method)]
    yield from checks.check_model("tiny", tiny, checks.greedy(tiny, prompt, 32), n_gpu_layers, served, each)
    if args.quick:
        return
    large = str(cached_model(RANDOM_MODEL))
    known = [token % n_vocab(large) for token in prompt]
    yield from checks.check_model(RANDOM_MODEL, large, Text(known[:300], known[300:332]), n_gpu_layers, served, each)


def run_features(args: argparse.Namespace, n_gpu_layers: int = EVERY_LAYER) -> Iterator[Check]:
    tiny = str(embedded_model())
    tokens = tokens_of(tiny, 632)
    text = Text(tokens[:600], tokens[600:])
    yield from features.check_features(tiny, text, n_gpu_layers, each_in(args.workers), args.device)


def tokens_of(model: str, n: int) -> list[int]:
    """Return ``n`` tokens of English text."""
    from pylongctx import Llama

    with Llama(model, vocab_only=True, verbose=False) as llm:
        return llm.tokenize(TEXT.encode() * (n // 20 + 1))[:n]


def n_vocab(model: str) -> int:
    from pylongctx import Llama

    with Llama(model, vocab_only=True, verbose=False) as llm:
        return llm.n_vocab()


def timed(args: argparse.Namespace) -> list[str]:
    """Return the methods to time."""
    return [name for name in args.method or METHODS if checks.serves(args.device, speed.METHODS[name])]


def run_layers(args: argparse.Namespace, copy: float) -> Iterator[Speed]:
    rows = Rows.load(args.rows) if args.rows else None
    depths = args.depth or ([len(rows.k)] if rows else DEPTHS)
    settings = {"repeats": args.repeats, "n_layer": args.layers, "methods": timed(args), "recorded": rows}
    for phase in (DECODE, PREFILL):
        for kv in args.kv or KV:
            for depth in depths:
                print(f"layers: {phase} {kv} {depth}", file=sys.stderr)
                yield from speed.layer_speeds(args.device, kv, depth, phase, copy, **settings)


def run_ends(args: argparse.Namespace, n_gpu_layers: int = EVERY_LAYER) -> Iterator[EndToEnd]:
    model = str(embedded_model() if args.quick else cached_model(TIMED_MODEL))
    methods, n = (QUICK_METHODS, QUICK_TOKENS) if args.quick else (speed.METHODS, speed.N_DECODED)
    for kv in args.kv or KV:
        for depth in args.depth or DEPTHS:
            for method in (None, *(methods[name] for name in timed(args))):
                print(f"end-to-end: {method} {kv} {depth}", file=sys.stderr)
                yield speed.end_to_end(model, method, kv, depth, n_gpu_layers, n)


# ---- tables ----

CHECKS = ("check", "n", "refused", "largest error, of what is allowed", "")
SPEEDS = ("", "method", "KV", "tokens", "attend us", "layer us", "stock us", "ratio", "GB/s", "of copy", "GFLOP/s",
          "scratch MiB", "stock's", "other ops us")  # fmt: skip
ENDS = ("method", "KV", "tokens", "prompt t/s", "decode t/s", "KV MiB", "GPU MiB")


def check_cells(c: Check) -> list[str]:
    return [c.name, str(c.n), str(c.refused or ""), f"{c.error:.2f}", "FAILED" if c.failures else "ok"]


def speed_cells(s: Speed) -> list[str]:
    times = [f"{us:.1f}" for us in (s.attend, s.step, s.stock)]
    of_machine = [f"{s.bandwidth / 1e9:.0f}", f"{100 * s.of_copy:.0f} %", f"{s.rate / 1e9:.0f}"]
    scratch = [f"{n / 2**20:.0f}" for n in (s.scratch, s.stock_scratch)]
    return [s.phase, s.method, s.kv, str(s.depth), *times, f"{s.stock / s.attend:.2f}", *of_machine, *scratch,
            ", ".join(f"{op} {us:.1f}" for op, us in s.others.items() if us > 0)]  # fmt: skip


def end_cells(e: EndToEnd) -> list[str]:
    kv = "" if e.kv_bytes is None else f"{e.kv_bytes / 2**20:.0f}"
    return [e.method, e.kv, str(e.depth), f"{e.prompt:.0f}", f"{e.decode:.1f}", kv, str(e.gpu_mib or "")]


def aims(speeds: list[Speed], ends: list[EndToEnd]) -> Iterator[tuple[str, bool]]:
    """Yield what this release wants to reach, where it was measured, and whether it does."""
    for s in speeds:
        at = f"{s.phase} {s.method} {s.kv} {s.depth}"
        if (s.phase, s.method, s.depth) == (DECODE, "full", 32768):
            yield f"{at}: {s.stock / s.attend:.2f} of 1.0 x stock", s.stock >= s.attend
            yield f"{at}: {100 * s.of_copy:.0f} of 70 % of copy bandwidth", s.of_copy >= 0.7
        if (s.phase, s.method, s.depth) == (DECODE, "longheads", 32768):
            yield f"{at}: {s.stock / s.step:.2f} of 4 x stock", s.stock >= 4 * s.step
        if (s.phase, s.method) == (PREFILL, "full"):
            yield f"{at}: {s.stock / s.attend:.2f} of 0.8 x stock", s.stock >= 0.8 * s.attend
        if (s.phase, s.method, s.depth) == (PREFILL, "longheads", 131072):
            yield f"{at}: {s.stock / s.step:.2f} of 1.5 x stock", s.stock >= 1.5 * s.step
    decode = {(e.method, e.kv, e.depth): e.decode for e in ends}
    for kv in KV:
        short, long = (decode.get((speed.METHODS["longheads"], kv, depth)) for depth in (8192, 131072))
        if short and long:
            at = f"end to end longheads {kv}: a token at 131072 takes {short / long:.2f} of 1.3 x one at 8192"
            yield at, short <= 1.3 * long


def print_checks(checked: list[Check]) -> bool:
    """Print the table and what failed; returns whether nothing did."""
    print(f"\n{table(CHECKS, [check_cells(c) for c in checked])}")
    failures = [f"{c.name}: {failure}" for c in checked for failure in c.failures]
    print("".join(f"\nFAILED {failure}" for failure in failures[:50]), end="\n" if failures else "")
    return not failures


def print_speeds(speeds: list[Speed], ends: list[EndToEnd]) -> None:
    for head, lines in ((SPEEDS, map(speed_cells, speeds)), (ENDS, map(end_cells, ends))):
        if rows := list(lines):
            print(f"\n{table(head, rows)}")
    for text, reached in aims(speeds, ends):
        print(f"{'reached' if reached else 'MISSED '} {text}")


# ---- main ----


def sanitize(args: argparse.Namespace) -> int:
    """Run a few ops under every tool of compute-sanitizer."""
    if not (tool := shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")):
        print("compute-sanitizer is not on PATH: it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    run = [sys.executable, __file__, "--section", "ops", "--every", str(SANITIZED_EVERY), "--device", args.device]
    failed = 0
    for name in TOOLS:
        done = subprocess.run([tool, "--tool", name, "--error-exitcode", "1", *run], check=False)
        print(f"{name}: {'ok' if done.returncode == 0 else f'FAILED, status {done.returncode}'}")
        failed |= done.returncode != 0
    return int(failed)


def main(words: list[str] | None = None) -> int:
    args = arguments(words)
    args.device = args.device or first_gpu()
    if reason := why_not(args.device):
        print(reason, file=sys.stderr)
        return 2
    if args.sanitize:
        return sanitize(args)
    sections = args.section or SECTIONS
    checking = {"ops": run_ops, "models": run_models, "features": run_features}
    found = {name: list(run(args)) for name, run in checking.items() if name in sections}
    checked = [check for several in found.values() for check in several]
    right = print_checks(checked) if checked else True
    copy = roofline(1, args.device).copy_bandwidth if "layers" in sections else 0.0
    speeds = list(run_layers(args, copy)) if "layers" in sections else []
    ends = list(run_ends(args)) if "end-to-end" in sections else []
    print(f"\n{args.device}, build {build_info()['cuda']}, copies {copy / 1e9:.0f} GB/s" if copy else "")
    print_speeds(speeds, ends)
    if args.json:
        numbers = {"device": args.device, "build": build_info(), "copy_bandwidth": copy}
        lists = {"checks": checked, "layers": speeds, "end_to_end": ends}
        numbers |= {name: [asdict(item) for item in items] for name, items in lists.items()}
        args.json.write_text(json.dumps(numbers, indent=1))
    print("\nFor an issue:\n")
    print("\n".join(summary(args.device, args.every, found, ends)))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
