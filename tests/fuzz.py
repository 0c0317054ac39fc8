"""Fuzz model files, saved states, calls of the C API, or a server, and print what ended in a wrong way, and a summary.

    python tests/fuzz.py {files,states,calls,requests} FOLDER [--seed N] [--count N] [--seconds N]

FOLDER/KIND.jsonl gets a line per seed: the seed, the architecture (and method) or the route, how it ended, and the most
memory in MiB. An end of 0 is that it ran, 3 an exception or an answer of 4xx; a negative number is a signal, ``hang``
more than LIMIT seconds, 1 a wrong answer, and the end of stderr follows. Seeds go around the architectures, cases or
routes. Exits with 1 when there was another end than 0 or 3, or one took more than MEMORY.
"""

import argparse
import json
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path

sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in ("tests/support", "bench"))

import drivers
import hostile_driver
import requests_driver
from drivers import CASES
from tiny_gguf import make_model
from tries import Line

MEMORY = 1024  # MiB


def within(lines: Generator[Line], seconds: float) -> Iterator[Line]:
    """Yield lines until the time is over."""
    until = time.monotonic() + seconds
    for line in lines:
        yield line
        if time.monotonic() > until:
            lines.close()
            return


def files(folder: Path, seeds: range, seconds: float) -> Iterator[Line]:
    """Yield the lines of mutated model files."""
    bases = [make_model(folder / f"{arch}.gguf", arch=arch) for arch in hostile_driver.ARCHS]
    yield from within(hostile_driver.run(seeds, bases, folder / f"mutated-{seeds.start}.gguf"), seconds)


def driven(kind: str, folder: Path, seeds: range, seconds: float) -> Iterator[Line]:
    """Yield the lines of one case after the other; each has its share of the seeds and of the time."""
    n = len(CASES[kind])
    for i, (model, method) in enumerate(CASES[kind]):
        case = f"{model} {method or 'without a method'}"
        yield from within(drivers.run(kind, drivers.model_of(folder, model), case, method, seeds[i::n]), seconds / n)


def summary(kind: str, lines: list[Line]) -> str:
    """Return one line of what was counted."""
    ends = [line[2] for line in lines]
    signals = sum(isinstance(end, int) and end < 0 for end in ends)
    peak = max((line[3] for line in lines), default=0)
    return (
        f"{kind}: {len(lines)} mutations, {ends.count(0)} ran, {ends.count(3)} refused, {signals} signals, "
        f"{ends.count('hang')} hangs, {ends.count(1)} wrong answers, at most {peak} MiB"
    )


def is_bad(line: Line) -> bool:
    """Return whether something has to be mended."""
    return line[2] not in (0, 3) or line[3] > MEMORY


def main() -> int:
    """Run; returns the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["files", "states", "calls", "requests"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10**9)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    seeds, lines = range(args.seed, args.seed + args.count), []
    if args.kind == "files":
        found = files(args.folder, seeds, args.seconds)
    elif args.kind == "requests":
        found = within(requests_driver.run(args.folder, seeds), args.seconds)
    else:
        found = driven(args.kind, args.folder, seeds, args.seconds)
    with (args.folder / f"{args.kind}.jsonl").open("w") as log:
        for line in found:
            lines.append(line)
            print(json.dumps(line), file=log, flush=True)
            if is_bad(line):
                print(json.dumps(line), flush=True)
    print(summary(args.kind, lines))
    return int(any(map(is_bad, lines)))


if __name__ == "__main__":
    sys.exit(main())
