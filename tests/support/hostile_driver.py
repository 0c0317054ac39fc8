"""Load mutated GGUF files of every kind of memory in processes that may die: ``fuzz.py`` explains the lines."""

import os
import random
import resource
import signal
import sys
from collections.abc import Generator
from pathlib import Path

from gguf_mutator import mutate
from tries import HANGS, LIMIT, Line

from pylongctx import Llama
from pylongctx.eval.peak import peak_memory, reset_peak_memory

ARCHS = (
    *("llama", "qwen2", "mixtral", "phi3", "gemma3", "gpt-oss", "deepseek2", "kimi-linear"),
    *("jamba", "lfm2", "qwen3next", "mamba", "bert", "granitehybrid"),
)
METHODS = ("auto", "auto", None, "selfextend", "window", "longheads", "corm")


def use(path: Path, seed: int) -> int:
    """Load and run the model; 0 when it works, 3 for an exception."""
    method = random.Random(seed).choice(METHODS)
    try:
        with Llama(str(path), n_ctx=64, n_threads=1, n_threads_batch=1, method=method, verbose=False) as llm:
            llm("ab", max_tokens=2)
    except Exception as reason:
        if os.environ.get("HOSTILE_VERBOSE"):
            print(seed, repr(reason)[:300], file=sys.stderr)
        return 3
    return 0


def run_child(seeds: range, bases: list[Path], scratch: Path, out: int) -> None:
    """Use one file after the other; a line of the code and the memory for each."""
    os.environ["GGML_NO_BACKTRACE"] = "1"
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    os.dup2(os.open(f"{scratch}.err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    for seed in seeds:
        scratch.write_bytes(mutate(bases[seed % len(bases)], seed))
        reset_peak_memory()
        signal.setitimer(signal.ITIMER_PROF, LIMIT)
        signal.alarm(10 * LIMIT)
        code = use(scratch, seed)
        os.write(out, b"%d %d\n" % (code, peak_memory() >> 20))


def run(seeds: range, bases: list[Path], scratch: Path) -> Generator[Line]:
    """Yield a line for each seed; after a child that died, a new one continues."""
    while seeds:
        ends, out = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(ends)
                run_child(seeds, bases, scratch, out)
            finally:
                os._exit(0)
        os.close(out)
        with open(ends, encoding="ascii") as lines:
            for line in lines:
                yield [seeds[0], bases[seeds[0] % len(bases)].stem, *map(int, line.split())]
                seeds = seeds[1:]
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if seeds:
            why = Path(f"{scratch}.err").read_text(errors="replace")[-300:]
            yield [seeds[0], bases[seeds[0] % len(bases)].stem, "hang" if code in HANGS else code, 0, why]
            seeds = seeds[1:]
