"""What a KV store saves, and whether it stays right when everything goes wrong.

    python bench/store.py --model smollm2.gguf --tokens 8000
    python bench/store.py --model random:llama-3-8b:2:q4_k_m --tokens 32512 --n-ctx 33000
    python bench/store.py --cold-load
    python bench/store.py --torture

A prompt is read in one process, and again in later ones: with its files in the page cache, and with them dropped from
it. The time is that of the first token's logits, without opening the model; the bits of the logits are compared.

``--cold-load`` asks an engine for small answers, in turns alone and while another sequence loads a text of 1 GiB from
files that are not in the page cache. The model has wide rows and few weights.

``--torture`` kills 200 processes while they write and verifies every block, flips a bit in 1000 stored blocks, fills a
disk (a file system in memory, for which it must be root), and lets two processes write at once. It reports answers that
differ from those of a process without a store; a block that a killed writer damaged counts as one.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles

import numpy as np
from geometries import model_file
from random_blocks import Q8_0
from random_model import LLAMA, Shape, write_model
from report import machine, table

from pylongctx import Llama
from pylongctx.engine.job import Job
from pylongctx.engine.sampling.params import SamplingParams
from pylongctx.engine.sampling.sampler import Sampler
from pylongctx.engine.thread import EngineThread
from pylongctx.models import embedded_model
from pylongctx.parallel import Host
from pylongctx.store.folder import UNFINISHED, Folder
from pylongctx.store.layout import BLOCK

TEXT = Path(__file__).with_name("emma.txt")
SETTINGS = {"n_threads": 1, "n_threads_batch": 1, "n_ctx": 2048, "verbose": False}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="", help="as pylongctx bench takes it (the embedded model)")
    add("--method", action="append", help="(full)")
    add("--tokens", type=int, default=2000, help="of the prompt")
    add("--n-ctx", type=int, default=0, help="tokens of the context (the model's)")
    add("--cold-load", action="store_true", help="measure small answers while a text is loaded")
    add("--rounds", type=int, default=25, help="of --cold-load")
    add("--torture", action="store_true", help="kill writers, flip bits, fill a disk")
    add("--kills", type=int, default=200)
    add("--flips", type=int, default=1000)
    add("--read", help=argparse.SUPPRESS)  # what a later process does
    add("--write", help=argparse.SUPPRESS)
    return parser.parse_args()


def prompt(llm: Llama, n: int, seed: int = 0) -> list[int]:
    """Return tokens of a novel, or of random ones for a model that knows no words."""
    tokens = llm.tokenize(TEXT.read_bytes())[seed * 37 :][:n]
    if len(tokens) == n and max(tokens) < llm.n_vocab():
        return tokens
    return np.random.default_rng(seed).integers(3, min(llm.n_vocab(), 500), n).tolist()


def first_logits(llm: Llama, tokens: list[int]) -> np.ndarray:
    next(llm.generate(tokens, temp=0.0))
    return llm.session.last_logits.copy()


# ---- what it saves ----


def read(job: dict) -> None:
    """Read the prompt, as a process of its own; prints seconds, and writes the logits."""
    with Llama(
        job["model"], method=job["method"], n_ctx=job["n_ctx"], kv_store=job["folder"], verbose=False, preflight=False
    ) as llm:
        tokens = prompt(llm, job["tokens"])
        started = time.perf_counter()
        logits = first_logits(llm, tokens)
        seconds = time.perf_counter() - started
        n_evaluated = llm.session.n_evaluated
    np.save(job["out"], logits)
    print(json.dumps({"seconds": seconds, "n_evaluated": n_evaluated}))


def drop_from_page_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(args: argparse.Namespace, method: str, folder: Path) -> list[str]:
    folder.mkdir()
    job = {"model": model_file(args.model) if args.model else str(embedded_model()), "method": method}
    job |= {"n_ctx": args.n_ctx, "tokens": args.tokens, "folder": str(folder / "kv")}
    found, logits = [], []
    for name in ("first", "cold", "warm"):
        if name == "cold":
            drop_from_page_cache(folder)
        job["out"] = str(folder / f"{name}.npy")
        done = subprocess.run(
            [sys.executable, __file__, "--read", json.dumps(job)], check=True, stdout=subprocess.PIPE, text=True
        )
        found.append(json.loads(done.stdout.splitlines()[-1]))
        logits.append(np.load(job["out"]))
    seconds = [one["seconds"] for one in found]
    same = all(np.array_equal(logits[0], other) for other in logits[1:])
    size = sum(path.stat().st_size for path in (folder / "kv").rglob("*") if path.is_file())
    return [
        method,
        f"{seconds[0]:.2f} s",
        f"{seconds[1]:.2f} s ({seconds[0] / seconds[1]:.0f} x)",
        f"{seconds[2]:.2f} s ({seconds[0] / seconds[2]:.0f} x)",
        str(found[1]["n_evaluated"]),
        f"{size / 2**20:.0f} MiB",
        "the same bits" if same else "DIFFERENT",
    ]


# ---- what others wait for ----

WIDE = Shape(n_vocab=512, n_embd=1024, n_layer=16, n_head=8, n_head_kv=8, n_ff=2048, n_ctx_train=8704)
N_SMALL, N_ANSWER = 16, 4
N_ROUND = 6  # small answers between two changes


class Pair:
    """An engine with a sequence for a large text and one for small ones."""

    def __init__(self, path: Path, store: Path) -> None:
        self.n_large = (1 << 30) // (2 * 4 * WIDE.n_embd * WIDE.n_layer)
        self.host = Host(
            str(path), 2, n_ctx=WIDE.n_ctx_train, type_k="f32", type_v="f32", kv_store=str(store), verbose=False
        )
        self.engine = EngineThread(self.host.sessions, self.host.library)
        self.n_asked = 0
        self.rates: list[float] = []  # bytes per second that were loaded

    def close(self) -> None:
        self.engine.close()
        self.host.close()

    def ask(self, slot: int, n: int, n_answer: int, seed: int) -> Job:
        tokens = np.random.default_rng(seed).integers(3, WIDE.n_vocab, n).astype(np.int32)
        job = Job(tokens, Sampler(self.host.model, SamplingParams(seed=1, temp=0.0)), n_answer, slot=slot)
        self.engine.submit(job)
        return job

    def small(self) -> tuple[float, float]:
        """Return the seconds of a small answer up to its first token, and up to its last one."""
        self.n_asked += 1
        started = time.perf_counter()
        job = self.ask(1, N_SMALL, N_ANSWER, self.n_asked)
        job.take()
        first = time.perf_counter() - started
        while job.take() is not None:
            pass
        return first, time.perf_counter() - started

    def fill(self) -> None:
        """Let the store have the large text, whose sequence is empty then."""
        self.large().take()
        store = self.host.store
        assert store is not None
        store.flush()
        self.engine.erase(0, None).result()

    def large(self) -> Job:
        return self.ask(0, self.n_large, 0, 0)

    def during_load(self, folder: Path) -> list[tuple[float, float]]:
        """Return small answers while the large text is loaded, which is given up then."""
        drop_from_page_cache(folder)
        started, job = time.perf_counter(), self.large()
        found = [self.small() for _ in range(N_ROUND)]
        self.rates.append(job.n_cached * 2 * 4 * WIDE.n_embd * WIDE.n_layer / (time.perf_counter() - started))
        if not job.results.empty():
            raise RuntimeError("the text was loaded before the answers were there: a larger one is needed")
        self.engine.cancel(job)
        while self.engine.n_busy:
            time.sleep(0.001)
        self.engine.erase(0, None).result()
        return found


def cold_load(args: argparse.Namespace, folder: Path) -> int:
    pair = Pair(write_model(folder / "wide.gguf", LLAMA, WIDE, qtype=Q8_0), folder / "kv")
    alone, loading = [], []
    try:
        pair.fill()
        pair.small()
        for _ in range(args.rounds):  # in turns, so that other work on the machine slows both
            alone += [pair.small() for _ in range(N_ROUND)]
            loading += pair.during_load(folder / "kv")
    finally:
        pair.close()
    rows = []
    for name, kind in (("first token", 0), ("all tokens", 1)):
        without, with_load = (sorted(1000 * one[kind] for one in answers) for answers in (alone, loading))
        ratio = median(with_load) / median(without)
        rows.append([name, quartiles(without), quartiles(with_load), f"{ratio:.2f}"])
    print(f"{len(loading)} answers during a load of {median(pair.rates) / 2**20:.0f} MiB/s; median (quartiles)")
    print(table([f"{N_SMALL} tokens read, {N_ANSWER} written", "alone", "during a cold load", "ratio"], rows))
    return 0


def quartiles(values: list[float]) -> str:
    low, middle, high = quantiles(values, n=4)
    return f"{middle:.0f} ({low:.0f} - {high:.0f}) ms"


# ---- what goes wrong ----


def write(job: dict) -> None:
    """Read prompts until killed."""
    with Llama(str(embedded_model()), kv_store=job["folder"], **SETTINGS) as llm:
        for seed in range(job["first"], 10**6):
            first_logits(llm, prompt(llm, 2 * BLOCK + 9, seed % 50))
            print(seed, flush=True)


@contextmanager
def writer(folder: Path, first: int) -> Iterator[subprocess.Popen]:
    job = json.dumps({"folder": str(folder), "first": first})
    process = subprocess.Popen([sys.executable, __file__, "--write", job], stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()


class Judge:
    """Compares answers with those of a process without a store."""

    def __init__(self) -> None:
        with Llama(str(embedded_model()), **SETTINGS) as llm:
            self.prompts = [prompt(llm, 2 * BLOCK + 9, seed) for seed in range(50)]
            self.want = [first_logits(llm, tokens) for tokens in self.prompts]
        self.n_wrong = self.n_asked = 0

    def ask(self, llm: Llama, seed: int) -> None:
        self.n_asked += 1
        self.n_wrong += not np.array_equal(first_logits(llm, self.prompts[seed]), self.want[seed])

    def all(self, folder: Path) -> None:
        with Llama(str(embedded_model()), kv_store=str(folder), **SETTINGS) as llm:
            for seed in range(50):
                self.ask(llm, seed)


def kill_writers(judge: Judge, folder: Path, n: int) -> str:
    rng = random.Random(1)
    for i in range(n):
        with writer(folder, i) as process:
            for _ in range(rng.randrange(3)):
                process.stdout.readline()
            time.sleep(rng.random() * 0.3)
    store = Folder(folder, 1 << 40)
    entries = store.entries()
    n_damaged = sum(store.load(entry.path) is None for entry in entries)
    n_unfinished = len(list(folder.rglob(f"{UNFINISHED}*")))
    judge.n_wrong += n_damaged
    judge.all(folder)
    store.trim()
    n_left = len(list(folder.rglob(f"{UNFINISHED}*")))
    found = f"{len(entries)} blocks, {n_damaged} of them damaged, {n_unfinished} unfinished files"
    return f"{n} writers killed: {found}, {n_left} after a trim"


def flip_bits(judge: Judge, folder: Path, n: int) -> str:
    rng = random.Random(2)
    judge.all(folder)
    n_lost = 0
    for _ in range(n // 20):
        paths = [path for path in folder.rglob("*.rows") if path.is_file()]
        for path in rng.sample(paths, 20):
            data = bytearray(path.read_bytes())
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
        with Llama(str(embedded_model()), kv_store=str(folder), **SETTINGS) as llm:
            for seed in range(50):
                judge.ask(llm, seed)
            n_lost += llm.kv_store_usage().lost
    return f"{n} bits flipped, {n_lost} blocks found damaged"


def fill_disk(judge: Judge, folder: Path) -> str:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", folder], check=True)
    try:
        judge.all(folder / "kv")
        judge.all(folder / "kv")
        free = os.statvfs(folder)
    finally:
        subprocess.run(["umount", folder], check=True)
    return f"a disk of 3 MiB, {free.f_bavail * free.f_bsize} bytes of it free at the end"


def write_together(judge: Judge, folder: Path) -> str:
    with writer(folder, 0) as one, writer(folder, 0) as other:
        for _ in range(60):
            one.stdout.readline()
            other.stdout.readline()
    judge.all(folder)
    return "two writers of the same prompts"


def torture(args: argparse.Namespace, folder: Path) -> int:
    judge, rows = Judge(), []
    for what in (
        lambda: kill_writers(judge, folder / "kills", args.kills),
        lambda: flip_bits(judge, folder / "flips", args.flips),
        lambda: fill_disk(judge, folder / "full"),
        lambda: write_together(judge, folder / "two"),
    ):
        before = judge.n_asked, judge.n_wrong
        said = what()
        rows.append([said, str(judge.n_asked - before[0]), str(judge.n_wrong - before[1])])
        print(*rows[-1], sep=" | ", flush=True)
    print(table(["what went wrong", "answers", "wrong ones"], rows))
    return 1 if judge.n_wrong else 0


def main() -> int:
    args = arguments()
    if args.read or args.write:
        (read if args.read else write)(json.loads(args.read or args.write))
        return 0
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        if args.torture or args.cold_load:
            return (torture if args.torture else cold_load)(args, Path(folder))
        rows = [measure(args, method, Path(folder) / str(i)) for i, method in enumerate(args.method or ["full"])]
    head = ["method", "first", "later, files from disk", "later", "tokens evaluated", "files", "logits"]
    print(table(head, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
