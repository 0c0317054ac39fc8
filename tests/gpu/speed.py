"""How fast a GPU attends: one layer of Llama-3-8B's heads at growing depth, and end to end, against stock llama.cpp.

Equal layers are timed together in one graph, enough that what they read does not fit into a cache: as in a model, and
without the time of a launch. Stock is ggml_flash_attn_ext on llama.cpp's own layout of the cache, on the same GPU.
"""

import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import numpy as np
from native_ops import SHAPES, Flash, Rows, Run, Shape, Step, flash, step

from gpu.checks import quiet
from pylongctx import Llama

SHAPE = SHAPES["llama-3-8b"]
PERIOD = 512  # tokens of a prefill step, and between two evictions
N_CTX_TRAIN = 8192
N_LAYER = 16
N_DECODED = 64  # tokens, end to end
METHODS = {
    "full": "full",
    "selfextend": "selfextend",
    "longheads": "longheads,window=4096",
    "corm": f"corm,window=256,recent=256,evict_every={PERIOD}",
}
HELD, OPEN = 0.3, 0.1  # corm: share of the rows that are held, and of these without a vote yet


@dataclass(frozen=True)
class Speed:
    """One line: microseconds of a layer, stock's ratio to them, and what they are of the machine.

    Attributes
    ----------
    attend, step, stock : float
        Microseconds of attend, of all sub-ops of the method, and of stock flash attention.
    bandwidth : float
        Bytes per second that attend read, each counted once.
    of_copy : float
        The same as a share of what the device copies, reads and writes.
    rate : float
        Operations per second of attend.
    scratch, stock_scratch : int
        Bytes of the device in addition to the tensors.
    others : dict of str to float
        Microseconds of the sub-ops other than attend.
    """

    phase: str
    method: str
    kv: str
    depth: int
    attend: float
    step: float
    stock: float
    bandwidth: float
    of_copy: float
    rate: float
    scratch: int
    stock_scratch: int
    others: dict[str, float]


def with_layers(run: Callable[[int], Step | Flash], most: int) -> Step | Flash:
    """Return what a run gives with as many layers as the device has memory for.

    Raises
    ------
    ValueError
        With the reason why not even one could run.
    """
    while True:
        try:
            return run(most)
        except ValueError as reason:
            if "out of memory" not in str(reason) or most == 1:
                raise
            most //= 2


def layer_speeds(
    device: str, kv: str, depth: int, phase: str, copy: float, repeats: int = 10, n_layer: int = N_LAYER,
    shape: Shape = SHAPE, methods: Iterable[str] = tuple(METHODS), recorded: Rows | None = None,
) -> Iterator[Speed]:  # fmt: skip
    """Yield every method at one depth, decoding one token or prefilling ``PERIOD``; ``copy``: bytes per second.

    ``recorded``: rows of a model and text in place of random ones; their shape is then that of the layer.
    """
    n_tokens = 1 if phase == "decode" else min(PERIOD, depth)
    # a step that ends in the middle between two evictions, or at one
    n_rows = depth - PERIOD // 2 if phase == "decode" else depth
    rows = recorded.step(n_rows, n_tokens) if recorded else Rows.random(shape, n_rows, n_tokens)

    def run(layers: int) -> Run:
        return Run(kv, n_rows, n_tokens, 1, repeats, device, layers)

    stock = with_layers(lambda n: flash(rows, run(n)), n_layer)
    for name in methods:
        method = METHODS[name]
        ours = with_layers(lambda n, method=method: step(rows, run(n), method, N_CTX_TRAIN, HELD, OPEN), n_layer)
        times = {op: median(us) for op, us in ours.times.items()}
        attend, rate = times["attend"], ours.attend_bytes / times["attend"] * 1e6
        flops = ours.attend_flops / attend * 1e6
        total = sum(times.values())
        others = {op: us for op, us in times.items() if op != "attend"}
        yield Speed(phase, name, kv, depth, attend, total, median(stock.times), rate, rate / copy, flops, ours.scratch,
                    stock.scratch, others)  # fmt: skip


@dataclass(frozen=True)
class EndToEnd:
    """Tokens per second of a model: its prompt, then one token after the other. ``gpu_mib``: None when unknown."""

    method: str
    kv: str
    depth: int
    prompt: float
    decode: float
    kv_bytes: int | None
    gpu_mib: int | None


def end_to_end(model: str, method: str | None, kv: str, depth: int, n_gpu_layers: int, n: int = N_DECODED) -> EndToEnd:
    """Evaluate ``depth`` random tokens, then ``n`` one by one; method None is stock llama.cpp with flash attention."""
    before = gpu_memory()
    with quiet():
        llm = Llama(model, method=method, n_ctx=depth + n + 1, n_batch=2048, n_ubatch=512, n_gpu_layers=n_gpu_layers,
                    type_k=kv, type_v=kv, flash_attn=True, verbose=False)  # fmt: skip
    with llm:
        tokens = np.random.default_rng(0).integers(3, llm.n_vocab(), depth + n).tolist()
        llm.eval(tokens[:1])  # kernels are loaded
        prompt = timed(lambda: llm.eval(tokens[1:depth]))
        times = [timed(lambda token=token: llm.eval([token])) for token in tokens[depth:]]
        after = gpu_memory()
        kv_bytes = llm.kv_usage().peak_bytes if method else None
    used = None if after is None or before is None else after - before
    return EndToEnd(method or "llama.cpp", kv, depth, (depth - 1) / prompt, 1 / median(times), kv_bytes, used)


def timed(run: Callable[[], None]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start


def ask_gpus(*fields: str) -> list[list[str]] | None:
    """Return the values of nvidia-smi's fields for every GPU, None without it."""
    if not (smi := shutil.which("nvidia-smi")):
        return None
    query = [smi, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return [line.split(", ") for line in done.stdout.splitlines()] if done.returncode == 0 else None


def gpu_memory() -> int | None:
    """Return the MiB that are in use on all GPUs, None without nvidia-smi."""
    gpus = ask_gpus("memory.used")
    return None if gpus is None else sum(int(used) for (used,) in gpus)
